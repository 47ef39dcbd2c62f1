"""The progress of a run, and the states on disk from which it goes on, each complete or absent.

DIR.uptraining/
    settings.json            what was asked for
    data/windows.arrow       the windows
    state-00000200/          accelerate's state behind step 200
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from filelock import FileLock, Timeout
from safetensors import SafetensorError

from ...errors import ConversionError, first_line
from ...files.writing import replace_text, sync
from ..checkpoint import read_json
from .processes import together

WORK = ".uptraining"  # what the working folder of a destination is called behind its name
SETTINGS = "settings.json"


def work_folder(destination: Path) -> Path:
    """Return the working folder of a destination: beside it."""
    target = Path(os.path.realpath(destination))
    return target.with_name(target.name + WORK)


@contextmanager
def working_in(accelerator: Accelerator, work: Path) -> Iterator[None]:
    """Have a working folder to oneself: made where it is not there, and locked by the main process.

    Raises: ConversionError where another run works there.
    """
    held = FileLock(work / "lock")
    with together(accelerator):
        if accelerator.is_main_process:
            work.mkdir(parents=True, exist_ok=True)
            try:
                held.acquire(timeout=0)
            except Timeout:
                raise ConversionError(f"another process is training in {str(work)!r}") from None
    try:
        yield
    finally:
        held.release()


@dataclass
class Progress:
    """The progress of a run; kept with every state.

    Attributes:
        step: steps done.
        planned: steps in all, as planned last.
        seconds, cpu_seconds: of training so far; the latter of the processor, of this process.
        losses: of every step: (loss, KL, cross entropy), means over its tokens.
        evaluations: rows of held-out figures, with step, tokens and seconds.
        rates: (step, largest learning rate from there on), of the beginning and of every change.
    """

    step: int = 0
    planned: int = 1
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    losses: list[tuple[float, float, float]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    rates: list[tuple[int, float]] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        """Return everything, for accelerate to save."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        vars(self).update(state)

    def set_rate(self, lr: float) -> None:
        """Note that the largest learning rate is `lr` from here on."""
        while self.rates and self.rates[-1][0] == self.step:
            self.rates.pop()
        if not self.rates or self.rates[-1][1] != lr:
            self.rates.append((self.step, lr))


def states(work: Path) -> list[Path]:
    """Return the states of a working folder, oldest first."""
    return sorted(path for path in work.glob("state-*") if path.name[6:].isdigit())


def save_state(accelerator: Accelerator, work: Path, step: int) -> None:
    """Save a state aside, rename it, and delete the older ones; called by every process.

    Raises: ConversionError where it cannot be written, with the state before it as it was.
    """
    target = work / f"state-{step:08}"
    if not target.exists():
        aside = work / "unfinished"
        what = f"the state of step {step} in {str(work)!r}"
        with together(accelerator):
            if accelerator.is_main_process:
                shutil.rmtree(aside, ignore_errors=True)
        try:
            with together(accelerator), writing(what, work):
                accelerator.save_state(str(aside))
            with together(accelerator), writing(what, work):
                if accelerator.is_main_process:
                    for path in (*aside.rglob("*"), aside):
                        sync(path)
                    aside.rename(target)
                    sync(work)
        except ConversionError:
            if accelerator.is_main_process:
                shutil.rmtree(aside, ignore_errors=True)
            raise
    if accelerator.is_main_process:
        for path in states(work):
            if path != target:
                shutil.rmtree(path)
    accelerator.wait_for_everyone()


@contextmanager
def writing(what: str, folder: Path) -> Iterator[None]:
    """Raise ConversionError for whatever goes wrong while `what` is written into a folder.

    A full disk is a RuntimeError of torch.save that speaks of positions in a stream, so that the bytes that are free are told.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        free = shutil.disk_usage(folder).free
        raise ConversionError(
            f"{what} cannot be written, with {free:,} bytes free there ({first_line(error)}): the state saved before is kept; go "
            "on with it (resume)"
        ) from error


def load_state(accelerator: Accelerator, work: Path) -> bool:
    """Load the latest state; False where there is none yet. Raises ConversionError for one that cannot be read."""
    found = states(work)
    if not found:
        return False
    try:
        accelerator.load_state(str(found[-1]))
    except Exception as error:  # whatever pickle, safetensors, torch or accelerate raise
        raise ConversionError(
            f"{found[-1]} cannot be read ({first_line(error)}): delete it, or the whole of {work} to begin anew"
        ) from error
    return True


def write_settings(work: Path, settings: dict[str, Any]) -> None:
    """Write what a run was asked for, so that it goes on with nothing else."""
    replace_text(work / SETTINGS, json.dumps(settings, indent=2) + "\n")


def read_settings(work: Path) -> dict[str, Any]:
    """Return what `write_settings` wrote. Raises ConversionError where there is nothing to go on with."""
    if not (work / SETTINGS).is_file():
        raise ConversionError(f"resume: there is no run to go on with at {work}")
    return read_json(work / SETTINGS)
