"""Every cache that a user of transformers can choose, by name, with the reason where one cannot run here."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, QuantizedCache, StaticCache

from ..cache.paged_cache import PagedCache
from ..cache.report import tensor_bytes
from ..checks import check_choice
from ..config import CacheConfig
from ..formats import ATTENTION_NAME, IMPLEMENTATIONS
from .shapes import SHAPES

# name -> arguments of transformers' QuantizedCache; the axes are those that its documentation recommends for a backend
QUANTIZED: dict[str, dict[str, Any]] = {
    "quanto_int4": {"backend": "quanto", "nbits": 4},
    "quanto_int2": {"backend": "quanto", "nbits": 2},
    "hqq_int8": {"backend": "hqq", "nbits": 8, "axis_key": 1, "axis_value": 1},
    "hqq_int4": {"backend": "hqq", "nbits": 4, "axis_key": 1, "axis_value": 1},
    "hqq_int2": {"backend": "hqq", "nbits": 2, "axis_key": 1, "axis_value": 1},
    "quantized_fp8": {"backend": "fp8"},
}
STOCK = ("dynamic", "static", "offloaded", *QUANTIZED)
CACHE_NAMES = (*STOCK, *IMPLEMENTATIONS)


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
    """Return the cache called `name`: one of CACHE_NAMES, with options behind a colon if need be, or recipe:PATH.

    "paged_int4:keys=int8,recent_tokens=32" takes options of kv_hf.CacheConfig, "hqq_int4:axis_key=1" those of
    transformers' QuantizedCache. `kernel` is kv_hf's option of that name.

    Raises: CacheOptionError for an unknown cache; ValueError for options of a cache that takes none, or that are not
        NAME=VALUE.
    """
    base, options = parse_cache_name(name)
    if base in IMPLEMENTATIONS:
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


def parse_cache_name(name: str) -> tuple[str, dict[str, Any]]:
    """Split "paged_int4:recent_tokens=32,keys=int8" into the cache and its options; numbers become integers.

    "recipe:PATH" is a cache with the formats of that recipe.
    """
    base, _, tail = name.partition(":")
    if base == "recipe":
        if not tail:
            raise ValueError(
                f"cache must name the recipe's file, as in recipe:my.json, got {name!r}"
            )
        return "paged_exact", {"recipe": tail}
    check_choice("cache", base, CACHE_NAMES)
    options: dict[str, Any] = {}
    for item in tail.split(",") if tail else []:
        option, equals, value = item.partition("=")
        if not (option and equals and value):
            raise ValueError(f"options of a cache must be NAME=VALUE, got {item!r} in {name!r}")
        options[option] = int(value) if value.lstrip("-").isdigit() else value
    return base, options


def cache_label(name: str) -> str:
    """Return the name of a cache in rows and tables: that of a recipe is its file's, without folder and ending."""
    options = parse_cache_name(name)[1]
    if "recipe" not in options:
        return name
    others = [f"{option}={value}" for option, value in options.items() if option != "recipe"]
    return ",".join([f"recipe:{Path(options['recipe']).stem}", *others])


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
