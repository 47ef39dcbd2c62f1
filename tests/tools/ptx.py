"""Carry out compiled kernels on a CPU: their PTX on the memory of tensors, with checks that no GPU makes.

    kernel = Kernel(ptx)
    hazards = launch(kernel, grid=(4, 1, 1), shared_bytes=4096, params=[address, 17], blocks={address: nbytes})

Threads of a program have a place each in the text: the segment that comes first runs next, for those threads that are
there, so that divergent branches and loops of different lengths are right. Programs run one after another: without hazards
any order gives the same. PtxError tells of what a GPU would fault on: addresses outside of all blocks, alignment, lanes that
are missing at an instruction of a whole warp. Hazards are accesses that nothing orders (ptx_memory). Registers begin as
garbage, and shared memory as nan.

Not there: time, values that are stale, how tensor cores round, and every instruction that Triton makes of no kernel here.
"""

import struct
from typing import Any

import numpy as np
from ptx_instructions import by_warp, translate
from ptx_memory import EPOCH, TURN, WARP, GlobalMemory, SharedMemory, some
from ptx_text import SIZES, Instruction, PtxError
from ptx_text import Kernel as Text

PACKED = {"f32": "<f", "f64": "<d"}


class Kernel(Text):
    """A kernel's text with what its instructions do."""

    def __init__(self, ptx: str):
        super().__init__(ptx)
        self.steps = [[self._step(one) for one in segment] for segment in self.segments]

    def _step(self, one: Instruction):
        try:
            return translate(one, self)
        except (PtxError, KeyError, ValueError, TypeError, AttributeError) as error:
            raise PtxError(f"{self.line(one.line)}: not known here ({error!r})") from error


