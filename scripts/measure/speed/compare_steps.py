"""Decode steps of a model with many caches at one context length, in turns."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from kv_hf.evaluation.cache_kinds import CacheKind
from kv_hf.evaluation.decode_steps import (
    WARMUP,
    Decoding,
    kernel_of,
    predicted_bytes,
    random_prompt,
    step_times,
)
from kv_hf.evaluation.timing import Budget, Spread, spread

MAX_STEPS = 60  # so that the context stays within a page of the nominal one, warm-up included


def start_all(
    model: Any,
    kinds: Sequence[CacheKind],
    prompt: torch.Tensor,
    *,
    fill: str,
    room: int,
    prefills: int,
    say: Callable[[str], object],
    budget: Budget | None = None,
) -> tuple[dict[str, Decoding], dict[str, list[float]]]:
    """Fill caches with the same prompt, in turns; one that does not fit into memory is left out, said so.

    Returns: the caches of the last turn, and the milliseconds of each prefill (none for random keys and values).
    """
    found: dict[str, Decoding] = {}
    times: dict[str, list[float]] = {kind.name: [] for kind in kinds}
    able = list(kinds)
    for turn in range(prefills if fill == "prompt" else 1):
        if turn and budget is not None and budget.spent:
            break
        for kind in tuple(able if turn % 2 == 0 else reversed(able)):
            found.pop(kind.name, None)  # the cache of the turn before makes room first
            try:
                decoding = Decoding(model, kind, prompt, fill=fill, room=room)
                decoding.note_peak()
            except torch.OutOfMemoryError:
                say(f"{kind.name} is left out: it does not fit beside the others")
                able.remove(kind)
                torch.cuda.empty_cache()
                continue
            found[kind.name] = decoding
            if decoding.prefill_ms is not None:
                times[kind.name].append(decoding.prefill_ms)
    return {kind.name: found[kind.name] for kind in able}, times


@torch.no_grad()
def compare_steps(
    model: Any,
    kinds: Sequence[CacheKind],
    context: int,
    *,
    batch: int = 1,
    fill: str = "prompt",
    steps: int = 24,
    prefills: int = 3,
    budget: Budget | None = None,
    say: Callable[[str], object] = print,
) -> list[dict[str, Any]]:
    """Return what each cache took and holds; times in ms, the first kind is what ratios refer to.

    Raises: ValueError when `steps` is more than a page has tokens, when some logits are not finite, or when the
        first kind does not fit into memory.
    """
    if not 1 <= steps <= MAX_STEPS:
        raise ValueError(f"steps must be between 1 and {MAX_STEPS}, got {steps}")
    prompt = random_prompt(model.config.vocab_size, batch, context, model.device)
    found, prefill_times = start_all(
        model,
        kinds,
        prompt,
        fill=fill,
        room=steps + WARMUP,
        prefills=prefills,
        say=say,
        budget=budget,
    )
    times = step_times(found, steps, budget)
    results = []
    for name, decoding in found.items():
        decoding.before()
        if not torch.isfinite(decoding.step()).all():
            raise ValueError(f"{name} gives logits that are not finite at {context} tokens")
        results.append(_result(decoding, spread(times[name]), prefill_times[name]))
    base = next((result for result in results if result["cache"] == kinds[0].name), None)
    if base is None:
        raise ValueError(f"{kinds[0].name} does not fit into memory at {context} tokens")
    for result in results:
        result["ratio_to_dynamic"] = base["step_ms_p50"] / result["step_ms_p50"]
        result["kv_ratio"] = result["kv_bytes"] / base["kv_bytes"]
    return results


def _result(decoding: Decoding, step: Spread, prefills: list[float]) -> dict[str, Any]:
    cuda = decoding.device.type == "cuda"
    return {
        "cache": decoding.kind.name,
        "kernel": kernel_of(decoding.cache),
        "tokens": decoding.tokens,
        **step.row("step_ms"),
        **(spread(prefills).row("prefill_ms") if prefills else {}),
        "kv_bytes": decoding.kv_bytes,
        "bytes_per_token": decoding.kv_bytes / (len(decoding.token) * decoding.tokens),
        # most that one step allocated for a while, beside the cache (on a CPU: resident memory)
        "transient_bytes": decoding.transient_bytes,
        "predicted_bytes": predicted_bytes(decoding.cache),
        # what was allocated at most for this cache, in the prefill or in a step; the model is not counted
        "peak_bytes": decoding.peak_bytes if cuda else None,
        "device_bytes": decoding.own_bytes if cuda else None,
        "rss_bytes": None if cuda else decoding.rss_bytes,
    }


def ms_per_1k_tokens(contexts: Sequence[int], ms: Sequence[float]) -> float:
    """Return the slope of the least-squares line through (context, ms), per 1,000 tokens."""
    count = len(contexts)
    if count < 2 or len(ms) != count:
        raise ValueError(f"a slope needs two contexts and as many times, got {count} and {len(ms)}")
    mean_x, mean_y = sum(contexts) / count, sum(ms) / count
    top = sum((x - mean_x) * (y - mean_y) for x, y in zip(contexts, ms, strict=True))
    return 1000 * top / sum((x - mean_x) ** 2 for x in contexts)
