"""Grids of retrieval: which prompts are asked of which caches, and what comes back as rows."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ...formats import ATTENTION_NAME
from ...texts import longest_context
from ..cache_kinds import CacheKind, cache_kind, why_not
from ..prefill import Prefill
from .haystack import LINCOLN, Haystack, load_haystack
from .prompt import Cell, Frame, make_prompt
from .puzzles import AT_A_DEPTH, TASKS
from .rate import Rate
from .reading import Reading, bytes_per_token, read

PROTOCOL = "context prefilled, question and answer decoded from the store"
Progress = Callable[[int], object]


def needle_cells(
    lengths: Sequence[int], depths: Sequence[float], task: str = "single"
) -> list[Cell]:
    """Return the cells of a grid of lengths by depths, the longest last.

    Raises: ValueError naming the argument for a depth outside of 0 to 1, no length or depth, or a task without a depth.
    """
    if task not in AT_A_DEPTH:
        raise ValueError(
            f"task must be one of {', '.join(AT_A_DEPTH)} to lie at a depth, got {task!r}"
        )
    if not lengths or not depths:
        raise ValueError(f"lengths and depths must not be empty, got {lengths} and {depths}")
    for depth in depths:
        if not 0 <= depth <= 1:
            raise ValueError(f"depths must be between 0 and 1, got {depth}")
    return [Cell(task, length, depth) for length in sorted(lengths) for depth in depths]


def task_cells(tasks: Sequence[str], length: int) -> list[Cell]:
    """Return one cell per task, what is hidden lying anywhere.

    Raises: ValueError naming a task that does not exist.
    """
    for task in tasks:
        if task not in TASKS:
            raise ValueError(f"tasks must be of {', '.join(TASKS)}, got {task!r}")
    if not tasks:
        raise ValueError(f"tasks must not be empty: give some of {', '.join(TASKS)}")
    return [Cell(task, length) for task in tasks]


def needle_grid(
    model: PreTrainedModel,
    tokenizer: Any,
    cache_name: str | Sequence[str],
    lengths: Sequence[int],
    depths: Sequence[float],
    samples: int = 3,
    seed: int = 0,
    task: str = "single",
    **how: Any,
) -> list[dict[str, Any]]:
    """Hide a needle at each depth of texts of each length and ask for it: one row per cache, length and depth.

    Args:
        cache_name: one cache (see cache_kinds.cache_kind) or several, which then share the prefills.
        task: "single", or "multi_key" with distractors.
        **how: haystack, chat, progress and first_sample of `measure_cells`.
    """
    cells = needle_cells(lengths, depths, task)
    return list(measure_cells(model, tokenizer, cache_name, cells, samples, seed, **how))


def retrieval_tasks(
    model: PreTrainedModel,
    tokenizer: Any,
    cache_name: str | Sequence[str],
    tasks: Sequence[str],
    length: int,
    samples: int = 5,
    seed: int = 0,
    **how: Any,
) -> list[dict[str, Any]]:
    """Ask tasks of puzzles.TASKS at one length: one row per cache and task, with depth None."""
    cells = task_cells(tasks, length)
    return list(measure_cells(model, tokenizer, cache_name, cells, samples, seed, **how))


def measure_cells(
    model: PreTrainedModel,
    tokenizer: Any,
    cache_name: str | Sequence[str],
    cells: Sequence[Cell],
    samples: int,
    seed: int,
    haystack: str | Path = LINCOLN,
    chat: bool | None = None,
    progress: Progress = lambda tokens: None,
    first_sample: int = 0,
) -> Iterator[dict[str, Any]]:
    """Yield one row per cell and cache, as cells finish.

    Args:
        model: a causal language model in eval mode, on one device.
        haystack: "lincoln", "noise", a bundled text or a file; the tasks on lists of words do not read it.
        chat: put the prompts into the tokenizer's chat template; None: where it has one.
        progress: called with the length of each prompt that one cache was asked.
        first_sample: number of the first sample: a later call goes on with other prompts.
    Yields: kind="needle", task, cache, length, depth, score, nll, top1 (means over samples; nll in nats per token of
        the expected answer), found (samples answered in full), rate_low and rate_high (95 % Wilson interval of their
        share), samples, first_sample, scores and nlls (of each sample), prompt_tokens (mean), answer_tokens (mean),
        bytes_per_token with bytes_dtype (of the context of the first sample), haystack, chat, protocol, seed, seconds.
    Raises: ValueError naming what is wrong, before the model runs: caches, samples, haystack, lengths beyond the model
        or too short for a task. ValueError when logits are not finite; the cell then gives no row.
    """
    names = [cache_name] if isinstance(cache_name, str) else list(cache_name)
    kinds = {name: cache_kind(name) for name in names}
    if not kinds or samples < 1 or first_sample < 0:
        raise ValueError(
            f"need a cache, samples of at least 1 and first_sample of at least 0, got {names}, {samples} and {first_sample}"
        )
    for name in names:
        if reason := why_not(name, model.device):
            raise ValueError(f"cache {name!r} cannot be measured here: {reason}")
        _check_model(kinds[name], model)
    hay, frame = load_haystack(haystack), Frame.of(tokenizer, chat)
    for cell in cells:
        _check_length(model, cell)
        make_prompt(tokenizer, hay, frame, cell, seed, 0)
    with _PagedAttention(model):
        for cell in cells:
            numbers = range(first_sample, first_sample + samples)
            yield from _measure_cell(
                model, tokenizer, kinds, cell, numbers, seed, hay, frame, progress
            )


def _measure_cell(
    model: PreTrainedModel,
    tokenizer: Any,
    kinds: dict[str, CacheKind],
    cell: Cell,
    samples: range,
    seed: int,
    hay: Haystack,
    frame: Frame,
    progress: Progress,
) -> Iterator[dict[str, Any]]:
    found: dict[str, list[Reading]] = {name: [] for name in kinds}
    seconds = dict.fromkeys(kinds, 0.0)
    stored: dict[str, tuple[float, str]] = {}
    prompts = []
    for sample in samples:
        prompt = make_prompt(tokenizer, hay, frame, cell, seed, sample)
        prompts.append(prompt)
        begun = time.perf_counter()
        prefill = Prefill(model, torch.tensor([prompt.context], device=model.device))
        shared = (time.perf_counter() - begun) / len(kinds)
        for name, kind in kinds.items():
            begun = time.perf_counter()
            try:
                found[name].append(read(model, tokenizer, kind, prompt, prefill))
            except ValueError as error:
                raise ValueError(f"{cell}, sample {sample}: {error}") from error
            if name not in stored:
                stored[name] = bytes_per_token(prefill, kind)
            seconds[name] += shared + time.perf_counter() - begun
            progress(cell.length)
    for name, readings in found.items():
        rate = Rate.of([each.score for each in readings])
        low, high = rate.interval()
        yield {
            "kind": "needle",
            "task": cell.task,
            "cache": name,
            "length": cell.length,
            "depth": cell.depth,
            "score": statistics.fmean(each.score for each in readings),
            "nll": statistics.fmean(each.nll for each in readings),
            "top1": statistics.fmean(each.top1 for each in readings),
            "found": rate.found,
            "rate_low": low,
            "rate_high": high,
            "samples": len(samples),
            "first_sample": samples.start,
            "scores": [each.score for each in readings],
            "nlls": [each.nll for each in readings],
            "prompt_tokens": statistics.fmean(len(p.context) + len(p.question) for p in prompts),
            "answer_tokens": statistics.fmean(len(p.answer) for p in prompts),
            "bytes_per_token": stored[name][0],
            "bytes_dtype": stored[name][1],
            "haystack": hay.name,
            "chat": frame.chat,
            "protocol": PROTOCOL,
            "seed": seed,
            "seconds": round(seconds[name], 3),
        }


def _check_model(kind: CacheKind, model: PreTrainedModel) -> None:
    try:
        kind.make(model.config, 1)  # transformers' quantized caches refuse sliding layers
    except ValueError as error:
        own = type(model).__name__
        raise ValueError(f"cache {kind.name!r} cannot be measured with {own}: {error}") from error


def _check_length(model: PreTrainedModel, cell: Cell) -> None:
    most = longest_context(model.config)
    if cell.length > most:
        raise ValueError(
            f"length {cell.length} is longer than the model reads: max_position_embeddings is {most}"
        )


class _PagedAttention:
    """Give a model the attention that reads pages (and every other cache) for a while, where it can be given one."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.before = model.config._attn_implementation

    def __enter__(self) -> None:
        if self.model._can_set_attn_implementation() and self.before in ("sdpa", None):
            self.model.set_attn_implementation(ATTENTION_NAME)

    def __exit__(self, *error: object) -> None:
        if self.model.config._attn_implementation != self.before:
            self.model.set_attn_implementation(self.before or "sdpa")
