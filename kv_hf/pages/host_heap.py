"""The heap of the C library: has glibc return memory that was freed. Decides when such a call is worth its time."""

import ctypes
import functools
import os
from collections.abc import Callable

import torch

VARIABLE = "KV_HF_MALLOC_TRIM"  # "never": the heap is left alone
# Of a row in one forward. Fewer are a decode step, one that tries candidates included, or a sentence of a chat: they leave
# behind less than the call is worth.
LEAST_COLUMNS = 64


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
    return os.environ.get(VARIABLE) != "never" and trim_heap()


def trim_heap() -> bool:
    """Have glibc return freed memory of all its arenas to the system; False beside another C library, which is left alone."""
    trim = _malloc_trim()
    if trim is None:
        return False
    trim(0)
    return True


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
