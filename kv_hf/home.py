"""The folder for files that are made once and used again: converted models, texts sampled from models."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from .files.folders import scratch_folder


def home() -> Path:
    """Return $KV_HF_HOME, or ~/.cache/kv_hf."""
    return Path(os.environ.get("KV_HF_HOME", Path.home() / ".cache" / "kv_hf"))


def made_once(target: Path, marker: str, make: Callable[[Path, Path], object]) -> Path:
    """Return the folder `target`, made first where it has no file `marker`.

    Args:
        make: called with (the folder to fill, a scratch folder); the first becomes `target` when it is full.
    """
    if (target / marker).is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(target) as scratch:
        done = scratch / "done"
        done.mkdir()
        make(done, scratch)
        if target.exists():
            shutil.rmtree(target)
        done.rename(target)
    return target
