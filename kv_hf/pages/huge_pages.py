"""Huge pages of memory for large tensors on a CPU: Linux gives them where a program asks for them.

A processor finds an address by a table of a few thousand places. With places of 4 KiB, reading a long cache misses that table
at every page of a kv head; with 2 MiB it hardly ever does. Decides nothing but which memory is worth the request.
"""

import ctypes
import functools
import sys
from pathlib import Path

import torch

_MADV_HUGEPAGE = 14  # asm-generic/mman-common.h
_MADV_COLLAPSE = 25  # the same file, Linux 6.1
_SIZE_FILE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_LEAST = 2  # huge pages that a tensor must have room for: smaller ones stay in memory that is shared with others


def advise(tensor: torch.Tensor, written: int = 0) -> bool:
    """Ask for huge pages for the memory of a contiguous CPU tensor [any shape].

    Only whole huge pages inside of the tensor are asked for: memory beside it is not touched, and none is added.

    Args:
        written: bytes at the front that were written already, and of which whole huge pages were asked for before. What
            is written cannot become huge by itself any more; Linux 6.1 and later put it together here.
    Returns: whether the system took the advice; it may still give small pages. Nothing depends on that but speed.
    """
    size = huge_page_bytes()
    if not size or type(tensor) is not torch.Tensor or tensor.device.type != "cpu":
        return False
    start = tensor.data_ptr()
    first, last = _whole(start, tensor.nbytes, size)
    _, asked = _whole(start, written, size)
    first = max(first, asked)
    if first >= last or _madvise()(first, last - first, _MADV_HUGEPAGE) != 0:
        return False
    behind = min(last, -(-(start + written) // size) * size)
    if written and first < behind:
        _madvise()(first, behind - first, _MADV_COLLAPSE)
    return True


def _whole(start: int, nbytes: int, size: int) -> tuple[int, int]:
    """Return the addresses [first, last) of the huge pages that lie inside of a tensor; (0, 0) where it is too small."""
    if nbytes < _LEAST * size:
        return 0, 0
    return -(-start // size) * size, (start + nbytes) // size * size


@functools.cache
def huge_page_bytes() -> int:
    """Return the bytes of a huge page that programs may ask for; 0 where there are none."""
    if sys.platform != "linux":
        return 0
    try:
        return int(_SIZE_FILE.read_text())
    except (OSError, ValueError):  # a kernel without them
        return 0


@functools.cache
def _madvise() -> "ctypes._NamedFuncPointer":
    function = ctypes.CDLL(None).madvise
    function.argtypes, function.restype = (
        [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int],
        ctypes.c_int,
    )
    return function
