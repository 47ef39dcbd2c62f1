"""Uptrain a converted checkpoint towards its original: check everything, prepare, train, write."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import ConversionError
from ..writer import check_destination
from .documents import Source, check_source, name_of
from .inputs import check_tokens, check_work, held_windows, sources_of, write_data
from .interrupt import stop_wishes
from .models import Pair, load_student, load_teacher, stored_dtype
from .processes import COMPUTE, make_accelerator, together
from .progress import Progress, load_state, work_folder, working_in, write_settings
from .result import bytes_needed, round_to_stored, write_checkpoint
from .settings import UptrainSettings
from .train import Run
from .windows import read_windows

HELD = 64  # windows held out of the data, at most, where no other text is given


@dataclass(frozen=True)
class UptrainReport:
    """The report of an uptraining.

    Attributes:
        student, teacher, destination: as given.
        finished: False after Ctrl-C: then there is no `destination` yet, and resume=True goes on.
        steps, tokens, seconds: of training, evaluations not counted.
        curve: rows of step, tokens, seconds, loss (mean since the row before), perplexity, teacher_perplexity, kl.
        losses: of every step: (loss, KL, cross entropy).
        rates: (step, largest learning rate from there on), of the beginning and of every change.
    """

    student: str
    teacher: str
    destination: str
    finished: bool
    steps: int
    tokens: int
    seconds: float
    curve: tuple[dict[str, Any], ...]
    losses: tuple[tuple[float, ...], ...]
    rates: tuple[tuple[int, float], ...]

    @property
    def became_worse(self) -> bool:
        """Return whether the student is further from the teacher than it was before."""
        return len(self.curve) > 1 and bool(self.curve[-1]["kl"] >= self.curve[0]["kl"])


def uptrain(
    student: str | Path,
    teacher: str | Path,
    destination: str | Path,
    data: str | Path | Sequence[Source],
    settings: UptrainSettings,
    *,
    held: Source | None = None,
    resume: bool = False,
    progress: Callable[[Progress], object] = lambda progress: None,
    sampling: Callable[[int, int], object] = lambda done, of: None,
) -> UptrainReport:
    """Train `student` towards the logits of `teacher`, and write it as a checkpoint of the same kind.

    Runs on what accelerate finds: a CPU, a GPU, or one process per GPU (or CPU) under `accelerate launch` or torchrun.

    Args:
        student, teacher: folders, or models of the hub: the converted checkpoint and its original. Neither is changed.
        destination: a folder that does not exist, or is empty. Beside it lies `destination`.uptraining until it is written.
        data: a source of text, or a list of several: a file, "dataset:PATH,CONFIG,SPLIT,FIELD", "self" (text sampled from the
            teacher); in a list also lists of documents.
        settings: how long, how fast.
        held: text to evaluate on, not part of the data; None holds windows of the data out.
        resume: go on with the run that was interrupted.
        progress: called behind every step. sampling: called with (tokens sampled, tokens wanted).
    Raises: ConversionError, before anything is written for whatever can be known then.
    """
    target = Path(destination)
    pair = Pair.open(student, teacher)
    length = pair.window(settings.length)
    work = work_folder(target)
    need = bytes_needed(pair, work)
    check_destination(target, pair.student.folder, need)
    check_destination(target, pair.teacher.folder, need)
    sources = sources_of(data)
    for source in sources:
        check_source(source)
    check_tokens(settings, sources, length, held is not None)
    scored = held_windows(pair, held, sources, length)
    accelerator = make_accelerator(settings)
    asked = asdict(settings) | {
        "student": str(student), "teacher": str(teacher), "data": [name_of(each) for each in sources],
        "held": None if held is None else name_of(held), "window": length,
        "processes": accelerator.num_processes,
    }  # fmt: skip
    check_work(work, resume, settings, asked)
    model = load_student(pair, settings.train)
    original = load_teacher(pair, COMPUTE[accelerator.mixed_precision], accelerator.device)
    accelerator.wait_for_everyone()  # all have seen what there is of the run
    with working_in(accelerator, work):
        with together(accelerator):
            if accelerator.is_main_process:
                write_settings(work, asked)
                write_data(work, pair, original, sources, settings, length, sampling)
        windows = read_windows(work / "data")
        count = len(windows)
        if not scored:
            kept = min(HELD, max(1, count // 20))
            if count <= kept:
                if accelerator.is_main_process:
                    shutil.rmtree(work)
                raise ConversionError(
                    f"data has one window of {length} tokens: take more, or a text to evaluate on"
                )
            count -= kept
            scored = [windows[count + i]["input_ids"].tolist() for i in range(kept)]
        own = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(
            own, settings.lr, (0.9, 0.95), weight_decay=settings.weight_decay
        )
        state = Progress()
        accelerator.register_for_checkpointing(state)
        model, optimizer = accelerator.prepare(model, optimizer)
        run = Run(
            accelerator, model, original, optimizer, windows, count, scored, settings, state, work, progress
        )  # fmt: skip
        if not (resume and load_state(accelerator, work)):
            run.evaluate()
        with stop_wishes() as wish:
            finished = run.train(wish)
        if finished:
            round_to_stored(accelerator.unwrap_model(model), stored_dtype(pair.student))
            run.evaluate()
            with together(accelerator):
                if accelerator.is_main_process:
                    write_checkpoint(
                        target, pair, accelerator.unwrap_model(model), _record(asked, run)
                    )
                    shutil.rmtree(work)
    accelerator.free_memory()
    return UptrainReport(
        str(student), str(teacher), str(destination), finished, state.step, state.step * run.tokens_per_step, state.seconds,
        tuple(state.evaluations), tuple(tuple(each) for each in state.losses), tuple((at, lr) for at, lr in state.rates),
    )  # fmt: skip


def _record(asked: dict[str, Any], run: Run) -> dict[str, Any]:
    names = ("perplexity", "teacher_perplexity", "kl", "scored")
    first, last = run.progress.evaluations[0], run.progress.evaluations[-1]

    def short(name: str) -> str:
        return Path(name).name if Path(name).is_dir() else name

    return {
        "student": short(asked["student"]),
        "teacher": short(asked["teacher"]),
        "data": [Path(name).name if Path(name).is_file() else name for name in asked["data"]],
        "held_out": short(Path(asked["held"]).name) if asked["held"] else "windows of the data",
        **{name: asked[name] for name in ("lr", "alpha", "temperature", "train", "batch", "accumulate", "seed", "window")},
        **({"lr_from_step": run.progress.rates} if len(run.progress.rates) > 1 else {}),
        "processes": run.accelerator.num_processes,
        "dtype": str(COMPUTE[run.accelerator.mixed_precision]).removeprefix("torch."),
        "steps": run.progress.step,
        "tokens": run.progress.step * run.tokens_per_step,
        "seconds": round(run.progress.seconds, 1),
        "before_training": {name: first[name] for name in names},
        "after_training": {name: last[name] for name in names},
    }  # fmt: skip
