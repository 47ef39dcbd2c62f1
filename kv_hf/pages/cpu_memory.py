"""Memory of pages on a CPU: mapped apart from the C library's heap, in huge pages, and given back behind a prefill.

Pages outlive a prefill, its activations do not. In one heap the pages of a layer would lie between activations, and cut up
the holes that these leave: later ones would find no room there, and the heap would grow. So each large field of a side
lies in a mapping of its own, which goes back to the system as a whole when its last tensor is gone:

    [ pages 0 .. n | n .. most )

Pages n .. most are addresses alone: the system gives memory, all zero, to what is written. Storage that grows up to there
copies nothing. Knows no formats and no ids.
"""

import ctypes
import functools
import math
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

LEAST_BYTES = (
    32 << 10
)  # smaller fields stay in the heap: a mapping is a whole number of 4 KiB, and a call to the system
AHEAD = 2  # a mapping has addresses for so many times the pages that are asked for

TRIM_VARIABLE = "KV_HF_MALLOC_TRIM"  # "never": the heap is left alone
# Of a row in one forward. Fewer are a decode step, one that tries candidates included, or a sentence of a chat: they leave
# behind less than the call is worth.
LEAST_COLUMNS = 64

_MADV_HUGEPAGE = 14  # asm-generic/mman-common.h
_MADV_COLLAPSE = 25  # the same file, Linux 6.1
_SIZE_FILE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_LEAST_HUGE = 2  # huge pages that a tensor must have room for: smaller ones lie in memory that is shared with others


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
    return torch.frombuffer(memory, dtype=field.dtype).view(shape)


# -- huge pages: a table of a few thousand places finds addresses; with 2 MiB a place, a long cache hardly ever misses it -----


def advise(tensor: torch.Tensor, written: int = 0) -> bool:
    """Ask for huge pages for the memory of a contiguous CPU tensor [any shape].

    Only whole huge pages inside of the tensor are asked for: memory beside it is not touched, and none is added.

    Args:
        written: bytes at the front that were written already, and of which whole huge pages were asked for before. What
            is written cannot become huge by itself any more; Linux 6.1 and later put it together here.
    Returns: whether the system took the advice; it may still give small pages. Nothing depends on that but speed.
    """
    size = huge_page_bytes()
    if not size or tensor.nbytes < _LEAST_HUGE * size or tensor.device.type != "cpu":
        return False
    start = tensor.data_ptr()
    behind = (start + tensor.nbytes) // size * size
    asked = start if written < _LEAST_HUGE * size else (start + written) // size * size
    first = -(-asked // size) * size
    if first >= behind or madvise()(first, behind - first, _MADV_HUGEPAGE) != 0:
        return False
    half_written = min(behind, -(-(start + written) // size) * size) - first
    if written and half_written > 0:
        madvise()(first, half_written, _MADV_COLLAPSE)
    return True


@functools.cache
def huge_page_bytes() -> int:
    """Return the bytes of a huge page that programs may ask for; 0 where there are none."""
    try:
        return int(_SIZE_FILE.read_text())
    except (OSError, ValueError):  # another system, or a kernel without them
        return 0


@functools.cache
def madvise() -> Callable[[int, int, int], int]:
    """Return the C library's function of that name: (address, bytes, advice) -> 0, or -1 where it was refused."""
    if sys.platform == "win32":
        return lambda address, nbytes, advice: -1
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    function.restype = ctypes.c_int
    found: Callable[[int, int, int], int] = function
    return found


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
    found: Callable[[int], int] = function
    return found
