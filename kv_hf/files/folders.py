"""Write a folder aside and rename it: there is no such folder until it is complete."""

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from .unfinished import CONVERTING, beside, remove_dead
from .writing import sync


@contextlib.contextmanager
def becoming_folder(destination: Path) -> Iterator[Path]:
    """Make a folder beside `destination` that becomes it when the block ends, and is deleted when it fails.

    The destination may be an empty folder, whose permissions the new one takes over. Whoever is killed in between leaves
    no `destination`, and beside it a folder that the next writer there removes (unfinished.py). Where it fails, parents
    that were made are taken away again.

    Raises: OSError.
    """
    target = Path(os.path.realpath(destination))
    made = [parent for parent in target.parents if not parent.exists()]
    with beside(target, CONVERTING) as aside:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            remove_dead(target.parent)
            mode = stat.S_IMODE(os.stat(target).st_mode) if target.exists() else None
            os.mkdir(aside, 0o777 if mode is None else 0o700)
            yield aside
            for path in aside.rglob("*"):
                sync(path)
            if mode is not None:
                os.chmod(aside, mode)
            sync(aside)
            os.rename(aside, target)  # onto an empty folder, or a name that is free
        except BaseException:
            _take_away(aside, made)
            raise
    with contextlib.suppress(OSError):
        sync(target.parent)  # the new name itself is on the disk only when its folder is


@contextlib.contextmanager
def scratch_folder(target: Path) -> Iterator[Path]:
    """Make a folder beside `target` for what is needed meanwhile only; deleted when the block ends. Raises OSError.

    Where this process is killed, the next writer there removes it.
    """
    with beside(target, CONVERTING) as folder:
        remove_dead(target.parent)
        os.mkdir(folder, 0o700)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _take_away(aside: Path, made: list[Path]) -> None:
    with contextlib.suppress(OSError):  # of a close that fails, which it does not ignore
        shutil.rmtree(aside, ignore_errors=True)
    with contextlib.suppress(OSError):
        for parent in made:
            parent.rmdir()
