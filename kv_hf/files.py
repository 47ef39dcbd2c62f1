"""Files of users: regular ones of a bounded size are read; new ones are written aside, synced and renamed.

Whoever reads a place finds the old contents or the new, never a part. What a killed process left unfinished is removed by
the next writer into that folder: a running writer holds a lock (flock) on what it writes, and a lock ends with its process.
"""

import contextlib
import errno
import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .errors import InputFileError
from .notices import say_once

try:
    import fcntl
except ImportError:  # Windows: nothing is locked, so that nothing is removed either
    fcntl = None  # type: ignore[assignment]

# the most bytes that are read of a file, by its kind
CONFIG_BYTES = (
    16 << 20
)  # config.json, adapter_config.json, settings; the largest known ones have 1 MB
INDEX_BYTES = 128 << 20  # an index of tensors; of the largest models 30 MB
CARD_BYTES = 16 << 20  # a model card
BESIDE_BYTES = 512 << 20  # a tokenizer, a licence: what is copied beside weights
ROWS_BYTES = 1 << 30  # rows of measurements
TEXT_BYTES = 16 << 30  # text that is measured or trained on, which lies in memory as a whole
UNFINISHED = ".kv_hf-unfinished"
_NEW = os.O_CREAT | os.O_EXCL | os.O_WRONLY
PathLike = str | os.PathLike[str]


