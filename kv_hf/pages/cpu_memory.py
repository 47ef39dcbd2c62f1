"""Memory of pages on a CPU: mapped apart from the C library's heap, in huge pages, and given back behind a prefill.

Pages outlive a prefill, its activations do not. In one heap the pages of a layer would lie between activations, and cut up
the holes that these leave: later ones would find no room there, and the heap would grow. So each large field of a side
lies in a mapping of its own, which goes back to the system as a whole when its last tensor is gone:

    [ pages 0 .. n | n .. most )

Pages n .. most are addresses alone: the system gives memory, all zero, to what is written. Storage that grows up to there
copies nothing.

Offloaded pages lie in host memory as they do on a device: one tensor for each field, all of a layer in one piece. So pages of
consecutive ids are one copy for each field. On a disk the piece is a mapped file without a name, and out of resident memory
except where it is just read: nobody can remove it, and nothing is left behind by a process that is killed. Its blocks are
reserved before they are written: a write into a mapping of a full disk would end the process. Knows no formats and no layers.
"""

import ctypes
import functools
import math
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from weakref import WeakValueDictionary

import torch

from ..errors import OffloadError

LEAST_BYTES = 256 << 10  # smaller fields stay in the heap: a mapping costs 4 KiB, and a call
RESERVE_FACTOR = 2  # a mapping has addresses for so many times the pages that are asked for
# Of mappings that are offered as huge pages of 2 MiB: a table of a few thousand places finds addresses, and a long cache hardly
# ever misses it then. The last one of a field is resident as a whole, so that small fields do without.
LEAST_HUGE = 16 << 20

TRIM_VARIABLE = "KV_HF_MALLOC_TRIM"  # "never": the heap is left alone
# Of a row in one forward. Fewer are a decode step, one that tries candidates included, or a sentence of a chat: they leave
# behind less than the call is worth.
LEAST_COLUMNS = 64

Tensors = Mapping[str, torch.Tensor]  # [pages, ..] by name
Run = tuple[int, int, int]  # first place, first id, count: of pages and places that are consecutive

MANY_RUNS = 5  # of pages, which are gathered field by field in place of copied one by one
ZEROS = bytes(1 << 20)
AROUND = 2 << 20  # bytes, aligned: reading one memory page may map others of the same page table


# -- mappings --------------------------------------------------------------------------------------------------------


def mapped_zeros(field: torch.Tensor, pages: int) -> torch.Tensor | None:
    """Return a field of `pages` pages, all zero, in a mapping of its own.

    Args:
        field: [any, *shape of the field in a page], of which shape and dtype are taken.
    Returns: None for a field that stays in the heap, on other devices, and where the system has no mapping to give.
    """
    shape = (pages, *field.shape[1:])
    size = math.prod(shape) * field.itemsize
    on_cpu = type(field) is torch.Tensor and field.device.type == "cpu"
    if not on_cpu or size < LEAST_BYTES or not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return None
    try:
        # private: after a fork each process has pages of its own
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # too many mappings, or no memory: torch's allocator finds some, or raises
        return None
    if size >= LEAST_HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them: nothing depends on it but speed
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=field.dtype).view(shape)


# -- offloaded pages -------------------------------------------------------------------------------------------------


def runs_of(places: Iterable[tuple[int, int]]) -> list[Run]:
    """Return (place, page) pairs as runs of consecutive places and pages."""
    found: list[Run] = []
    for place, page in places:
        if found:
            first, start, count = found[-1]
            if (place, page) == (first + count, start + count):
                found[-1] = (first, start, count + 1)
                continue
        found.append((place, page, 1))
    return found


