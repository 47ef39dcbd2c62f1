"""Memory and speed of one cache, measured alone in a fresh process: `python -m kv_hf.evaluation.memory` is the child.

What a process has freed, it may still hold: two caches measured in one process hide in each other's memory. So on a CPU
times and memory come from a process each. Throughput is a by-product here: speeds that are to be compared closely come
from caches that take turns in one process (scripts/).
"""

import gc
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedConfig,
)
from transformers.utils import logging as transformers_logging

from ..texts import load_text, longest_context
from .accuracy import check_finite
from .caches import HELD, CacheKind, cache_kind, cache_parts, kept_bytes, predicted_bytes, why_not
from .models import check_model_name
from .steps import WARMUP, Decoding, Meter, interleave, kernel_of, random_prompt, spread

DTYPES = ("bfloat16", "float16", "float32")
WARM_TOKENS = 200  # three pages of 64: every kernel runs, every library is loaded


class MeasurementError(RuntimeError):
    """A measurement gave no figures: out of memory, killed, or its results contradict each other."""


@dataclass(frozen=True)
class Request:
    """What `measure_footprint` is asked for.

    Attributes:
        model: hub id or folder; with weights="random" also a config.
        cache: name as `cache_kind` takes it, with options.
        context: tokens of each row's prompt, from `text` (repeated), or random ids with random weights.
        batch: rows.
        steps: decode steps; memory is read behind them. transformers' quanto and hqq caches encode everything
            anew each 128 tokens, which is seen with more steps than that only.
    """

    model: Any
    cache: str
    context: int
    batch: int = 1
    dtype: str = "bfloat16"
    device: str = "cpu"
    steps: int = 32
    weights: str = "real"
    text: str = "lincoln_1862"

    def check(self) -> PreTrainedConfig:
        """Return the model's config. Raises ValueError that names the argument that cannot be measured."""
        cache_kind(self.cache)
        for name in ("context", "batch", "steps"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        for name, choices in (("dtype", DTYPES), ("weights", ("real", "random"))):
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        check_device(self.device)
        if self.weights == "real":
            load_text(self.text)
        config = self.model
        if isinstance(config, str):
            try:
                config = AutoConfig.from_pretrained(check_model_name(config))
            except OSError as error:
                raise ValueError(f"model {self.model!r} cannot be loaded: {error}") from error
        elif self.weights == "real":
            raise ValueError("model must be a hub id or a folder with real weights, got a config")
        most, tokens = longest_context(config), self.steps + WARMUP
        if self.context + tokens > most:
            raise ValueError(
                f"context={self.context} and {tokens} decoded tokens are {self.context + tokens}, but the model supports "
                f"{most} tokens"
            )
        return config


def measure_footprint(
    model: str | PreTrainedConfig,
    cache: str,
    context: int,
    batch: int = 1,
    *,
    threads: int | None = None,
    speed: bool = True,
    timeout: float | None = None,
    **how: Any,
) -> dict[str, Any]:
    """Measure bytes, memory and throughput of one cache in processes of its own (on a CPU one for each).

    Args:
        model, cache, context, batch, **how: the fields of `Request`: dtype, device, steps, weights and text have defaults.
        threads: of torch, on a CPU; None leaves them to torch.
        speed: False leaves the times out.
        timeout: seconds until a process is ended.
    Returns: the fields of a row of kind "memory" (docs/speed_and_memory.md), without date, machine and versions.
    Raises: ValueError for bad input, before anything runs where that can be told; MeasurementError when the
        process runs out of memory, is killed, or finds its own figures wrong.
    """
    asked = Request(model, cache, context, batch, **how)
    config = asked.check()
    found = dict(vars(asked))
    if asked.weights == "random":
        found["text"] = None
    if not isinstance(model, str):
        found["model"] = model.name_or_path or model.model_type
    passes = ("speed", "memory") if speed else ("memory",)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        wanted = {**vars(asked), "model": found["model"], "config": folder, "threads": threads}
        # a GPU's allocator counts for itself, so that one process does there
        for together in [passes] if asked.device != "cpu" else [(one,) for one in passes]:
            found |= _in_a_child({**wanted, "passes": together}, timeout)
    return found


def check_device(device: str) -> None:
    """Raise ValueError for a device that is neither a CPU nor a CUDA device that is there."""
    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"device must be a CPU or CUDA, got {device!r}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}, but there is no CUDA device here")


def _in_a_child(request: dict[str, Any], timeout: float | None) -> dict[str, Any]:
    """Return what a process of its own measures (see `main`). Raises ValueError and MeasurementError in its words."""
    command = [sys.executable, "-m", "kv_hf.evaluation.memory", json.dumps(request)]
    # the child finds this package whatever folder it starts in
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise MeasurementError(f"it took more than {timeout:g} seconds") from None
    try:
        [(kind, found)] = json.loads(done.stdout.splitlines()[-1]).items()
    except (ValueError, IndexError, AttributeError):
        kind = "nothing"
    if kind == "result":
        return dict(found)
    if kind in ("refused", "failed"):
        raise (ValueError if kind == "refused" else MeasurementError)(found)
    how, said = f"ended with exit code {done.returncode}", done.stderr.strip().splitlines()
    if done.returncode < 0:
        how = f"was killed by {signal.Signals(-done.returncode).name}"
    if done.returncode == -signal.SIGKILL:
        how += " (out of memory, most likely)"
    raise MeasurementError(f"its process {how}; its last words: {said[-1][:200] if said else '-'}")


def in_words(error: BaseException) -> str:
    """Return an error in one line, out of memory in plain words."""
    words = " ".join(str(error).split())
    # torch raises a RuntimeError of words on a CPU
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in words:
        return f"out of memory: {words[:200] or type(error).__name__}"
    plain = isinstance(error, (ValueError, MeasurementError)) and words
    return words if plain else f"{type(error).__name__}: {words[:600]}"


