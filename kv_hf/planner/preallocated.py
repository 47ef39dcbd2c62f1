"""Bytes of transformers' StaticCache, layer by layer."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from ..errors import CacheOptionError
from .figures import EMPTY, Figures
from .growing import COUNTER, check_classes, state_bytes
from .inventory import CachedLayer, Inventory

WITHOUT_LENGTH = ("LinearAttentionLayer", "DummyLayer")


def preallocated(
    inventory: Inventory, row_tokens: Sequence[int], max_length: int | None, dtype: torch.dtype
) -> Figures:
    """Return what a StaticCache of `max_length` columns takes; None: as many as the longest row has tokens."""
    check_classes(inventory)
    columns = max(row_tokens, default=0)
    room = columns if max_length is None else max_length
    if room < columns:
        raise CacheOptionError(
            f"max_length={max_length} has no room for a row of {columns} tokens (row_tokens)"
        )
    total = Figures(replace(EMPTY, tokens=sum(row_tokens)))
    for layer, count in Counter(inventory.layers).items():
        total += _layer(layer, row_tokens, room, dtype).times(count)
    return total


def _layer(layer: CachedLayer, row_tokens: Sequence[int], room: int, dtype: torch.dtype) -> Figures:
    rows, per_token = len(row_tokens), layer.elements * dtype.itemsize
    held = room if layer.window is None else min(room, layer.window)
    columns, index = max(row_tokens, default=0), layer.index_bytes(dtype)
    positions = layer.index_positions * torch.int64.itemsize  # these grow here too
    other = rows * (room * index + columns * positions) + state_bytes(layer, rows, dtype)
    if layer.cache_class not in WITHOUT_LENGTH:
        other += COUNTER
    if layer.cache_class == "MiniMaxM3VLSparseCacheLayer" or index:
        other += COUNTER  # tokens of the indexer
    lengths = Counter(row_tokens).items()
    empty = sum(n * (held - min(tokens, held)) for tokens, n in lengths) * per_token
    empty += sum(
        n * ((room - tokens) * index + (columns - tokens) * positions) for tokens, n in lengths
    )
    return Figures(replace(EMPTY, payload=rows * held * per_token, other=other), empty)
