"""Memory and speed of one cache, measured alone in a fresh process: `python -m kv_hf.evaluation.memory` is the child.

What a process has freed, it may still hold: two caches measured in one process hide in each other's memory. Throughput is
a by-product, measured behind the memory: speeds that are to be compared closely come from caches that take turns in one
process (scripts/).
"""

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
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

from ..cache.paged_cache import PagedCache
from ..hf.models import use_paged_attention
from ..pages.host_heap import trim_heap
from ..texts import load_text, longest_context
from .accuracy import check_finite, last_logits
from .caches import CacheKind, cache_kind, held_bytes, why_not
from .models import check_model_name

DTYPES = ("bfloat16", "float16", "float32")
WARMUP = 2  # steps that are not timed
WARM_TOKENS = 200  # three pages of 64: every kernel runs, every library is loaded
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class MeasurementError(RuntimeError):
    """A measurement gave no figures: out of memory, or killed."""


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Return the milliseconds of one call: wall time on a CPU, CUDA events on a GPU.

    The events lie in the stream before and behind the call, so that the time holds the launches that the GPU
    had to wait for, as a user's decode step does.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)
    torch.cuda.synchronize(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end))


class Meter:
    """The growth of memory since a moment, and its peak: on CUDA what torch's allocator has given, else resident memory.

    It is made when everything else is in place: freed blocks are given back first, so that growth is new memory. From then
    on nothing is: what an allocator keeps counts as taken. Figures are None where the system does not tell them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.name = device, "allocated" if device.type == "cuda" else "resident"
        gc.collect()
        if self.name == "allocated":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        self.base = self._now("VmRSS", trim=True)
        self.restart()

    def restart(self) -> None:
        """Let the peak begin at what is taken now."""
        self._peaks = True
        try:
            if self.name == "allocated":
                torch.cuda.reset_peak_memory_stats(self.device)
            else:
                CLEAR.write_text("5")
        except OSError:  # a sandbox may forbid it; the peak since the start of the process would be another figure
            self._peaks = False

    def grown(self) -> int | None:
        """Return the bytes taken since the meter was made."""
        now = self._now("VmRSS")
        return None if now is None or self.base is None else now - self.base

    def peak(self) -> int | None:
        """Return the most bytes taken on top of the start, since `restart`."""
        most = self._now("VmHWM") if self._peaks else None
        return None if most is None or self.base is None else most - self.base

    def _now(self, field: str, trim: bool = False) -> int | None:
        """Return bytes, as /proc calls them: VmRSS (now), VmHWM (most)."""
        if self.name == "allocated":
            most = field == "VmHWM"
            tell = torch.cuda.max_memory_allocated if most else torch.cuda.memory_allocated
            return tell(self.device)
        if trim:  # what glibc holds although it is free
            trim_heap()
        lines = STATUS.read_text().splitlines() if STATUS.is_file() else []
        return next((1024 * int(line.split()[1]) for line in lines if line.startswith(field)), None)


def kernel_of(cache: Any) -> str | None:
    """Return the name of the kernel that a paged cache's attention runs on, None for other caches."""
    if not isinstance(cache, PagedCache):
        return None
    store = cache.paged_layers[0].store
    store = getattr(store, "base", store)  # a preallocated store wraps the plain one
    return None if store is None else store.kernel.name


def random_prompt(vocab: int, batch: int, tokens: int, device: torch.device) -> torch.Tensor:
    """Return random token ids [batch, tokens], the same on every device."""
    numbers = torch.Generator().manual_seed(0)
    return torch.randint(3, vocab, (batch, tokens), generator=numbers).to(device)


