"""Memory and speed of one cache, measured alone in a fresh process.

This is the measurement of memory; its throughput is a by-product of one run per cache. Speeds that are to be compared
closely come from scripts/bench_generate.py, where all caches take turns in one process.
"""

from typing import Any

import torch
from transformers import AutoConfig

from ..texts import load_text, longest_context
from .cache_kinds import cache_kind
from .child import run_child
from .decode_steps import WARMUP
from .model_name import check_model_name
from .shapes import RANDOM_MODELS, random_config

DTYPES = ("bfloat16", "float16", "float32")
CHILD = "kv_hf.evaluation.footprint_child"


def measure_footprint(
    model: str,
    cache: str,
    context: int,
    batch: int = 1,
    *,
    dtype: str = "bfloat16",
    device: str = "cpu",
    steps: int = 32,
    weights: str = "real",
    text: str = "lincoln_1862",
    threads: int | None = None,
    speed: bool = True,
    timeout: float | None = None,
) -> dict[str, Any]:
    """Measure bytes, memory and throughput of one cache in processes of its own (on a CPU one for each).

    Args:
        model: hub id or folder; with weights="random" one of shapes.RANDOM_MODELS.
        cache: name as `cache_kind` takes it, with options.
        context: tokens of each row's prompt, from `text` (repeated), or random ids with random weights.
        steps: decode steps; memory is read behind them. transformers' quanto and hqq caches encode everything
            anew each 128 tokens, which is seen with more steps than that only.
        threads: of torch, on a CPU; None leaves them to torch.
        speed: False leaves the times out.
        timeout: seconds until a process is ended.
    Returns: the fields of a row of kind "memory" (docs/memory.md), without date, machine and versions.
    Raises: ValueError for bad input, before anything runs where that can be told; child.MeasurementError when the
        process runs out of memory, is killed, or finds its own figures wrong.
    """
    folder = check_request(
        model,
        cache,
        context,
        batch,
        dtype=dtype,
        device=device,
        steps=steps,
        weights=weights,
        text=text,
    )
    request = {
        "cache": cache,
        "context": context,
        "batch": batch,
        "dtype": dtype,
        "device": device,
        "steps": steps,
        "weights": weights,
        "text": text,
    }
    kind = torch.device(device).type
    wanted = {**request, "folder": folder, "threads": threads}
    found: dict[str, Any] = {"model": model, **request}
    if weights == "random":
        found["text"] = None
    passes = ("speed", "memory") if speed else ("memory",)
    # a GPU's allocator counts for itself, so that one process does there
    for together in [(one,) for one in passes] if kind == "cpu" else [passes]:
        found.update(run_child(CHILD, {**wanted, "passes": together}, timeout=timeout))
    return found


def check_request(
    model: str,
    cache: str,
    context: int,
    batch: int = 1,
    *,
    dtype: str = "bfloat16",
    device: str = "cpu",
    steps: int = 32,
    weights: str = "real",
    text: str = "lincoln_1862",
) -> str:
    """Check the arguments of `measure_footprint`; return the folder, hub id or random model to load.

    Raises: ValueError that names the argument.
    """
    cache_kind(cache)
    for name, value in (("context", context), ("batch", batch), ("steps", steps)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if weights not in ("real", "random"):
        raise ValueError(f"weights must be 'real' or 'random', got {weights!r}")
    kind = str(device).partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device must be a CPU or CUDA to measure memory on, got {device!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}, but there is no CUDA device here")
    if weights == "random":
        if model not in RANDOM_MODELS:
            raise ValueError(
                f"model must be one of {', '.join(RANDOM_MODELS)} with random weights, got {model!r}"
            )
        folder, config = model, random_config(model)
    else:
        load_text(text)
        folder = check_model_name(model)
        try:
            config = AutoConfig.from_pretrained(folder)
        except OSError as error:
            raise ValueError(f"model {model!r} cannot be loaded: {error}") from error
    needed = context + steps + WARMUP
    most = longest_context(config)
    if needed > most:
        raise ValueError(
            f"context={context} and {steps + WARMUP} decoded tokens are {needed}, but {model} supports {most} tokens"
        )
    return folder