class Launch:
    """What the programs of a grid share."""

    def __init__(
        self, kernel: Kernel, grid: tuple[int, int, int], shared_bytes: int, params, blocks: dict[int, int]
    ):  # fmt: skip
        self.kernel, self.grid, self.shared_bytes = kernel, grid, shared_bytes
        self.memory = GlobalMemory(blocks, kernel.granules["global"])
        self.epoch = 0  # barriers of all programs so far
        self.hazards: dict[tuple[int, str], str] = {}
        given = bytearray(kernel.param_bytes)
        for (offset, kind), value in zip(kernel.params, params, strict=True):
            if kind in PACKED:
                struct.pack_into(PACKED[kind], given, offset, value)
            else:
                size = SIZES[kind]
                given[offset : offset + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")
        self.params = Params(given)
        # what registers hold in all programs
        self.registers = [np.ones(kernel.threads, "?") if one.kind == "pred" else np.full(kernel.threads, 0xDD, one.code)
                          for one in kernel.registers]  # fmt: skip
        for (bits, _), register in kernel.constants.items():
            self.registers[register.place] = np.full(kernel.threads, bits, register.code)


class Params:
    """The bytes that a launch hands over."""

    def __init__(self, given: bytes):
        self.bytes = np.frombuffer(given, np.uint8)

    def load(self, program, line: int, address, size: int, count: int, mask):
        """Return a number of `size` bytes for each thread."""
        return self.bytes[address[:, None] + np.arange(size)].view(f"u{size}").T


class Program:
    """One program (CTA)."""

    def __init__(self, launch: Launch, index: int):
        self.launch, self.kernel, self.index = launch, launch.kernel, index
        self.threads = launch.kernel.threads
        self.lanes = np.arange(self.threads)
        x, y, _ = launch.grid
        self.place = (index % x, index // x % y, index // (x * y))
        self.registers = list(launch.registers)
        specials = {"%tid.x": self.lanes}
        for axis, at, count in zip("xyz", self.place, launch.grid, strict=True):
            specials |= {f"%ctaid.{axis}": at, f"%nctaid.{axis}": count}
        for name, register in launch.kernel.specials.items():
            self.registers[register.place] = np.full(self.threads, specials[name], "u4")
        shared = SharedMemory(launch.shared_bytes, launch.kernel.granules["shared"])
        self.spaces = {"global": launch.memory, "shared": shared, "param": launch.params}
        self.new_epoch()
        # asynchronous copies: groups are counted from 1
        self.committed = self.completed = 0
        self.open_copies: list[tuple[Any, Any]] = []
        self.groups: dict[int, list[tuple[Any, Any]]] = {}

    # -- running

    def run(self):
        """Run to the end."""
        # the segment that each thread comes to, -1 behind the end
        places = np.zeros(self.threads, np.int64)
        waiting = np.zeros(self.threads, bool)  # at a barrier
        while some(places >= 0):
            going = (places >= 0) & ~waiting
            if not some(going):
                self.meet(places[waiting])
                waiting[:] = False
                continue
            here = int(places[going].min())
            mask = going & (places == here)
            everyone = None if some(mask) == self.threads else mask
            for step in self.kernel.steps[here]:
                step(self, everyone)
            places[mask] = self.following(here)[mask]
            if self.kernel.segments[here][-1].is_barrier:
                waiting |= mask

    def following(self, here: int):
        """Return the segment that each thread goes to."""
        last = self.kernel.segments[here][-1]
        after = here + 1 if here + 1 < len(self.kernel.segments) else -1
        if last.parts[0] not in ("bra", "ret"):
            return np.full(self.threads, after)
        target = self.kernel.labels[last.operands[0]] if last.parts[0] == "bra" else -1
        if last.guard is None:
            return np.full(self.threads, target)
        return np.where(self.taken(last.guard, last.negated), target, after)

    def meet(self, places):
        """End a barrier that threads wait at in front of `places`."""
        barriers = [self.kernel.segments[place - 1][-1].line for place in np.unique(places)]
        if len(barriers) > 1:
            self.hazard(
                barriers[0], f"threads meet at different barriers, also in line {barriers[1]}"
            )
        self.new_epoch()

    def error(self, line: int, why: str) -> PtxError:
        """Return the error of a line."""
        return PtxError(f"{self.kernel.line(line)}: {why} (program {self.place})")

    def hazard(self, line: int, why: str, example: str = ""):
        """Note a hazard; the first of its kind in a line is told."""
        text = f"{self.kernel.line(line)}: {why} (program {self.place}; {example})"
        self.launch.hazards.setdefault((line, why.split(" that ")[0]), text)

    def together(self, line: int, mask, members=None):
        """Refuse an instruction of whole warps that not all lanes of a warp have come to, or that names a part of them."""
        if members is not None and some(self.read(members) != 2**WARP - 1):
            raise self.error(line, "a part of a warp is not known here")
        if mask is not None:
            there = by_warp(mask)
            if some(there.any(1) & ~there.all(1)):
                raise self.error(line, "lanes of a warp are missing")

    # -- registers

    def read(self, source: tuple[int, int, str]):
        """Return the low bytes of a register as numbers; halves twice as many."""
        place, size, code = source
        bits = self.registers[place]
        return (bits if bits.itemsize == size else bits.astype(f"u{size}")).view(code)

    def write(self, register, value, mask):
        """Set a register; numbers of fewer bits are extended by their sign or by zeros."""
        if register is None:
            return
        code, size = register.code, value.itemsize
        if len(value) > self.threads:
            value = value.view(code)
        elif code != "?" and size < int(code[1:]):
            kind = "i" if value.dtype.kind == "i" else "u"
            value = value.view(f"{kind}{size}").astype(f"{kind}{code[1:]}")
        value = value.view(code)
        old = self.registers[register.place]
        self.registers[register.place] = value if mask is None else np.where(mask, value, old)

    def taken(self, guard, negated: bool):
        """Return the threads whose predicate says so."""
        value = self.registers[guard.place]
        return ~value if negated else value

    # -- copies to shared memory, done at once and remembered until they are waited for

    def givers(self, count: int, mask):
        """Return the lanes whose addresses count for `count` matrices."""
        lanes = self.lanes % WARP < 8 * count
        return lanes if mask is None else lanes & mask

    def copy(self, line: int, to, of, size: int, given, mask):
        """cp.async of `size` bytes, of which the first `given` are read and the others are zeros."""
        taking = np.ones(self.threads, bool) if mask is None else mask
        reading = taking & (given > 0)
        if some(reading & (given < size)):
            raise self.error(line, "cp.async of a part of its bytes")
        shared = self.spaces["shared"]
        data = self.spaces["global"].load(self, line, of, min(size, 8), -(-size // 8), reading)
        if not some(taking):
            return
        granules, lanes = shared.store(self, line, to, data, taking)
        shared.copies[granules] = self.committed + 1
        self.open_copies.append((granules, lanes))

    def commit(self):
        """cp.async.commit_group."""
        self.committed += 1
        self.groups[self.committed] = self.open_copies
        self.open_copies = []

    def wait(self, most: int):
        """cp.async.wait_group: all but the last `most` groups are there, for the threads that copied."""
        while self.completed < self.committed - most:
            self.completed += 1
            for granules, lanes in self.groups.pop(self.completed):
                self.spaces["shared"].writer[granules] = self.stamp[lanes][:, None]

    # -- the order of threads

    def new_epoch(self):
        """All threads have met."""
        self.launch.epoch += 1
        self.floor = self.launch.epoch << EPOCH
        self.stamp = self.floor | self.lanes

    def new_turn(self, mask):
        """Lanes of warps have met."""
        if self.threads == WARP:
            self.new_epoch()
        else:
            self.stamp = self.stamp + ((1 if mask is None else mask.astype(np.int64)) << TURN)


def launch(
    kernel: Kernel, grid: tuple[int, int, int], shared_bytes: int, params, blocks: dict[int, int]
) -> list[str]:
    """Run a kernel and return its hazards.

    Args:
        grid: programs along x, y, z; shared_bytes: of each.
        params: numbers in the kernel's order; pointers are addresses on the host.
        blocks: {address: bytes} that the kernel may touch.
    Raises: PtxError where a GPU would fault.
    """
    shared = Launch(kernel, grid, shared_bytes, params, blocks)
    with np.errstate(all="ignore"):
        for index in range(int(np.prod(grid))):
            Program(shared, index).run()
    return list(shared.hazards.values())
