"""Decode steps with pages outside of the device: what is resident, what a step costs, and that nothing changes."""

import gc
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from kv_hf.evaluation.cache_kinds import CacheKind
from kv_hf.evaluation.decode_steps import Decoding, random_prompt, step_times
from kv_hf.evaluation.resident import resident, restart_peak
from kv_hf.evaluation.timing import Budget, spread

from kv_hf.cache.paged_cache import PagedCache
from kv_hf.formats import ATTENTION_NAME

SETTLING = 3  # steps before resident memory is read: buffers are made at the first
GATE_PROMPT, GATE_STEPS = 700, 70  # ten pages, and one that is sealed on the way
Options = Mapping[str, Any]


def offload_kind(name: str, options: Options) -> CacheKind:
    """Return a paged cache with these options as a contender."""
    return CacheKind(name, ATTENTION_NAME, lambda config, _: PagedCache(config, **options))


@torch.no_grad()
def differing(model: Any, keys: str, offloads: Sequence[Options]) -> list[Options]:
    """Decode a random prompt with and without offload; return the options whose logits are not bit-equal."""
    prompt = random_prompt(model.config.vocab_size, 1, GATE_PROMPT, model.device)
    plain = Decoding(model, offload_kind("plain", {"keys": keys}), prompt)
    right = [plain.step() for _ in range(GATE_STEPS)]
    wrong = []
    for options in offloads:
        found = Decoding(model, offload_kind("offload", {"keys": keys, **options}), prompt)
        if not all(torch.equal(found.step(), logits) for logits in right):
            wrong.append(options)
    return wrong


def _named(options: Options) -> str:
    if "offload" not in options:
        return "none"
    budget, read = options.get("device_bytes"), options.get("read_tokens")
    name = f"{options['offload']}, " + (f"{budget >> 20} MiB" if budget else "least")
    return name if read is None else f"{name}, {read:,} read"


@torch.no_grad()
def offload_steps(
    model: Any,
    keys: str,
    context: int,
    places: Sequence[str],
    shares: Sequence[float],
    *,
    steps: int = 12,
    budget: Budget | None = None,
    read_tokens: int | None = None,
) -> list[dict[str, Any]]:
    """Time decode steps behind `context` random tokens with all pages on the device and with budgets for them.

    Args:
        places: "cpu", "disk".
        shares: budgets as parts of what all pages take; 0 for the least that works.
        read_tokens: of steps that read a part, for which there is one cache more of each place, with the least budget.
    Returns: one result for each cache: bytes that it says it has, growth of resident (CUDA: allocated) memory from
        before the cache was made to when it is stepping, and the times of interleaved steps.
    Raises: RuntimeError when some logits differ from those without offload, steps that read a part apart.
    """
    device = model.device
    prompt = random_prompt(model.config.vocab_size, 1, context, device)
    found: dict[str, Decoding] = {}
    results: list[dict[str, Any]] = []
    everything = 0
    wanted: list[tuple[str | None, float, int | None]] = [(None, 0.0, None)]
    wanted += [(place, share, None) for place in places for share in shares]
    if read_tokens is not None:
        wanted += [(place, 0.0, read_tokens) for place in places]
    for place, share, read in wanted:
        options: dict[str, Any] = {"keys": keys}
        if read is not None:
            options["read_tokens"] = read
        if place is not None:
            options["offload"] = place
            if share:
                options["device_bytes"] = int(share * everything)
        name = _named(options)
        gc.collect()
        before = resident()
        restart_peak()
        room = steps + SETTLING + 4
        decoding = Decoding(model, offload_kind(name, options), prompt, fill="random", room=room)
        filled = resident()
        restart_peak()
        for _ in range(SETTLING):
            decoding.note_peak()
        now, memory = resident(), decoding.cache.memory()
        if place is None:
            everything = memory.payload + memory.scales
        found[name] = decoding
        results.append(
            {
                "cache": name,
                "keys": keys,
                "offload": place,
                "device_bytes": options.get("device_bytes"),
                "read_tokens": read,
                "page_bytes": memory.payload + memory.scales + memory.staging,
                "total_bytes": memory.total,
                "offloaded_bytes": memory.offloaded,
                "layers_outside": sum(
                    layer.storage.offloaded_bytes > 0 for layer in decoding.cache.paged_layers
                ),
                "resident_bytes": now["VmRSS"] - before["VmRSS"] if now else None,
                "resident_peak_filling": filled["VmHWM"] - before["VmRSS"] if now else None,
                "resident_peak_stepping": now["VmHWM"] - before["VmRSS"] if now else None,
                "allocated_peak": decoding.peak_bytes if device.type == "cuda" else None,
            }
        )
    times = step_times(found, steps, budget)
    plain = found["none"]
    last = plain.step()
    for result in results:
        decoding = found[result["cache"]]
        compared = decoding is not plain and result["read_tokens"] is None
        if compared and not torch.equal(decoding.step(), last):
            raise RuntimeError(f"{result['cache']}: logits differ from those without offload")
        result.update(spread(times[result["cache"]]).row("step_ms"))
    base = results[0]["step_ms_p50"]
    return [{**result, "ratio_to_none": result["step_ms_p50"] / base} for result in results]
