"""Memory that a kernel touches: every access lies in one allocation, is aligned, and is ordered behind those before it.

Who touched a place is noted for each granule of bytes. Barriers and warps order the threads of a program. Nothing orders the
programs of a launch: none may touch what another one writes. Knows no instructions.
"""

from functools import cache

import numpy as np

WARP = 32
# An access: thread (10 bits), barriers of its warp since that of the program (22), those of all programs so far (31).
THREADS, TURN, EPOCH = (1 << 10) - 1, 10, 32

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

    def check(self, program, line: int, address, nbytes: int, end, lanes):
        """Refuse accesses that reach behind `end`, that of the memory around each, and those that are not aligned."""
        for bad, why in (
            (address + nbytes > end, "out of bounds"),
            (address & (nbytes - 1), "misaligned"),
        ):
            if some(bad):
                lane = int(bad.nonzero()[0][0])
                where = f"{nbytes} bytes at {address[lane]:#x} of {self.name} memory that ends at {end[lane]:#x}"
                raise program.error(line, f"{where}, thread {lanes[lane]}: {why}")

    def unordered(self, program, noted, mine):
        """Return which accesses of this program no barrier orders before those of `mine`; floor: of its last barrier."""
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
        bad = self.unordered(program, last, mine)
        self.report(program, line, ("reads", "wrote"), last, bad, granules, lanes)
        mine = np.broadcast_to(mine, granules.shape)
        before = self.reader[granules]
        self.reader[granules] = mine
        for other in (before, mine):  # another reader than the last
            kept = other != self.reader[granules]
            self.reader_before[granules[kept]] = other[kept]

    def note_write(self, program, line: int, granules, lanes, changed):
        """Look for accesses that are not ordered before a write, and note it; changed: writes of what was not there."""
        mine = program.stamp[lanes][:, None]
        for did, noted in (
            ("wrote", self.writer),
            ("read", self.reader),
            ("read", self.reader_before),
        ):
            last = noted[granules]
            bad = self.unordered(program, last, mine)
            if did == "wrote":  # the same value once more does no harm
                bad &= changed[:, None]
            self.report(program, line, ("writes", did), last, bad, granules, lanes)
        self.writer[granules] = mine

    def report(self, program, line: int, verbs: tuple[str, str], last, bad, granules, lanes):
        """Tell of the first access of `bad`, if there is any."""
        if not some(bad):
            return
        lane, column = (int(x[0]) for x in bad.nonzero())
        other, at = int(last[lane, column]) & THREADS, int(granules[lane, column]) * self.granule
        does, did = verbs
        program.hazard(
            line, f"{does} {self.name} memory that thread {other} {did}, without a barrier in between",
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
    """Host memory in blocks, shared by all programs of a launch, with the first program that wrote or read each granule.

    Args:
        blocks: bytes that kernels may touch, by address; no two overlap.
    """

    name = "global"

    def __init__(self, blocks: dict[int, int], granule: int):
        # the first block is nothing: what lies below all others
        ends = [(0, 0), *sorted((start, start + nbytes) for start, nbytes in blocks.items())]
        self.starts, self.ends = (np.array(column, np.uint64) for column in zip(*ends, strict=True))
        self.origins = self.starts & ~np.uint64(15)
        room = (self.ends - self.origins + np.uint64(31)) & ~np.uint64(15)
        self.firsts = np.cumsum(room) - room
        super().__init__(int(room.sum()), granule)
        # program + 1, or 0 for none
        self.first_writer = np.zeros(len(self.writer), np.int32)
        self.first_reader = np.zeros(len(self.writer), np.int32)

    def rows(self, size: int, count: int) -> np.ndarray:
        return host_rows(size, count)

    def place(self, program, line: int, address, nbytes: int, lanes):
        block = self.starts.searchsorted(address, "right") - 1
        self.check(program, line, address, nbytes, self.ends[block], lanes)
        shadow = address - self.origins[block] + self.firsts[block]
        return address.view(np.int64) - HostMemory.BASE, shadow.view(np.int64)

    def note_read(self, program, line: int, granules, lanes):
        self.look_for_others(program, line, ("reads", "wrote"), self.first_writer, granules)
        super().note_read(program, line, granules, lanes)
        self.note_first(program, self.first_reader, granules)

    def note_write(self, program, line: int, granules, lanes, changed):
        # the same value once more does no harm
        self.look_for_others(program, line, ("writes", "wrote"), self.first_writer, granules[changed])  # fmt: skip
        self.look_for_others(program, line, ("writes", "read"), self.first_reader, granules)
        super().note_write(program, line, granules, lanes, changed)
        self.note_first(program, self.first_writer, granules)

    def look_for_others(self, program, line: int, verbs: tuple[str, str], first, granules):
        """Tell of an access to what another program has touched."""
        found = first[granules]
        others = found[(found != 0) & (found != program.index + 1)]
        if len(others):
            does, did = verbs
            program.hazard(line, f"{does} global memory that program {others[0] - 1} {did}")

    def note_first(self, program, first, granules):
        """Note a program where it is the first one.

        Programs run one after another, so that no other one has been where a program is the first.
        """
        first[granules[first[granules] == 0]] = program.index + 1


class SharedMemory(Space):
    """Shared memory of one program; it begins as nan, and holds copies that are under way."""

    name = "shared"

    def __init__(self, nbytes: int, granule: int):
        self.nbytes = nbytes
        self.bytes = np.full(-(-nbytes // 16) * 2, -1, np.int64).view(np.uint8)
        super().__init__(nbytes, granule)
        # the group of a cp.async that wrote it last
        self.copies = np.zeros(len(self.writer), np.int64)

    def rows(self, size: int, count: int) -> np.ndarray:
        return self.bytes.view(f"u{size}").reshape(-1, count)

    def place(self, program, line: int, address, nbytes: int, lanes):
        offset = address.astype(np.int64)
        end = np.broadcast_to(self.nbytes, offset.shape)
        self.check(program, line, offset, nbytes, end, lanes)
        return offset, offset

    def note_read(self, program, line: int, granules, lanes):
        if some(self.writer[granules] == 0):
            program.hazard(line, "reads shared memory that nobody wrote")
        self.look_for_copies(program, line, granules)
        super().note_read(program, line, granules, lanes)

    def note_write(self, program, line: int, granules, lanes, changed):
        self.look_for_copies(program, line, granules[changed])
        super().note_write(program, line, granules, lanes, changed)

    def look_for_copies(self, program, line: int, granules):
        """Tell of an access to what a copy under way writes."""
        if some(self.copies[granules] > program.completed):
            program.hazard(
                line, "touches shared memory that a cp.async under way writes (wait_group missing)"
            )
