"""What caches cost in quality, as workloads of the runner: accuracy, needles, reading a part.

Every scored token reads the stored cache as a decode step does. A process keeps one model, with the exact distributions of
one text: let caches vary fastest.
"""

import functools
import gc
import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from kv_hf.cache_names import parse_cache_name
from kv_hf.config import CacheConfig
from kv_hf.evaluation.caches import cache_kind
from kv_hf.evaluation.models import LoadedModel, TextSettings, revision_of
from kv_hf.evaluation.needles import needle_grid
from kv_hf.formats import cache_names
from kv_hf.read_budget import ReadBudget
from kv_hf.texts import load_text, text_names
from measure.models.packaged import packaged_model, resolve_model
from measure.peers import known_peers
from measure.runner import Device, Fields, workload

PEERS = ["quantized_fp8", "quanto_int4", "hqq_int4"]  # of transformers
MODEL: Fields = {"model": "smollm2-135m", "dtype": "float32"}
DISTANCES = "stored_bits kl_mean kl_low kl_high kl_p99 kl_p999 top1 perplexity_delta"
_held: dict[Any, LoadedModel] = {}


def held(name: str, dtype: str, device: Device) -> LoadedModel:
    """Return a model; the one before is let go first."""
    key = name, dtype, device
    if key not in _held:
        _held.clear()
        gc.collect()
        _held[key] = packaged_model(name, getattr(torch, dtype), device)
    return _held[key]


@functools.cache
def revision(model: str) -> str:
    """Return what tells one state of a model's files from another."""
    return revision_of(resolve_model(model))


@known_peers()
def state_of(config: Mapping[str, Any]) -> list[str]:
    """Return what decides a configuration's figures beside it: the files of its model, and its text.

    Raises: ValueError for a model, a text or a cache that is not there, before anything is measured.
    """
    for name in [config["cache"]] if "cache" in config else config["caches"]:
        cache_kind(name)
    names = text_names(config["text"]) if "text" in config else ()
    text = "".join(map(load_text, names))
    return [revision(config["model"]), hashlib.sha256(text.encode()).hexdigest()]


quality = functools.partial(workload, state=state_of, timed=False)


@quality(
    "accuracy",
    grid=[
        MODEL
        | {
            "text": "held_out",
            "windows": 2,
            "window": 1600,
            "prompt": 512,
            "cache": [*cache_names(), *PEERS],
        }
    ],
    file="accuracy_vs_memory",
    columns=DISTANCES,
)
@known_peers()
def accuracy(device: Device, model: str, dtype: str, cache: str, **text: Any) -> list[Fields]:
    """Distances from the exact cache, and bytes: a row per cache and text, or set of texts."""
    loaded = held(model, dtype, device)
    return [loaded.accuracy(cache, TextSettings(**text))]


@quality(
    "needle",
    grid=[
        MODEL
        | {
            "haystack": "lincoln",
            "seed": 0,
            "task": "single",
            "length": [1024, 2048],
            "depth": None,
            "first_sample": 0,
            "samples": 4,
            "caches": [["dynamic", "paged_int8", "paged_int4", "paged_int2"]],
        }
    ],
    file="long_context",
    columns="cache found rate_low rate_high nll top1 bytes_per_token",
)
@known_peers()
def needle(
    device: Device,
    model: str,
    dtype: str,
    caches: list[str],
    length: int,
    depth: float | None,
    **how: Any,
) -> list[Fields]:
    """What is found again of facts hidden in long texts. All caches are asked the same prompts, each prefilled once."""
    loaded = held(model, dtype, device)
    rows = needle_grid(loaded.model, loaded.tokenizer, caches, [length], [depth], **how)
    return [{**row, "model": model, "model_revision": loaded.revision} for row in rows]


PARTS = [f"read={tokens}" for tokens in (1024, 2048, 4096)]


@quality(
    "reading",
    grid=[
        MODEL
        | {
            "text": "held_out",
            "windows": 1,
            "window": 8192,
            "prompt": 7936,
            "cache": ["paged_int4", *(f"paged_int4:{part}" for part in PARTS)],
        }
    ],
    columns="kl_mean kl_low kl_high top1",
)
def reading(device: Device, model: str, dtype: str, cache: str, **text: Any) -> list[Fields]:
    """Distances where a decode step reads a part of a long text."""
    base, given = parse_cache_name(cache)
    options = CacheConfig.from_options(base, given)
    found = {
        "cache": cache,
        "read_tokens": (options.read or {}).get("tokens"),
        "read_from": (options.budget or ReadBudget()).from_tokens,
    }
    return [held(model, dtype, device).accuracy(cache, TextSettings(**text)) | found]
