"""What a step costs in ragged batches, and whether any single step stalls while a cache grows."""

from collections.abc import Sequence
from typing import Any

import torch
from kv_hf.evaluation.cache_kinds import CacheKind
from kv_hf.evaluation.decode_steps import (
    WARMUP,
    Decoding,
    predicted_bytes,
    random_prompt,
    step_times,
)
from kv_hf.evaluation.timing import Budget, quantile, spread


def left_padding(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return the mask [rows, longest] of rows of these lengths, padded on the left."""
    longest = max(lengths)
    columns = torch.arange(longest, device=device)
    starts = torch.tensor([longest - length for length in lengths], device=device)
    return (columns >= starts[:, None]).long()


@torch.no_grad()
def ragged_steps(
    model: Any,
    kinds: Sequence[CacheKind],
    context: int,
    *,
    rows: int = 4,
    steps: int = 12,
    budget: Budget | None = None,
) -> list[dict[str, Any]]:
    """Time a batch of equal rows against one whose rows but the first hold a quarter.

    A padded cache pays for columns, pages for tokens. Returns one result per cache and batch, with the tokens
    that the rows really hold; all batches of all caches take turns.
    """
    batches = {"equal": [context] * rows, "ragged": [context] + [context // 4] * (rows - 1)}
    prompt = random_prompt(model.config.vocab_size, rows, context, model.device)
    found: dict[str, Decoding] = {}
    for kind in kinds:
        for batch, lengths in batches.items():
            found[f"{kind.name}/{batch}"] = Decoding(
                model,
                kind,
                prompt,
                fill="random",
                room=steps + WARMUP,
                mask=left_padding(lengths, model.device),
            )
    times = step_times(found, steps, budget)
    return [
        {
            "cache": name.split("/")[0],
            "rows": name.split("/")[1],
            "tokens_held": sum(batches[name.split("/")[1]]),
            **spread(times[name]).row("step_ms"),
            "kv_bytes": decoding.kv_bytes,
        }
        for name, decoding in found.items()
    ]


@torch.no_grad()
def growth(
    model: Any,
    kinds: Sequence[CacheKind],
    context: int,
    steps: int,
    budget: Budget | None = None,
) -> list[dict[str, Any]]:
    """Time every single step of a long decode: pages are sealed and storage grows in some of them.

    Besides the spread: the 99th percentile, the largest step and which one it was, and the bytes held at the end
    against what `predict_memory` says.
    """
    prompt = random_prompt(model.config.vocab_size, 1, context, model.device)
    found = {
        kind.name: Decoding(model, kind, prompt, fill="random", room=steps + WARMUP)
        for kind in kinds
    }
    times = step_times(found, steps, budget)
    results = []
    for name, decoding in found.items():
        samples = times[name]
        results.append(
            {
                "cache": name,
                **spread(samples).row("step_ms"),
                "step_ms_p99": quantile(samples, 0.99),
                "slowest_step": samples.index(max(samples)),
                "max_over_median": max(samples) / quantile(samples, 0.5),
                "kv_bytes": decoding.kv_bytes,
                "predicted_bytes": predicted_bytes(decoding.cache),
            }
        )
    return results