def measure_footprint(
    model: str | PreTrainedConfig,
    cache: str,
    context: int,
    batch: int = 1,
    *,
    dtype: str = "bfloat16",
    device: str = "cpu",
    steps: int = 32,
    text: str = "lincoln_1862",
    threads: int | None = None,
    speed: bool = True,
    timeout: float | None = None,
) -> dict[str, Any]:
    """Measure bytes, memory and throughput of one cache in a process of its own.

    Args:
        model: hub id or folder; or a config, of which a model of random weights is made.
        cache: name as `cache_kind` takes it, with options.
        context: tokens of each row's prompt, from `text` (repeated), or random ids with random weights.
        batch: rows.
        steps: decode steps; memory is read behind them. transformers' quanto and hqq caches encode everything
            anew each 128 tokens, which is seen with more steps than that only.
        threads: of torch, on a CPU; None leaves them to torch.
        speed: False leaves the times out.
        timeout: seconds until the process is ended.
    Returns: the fields of a row of kind "memory" (docs/speed_and_memory.md), without date, machine and versions.
    Raises: ValueError for bad input, before anything runs where that can be told; MeasurementError when the
        process runs out of memory or is killed.
    """
    cache_kind(cache)
    for name, value in (("context", context), ("batch", batch), ("steps", steps)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    check_device(device)
    config: Any = model
    label, real = str(model), isinstance(model, str)
    if isinstance(model, str):
        load_text(text)
        try:
            config = AutoConfig.from_pretrained(check_model_name(model))
        except OSError as error:
            raise ValueError(f"model {model!r} cannot be loaded: {error}") from error
    else:
        label = model.name_or_path or model.model_type
    most, tokens = longest_context(config), context + steps + WARMUP
    if tokens > most:
        raise ValueError(
            f"context={context} and {steps + WARMUP} decoded tokens are {tokens}, but the model supports {most} tokens"
        )
    asked = {"model": label, "cache": cache, "context": context, "batch": batch, "dtype": dtype}
    asked |= {"device": device, "steps": steps, "weights": "real" if real else "random"}
    asked["text"] = text if real else None
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        wanted = {**asked, "config": folder, "threads": threads, "speed": speed}
        return asked | _in_a_child(wanted, timeout)


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
    model, kind = model.to(device).eval(), cache_kind(request["cache"])
    if kind.attention != "sdpa":
        model.set_attn_implementation(kind.attention)
    use_paged_attention(model)
    found = {"threads": torch.get_num_threads(), **memory(model, kind, prompt, request["steps"])}
    return found | (speed(model, kind, prompt, request["steps"]) if request["speed"] else {})


def text_prompt(tokenizer: Any, text: str, batch: int, context: int) -> torch.Tensor:
    """Return token ids [batch, context] of a text, repeated to that length; rows begin at different places."""
    ids = torch.tensor(tokenizer(text).input_ids)
    starts = torch.arange(batch) * (len(ids) // batch)
    return ids[(starts[:, None] + torch.arange(context)[None]) % len(ids)]


def _times(model: Any, kind: CacheKind, ids: torch.Tensor, steps: int) -> list[float]:
    """Return the milliseconds of a prefill of ids [batch, tokens], and of each greedy step behind it."""
    cache, fed = kind.make(model.config, ids.shape[1] + steps), ids

    def forward() -> None:
        nonlocal fed
        fed = last_logits(model, fed, cache).argmax(-1, keepdim=True)

    return [timed(forward, ids.device) for _ in range(1 + steps)]


def speed(model: Any, kind: CacheKind, prompt: torch.Tensor, steps: int) -> dict[str, Any]:
    """Return the time of one prefill of `prompt` [batch, context], and of `steps` decode steps behind it."""
    _times(model, kind, prompt[:, :WARM_TOKENS], WARMUP)  # a rehearsal
    gc.collect()
    prefill_ms, *times = _times(model, kind, prompt, WARMUP + steps)
    kept = torch.tensor(times[WARMUP:], dtype=torch.float64)
    low, middle, high = (kept.quantile(part).item() for part in (0.2, 0.5, 0.8))
    return {
        "prefill_ms": prefill_ms,
        "prefill_tokens_per_s": 1e3 * prompt.numel() / prefill_ms,
        "decode_tokens_per_s": 1e3 * len(prompt) / middle,
        "step_ms_p20": low,
        "step_ms_p50": middle,
        "step_ms_p80": high,
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

    Raises: ValueError when some logits are not finite.
    """
    meter = Meter(prompt.device)
    cache, marks = kind.make(model.config, prompt.shape[1] + steps + 1), Marks(kind.name, meter)
    model.generation_config = GenerationConfig(pad_token_id=0)
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        past_key_values=cache,
        max_new_tokens=steps + 1,  # the last one is never stored
        do_sample=False,
        disable_compile=True,
        logits_processor=LogitsProcessorList([marks]),
    )
    tokens, held = prompt.shape[1] + steps, held_bytes(cache)
    grown = marks.found["steps_grown_bytes"]
    peaks = [size for name, size in marks.found.items() if size is not None and "peak" in name]
    return {
        "kernel": kernel_of(cache),
        "tokens": tokens,
        "held_bytes": held,
        "offloaded_bytes": cache.memory().offloaded if isinstance(cache, PagedCache) else 0,
        "bytes_per_token": held / (tokens * len(prompt)),
        "measured_by": meter.name,
        "base_bytes": meter.base,
        **marks.found,
        "peak_bytes": max(peaks, default=None),
        "rss_bytes": grown if meter.name == "resident" else None,
    }


if __name__ == "__main__":
    sys.exit(main())