def expendable() -> None:
    """Have Linux end this process first when memory runs out, not the one that waits for it."""
    try:
        Path("/proc/self/oom_score_adj").write_text("1000")
    except OSError:  # another system, or not allowed: no harm
        return


def main() -> int:
    """Be the child: print what the request in sys.argv gives as the last line of standard output, {"result" or why not: ..}."""
    expendable()
    found: Any
    try:
        kind, found = "result", measure(json.loads(sys.argv[1]))
    except Exception as error:
        refused = isinstance(error, ValueError) and not isinstance(error, torch.OutOfMemoryError)
        kind, found = "refused" if refused else "failed", in_words(error)
    print(json.dumps({kind: found}))
    return int(kind != "result")


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a request of `measure_footprint`, measured in this process."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if request["threads"]:
        torch.set_num_threads(request["threads"])
    device, dtype = torch.device(request["device"]), getattr(torch, request["dtype"])
    reason = why_not(request["cache"], device)
    if reason:
        raise ValueError(f"{request['cache']} cannot run here: {reason}")
    batch, context = request["batch"], request["context"]
    if request["weights"] == "random":
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(request["config"])
        with device:
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
        vocab = config.get_text_config(decoder=True).vocab_size
        prompt = random_prompt(vocab, batch, context, device)
    else:
        model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=dtype)
        for tensor in (*model.parameters(), *model.buffers()):
            # weights that are mapped from their file become resident when they are read: that is not the cache
            tensor.data = tensor.data.clone()
        tokenizer = AutoTokenizer.from_pretrained(request["model"])
        prompt = text_prompt(tokenizer, load_text(request["text"]), batch, context).to(device)
    model = model.to(device).eval()
    found: dict[str, Any] = {"threads": torch.get_num_threads()}
    for one in request["passes"]:
        run = {"speed": speed, "memory": memory}[one]
        found |= run(model, cache_kind(request["cache"]), prompt, request["steps"])
    return found


def text_prompt(tokenizer: Any, text: str, batch: int, context: int) -> torch.Tensor:
    """Return token ids [batch, context] of a text, repeated to that length; rows begin at different places."""
    ids = torch.tensor(tokenizer(text).input_ids)
    starts = torch.arange(batch) * (len(ids) // batch)
    return ids[(starts[:, None] + torch.arange(context)[None]) % len(ids)]


def speed(model: Any, kind: CacheKind, prompt: torch.Tensor, steps: int) -> dict[str, Any]:
    """Return the time of one prefill of `prompt` [batch, context], and of `steps` decode steps behind it."""
    rehearsal = Decoding(model, kind, prompt[:, :WARM_TOKENS], room=2)
    for _ in range(2):
        rehearsal.step()
    del rehearsal
    gc.collect()
    decoding = Decoding(model, kind, prompt, room=steps + WARMUP)
    step = spread(interleave({"step": decoding.step}, steps, prompt.device)["step"])
    prefill_ms = decoding.prefill_ms or math.nan
    return {
        "prefill_ms": prefill_ms,
        "prefill_tokens_per_s": 1e3 * prompt.numel() / prefill_ms,
        "decode_tokens_per_s": 1e3 * len(prompt) / step.p50,
        **step.row("step_ms"),
    }


class Marks(LogitsProcessor):
    """Reads memory where generate() has logits: behind the prefill, and behind every step."""

    def __init__(self, name: str, meter: Meter) -> None:
        self.name, self.meter = name, meter
        self.found: dict[str, int | None] = {}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the logits [batch, vocab] as they are. Raises ValueError where some are not finite."""
        check_finite(scores, self.name, f"behind {input_ids.shape[1]} tokens")
        part = "steps" if self.found else "prefill"
        self.found[f"{part}_grown_bytes"] = self.meter.grown()
        self.found[f"{part}_peak_bytes"] = self.meter.peak()
        if part == "prefill":
            self.meter.restart()
        return scores


def memory(model: Any, kind: CacheKind, prompt: torch.Tensor, steps: int) -> dict[str, Any]:
    """Return what a cache holds behind `prompt` [batch, context] and `steps` tokens, and the memory taken for it.

    The model generates as users do, greedily and on beyond an end of the text, with the allocator as every user has it and
    without a rehearsal.

    Raises: ValueError when some logits are not finite; MeasurementError when bytes and prediction differ.
    """
    model.set_attn_implementation(kind.attention)
    meter = Meter(prompt.device)
    cache, marks = kind.make(model.config, prompt.shape[1] + steps + 1), Marks(kind.name, meter)
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
    tokens, parts = prompt.shape[1] + steps, cache_parts(cache, prompt.device)
    held, predicted = sum(parts[part] for part in HELD), predicted_bytes(cache)
    if predicted not in (None, held):
        raise MeasurementError(f"the cache holds {held} bytes, but predict_memory says {predicted}")
    grown = marks.found["steps_grown_bytes"]
    peaks = [size for name, size in marks.found.items() if size is not None and "peak" in name]
    return {
        "kernel": kernel_of(cache),
        "tokens": tokens,
        "held_bytes": held,
        **{f"{part}_bytes": size for part, size in parts.items()},
        "kept_bytes": kept_bytes(cache),
        "predicted_bytes": predicted,
        "bytes_per_token": held / (tokens * len(prompt)),
        "measured_by": meter.name,
        "base_bytes": meter.base,
        **marks.found,
        "peak_bytes": max(peaks, default=None),
        "rss_bytes": grown if meter.name == "resident" else None,
    }


if __name__ == "__main__":
    sys.exit(main())
