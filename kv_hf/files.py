"""Files of users: regular ones of a bounded size are read; new ones are written aside, synced and renamed; some are made once and kept.

Whoever reads a place finds the old contents or the new, never a part. What a killed process left unfinished is removed by
the next writer into that folder: a running writer holds a lock (flock) on what it writes, and a lock ends with its process.
"""

import contextlib
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .errors import InputFileError, KVCacheError, reason
from .notices import say_once

try:
    import fcntl
except ImportError:  # Windows: nothing is locked, so that nothing is removed either
    fcntl = None  # type: ignore[assignment]

# the most bytes that are read of a file, by its kind
CONFIG_BYTES = 16 << 20  # config.json, adapter_config.json, settings; the largest have 1 MB
INDEX_BYTES = 128 << 20  # an index of tensors; of the largest models 30 MB
CARD_BYTES = 16 << 20  # a model card
COPIED_BYTES = 512 << 20  # a tokenizer, a licence: what is copied beside weights
ROWS_BYTES = 1 << 30  # rows of measurements
TEXT_BYTES = 16 << 30  # text that is measured or trained on, which lies in memory as a whole
UNFINISHED = ".kv_hf-unfinished"
PathLike = str | os.PathLike[str]


def read_bytes(path: PathLike, limit: int, what: str) -> bytes:
    """Return the contents of a regular file of at most `limit` bytes; a pipe is not waited for.

    Args:
        what: what messages call it, such as "config".
    Raises: InputFileError naming the path, its size and the limit; OSError where it cannot be opened.
    """
    name = f"{what} {os.fspath(path)!r}"
    with _opened(path, getattr(os, "O_NONBLOCK", 0)) as number:
        found = os.fstat(number)  # of what is open, so that nobody can swap it
        if not stat.S_ISREG(found.st_mode):
            raise InputFileError(f"{name} must be a regular file")
        if found.st_size > limit:
            size = f"{found.st_size:,} bytes, at most {limit:,} are read"
            raise InputFileError(f"{name} is too large: {size}")
        with open(number, "rb", closefd=False) as file:
            return file.read()


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


@contextlib.contextmanager
def replacing(path: PathLike) -> Iterator[Path]:
    """Give the path for a new file, which takes the place of `path` when the block ends, and is deleted when it fails.

    The place keeps the permissions of the file that was there; a new file has what the umask leaves. A link stays a link:
    what it leads to is replaced.

    Raises: OSError: for a folder, pipe or device, a file that may not be written, and whatever the disk refuses.
    """
    target = Path(os.path.realpath(path))
    mode = _mode_of(target, path)
    with scratch_folder(target) as folder:
        aside = folder / "new"
        aside.touch()
        made = aside.stat().st_mode
        yield aside
        os.chmod(aside, stat.S_IMODE(made if mode is None else mode))
        _sync(aside)
        os.replace(aside, target)
    _sync_names(target.parent)


def replace_text(path: PathLike, text: str) -> None:
    """Write `text` in UTF-8 to the place `path`, as `replacing` does. Raises OSError."""
    with replacing(path) as aside:
        aside.write_text(text, encoding="utf-8", newline="")


@contextlib.contextmanager
def becoming_folder(destination: Path) -> Iterator[Path]:
    """Make a folder beside `destination` that becomes it when the block ends, and is deleted when it fails.

    The destination may be an empty folder, whose permissions the new one takes over. Parents that are missing are made.
    Raises OSError.
    """
    target = Path(os.path.realpath(destination))
    there = target.exists()
    target.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(target, 0o700 if there else 0o777) as aside:
        yield aside
        if there:
            shutil.copymode(target, aside)
        for path in [*aside.rglob("*"), aside]:
            _sync(path)
        os.rename(aside, target)  # onto an empty folder, or a name that is free
    _sync_names(target.parent)


@contextlib.contextmanager
def scratch_folder(target: Path, mode: int = 0o700) -> Iterator[Path]:
    """Make a folder beside `target`, locked until the block ends; what has not been renamed then is deleted. Raises OSError."""
    _remove_abandoned(target.parent)
    path = target.with_name(f"{secrets.token_hex(8)}{UNFINISHED}")
    with contextlib.ExitStack() as held:
        held.callback(_remove, path)
        while not path.exists():  # another writer may take it for abandoned before it is locked
            os.mkdir(path, mode)
            with contextlib.suppress(FileNotFoundError):
                held.enter_context(_locked(path))
        yield path


