"""Memory that a kernel touches: every access lies in one allocation, is aligned, and is ordered behind those before it.

Who touched a place last is noted for each granule of bytes. What happened before what follows from barriers, warps and
releases that were acquired, so that a race is found in whatever order the programs ran. Knows no instructions.
"""

from functools import cache

import numpy as np

WARP = 32
# An access: thread (10 bits), whether it was atomic, barriers of its warp since that of the program (12), those of the
# program (20), program + 1 (20).
THREADS, ATOMIC, TURN, EPOCH, PROGRAM = (1 << 10) - 1, 1 << 10, 11, 23, 43
EPOCHS = (1 << 20) - 1

some = np.count_nonzero  # of booleans: several times faster than any()


class HostMemory:
    """All of the address space from BASE on, as an array: checked addresses index it."""

    BASE = 4096

    def __init__(self, size: int, count: int):
        shape = ((1 << 47) // (size * count), count)
        self.__array_interface__ = {
            "shape": shape, "typestr": f"<u{size}", "data": (self.BASE, False), "version": 3,
        }  # fmt: skip


@cache
def host_rows(size: int, count: int) -> np.ndarray:
    """Return the address space as rows of `count` numbers of `size` bytes."""
    return np.asarray(HostMemory(size, count))


def merged(blocks: dict[int, int]) -> list[tuple[int, int]]:
    """Return (start, end) of blocks {address: bytes} in order; those that overlap become one."""
    found: list[tuple[int, int]] = []
    for start, nbytes in sorted(blocks.items()):
        if found and start < found[-1][1]:
            start, end = found.pop()
            found.append((start, max(end, start + nbytes)))
        elif nbytes:
            found.append((start, start + nbytes))
    return found


class Space:
    """Memory with its last writer and two last readers of different warps for each granule of bytes."""

    name = ""

    def __init__(self, nbytes: int, granule: int):
        self.granule = granule
        count = nbytes // granule + 1
        self.writer, self.reader, self.reader_before = (np.zeros(count, np.int64) for _ in range(3))

    def rows(self, size: int, count: int) -> np.ndarray:
        """Return the memory as rows of `count` numbers of `size` bytes."""
        raise NotImplementedError

    def place(self, program, line: int, address, nbytes: int, lanes):
        """Check addresses [accesses]; return byte offsets into `rows` and into what is noted."""
        raise NotImplementedError

    def unordered(self, program, noted, mine):
        """Return which accesses of this program no barrier orders before those of `mine`."""
        late = noted >= program.floor
        if not some(late):
            return late
        apart = noted ^ mine
        same_warp = (apart & THREADS) >> 5 == 0
        one_turn = (apart >> TURN == 0) & (apart & THREADS != 0)
        return late & (~same_warp | one_turn)

    def load(self, program, line: int, address, size: int, count: int, mask):
        """Return `count` arrays of `size` bytes each, for the threads of `mask` (None: all); zeros for others."""
        lanes = program.lanes if mask is None else mask.nonzero()[0]
        found = np.zeros((program.threads, count), f"u{size}")
        if len(lanes):
            offset, shadow = self.place(program, line, address[lanes], size * count, lanes)
            self.note_read(program, line, self.granules(shadow, size * count), lanes)
            found[lanes] = self.rows(size, count)[offset // (size * count)]
        return list(np.ascontiguousarray(found.T))

    def store(self, program, line: int, address, values, mask):
        """Write arrays of all threads, for those of `mask`; return the granules and the threads."""
        lanes = program.lanes if mask is None else mask.nonzero()[0]
        data = np.stack(values, 1)[lanes]
        nbytes = data.itemsize * data.shape[1]
        offset, shadow = self.place(program, line, address[lanes], nbytes, lanes)
        rows, at = self.rows(data.itemsize, data.shape[1]), offset // nbytes
        granules = self.granules(shadow, nbytes)
        self.note_write(program, line, granules, lanes, (rows[at] != data).any(1))
        rows[at] = data
        there = rows[at]
        bad = there != data
        if some(bad) and not copies_of_a_sum(data[bad], there[bad]):
            lane, column = (int(x[0]) for x in bad.nonzero())
            program.hazard(
                line, f"threads of one instruction write different values to the same place of {self.name} memory",
                f"thread {lanes[lane]} {data[lane, column]:#x}, another {there[lane, column]:#x}",
            )  # fmt: skip
        return granules, lanes

    def granules(self, shadow, nbytes: int):
        """Return the granules [accesses, granules of one]."""
        first = (shadow // self.granule)[:, None]
        return first + np.arange(max(nbytes // self.granule, 1))

    def note_read(self, program, line: int, granules, lanes):
        """Look for writes that are not ordered before a read, and note it."""
        mine = program.stamp[lanes][:, None]
        last = self.writer[granules]
        self.report(
            program,
            line,
            ("reads", "wrote"),
            last,
            self.unordered(program, last, mine),
            granules,
            lanes,
        )
        mine = np.broadcast_to(mine, granules.shape)
        before = self.reader[granules]
        self.reader[granules] = mine
        for other in (before, mine):  # another reader than the last
            kept = other != self.reader[granules]
            self.reader_before[granules[kept]] = other[kept]

    def note_write(self, program, line: int, granules, lanes, changed, atomic: bool = False):
        """Look for accesses that are not ordered before a write, and note it; changed: writes of what was not there."""
        mine = program.stamp[lanes][:, None] | (ATOMIC if atomic else 0)
        for did, shadow in (
            ("wrote", self.writer),
            ("read", self.reader),
            ("read", self.reader_before),
        ):
            last = shadow[granules]
            bad = self.unordered(program, last, mine)
            if did == "wrote":  # the same value once more does no harm
                bad &= changed[:, None]
            if atomic:  # nor do atomics among themselves
                bad &= (last & ATOMIC) == 0
            self.report(program, line, ("writes", did), last, bad, granules, lanes)
        self.writer[granules] = mine

    def report(
        self, program, line: int, verbs: tuple[str, str], last, bad, granules, lanes
    ):  # fmt: skip
        """Tell of the first access of `bad`, if there is any."""
        if not some(bad):
            return
        lane, column = (int(x[0]) for x in bad.nonzero())
        access, at = int(last[lane, column]), int(granules[lane, column]) * self.granule
        other, who = (access >> PROGRAM) - 1, f"thread {access & THREADS}"
        missing = "a barrier"
        if other != program.index:
            who, missing = f"program {other}, {who}", "a release and an acquire"
        does, did = verbs
        program.hazard(
            line, f"{does} {self.name} memory that {who} {did}, without {missing} in between",
            f"thread {lanes[lane]}, noted at byte {at}",
        )  # fmt: skip


def copies_of_a_sum(a, b) -> bool:
    """Say whether numbers are the same floats but for their last places.

    Triton contracts the steps of a sum over lanes, which each lane rounds in another order, and has each write the same place.
    """
    for size, normal, places in ((4, 1 << 23, 8), (2, 1 << 10, 1)):
        if a.itemsize >= size:
            one, other = (x.view(f"u{size}").astype(np.int64) for x in (a, b))
            bare = np.minimum(one, other) % (1 << 8 * size - 1)  # without the sign
            if ((one == other) | ((np.abs(one - other) <= places) & (bare >= normal))).all():
                return True
    return False


class GlobalMemory(Space):
    """Host memory in blocks, shared by all programs of a launch.

    Args:
        blocks: bytes that kernels may touch, by address.
    """

    name = "global"

    def __init__(self, blocks: dict[int, int], granule: int):
        # the first block is nothing: what lies below all others
        ends = [(0, 0), *merged(blocks)]
        self.starts, self.ends = (np.array(column, np.uint64) for column in zip(*ends, strict=True))
        self.origins = self.starts & ~np.uint64(15)
        room = (self.ends - self.origins + np.uint64(31)) & ~np.uint64(15)
        self.firsts = np.cumsum(room) - room
        super().__init__(int(room.sum()), granule)

    def rows(self, size: int, count: int) -> np.ndarray:
        return host_rows(size, count)

    def place(self, program, line: int, address, nbytes: int, lanes):
        block = self.starts.searchsorted(address, "right") - 1
        outside, odd = address + nbytes > self.ends[block], address & (nbytes - 1)
        if some(outside):
            lane = int(outside.nonzero()[0][0])
            past = int(address[lane]) + nbytes - int(self.ends[block[lane]])
            why = f"out of bounds, {past} bytes behind the end of an allocation"
            raise program.error(
                line, f"{nbytes} bytes at {address[lane]:#x}, thread {lanes[lane]}: {why}"
            )
        if some(odd):
            lane = int(odd.nonzero()[0][0])
            raise program.error(
                line, f"{nbytes} bytes at {address[lane]:#x}, thread {lanes[lane]}: misaligned"
            )
        shadow = address - self.origins[block] + self.firsts[block]
        return address.view(np.int64) - HostMemory.BASE, shadow.view(np.int64)

    def unordered(self, program, noted, mine):
        bad = super().unordered(program, noted, mine)
        who = noted >> PROGRAM
        foreign = (who != 0) & (who != program.index + 1)
        if not some(foreign):
            return bad
        bad &= ~foreign
        unknown = foreign & ((noted >> EPOCH) & EPOCHS >= program.known.epochs[who - 1])
        mine = np.broadcast_to(mine, noted.shape)
        for at in zip(*unknown.nonzero(), strict=True):
            bad[at] = not program.knows(int(mine[at]) & THREADS, int(noted[at]))
        return bad


class SharedMemory(Space):
    """Shared memory of one program; it begins as nan, and holds copies that are under way."""

    name = "shared"

    def __init__(self, nbytes: int, granule: int):
        self.nbytes = nbytes
        self.bytes = np.full(-(-nbytes // 16) * 2, -1, np.int64).view(np.uint8)
        super().__init__(nbytes, granule)
        self.copies = np.zeros(
            len(self.writer), np.int64
        )  # the group of a cp.async that wrote it last

    def rows(self, size: int, count: int) -> np.ndarray:
        return self.bytes.view(f"u{size}").reshape(-1, count)

    def place(self, program, line: int, address, nbytes: int, lanes):
        offset = address.astype(np.int64)
        outside = offset + nbytes > self.nbytes
        for bad, why in ((outside, "out of bounds"), (offset & (nbytes - 1), "misaligned")):
            if some(bad):
                lane = int(bad.nonzero()[0][0])
                where = f"{nbytes} bytes at byte {offset[lane]} of {self.nbytes} of shared memory"
                raise program.error(line, f"{where}, thread {lanes[lane]}: {why}")
        return offset, offset

    def note_read(self, program, line: int, granules, lanes):
        if some(self.writer[granules] == 0):
            program.hazard(line, "reads shared memory that nobody wrote")
        self.look_for_copies(program, line, granules)
        super().note_read(program, line, granules, lanes)

    def note_write(self, program, line: int, granules, lanes, changed, atomic: bool = False):
        self.look_for_copies(program, line, granules[changed])
        super().note_write(program, line, granules, lanes, changed, atomic)

    def look_for_copies(self, program, line: int, granules):
        """Tell of an access to what a copy under way writes."""
        if some(self.copies[granules] > program.completed):
            program.hazard(
                line, "touches shared memory that a cp.async under way writes (wait_group missing)"
            )


class Known:
    """What happened before: all of a program's epochs below a number, and single threads up to one."""

    def __init__(self, programs: int):
        self.epochs = np.zeros(programs, np.int64)
        self.threads: dict[tuple[int, int], int] = {}

    def add(self, other: "Known"):
        """Take over what another has seen."""
        np.maximum(self.epochs, other.epochs, out=self.epochs)
        for who, epoch in other.threads.items():
            self.threads[who] = max(epoch, self.threads.get(who, -1))

    def has(self, program: int, thread: int, epoch: int) -> bool:
        """Say whether an access happened before."""
        return epoch < self.epochs[program] or epoch <= self.threads.get((program, thread), -1)
