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
_SIZE_FILE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_LEAST = 2  # huge pages that a tensor must have room for: smaller ones stay in memory that is shared with others


def advise(tensor: torch.Tensor) -> bool:
    """Ask for huge pages for the memory of a contiguous CPU tensor [any shape] that nobody has written to yet.

    Only whole huge pages inside of the tensor are asked for: memory beside it is not touched, and none is added.

    Returns: whether the system took the advice; it may still give small pages. Nothing depends on that but speed.
    """
    size = huge_page_bytes()
    if not size or type(tensor) is not torch.Tensor or tensor.device.type != "cpu":
        return False
    start, nbytes = tensor.data_ptr(), tensor.nbytes
    if nbytes < _LEAST * size:
        return False
    first, last = -(-start // size) * size, (start + nbytes) // size * size
    return first < last and _madvise()(first, last - first, _MADV_HUGEPAGE) == 0


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
