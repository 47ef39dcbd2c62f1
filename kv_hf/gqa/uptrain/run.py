"""Uptrain a converted checkpoint towards its original: check everything, prepare, train, write."""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, GradientAccumulationPlugin

from ...errors import ConversionError
from ..writer import check_destination
from .documents import SELF, Source, check_source, documents, name_of
from .interrupt import stop_wishes
from .models import Pair, load_student, load_teacher, stored_dtype
from .progress import Progress, load_state, read_settings, work_folder, write_settings
from .result import round_to_stored, write_checkpoint
from .sampling import sampled
from .settings import UptrainSettings, mixed_precision
from .train import Run
from .windows import held_out, packed, read_windows, token_documents, write_windows

COMPUTE = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KINDS = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
HELD = 64  # windows held out of the data, at most, where no other text is given


@dataclass(frozen=True)
class UptrainReport:
    """What an uptraining did.

    Attributes:
        student, teacher, destination: as given.
        finished: False after Ctrl-C: then there is no `destination` yet, and resume=True goes on.
        steps, tokens, seconds: of training, evaluations not counted.
        curve: rows of step, tokens, seconds, loss (mean since the row before), perplexity, teacher_perplexity, kl.
        losses: of every step: (loss, KL, cross entropy).
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
    need = (
        5 * pair.student.nbytes
    )  # weights and sums of AdamW in fp32, twice while a state is saved
    check_destination(target, pair.student.folder, need)
    check_destination(target, pair.teacher.folder, need)
    sources = _sources(data)
    for source in sources:
        check_source(source)
    scored = _held(pair, held, length)
    work = work_folder(target)
    asked = asdict(settings) | {
        "student": str(student), "teacher": str(teacher), "data": [name_of(each) for each in sources],
        "held": None if held is None else name_of(held), "window": length,
    }  # fmt: skip
    _check_work(work, resume, settings, asked)
    accelerator = make_accelerator(settings)
    if not resume:
        accelerator.wait_for_everyone()  # all have seen that there is no run yet
    dtype = COMPUTE[accelerator.mixed_precision]
    original = load_teacher(pair, dtype, accelerator.device)
    with _first(accelerator):
        if accelerator.is_main_process:
            work.mkdir(parents=True, exist_ok=True)
            write_settings(work, asked)
            _write_data(work, pair, original, sources, settings, length, sampling)
    windows = read_windows(work / "data")
    count = len(windows)
    if not scored:
        kept = min(HELD, max(1, count // 20))
        if count <= kept:
            raise ConversionError(
                f"data has one window of {length} tokens: take more, or a text to evaluate on"
            )
        count -= kept
        scored = [windows[count + i]["input_ids"].tolist() for i in range(kept)]
    model = load_student(pair, settings.train)
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(own, settings.lr, (0.9, 0.95), weight_decay=settings.weight_decay)
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
        with _first(accelerator):
            if accelerator.is_main_process:
                write_checkpoint(target, pair, accelerator.unwrap_model(model), _record(asked, run))
                shutil.rmtree(work)
    accelerator.free_memory()
    return UptrainReport(
        str(student), str(teacher), str(destination), finished, state.step, state.step * run.tokens_per_step, state.seconds,
        tuple(state.evaluations), tuple(tuple(each) for each in state.losses),
    )  # fmt: skip


def make_accelerator(settings: UptrainSettings) -> Accelerator:
    """Return accelerate's accelerator for these settings.

    Raises: ConversionError for a dtype that the device lacks, and for what is not data parallelism.
    """
    # the other processes wait while the first one samples or tokenizes
    device = PartialState(**_waiting()).device
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    precision = mixed_precision(settings.dtype, device)
    if settings.dtype == "auto" and launched in COMPUTE and launched != "no":
        precision = launched
    plugin = GradientAccumulationPlugin(num_steps=settings.accumulate, sync_with_dataloader=False)
    accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_plugin=plugin)
    if accelerator.distributed_type not in KINDS:
        raise ConversionError(
            f"uptraining runs data parallel (a whole model per process), not as {accelerator.distributed_type.value}"
        )
    return accelerator


def _waiting() -> dict[str, Any]:
    many = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return {"timeout": timedelta(hours=12)} if many else {}


class _first:
    """A block that the main process runs while the others wait, and fails on all of them where it fails there."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        failed = torch.tensor([int(kind is not None)], device=self.accelerator.device)
        if self.accelerator.num_processes > 1:
            failed = self.accelerator.reduce(failed, "sum")
        if kind is None and int(failed):
            raise ConversionError("the main process failed; its message says why")


def _sources(data: str | Path | Sequence[Source]) -> list[Source]:
    if isinstance(data, str | Path):
        return [data]
    if not data:
        raise ConversionError("data is empty: it names no text")
    return list(data)


def _held(pair: Pair, held: Source | None, length: int) -> list[list[int]]:
    if held is None:
        return []
    check_source(held)
    found = held_out(token_documents(pair.tokenizer, documents(held)), length, 10_000_000)
    if not found:
        raise ConversionError(f"held {name_of(held)!r} has no text of two tokens")
    return found


def _check_work(work: Path, resume: bool, settings: UptrainSettings, asked: dict[str, Any]) -> None:
    if not resume:
        if work.exists():
            raise ConversionError(
                f"{str(work)!r} holds an unfinished run: go on with it (resume), or delete it"
            )
        return
    before = read_settings(work)
    other = settings.differences(before)
    names = ("student", "teacher", "data", "held", "window")
    other += [
        f"{name}: {before.get(name)!r} then, {asked[name]!r} now"
        for name in names
        if before.get(name) != asked[name]
    ]
    if other:
        raise ConversionError(f"resume: {work} holds a run of other settings: {'; '.join(other)}")


def _write_data(
    work: Path,
    pair: Pair,
    teacher: Any,
    sources: list[Source],
    settings: UptrainSettings,
    length: int,
    sampling: Callable[[int, int], object],
) -> None:
    """Write the windows of all sources, unless they are there."""
    folder = work / "data"
    if folder.exists():
        return

    def every() -> Iterator[list[int]]:
        for source in sources:
            ids: Iterable[list[int]]
            if source == SELF:
                ids = sampled(
                    lambda: teacher, pair, settings.sample_tokens, length, settings.seed, sampling
                )
            else:
                ids = token_documents(pair.tokenizer, documents(source))
            yield from ids

    aside = work / "data.unfinished"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        name = ", ".join(name_of(source) for source in sources)
        write_windows(aside, packed(every(), length, settings.tokens), length, name)
    except ConversionError:
        shutil.rmtree(work, ignore_errors=True)
        raise
    aside.rename(folder)


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
        "processes": run.accelerator.num_processes,
        "dtype": str(COMPUTE[run.accelerator.mixed_precision]).removeprefix("torch."),
        "steps": run.progress.step,
        "tokens": run.progress.step * run.tokens_per_step,
        "seconds": round(run.progress.seconds, 1),
        "before_training": {name: first[name] for name in names},
        "after_training": {name: last[name] for name in names},
    }  # fmt: skip
