"""Memory of one cache, measured alone in a fresh process.

What a process has freed, it may still hold: two caches measured in one process hide in each other's memory.
"""

import gc
import multiprocessing
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from ..cache.paged_cache import PagedCache
from ..checks import check_choice, check_int, usable_device
from ..pages.cpu_memory import trim_heap
from ..texts import longest_context
from .accuracy import check_finite, last_logits
from .caches import CacheKind, cache_kind, check_runs, held_bytes
from .models import check_model_name, name_of, revision_of
from .rows import Row

MAIN = 'if __name__ == "__main__":'
DTYPES = ("float32", "bfloat16", "float16")
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class MeasurementError(RuntimeError):
    """A measurement gave no figures: out of memory, or killed."""


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
        else:
            trim_heap()  # what glibc holds although it is free
        self.base = self._now()
        self.restart()

    def restart(self) -> None:
        """Let the peak begin at what is taken now."""
        self._peaks = True
        if self.name == "allocated":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            CLEAR.write_text("5")
        except OSError:  # a sandbox may forbid it; the peak since the start of the process would be another figure
            self._peaks = False

    def grown(self) -> int | None:
        """Return the bytes taken since the meter was made."""
        now = self._now()
        return None if now is None or self.base is None else now - self.base

    def peak(self) -> int | None:
        """Return the most bytes taken on top of the start, since `restart`."""
        most = self._now(most=True) if self._peaks else None
        return None if most is None or self.base is None else most - self.base

    def _now(self, most: bool = False) -> int | None:
        """Return the bytes that are taken, or the most that were."""
        if self.name == "allocated":
            tell = torch.cuda.max_memory_allocated if most else torch.cuda.memory_allocated
            return tell(self.device)
        lines = STATUS.read_text().splitlines() if STATUS.is_file() else []
        field = "VmHWM" if most else "VmRSS"
        return next((1024 * int(line.split()[1]) for line in lines if line.startswith(field)), None)


def kernel_of(cache: Any) -> str | None:
    """Return the name of the kernel that a paged cache's attention runs on, None for other caches."""
    store = cache.paged_layers[0].store if isinstance(cache, PagedCache) else None
    return None if store is None else store.kernel.name


def random_prompt(vocab: int, batch: int, tokens: int, device: torch.device) -> Tensor:
    """Return random token ids [batch, tokens], the same on every device."""
    numbers = torch.Generator().manual_seed(0)
    return torch.randint(3, vocab, (batch, tokens), generator=numbers, device="cpu").to(device)


def measure_footprint(
    model: str | Path | PreTrainedConfig,
    cache: str,
    context: int,
    batch: int = 1,
    *,
    dtype: str = "bfloat16",
    device: str = "cpu",
    steps: int = 32,
    threads: int | None = None,
) -> Row:
    """Measure bytes and memory of one cache in a process of its own.

    That process imports the script which calls this: keep the call below `if __name__ == "__main__":`.

    Args:
        model: hub id or folder; or a config, of which a model of random weights is made.
        cache: name as `cache_kind` takes it, with options.
        context: tokens of each row's prompt, which are random.
        batch: rows.
        steps: decode steps; memory is read behind them. transformers' quanto and hqq caches encode everything
            anew each 128 tokens, which is seen with more steps than that only.
        threads: of torch, on a CPU, at least 1; None leaves them to torch.
    Returns: the fields of a row of kind "memory" (docs/speed_and_memory.md), without date, machine and versions.
    Raises: ValueError for bad input, before anything runs where that can be told; MeasurementError when the
        process runs out of memory or is killed.
    """
    cache_kind(cache)
    counts = {"context": context, "batch": batch, "steps": steps}
    counts |= {} if threads is None else {"threads": threads}
    for name, value in counts.items():
        check_int(name, value, 1)
    check_choice("dtype", dtype, DTYPES)
    measured_device(device)
    if isinstance(model, str | Path):
        model = str(model)
        config: Any = AutoConfig.from_pretrained(check_model_name(model))
        row: Row = {"model": model, "weights": "real", "model_revision": revision_of(model)}
    else:
        config = model
        row = {"model": name_of(config), "weights": "random", "model_revision": None}
    most, tokens = longest_context(config), context + steps
    if tokens > most:
        raise ValueError(
            f"context={context} and {steps} decoded tokens are {tokens}, but the model supports {most} tokens"
        )
    asked: Row = {"cache": cache, "context": context, "batch": batch, "steps": steps}
    asked |= {"dtype": dtype, "device": device}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as child:
        try:
            return row | asked | child.submit(measure, model, threads, asked).result()
        except BrokenProcessPool:
            why = f"the process of {cache} ended without an answer: memory ran out, or the script lacks {MAIN}"
            raise MeasurementError(why) from None
        except (RuntimeError, MemoryError) as error:
            raise MeasurementError(in_words(error)) from None