def lock(number: int, flags: int = 0) -> bool:
    """Wait for a lock on an open file, which is held until the file is closed.

    Args:
        number: its descriptor.
        flags: fcntl.LOCK_NB does not wait.
    Returns: False where another process holds it, and where nothing can be locked (Windows, some disks).
    """
    try:
        fcntl.flock(number, fcntl.LOCK_EX | flags)
    except (AttributeError, OSError):
        return False
    return True


def _mode_of(target: Path, path: PathLike) -> int | None:
    """Return the permissions of the file in this place, None where there is none. Raises OSError for what must not be replaced."""
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(mode):
        kind = IsADirectoryError if stat.S_ISDIR(mode) else FileExistsError
        raise kind(f"{path} is no regular file; give the name of a file")
    if not os.access(target, os.W_OK):
        raise PermissionError(f"{path} is a file that may not be written")
    return mode & 0o777


@contextlib.contextmanager
def _opened(path: PathLike, flags: int = 0) -> Iterator[int]:
    number = os.open(path, os.O_RDONLY | flags | getattr(os, "O_BINARY", 0))
    try:
        yield number
    finally:
        os.close(number)


def _sync(path: Path) -> None:
    if fcntl is not None or path.is_file():
        with _opened(path) as number:
            os.fsync(number)


def _sync_names(folder: Path) -> None:
    """Have the system write out that a file has a new name. Raises nothing: the file is complete under its name."""
    with contextlib.suppress(OSError):
        _sync(folder)


@contextlib.contextmanager
def _locked(path: Path, flags: int = 0) -> Iterator[bool]:
    """Hold a lock on a file or folder, if there are locks; see `lock`. Raises OSError for what cannot be opened."""
    if fcntl is None:
        yield False
        return
    with _opened(path) as number:
        yield lock(number, flags)


def _remove(folder: Path) -> None:
    """Remove a folder with what is in it, as far as it can be."""
    with contextlib.suppress(OSError):  # rmtree raises those of a close all the same
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(folder: Path) -> None:
    """Remove what killed processes left unfinished in a folder, and say so. Never raises OSError."""
    removed = []
    for path in sorted(folder.glob(f"*{UNFINISHED}/")) if fcntl else ():
        with contextlib.suppress(OSError), _locked(path, fcntl.LOCK_NB) as abandoned:
            if abandoned and not path.is_symlink():
                _remove(path)
                removed.append(path.name)
    if removed:
        say_once(
            f"unfinished {folder}",
            f"kv_hf: removed from {folder} what killed processes left unfinished: {', '.join(removed)}",
        )


# -- the folder for files that are made once and used again: converted models, texts sampled from models -----------------------------


def user_dir() -> Path:
    """Return $KV_HF_HOME, or ~/.cache/kv_hf. Raises KVCacheError where neither is known."""
    given = os.environ.get("KV_HF_HOME")
    if given is not None:
        return Path(given)
    try:
        return Path.home() / ".cache" / "kv_hf"
    except RuntimeError:
        raise KVCacheError(
            "KV_HF_HOME must be a folder that can be written to, got none, and this user has no home folder; set KV_HF_HOME"
        ) from None


def check_writable(folder: Path) -> None:
    """Make a folder of `user_dir`, and its parents. Raises KVCacheError where nothing can be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:
        default = "" if "KV_HF_HOME" in os.environ else " (the default)"
        raise KVCacheError(
            f"KV_HF_HOME must be a folder that can be written to, got {str(user_dir())!r}{default}: {folder} cannot be "
            f"({reason(error)}); set KV_HF_HOME to another folder"
        ) from error


def made_once(target: Path, marker: str, make: Callable[[Path, Path], object]) -> Path:
    """Return the folder `target`, made first where it has no file `marker`.

    Args:
        make: called with (the folder to fill, a scratch folder); the first becomes `target` when it is full.
    Raises: KVCacheError where nothing can be written beside `target`.
    """
    if (target / marker).is_file():
        return target
    check_writable(target.parent)
    with scratch_folder(target) as scratch:
        done = scratch / "done"
        done.mkdir()
        make(done, scratch)
        if target.exists() and not (target / marker).is_file():  # cut off long ago
            target.rename(scratch / "old")
        # another process was faster: its folder has all that this one has
        with contextlib.suppress(OSError):
            done.rename(target)
        if not (target / marker).is_file():
            raise KVCacheError(
                f"{target} cannot be made: {marker} is not in it; delete it and try again"
            )
    return target
