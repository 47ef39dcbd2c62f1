"""The writer of a file: a name for this process that tells later whether it is still running.

    <machine>-<boot>-<pid>-<begin>      "3f0c9a1b7d-51e2aa90-4711-8812345"

machine: hash of the host's name and machine-id. boot: hash of this boot of the kernel and of the namespace that counts
processes, so that containers on one machine do not take each other's numbers for their own. begin: when the process
began, in clock ticks of the kernel, as the number alone may belong to another process by now.
"""

import hashlib
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

PATTERN = re.compile(r"([0-9a-f]{10})-([0-9a-f]{8})-([0-9]{1,10})-([0-9]{1,20})")
# fields of /proc/<pid>/stat behind the name: state, threads, clock ticks between boot and begin
_STATE, _THREADS, _BEGIN = 0, 17, 19


def process_name() -> str:
    """Return the name of this process; a forked child has its own."""
    begin = _stat(os.getpid())
    ticks = begin[_BEGIN] if begin else "0"
    return f"{_machine()}-{_boot()}-{os.getpid()}-{ticks}"


def is_dead(name: str, written: float) -> bool:
    """Say whether the process of a `process_name` certainly runs no more.

    Certain is that of a process of this machine only. What another machine or container wrote is never called dead,
    unless this very machine has been started anew since.

    Args:
        written: when that process last wrote, in seconds since the epoch.
    """
    found = PATTERN.fullmatch(name)
    if found is None or os.name != "posix" or found[1] != _machine():
        return False
    if found[2] != _boot():
        booted = _boot_time()
        return _has_machine_id() and booted is not None and written < booted
    return not _runs(int(found[3]), found[4])


def _runs(pid: int, begin: str) -> bool:
    try:
        os.kill(pid, 0)  # sends nothing
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # it is there, and another user's
        pass
    now = _stat(pid)
    if not now or begin == "0":
        return True  # hidden from us, or a system without /proc
    ended = now[_STATE] in "ZX" and now[_THREADS] in ("0", "1")
    return now[_BEGIN] == begin and not ended


def _stat(pid: int) -> list[str]:
    """Return what /proc says of a process, behind its name; nothing where it says nothing."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def _machine() -> str:
    return _hash(socket.gethostname(), *_first_lines("/etc/machine-id"), digits=10)


def _has_machine_id() -> bool:
    return any(_first_lines("/etc/machine-id"))


def _boot() -> str:
    try:
        namespace = str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        namespace = ""
    return _hash(*_first_lines("/proc/sys/kernel/random/boot_id"), namespace, digits=8)


def _boot_time() -> float | None:
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return None if clock is None else time.time() - time.clock_gettime(clock)


def _first_lines(*paths: str) -> Iterator[str]:
    for path in paths:
        try:
            yield Path(path).read_text("utf-8").strip()[:200]
        except (OSError, ValueError):
            yield ""


def _hash(*parts: str, digits: int) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:digits]
