"""Every cache that a user of transformers can choose, by name, with the reason where one cannot run here."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, QuantizedCache, StaticCache

from ..cache.paged_cache import PagedCache
from ..cache.report import tensor_bytes
from ..cache_names import QUANTIZED, parse_cache_name
from ..config import CacheConfig
from ..formats import ATTENTION_NAME, is_cache_name
from .shapes import SHAPES


@dataclass(frozen=True)
class CacheKind:
    """A way to cache.

    Attributes:
        attention: attention implementation of the model that it is measured with.
        make: (model config, most tokens that will be held) -> an empty cache.
    """

    name: str
    attention: str
    make: Callable[[Any, int], Any]


def cache_kind(name: str, kernel: str = "auto") -> CacheKind:
    """Return the cache called `name`: one of all_cache_names(), with options behind a colon if need be, or recipe:PATH.

    "paged_int4:keys=int8,recent_tokens=32" takes options of kv_hf.CacheConfig, "hqq_int4:axis_key=1" those of
    transformers' QuantizedCache. `kernel` is kv_hf's option of that name.

    Raises: CacheOptionError for an unknown cache; ValueError for options of a cache that takes none, or that are not
        NAME=VALUE.
    """
    base, options = parse_cache_name(name)
    if is_cache_name(base):
        given = {"kernel": kernel, **options}
        CacheConfig.from_options(base, given)
        return CacheKind(
            name,
            ATTENTION_NAME,
            lambda config, _: PagedCache.from_implementation(config, base, given),
        )
    if base in QUANTIZED:
        quantized = {**QUANTIZED[base], **options}
        return CacheKind(name, "sdpa", lambda config, _: QuantizedCache(config=config, **quantized))
    if options:
        raise ValueError(f"cache {base!r} takes no options, got {name!r}")
    if base == "static":
        return CacheKind(
            name, "sdpa", lambda config, most: StaticCache(config=config, max_cache_len=most)
        )
    offloads = base == "offloaded"
    return CacheKind(
        name, "sdpa", lambda config, _: DynamicCache(config=config, offloading=offloads)
    )


def why_not(name: str, device: torch.device) -> str | None:
    """Return why the cache `name` cannot be measured on `device`, or None.

    A quantized cache is tried: some need a package, a newer transformers, or a compiler at their first step.
    """
    if name == "offloaded" and device.type != "cuda":
        return "it moves layers from the GPU to the CPU, and there is no GPU"
    if parse_cache_name(name)[0] not in QUANTIZED:
        return None
    states = torch.randn(1, 8, 64, 128, dtype=torch.bfloat16, device=device)
    try:
        cache = cache_kind(name).make(SHAPES["llama-8b"].config(1), 0)
        for _ in range(2):  # what was quantized is read at the second call
            cache.update(states, states, 0)
    except Exception as error:  # whatever a missing or broken package raises
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"{type(error).__name__}: {lines[0][:120]}"
    return None


def held_bytes(cache: Any) -> int:
    """Return the bytes of all keys and values that a cache holds, with scales, wherever they lie."""
    if isinstance(cache, PagedCache):
        return cache.memory().total
    return sum(tensor_bytes(vars(layer)) for layer in cache.layers)