def measured_device(device: str | None) -> str:
    """Return a device as `usable_device` does. Raise ValueError for one that is neither a CPU nor CUDA."""
    if device is not None and device.partition(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"device must be a CPU or CUDA, got {device!r}")
    return usable_device(device)


def in_words(error: BaseException) -> str:
    """Return an error in one line, out of memory in plain words."""
    words = " ".join(str(error).split())
    # torch raises a RuntimeError of words on a CPU
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in words:
        return f"out of memory: {words[:200] or type(error).__name__}"
    plain = isinstance(error, (ValueError, MeasurementError)) and words
    return words if plain else f"{type(error).__name__}: {words[:600]}"


def measure(model: Any, threads: int | None, asked: Mapping[str, Any]) -> Row:
    """Return the figures of `measure_footprint`, measured in this process; `asked` are its other arguments."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if threads:
        torch.set_num_threads(threads)
    place, how = torch.device(asked["device"]), {"dtype": getattr(torch, asked["dtype"])}
    if isinstance(model, str):
        made: Any = AutoModelForCausalLM.from_pretrained(model, **how)
        for tensor in (*made.parameters(), *made.buffers()):
            # weights that are mapped from their file become resident when they are read: that is not the cache
            tensor.data = tensor.data.clone()
    else:
        torch.manual_seed(0)
        with place:
            made = AutoModelForCausalLM.from_config(model, **how)
    kind = cache_kind(asked["cache"])
    made = made.to(place).eval()
    check_runs(kind.name, made)
    vocab = made.config.get_text_config(decoder=True).vocab_size
    prompt = random_prompt(vocab, asked["batch"], asked["context"], place)
    return {"threads": torch.get_num_threads(), **memory(made, kind, prompt, asked["steps"])}


def memory(model: Any, kind: CacheKind, prompt: Tensor, steps: int) -> Row:
    """Return what a cache holds behind `prompt` [batch, context] and `steps` greedy tokens, and the memory taken for it.

    Nothing is rehearsed, and the allocator is as every user has it.

    Raises: ValueError when some logits are not finite.
    """
    meter, fed = Meter(prompt.device), prompt
    tokens = prompt.shape[1] + steps
    cache = kind.make(model.config, tokens)
    found: Row = {}
    for part, forwards in (("prefill", 1), ("steps", steps)):
        for _ in range(forwards):
            logits = last_logits(model, fed, cache)
            where = f"after {cache.get_seq_length()} tokens"
            fed = check_finite(logits, kind.name, where).argmax(-1, keepdim=True)
        found[f"{part}_grown_bytes"], found[f"{part}_peak_bytes"] = meter.grown(), meter.peak()
        meter.restart()
    peaks = [found["prefill_peak_bytes"], found["steps_peak_bytes"]]
    held = held_bytes(cache)
    return {
        "kernel": kernel_of(cache),
        "tokens": tokens,
        "held_bytes": held,
        "offloaded_bytes": cache.memory().offloaded if isinstance(cache, PagedCache) else 0,
        "bytes_per_token": held / (tokens * len(prompt)),
        "measured_by": meter.name,
        **found,
        "peak_bytes": None if None in peaks else max(peaks),
    }
