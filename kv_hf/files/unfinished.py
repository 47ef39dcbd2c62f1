"""Names of files and folders that are being written, and the removal of those whose writer was killed.

<name>.<process>.<random>.kv_hf-saving        a file; <process> as processes.py writes it
<name>.<process>.<random>.kv_hf-converting    a folder
"""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..notices import say_once
from .processes import PATTERN, is_dead, process_name

SAVING = ".kv_hf-saving"
CONVERTING = ".kv_hf-converting"
_MOST_NAME = 255  # bytes of a name in a folder


_being_written: set[str] = set()  # names of this process


@contextlib.contextmanager
def beside(target: Path, suffix: str) -> Iterator[Path]:
    """Give a new name beside `target` for what is to become it, known as this process's until the block ends.

    What is left under that name afterwards is removed with that of killed processes. Makes nothing.
    """
    path = target.with_name(_name_aside(target.name, suffix))
    _being_written.add(path.name)
    try:
        yield path
    finally:
        _being_written.discard(path.name)


def _name_aside(name: str, suffix: str) -> str:
    """Return `name`, of which the end is left out where it is long, with process and random digits behind."""
    end = f".{process_name()}.{secrets.token_hex(8)}{suffix}"
    begin = os.fsencode(name)[: _MOST_NAME - len(end)]
    # not in the middle of a character, which would be left as halves of surrogate pairs
    return os.fsdecode(begin).encode("utf-8", "ignore").decode() + end


def writer_of(name: str) -> str | None:
    """Return the process in a name that `name_aside` made; None for all other names."""
    for suffix in (SAVING, CONVERTING):
        if name.endswith(suffix):
            parts = name.removesuffix(suffix).rsplit(".", 2)
            if len(parts) == 3 and PATTERN.fullmatch(parts[1]):
                return parts[1]
    return None


def remove_dead(folder: Path) -> list[str]:
    """Remove what killed processes left unfinished in a folder, and say so once; return the names.

    Left alone are those of processes that run, those of other machines, and those that may not be removed. Never raises
    OSError: whoever writes here next has not asked for this.
    """
    removed = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            process = writer_of(entry.name)
            if process is None:
                continue
            with contextlib.suppress(OSError):
                if _is_left(entry, process):
                    _remove(Path(entry.path), entry.is_dir(follow_symlinks=False))
                    removed.append(entry.name)
    if removed:
        say_once(
            f"unfinished {folder}",
            f"kv_hf: removed from {folder} the unfinished files of killed processes: {', '.join(sorted(removed))}",
        )
    return removed


def _is_left(entry: os.DirEntry[str], process: str) -> bool:
    """Say whether nobody writes this file or folder any more."""
    if process == process_name():
        return entry.name not in _being_written
    return is_dead(process, entry.stat(follow_symlinks=False).st_mtime)


def _remove(path: Path, is_folder: bool) -> None:
    if is_folder:
        shutil.rmtree(path)
    else:
        os.unlink(path)
