"""Every cache that a user of transformers can choose, by name, and the bytes that it holds. Knows no text."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    Cache,
    DynamicCache,
    LlamaConfig,
    PreTrainedModel,
    QuantizedCache,
    StaticCache,
)

from ..cache.model_shape import CACHE
from ..cache.paged_cache import PagedCache
from ..cache.report import tensor_bytes
from ..cache_names import PEERS, QUANTIZED, all_cache_names, parse_cache_name
from ..config import CacheConfig
from ..errors import CacheOptionError, first_line
from ..formats import is_cache_name

# [kv heads, key dim, value dim] of a layer, or None for a layer that holds no keys and values
LayerShape = tuple[int, int, int] | None


@dataclass(frozen=True)
class CacheKind:
    """A way to cache.

    Attributes:
        make: (model config, most tokens that will be held) -> an empty cache.
    """

    name: str
    make: Callable[[Any, int], Any]


def cache_kind(name: str) -> CacheKind:
    """Return the cache called `name`: one of all_cache_names(), with options behind a colon if need be.

    "paged_int4:keys=int8,recent_tokens=32" takes options of kv_hf.CacheConfig, "hqq_int4:axis_key=1" those of
    transformers' QuantizedCache; those of `register_peer` decide themselves.

    Raises: CacheOptionError for an unknown cache; ValueError for options of a cache that takes none, or that are not
        NAME=VALUE.
    """
    return named_kind(name, *parse_cache_name(name))


def named_kind(name: str, base: str, options: dict[str, Any]) -> CacheKind:
    """Do what `cache_kind` says with a name that is split into the cache and its options; `name` is what rows call it."""
    if is_cache_name(base):
        CacheConfig.from_options(base, options)
        return CacheKind(name, lambda c, _: PagedCache.from_implementation(c, base, options))
    if base in QUANTIZED:
        return CacheKind(name, lambda c, _: QuantizedCache(config=c, **QUANTIZED[base] | options))
    if base in PEERS:
        peer = PEERS[base]  # as it is known now
        return CacheKind(name, lambda c, _: peer(c, dict(options)))
    if options:
        raise ValueError(f"cache {base!r} takes no options, got {name!r}")
    if base == "static":
        return CacheKind(name, lambda c, most: StaticCache(config=c, max_cache_len=most))
    return CacheKind(name, lambda c, _: DynamicCache(config=c, offloading=base == "offloaded"))


def register_peer(name: str, make: Callable[[Any, Mapping[str, Any]], Cache]) -> None:
    """Make a cache of another package known by name, so that everything here measures it beside the others.

    Each token that is scored is read by a forward of its own, unless `make` returns a plain PagedCache or
    QuantizedCache, whose rules are known (see `accuracy.next_chunk`). Processes that are started for a
    measurement (`measure_footprint`) do not know the name.

    Args:
        name: lower-case letters, digits and underscores; names that begin with "paged_" are kv_hf's.
        make: (model config, options behind the colon of the name) -> an empty cache. It raises ImportError, saying what
            to install, where a package is missing.
    Raises: CacheOptionError for a bad name and for one that is taken.
    """
    if not re.fullmatch(r"(?!paged_)[a-z][a-z0-9_]*", name):
        raise CacheOptionError(
            "name of a peer must be lower-case letters, digits or underscores, a letter first, and must not begin with "
            f"paged_, got {name!r}"
        )
    if name in all_cache_names():
        raise CacheOptionError(f"cache {name!r} is there already; take another name")
    PEERS[name] = make


def unregister_peer(name: str) -> None:
    """Take a name back that `register_peer` added."""
    PEERS.pop(name, None)


def why_not(name: str, device: torch.device) -> str | None:
    """Return why the cache `name` cannot be measured on `device`, or None.

    A quantized cache and a registered one are tried: some need a package, a newer transformers, or a compiler at their first step.
    """
    if name == "offloaded" and device.type != "cuda":
        return "it moves layers from the GPU to the CPU, and there is no GPU"
    if parse_cache_name(name)[0] not in (*QUANTIZED, *PEERS):
        return None
    config = LlamaConfig(
        hidden_size=4096, num_hidden_layers=1, num_attention_heads=32, num_key_value_heads=8
    )
    states = torch.randn(1, 8, 64, 128, dtype=torch.bfloat16, device=device)
    try:
        cache = cache_kind(name).make(config, 0)
        for _ in range(2):  # what was quantized is read at the second call
            cache.update(states, states, 0)
    except Exception as error:  # whatever a missing or broken package raises
        return f"{type(error).__name__}: {first_line(error)[:240]}"
    return None


def check_runs(name: str, model: PreTrainedModel) -> None:
    """Raise ValueError where the cache `name` cannot be measured with `model` and on its device."""
    reason = why_not(name, model.device)
    if reason is None:
        try:  # transformers' quantized caches refuse sliding layers
            cache_kind(name).make(model.config, 1)
        except ValueError as error:
            reason = f"{type(model).__name__}: {error}"
    if reason is not None:
        raise ValueError(f"cache {name!r} cannot run here: {reason}")


def held_bytes(cache: Any) -> int:
    """Return the bytes of all keys and values that a cache holds, with scales, wherever they lie."""
    if isinstance(cache, PagedCache):
        return cache.memory().total
    return sum(tensor_bytes(vars(layer)) for layer in cache.layers)


def layer_shapes(model: PreTrainedModel) -> list[LayerShape]:
    """Return the shape of every layer's keys and values, found by one forward over two tokens."""
    cache = DynamicCache(config=model.config)
    ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    with torch.no_grad():
        model(ids, use_cache=True, **{CACHE: cache})
    shapes: list[LayerShape] = []
    for layer in cache.layers:
        keys: Any = getattr(layer, "keys", None)
        values: Any = getattr(layer, "values", None)
        there = keys is not None and values is not None and keys.numel()
        shapes.append((keys.shape[1], keys.shape[-1], values.shape[-1]) if there else None)
    return shapes
