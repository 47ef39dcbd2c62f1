"""The bytes of a cache by part, whoever made it; and what `predict_memory` says of ours."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import Cache

from ..cache.paged_cache import PagedCache
from ..spec import MemoryReport, predict_memory

# parts on the model's device; "offloaded" lies outside of it and is counted apart
HELD = ("payload", "scales", "tail", "tables", "staging", "other")
PARTS = (*HELD, "offloaded")
QUANTIZED = ("_quantized_keys", "_quantized_values")
EXACT = ("keys", "values")


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path of names, plain tensor [any shape]) for all tensors in tensors of tensors, lists and dicts.

    A wrapper subclass (quanto) has no memory of its own: the tensors that it is made of count.
    """
    if isinstance(value, torch.Tensor):
        flatten = getattr(value, "__tensor_flatten__", None)
        if flatten is None:
            yield name, value
        else:
            for part in flatten()[0]:
                yield from leaves(getattr(value, part), f"{name}.{part}")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from leaves(item, f"{name}.{index}")


def cache_parts(cache: Cache, device: torch.device) -> dict[str, int]:
    """Return the bytes of each of PARTS; those of HELD add up to what lies on `device`.

    payload: codes of what is quantized, and the keys and values of caches that store them exactly, with
        the room that a preallocated one keeps free. scales: scales and offsets. tail: exact tokens beside
        quantized ones. tables, staging: of PagedCache only. other: counters and states that are no keys or
        values. offloaded: of all these, what lies on another device.
    """
    if isinstance(cache, PagedCache):
        memory = cache.memory()
        return {part: int(getattr(memory, part)) for part in PARTS}
    found = dict.fromkeys(PARTS, 0)
    for layer in cache.layers:
        for name, value in vars(layer).items():
            for path, tensor in leaves(value, name):
                away = tensor.device.type != device.type
                found["offloaded" if away else _part(layer, name, path)] += tensor.nbytes
    return found


def _part(layer: Any, name: str, path: str) -> str:
    """Return the part that a tensor of a layer of transformers belongs to."""
    if name in QUANTIZED:
        # quanto: ._data._data, ._scale, ._shift; hqq and fp8: .0 are the codes, .1 the scales of them
        return "payload" if path.startswith((f"{name}._data", f"{name}.0")) else "scales"
    if name in EXACT:
        return "tail" if hasattr(layer, QUANTIZED[0]) else "payload"
    return "other"


def kept_bytes(cache: Cache) -> int | None:
    """Return the bytes of memory that the tensors of a cache of transformers keep alive; None for PagedCache.

    More than the parts where a tensor is a view of a larger one (a sliding layer right behind a long prompt).
    """
    if isinstance(cache, PagedCache):
        return None
    blocks = {}
    for layer in cache.layers:
        for _, tensor in leaves(vars(layer)):
            storage = tensor.untyped_storage()
            blocks[storage.data_ptr(), tensor.device] = storage.nbytes()
    return sum(blocks.values())


def predicted_memory(cache: Cache, prompt: int | None = None) -> MemoryReport | None:
    """Return what `predict_memory` says of a cache's tokens, None for caches that it does not cover.

    Those are caches of transformers, layers without pages, pages outside of the device and shared ones, and sliding
    windows unless `prompt` says how many tokens of the longest row came in the first forward. With `max_length` the
    tables are others: they are taken as they are, and rows must have no padding.
    """
    if not isinstance(cache, PagedCache):
        return None
    options, paged = cache.options, cache.paged_layers
    if options.offload is not None or options.prefix_store is not None:
        return None
    windows = {layer: getattr(layer, "window", None) for layer in paged}
    filled = sum(layer.spec is not None for layer in paged)
    if filled < len(cache.layers) or (prompt is None and any(windows.values())):
        return None
    fixed = options.max_length is not None
    rows = [cache.get_seq_length()] * cache.group.rows if fixed else None
    parts = [
        predict_memory(
            [layer.spec for layer in paged if layer.spec is not None and windows[layer] == window],
            rows or [cache.group.tokens(row) for row in cache.group.rows],
            sink_tokens=options.sink_tokens,
            recent_tokens=options.recent_tokens,
            reserve_tokens=options.max_length or options.reserve_tokens,
            max_pages=options.max_pages,
            window=window,
            prompt=prompt if window else None,
        )
        for window in set(windows.values())
    ]
    sums = {
        field.name: sum(getattr(part, field.name) for part in parts)
        for field in dataclasses.fields(MemoryReport)
    }
    told = MemoryReport(**{**sums, "tokens": parts[0].tokens})
    if fixed:
        memory = cache.memory()
        told = dataclasses.replace(told, tables=memory.tables, other=memory.other)
    return told


def check_prediction(cache: Cache, prompt: int | None = None) -> int | None:
    """Return the bytes that were predicted, None where nothing can be; see `predicted_memory`.

    Raises: RuntimeError when the cache holds something else.
    """
    told = predicted_memory(cache, prompt)
    if told is None:
        return None
    assert isinstance(cache, PagedCache)
    memory = cache.memory()
    if memory != told:
        raise RuntimeError(f"the cache holds {memory}, but predict_memory says {told}")
    return told.total
