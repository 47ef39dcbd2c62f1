"""Measure one cache in this process: `python -m kv_hf.evaluation.footprint_child` is what footprint.py starts.

Two passes over the same prompt, on a CPU each in a process of its own, since memory that one has freed serves the other. One is
timed. The other calls generate() and reads memory, with the allocator as every user has it and without a rehearsal.
"""

import gc
import sys
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
)
from transformers.utils import logging as transformers_logging

from ..texts import load_text
from .cache_kinds import CacheKind, cache_kind, why_not
from .cache_parts import HELD, cache_parts, check_prediction, kept_bytes
from .child import answer
from .decode_steps import WARMUP, Decoding, kernel_of, random_prompt, step_times
from .memory_meter import Meter, meter_for
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


def memory(model: Any, kind: CacheKind, prompt: torch.Tensor, steps: int) -> dict[str, Any]:
    """Return what a cache holds behind `prompt` [batch, context] and `steps` tokens, and the memory taken for it.

    Raises: ValueError when some logits are not finite; RuntimeError when bytes and prediction differ.
    """
    model.set_attn_implementation(kind.attention)
    meter = meter_for(prompt.device)
    cache = kind.make(model.config, prompt.shape[1] + steps + 1)
    marks = Marks(kind.name, meter)
    _generate(model, cache, prompt, steps, marks)
    tokens = prompt.shape[1] + steps
    parts = cache_parts(cache, prompt.device)
    held = sum(parts[part] for part in HELD)
    return {
        "kernel": kernel_of(cache),
        "tokens": tokens,
        "held_bytes": held,
        **{f"{part}_bytes": size for part, size in parts.items()},
        "kept_bytes": kept_bytes(cache),
        "predicted_bytes": check_prediction(cache, prompt.shape[1]),
        "bytes_per_token": held / (tokens * len(prompt)),
        "measured_by": meter.name,
        "base_bytes": meter.base,
        **marks.figures(),
        "rss_bytes": marks.grown if meter.name == "resident" else None,
    }


class Marks(LogitsProcessor):
    """Reads memory where generate() has logits: behind the prefill, and behind every step.

    Attributes:
        grown: bytes taken when it was asked last; None where the system does not tell.
    """

    def __init__(self, name: str, meter: Meter) -> None:
        self.name, self.meter = name, meter
        self.grown: int | None = None
        self._prefill: tuple[int | None, int | None] | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the logits [batch, vocab] as they are. Raises ValueError where some are not finite."""
        if not torch.isfinite(scores).all():
            raise ValueError(
                f"{self.name} gives logits that are not finite behind {input_ids.shape[1]} tokens"
            )
        self.grown = self.meter.grown()
        if self._prefill is None:
            self._prefill = self.grown, self.meter.peak()
            self.meter.restart()
        return scores

    def figures(self) -> dict[str, int | None]:
        """Return growth and peaks of the prefill and of the steps, in bytes."""
        assert self._prefill is not None
        grown, peaks = self._prefill[0], (self._prefill[1], self.meter.peak())
        return {
            "prefill_grown_bytes": grown,
            "prefill_peak_bytes": peaks[0],
            "steps_grown_bytes": self.grown,
            "steps_peak_bytes": peaks[1],
            "peak_bytes": max((one for one in peaks if one is not None), default=None),
        }


def _generate(model: Any, cache: Any, prompt: torch.Tensor, steps: int, marks: Marks) -> None:
    """Generate as users do, greedily and on beyond an end of the text, until `cache` holds `steps` tokens more."""
    own, model.generation_config = model.generation_config, GenerationConfig(pad_token_id=0)
    try:
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            past_key_values=cache,
            max_new_tokens=steps + 1,  # the last one is never stored
            do_sample=False,
            disable_compile=True,
            logits_processor=LogitsProcessorList([marks]),
        )
    finally:
        model.generation_config = own


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