def read_bytes(path: PathLike, limit: int, what: str) -> bytes:
    """Return the contents of a regular file of at most `limit` bytes; a pipe is not waited for.

    Args:
        what: what messages call it, such as "config".
    Raises: InputFileError naming the path, its size and the limit; OSError where it cannot be opened.
    """
    name = f"{what} {os.fspath(path)!r}"
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    number = os.open(path, flags)
    try:  # of what is open, so that nobody can swap it
        found = os.fstat(number)
        if not stat.S_ISREG(found.st_mode):
            raise InputFileError(f"{name} must be a regular file")
        if found.st_size > limit:
            size = f"{found.st_size:,} bytes, at most {limit:,} are read"
            raise InputFileError(f"{name} is too large: {size}")
        with open(number, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(number)


def read_text(path: PathLike, limit: int, what: str) -> str:
    """Return the text of a UTF-8 file, without the mark that some editors put at its begin, line ends as "\\n".

    Raises: InputFileError for a file that is not UTF-8, and as `read_bytes` does.
    """
    try:
        text = read_bytes(path, limit, what).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputFileError(f"{what} {os.fspath(path)!r} is not UTF-8: {error}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json_object(path: PathLike, limit: int, what: str) -> dict[str, Any]:
    """Return a JSON object from a file. Raises InputFileError for anything else, and as `read_text` does."""
    text = read_text(path, limit, what)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputFileError(f"{what} {os.fspath(path)!r} is no JSON: {error}") from None
    if not isinstance(found, dict):
        got = type(found).__name__
        raise InputFileError(f"{what} {os.fspath(path)!r} must hold a JSON object, got {got}")
    return found


def is_within(path: Path, folder: Path) -> bool:
    """Say whether a path, all links followed, lies in a folder (which is taken as it is)."""
    return Path(os.path.realpath(path)).is_relative_to(folder)


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
def creating(path: Path) -> Iterator[Writer]:
    """Create a file, on the disk when the block ends; it must not exist. Raises OSError."""
    with _open(path, _NEW) as file:
        yield file
        os.fsync(file.number)


def create_text(path: Path, text: str) -> None:
    """Write `text` in UTF-8 into a new file. Raises OSError."""
    with creating(path) as file:
        file.write(text.encode("utf-8"))


@contextlib.contextmanager
def replacing(path: PathLike) -> Iterator[Writer]:
    """Open a new file beside `path` that takes its place when the block ends, and is deleted when it fails.

    The place keeps the permissions of the file that was there, and its owner and group where this process may give
    them; a new file has what the umask leaves. A link stays a link: what it leads to is replaced.

    Raises: OSError: for a folder, pipe or device, a file that may not be written, and whatever the disk refuses.
    """
    target = Path(os.path.realpath(path))
    before = _replaceable(target, path)
    mode = 0o666 if before is None else 0o600
    with _beside(target, lambda path: os.close(os.open(path, _NEW, mode))) as aside:
        with _open(aside) as file:
            yield file
            if before is not None and os.name == "posix":
                with contextlib.suppress(OSError):
                    os.fchown(file.number, before.st_uid, before.st_gid)
                os.fchmod(file.number, stat.S_IMODE(before.st_mode) & 0o777)
            os.fsync(file.number)
        os.replace(aside, target)
    _sync_names(target.parent)


def replace_text(path: PathLike, text: str) -> None:
    """Write `text` in UTF-8 to the place `path`, as `replacing` does. Raises OSError."""
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


@contextlib.contextmanager
def becoming_folder(destination: Path) -> Iterator[Path]:
    """Make a folder beside `destination` that becomes it when the block ends, and is deleted when it fails.

    The destination may be an empty folder, whose permissions the new one takes over. Parents that are missing are made, and
    taken away again where it fails. Raises OSError.
    """
    target = Path(os.path.realpath(destination))
    there = target.exists()
    mode = 0o700 if there else 0o777
    missing = [parent for parent in target.parents if not parent.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _beside(target, lambda path: os.mkdir(path, mode)) as aside:
            yield aside
            if there:
                os.chmod(aside, stat.S_IMODE(os.stat(target).st_mode))
            for path in [*aside.rglob("*"), aside]:
                _sync(path)
            os.rename(aside, target)  # onto an empty folder, or a name that is free
    except BaseException:
        with contextlib.suppress(OSError):
            for parent in missing:
                parent.rmdir()
        raise
    _sync_names(target.parent)


@contextlib.contextmanager
def scratch_folder(target: Path) -> Iterator[Path]:
    """Make a folder beside `target` for what is needed meanwhile only; deleted when the block ends. Raises OSError."""
    with _beside(target, lambda path: os.mkdir(path, 0o700)) as folder:
        yield folder


def _sync_names(folder: Path) -> None:
    """Have the system write out that a file has a new name. Raises nothing: the file is complete under its name."""
    with contextlib.suppress(OSError):
        _sync(folder)


def _sync(path: Path) -> None:
    if path.is_dir() and os.name != "posix":
        return
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _replaceable(target: Path, path: PathLike) -> os.stat_result | None:
    """Return the status of the file in this place, None where there is none. Raises OSError for what must not be replaced."""
    try:
        found = os.stat(target)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):
        kind = IsADirectoryError if stat.S_ISDIR(found.st_mode) else FileExistsError
        raise kind(f"{path} is no regular file; give the name of a file")
    if not os.access(target, os.W_OK):
        raise PermissionError(f"{path} is a file that may not be written")
    return found


@contextlib.contextmanager
def _open(path: Path, flags: int = 0) -> Iterator[Writer]:
    number = os.open(path, flags | os.O_WRONLY | getattr(os, "O_BINARY", 0), 0o666)
    try:
        yield Writer(number)
    finally:
        os.close(number)


@contextlib.contextmanager
def _beside(target: Path, make: Callable[[Path], None]) -> Iterator[Path]:
    """Make a new file or folder beside `target`, locked until the block ends; what has not been renamed then is removed."""
    _remove_abandoned(target.parent)
    lock = None
    while lock is None:
        path = target.with_name(f"{secrets.token_hex(8)}{UNFINISHED}")
        make(path)
        lock = _lock(path)  # None: another writer took it for abandoned before it was locked
    try:
        yield path
    finally:
        if path.exists():
            _remove(path)
        if lock >= 0:
            os.close(lock)


def lock(number: int, flags: int = 0) -> None:
    """Wait for a lock on an open file, which is held until the file is closed; without locks (Windows) nothing happens.

    Args:
        number: its descriptor.
        flags: LOCK_NB raises BlockingIOError where another one holds it, and does not wait.
    """
    if fcntl is not None:
        fcntl.flock(number, fcntl.LOCK_EX | flags)


def _lock(path: Path, flags: int = 0) -> int | None:
    """Return a descriptor that holds a lock on a file or folder, None where it is gone, -1 without locks.

    Args:
        flags: LOCK_NB raises BlockingIOError where another one holds it, and does not wait.
    """
    if fcntl is None:
        return -1
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        lock(number, flags)
    except OSError as error:
        if flags or error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
            os.close(number)
            raise
    if path.exists():
        return number  # a disk without locks: what is left there stays
    os.close(number)
    return None


def _remove(path: Path) -> None:
    """Remove a file or a folder with what is in it, as far as it can be."""
    with contextlib.suppress(OSError):  # rmtree raises those of a close all the same
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _remove_abandoned(folder: Path) -> None:
    """Remove what killed processes left unfinished in a folder, and say so. Never raises OSError."""
    removed = []
    for path in sorted(folder.glob(f"*{UNFINISHED}")) if fcntl else ():
        with contextlib.suppress(OSError):
            lock = _lock(path, fcntl.LOCK_NB)
            if lock is not None:
                _remove(path)
                removed.append(path.name)
                os.close(lock)
    if removed:
        say_once(
            f"unfinished {folder}",
            f"kv_hf: removed from {folder} what killed processes left unfinished: {', '.join(removed)}",
        )