class HostMemory:
    """Memory of the host; page-locked where there is a GPU, which copies from it by itself."""

    piece_bytes: int | None = None  # largest copy at a time, None for any

    def __init__(self) -> None:
        self.pinned = torch.cuda.is_available()

    def check_process(self) -> None:
        """Raise OffloadError where this memory is another process's; memory of one's own is copied by a fork."""

    def check_room(self, nbytes: int) -> None:
        """Raise OffloadError where `nbytes` are known not to fit."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return memory [nbytes], uint8. Raises: OffloadError when there is no room."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.pinned, device="cpu")

    def drop(self, piece: torch.Tensor) -> None:
        """Take a contiguous piece [any shape] out of resident memory where that is possible; its contents stay."""

    def fetch(self, fields: Tensors, runs: Sequence[Run], targets: Tensors) -> None:
        """Copy pages of `fields`, which lie here, to `targets`; both [pages, ..] by name.

        Args:
            runs: with places in `targets`.
        Raises: OffloadError in a process that was forked from the one whose file the pages lie in.
        """
        self.check_process()
        places = sum(count for _, _, count in runs)
        many = not self.pinned and len(runs) >= MANY_RUNS
        if many and runs[-1][0] + runs[-1][2] - runs[0][0] == places:
            return self._gather(fields, runs, targets)
        for name, target in targets.items():
            for place, page, count in self._pieces(fields[name], runs):
                piece = fields[name][page : page + count]
                target[place : place + count].copy_(piece, non_blocking=self.pinned)
                self.drop(piece)

    def _gather(self, fields: Tensors, runs: Sequence[Run], targets: Tensors) -> None:
        """Copy runs without places between them; one by one, most of the time would go to the calls."""
        pages = [page + at for _, page, count in runs for at in range(count)]
        ids = torch.tensor(pages, device="cpu")
        for name, target in targets.items():
            field, first = fields[name], runs[0][0]
            for at, _, count in self._pieces(field, [(0, 0, len(ids))]):
                some, to = ids[at : at + count], target[first + at : first + at + count]
                if to.device == field.device:
                    torch.index_select(field, 0, some, out=to)
                else:
                    to.copy_(field.index_select(0, some))
                self.drop(field[int(some.min()) : int(some.max()) + 1])

    def store(self, sources: Tensors, runs: Sequence[Run], fields: Tensors) -> None:
        """Copy pages of `sources` to `fields`, which lie here; fields that `sources` lacks are left as they are.

        Args:
            runs: with places in `sources`.
        Raises: as `fetch`, before anything is written.
        """
        self.check_process()
        for name, source in sources.items():
            for place, page, count in self._pieces(fields[name], runs):
                piece = fields[name][page : page + count]
                piece.copy_(source[place : place + count], non_blocking=self.pinned)
                self.drop(piece)

    def _pieces(self, field: torch.Tensor, runs: Iterable[Run]) -> Iterator[Run]:
        """Cut runs of pages of a field into pieces of at most `piece_bytes`."""
        page_bytes = field[:1].nbytes  # 0: RoPE keys of a NoPE layer
        for place, page, count in runs:
            most = count
            if self.piece_bytes is not None and page_bytes:
                most = max(1, self.piece_bytes // page_bytes)
            for at in range(0, count, most):
                yield place + at, page + at, min(most, count - at)


class DiskMemory(HostMemory):
    """Memory that lies in temporary files, one for each piece that is allocated.

    A fork shares them: the child would write into its parent's pages, and read what the parent writes there later. So they
    belong to the process that made them, and any other one is refused.

    Args:
        folder: where files are made; None takes the system's folder for temporary files.
    """

    # bounds what is resident at once beside the copy; larger pieces were not faster
    piece_bytes = 1 << 20

    def __init__(self, folder: str | None) -> None:
        self.pinned = False
        self.folder = tempfile.gettempdir() if folder is None else folder
        self._process = os.getpid()
        self._mappings: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()  # by address

    def check_process(self) -> None:
        """Raise OffloadError in a process that was forked from the one that made the files."""
        if os.getpid() != self._process:
            raise OffloadError(
                f"offload: these pages lie in a file of process {self._process}, and this is process "
                f"{os.getpid()}, which was forked from it: writing would change the cache of that process, and its pages "
                "may change while they are read. Nothing was touched. Call reset() and start again here, make a new cache "
                "after the fork, or take one without offload"
            )

    def check_room(self, nbytes: int) -> None:
        """Raise OffloadError where the disk has less than `nbytes` free."""
        free = shutil.disk_usage(self.folder).free if os.path.isdir(self.folder) else nbytes
        if nbytes > free:
            raise self._full(nbytes, f"{free:,} bytes are free")

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return memory [nbytes], uint8, in a file of its own, which goes with its last tensor."""
        self.check_process()
        try:
            file = tempfile.TemporaryFile(prefix="kv_hf-", dir=self.folder)  # noqa: SIM115
        except OSError as error:
            raise OffloadError(
                f"offload: no file can be made in {self.folder!r}: {error.strerror or error}"
            ) from error
        with file:
            try:
                _reserve(file.fileno(), nbytes)
                mapping = mmap.mmap(file.fileno(), nbytes)
            except (OSError, ValueError) as error:
                raise self._full(nbytes, getattr(error, "strerror", None) or str(error)) from error
        piece = torch.frombuffer(mapping, dtype=torch.uint8)
        self._mappings[piece.data_ptr()] = mapping
        return piece

    def drop(self, piece: torch.Tensor) -> None:
        """Unmap the memory pages of a piece [any shape] and those mapped with them; its contents stay in the file."""
        base = piece.untyped_storage().data_ptr()
        first = piece.data_ptr() - base
        if piece.nbytes and hasattr(mmap, "MADV_DONTNEED"):
            start = first - first % AROUND
            count = -(-(first + piece.nbytes - start) // AROUND) * AROUND
            self._mappings[base].madvise(mmap.MADV_DONTNEED, start, count)

    def _full(self, nbytes: int, reason: str) -> OffloadError:
        return OffloadError(
            f"offload: {nbytes:,} more bytes do not fit into {self.folder!r} ({reason}); the cache is "
            "unchanged. Make room there, or name another folder"
        )


def _reserve(file: int, nbytes: int) -> None:
    """Have the blocks of an empty file reserved, by writing them where the system knows no other way.

    glibc's posix_fallocate writes by itself where the file system cannot reserve; that of another C library may refuse.
    """
    if hasattr(os, "posix_fallocate"):
        return os.posix_fallocate(file, 0, nbytes)
    left = nbytes
    while left:
        left -= os.write(file, ZEROS[:left])


# -- the heap --------------------------------------------------------------------------------------------------------


class PrefillWatch:
    """Give freed memory back to the system once behind each prefill on a CPU: never behind a decode step.

    glibc keeps what a prefill frees, because it takes it for memory that will be asked for again soon. Decode steps ask
    for a hundredth of it.
    """

    def __init__(self) -> None:
        self._due = False

    def begin(self, columns: int, device: torch.device) -> None:
        """Note that a forward over `columns` columns begins: a long one is a prefill or a chunk of one, a short one ends it."""
        if columns >= LEAST_COLUMNS:
            self._due = device.type == "cpu"
        elif self._due:
            self.end()

    def end(self) -> None:
        """Give memory back, if there was a prefill since the last time: nothing of it runs any more."""
        if self._due:
            self._due = False
            give_back_freed()


def give_back_freed() -> bool:
    """Return freed memory to the system unless KV_HF_MALLOC_TRIM=never is in the environment; say whether that was tried."""
    return os.environ.get(TRIM_VARIABLE) != "never" and trim_heap()


def trim_heap() -> bool:
    """Have glibc return freed memory of all its arenas to the system; False beside another C library, which is left alone."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)
    return trim is not None


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """Return glibc's malloc_trim, or None in a process that has another C library."""
    try:
        if not (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc"):
            return None
        function = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, ValueError):  # no confstr, no such name, no such function
        return None
    function.argtypes, function.restype = [ctypes.c_size_t], ctypes.c_int
    return function
