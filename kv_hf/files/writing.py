"""Write a file aside and rename it: whoever reads its place finds the old contents or the new, never a part.

Every system call that changes a disk stands here and in folders.py, through `os`, so that tests can make each of them fail.
"""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from .unfinished import SAVING, beside, remove_dead


class Writer:
    """A file that is written from its begin to its end, without a buffer.

    Attributes:
        number: its descriptor.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def write(self, data: bytes | memoryview) -> None:
        """Write all of `data`, in as many calls as the system needs. Raises OSError."""
        left = memoryview(data).cast("B")
        while left:
            left = left[os.write(self.number, left) :]


@contextlib.contextmanager
def creating(path: Path, mode: int = 0o666) -> Iterator[Writer]:
    """Create a file, on the disk when the block ends; it must not exist. Raises OSError.

    Args:
        mode: its permissions, less those that the process takes away from new files (umask).
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    number = os.open(path, flags, mode)
    try:
        yield Writer(number)
        os.fsync(number)
    finally:
        os.close(number)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Writer]:
    """Open a new file beside `path` that takes its place when the block ends, and is deleted when it fails.

    The place keeps the permissions of the file that was there, and its owner and group where this process may give
    them; a new file has what the umask leaves. A link stays a link: what it leads to is replaced. Whoever is killed in
    between leaves `path` as it was, and beside it a file that the next writer into this folder removes (unfinished.py).

    Raises: OSError: for a folder, pipe or device, a file that may not be written, and whatever the disk refuses.
    """
    target = Path(os.path.realpath(path))
    before = _replaceable(target, path)
    remove_dead(target.parent)
    with beside(target, SAVING) as aside:
        try:
            with creating(aside, 0o666 if before is None else 0o600) as file:
                yield file
                if before is not None:
                    _take_over(file.number, before)
            os.replace(aside, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(aside)
            raise
    with contextlib.suppress(OSError):
        sync(target.parent)  # the new name itself is on the disk only when its folder is


def replace_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` in UTF-8 to the place `path`, as `replacing` does. Raises OSError."""
    data = text.encode("utf-8")
    with replacing(path) as file:
        file.write(data)


def create_text(path: Path, text: str) -> None:
    """Write `text` in UTF-8 into a new file. Raises OSError."""
    data = text.encode("utf-8")
    with creating(path) as file:
        file.write(data)


def sync(path: Path) -> None:
    """Have the system write a file or a folder out (folders where it can). Raises OSError."""
    if path.is_dir() and os.name != "posix":
        return
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _replaceable(target: Path, path: str | os.PathLike[str]) -> os.stat_result | None:
    """Return what is known of the file in this place, None where there is none. Raises OSError for what must not be replaced."""
    try:
        found = os.stat(target)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(f"{path} is a folder; give the name of a file")
    if not stat.S_ISREG(found.st_mode):
        raise FileExistsError(f"{path} is a pipe or a device; give the name of a file")
    if not os.access(target, os.W_OK):
        raise PermissionError(f"{path} is a file that may not be written")
    return found


def _take_over(number: int, before: os.stat_result) -> None:
    """Give a file the permissions of another one, and its owner and group where that is allowed."""
    if not hasattr(os, "fchown"):  # Windows
        return
    own = os.fstat(number)
    mode = stat.S_IMODE(before.st_mode) & 0o777
    if own.st_uid != before.st_uid:
        with contextlib.suppress(OSError):
            os.fchown(number, before.st_uid, -1)
    if own.st_gid != before.st_gid:
        try:
            os.fchown(number, -1, before.st_gid)
        except OSError:
            # the permissions of the old group are not for the new one: it gets those of everybody
            mode = mode & ~0o070 | (mode & 0o007) << 3 & mode
    os.fchmod(number, mode)
