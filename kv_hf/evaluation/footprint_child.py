"""Measure one cache in this process: `python -m kv_hf.evaluation.footprint_child` is what footprint.py starts.

Two passes over the same prompt. One is timed with the allocator as every user has it. The other reads memory, with
freed blocks given back to the system at once; that costs time, and blocks that were freed before stay behind as
holes, so that on a CPU each pass has a process of its own.
"""

import gc
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from ..texts import load_text
from .cache_kinds import CacheKind, cache_kind, why_not
from .cache_parts import HELD, cache_parts, check_prediction, kept_bytes
from .child import answer
from .decode_steps import WARMUP, Decoding, kernel_of, random_prompt, step_times
from .memory_meter import meter_for
from .shapes import random_model
from .timing import spread

WARM_TOKENS = 200  # three pages of 64: every kernel runs, every library is loaded


def text_prompt(
    tokenizer: Any, text: str, batch: int, context: int, device: torch.device
) -> torch.Tensor:
    """Return token ids [batch, context] of a text, repeated to that length; rows begin at different places."""
    ids = torch.tensor(tokenizer(text).input_ids)
    starts = torch.arange(batch) * (len(ids) // batch)
    places = (starts[:, None] + torch.arange(context)[None]) % len(ids)
    return ids[places].to(device)


@torch.no_grad()
def speed(model: Any, kind: CacheKind, prompt: torch.Tensor, steps: int) -> dict[str, Any]:
    """Return the time of one prefill of `prompt` [batch, context], and of `steps` decode steps behind it."""
    batch, context = prompt.shape
    _rehearse(model, kind, prompt[:, :WARM_TOKENS])
    decoding = Decoding(model, kind, prompt, room=steps + WARMUP)
    step = spread(step_times({kind.name: decoding}, steps)[kind.name])
    assert decoding.prefill_ms is not None
    return {
        "prefill_ms": decoding.prefill_ms,
        "prefill_tokens_per_s": 1e3 * batch * context / decoding.prefill_ms,
        "decode_tokens_per_s": 1e3 * batch / step.p50,
        **step.row("step_ms"),
    }


@torch.no_grad()
def memory(model: Any, kind: CacheKind, prompt: torch.Tensor, steps: int) -> dict[str, Any]:
    """Return what a cache holds behind `prompt` [batch, context] and `steps` tokens, and the memory taken for it.

    Raises: ValueError when some logits are not finite; RuntimeError when bytes and prediction differ.
    """
    _rehearse(model, kind, prompt)  # buffers that libraries keep for these sizes are not the cache
    meter = meter_for(prompt.device)
    decoding = Decoding(model, kind, prompt, room=steps)
    prefill = meter.grown(), meter.peak()
    meter.restart()
    for _ in range(steps):
        decoding.before()
        if not torch.isfinite(decoding.step()).all():
            raise ValueError(
                f"{kind.name} gives logits that are not finite behind {decoding.tokens} tokens"
            )
    grown, peak = meter.grown(), meter.peak()
    parts = cache_parts(decoding.cache, prompt.device)
    held = sum(parts[part] for part in HELD)
    return {
        "kernel": kernel_of(decoding.cache),
        "tokens": decoding.tokens,
        "held_bytes": held,
        **{f"{part}_bytes": size for part, size in parts.items()},
        "kept_bytes": kept_bytes(decoding.cache),
        "predicted_bytes": check_prediction(decoding.cache, prompt.shape[1]),
        "bytes_per_token": held / (decoding.tokens * len(prompt)),
        "measured_by": meter.name,
        "base_bytes": meter.base,
        "prefill_grown_bytes": prefill[0],
        "prefill_peak_bytes": prefill[1],
        "steps_grown_bytes": grown,
        "steps_peak_bytes": peak,
        "peak_bytes": max((one for one in (prefill[1], peak) if one is not None), default=None),
        "rss_bytes": grown if meter.name == "resident" else None,
    }


def _rehearse(model: Any, kind: CacheKind, prompt: torch.Tensor) -> None:
    """Run a prefill and two steps, and forget them."""
    decoding = Decoding(model, kind, prompt, room=2)
    for _ in range(2):
        decoding.step()
    del decoding
    gc.collect()


PASSES = {"speed": speed, "memory": memory}


def _loaded(request: dict[str, Any], device: torch.device) -> tuple[Any, torch.Tensor]:
    """Return the model and its prompt."""
    dtype = getattr(torch, request["dtype"])
    batch, context = request["batch"], request["context"]
    if request["weights"] == "random":
        made = random_model(request["folder"], device, dtype)
        return made, random_prompt(made.config.vocab_size, batch, context, device)
    model: Any = AutoModelForCausalLM.from_pretrained(request["folder"], dtype=dtype)
    for tensor in (*model.parameters(), *model.buffers()):
        # weights that are mapped from their file become resident when they are read: that is not the cache
        tensor.data = tensor.data.clone()
    tokenizer = AutoTokenizer.from_pretrained(request["folder"])
    text = load_text(request["text"])
    return model.to(device).eval(), text_prompt(tokenizer, text, batch, context, device)


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a request of `footprint.measure_footprint`."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if request["threads"]:
        torch.set_num_threads(request["threads"])
    device = torch.device(request["device"])
    name = request["cache"]
    reason = why_not(name, device)
    if reason:
        raise ValueError(f"{name} cannot run here: {reason}")
    model, prompt = _loaded(request, device)
    found: dict[str, Any] = {"threads": torch.get_num_threads()}
    for one in request["passes"]:
        found.update(PASSES[one](model, cache_kind(name), prompt, request["steps"]))
    return found


if __name__ == "__main__":
    sys.exit(answer(measure))
