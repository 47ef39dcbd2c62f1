"""Resident memory of this process, as Linux counts it."""

import ctypes
from pathlib import Path

from ..pages.host_heap import trim_heap

M_MMAP_THRESHOLD = -3  # of glibc's mallopt
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def give_freed_memory_back(threshold: int = 1 << 18) -> None:
    """Have glibc give freed blocks of `threshold` bytes or more back to the system at once.

    Otherwise it keeps blocks of up to 32 MiB for itself, and resident memory says little about what is in use.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, threshold)


def resident(trim: bool = True) -> dict[str, int]:
    """Return bytes by name: VmRSS (now), VmHWM (most), RssAnon, RssFile; empty where /proc does not tell.

    Args:
        trim: give back what glibc holds although it is free, first.
    """
    if not STATUS.is_file():
        return {}
    if trim:
        trim_heap()
    fields = (line.split() for line in STATUS.read_text().splitlines())
    return {
        field[0].rstrip(":"): 1024 * int(field[1])
        for field in fields
        if field[0].startswith(("VmRSS", "VmHWM", "Rss"))
    }


def restart_peak() -> None:
    """Let VmHWM begin at what is resident now."""
    if CLEAR.is_file():
        CLEAR.write_text("5")
