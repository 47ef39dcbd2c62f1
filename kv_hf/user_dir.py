"""The folder for files that are made once and used again: converted models, texts sampled from models."""

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from .errors import KVCacheError, reason
from .files import scratch_folder


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
        with suppress(OSError):  # another process was faster: its folder has all that this one has
            done.rename(target)
        if not (target / marker).is_file():
            raise KVCacheError(
                f"{target} cannot be made: {marker} is not in it; delete it and try again"
            )
    return target
