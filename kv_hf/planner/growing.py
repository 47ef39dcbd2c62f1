"""Bytes of transformers' DynamicCache, layer by layer."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from ..errors import UnsupportedModelError
from .figures import EMPTY, Figures
from .inventory import CachedLayer, Inventory

COUNTER = torch.int64.itemsize  # a layer's number that lives in a tensor

# class of a layer in a DynamicCache -> the one in a StaticCache that takes its place
STATIC_CLASSES = {
    "DynamicLayer": "StaticLayer",
    "DynamicSlidingWindowLayer": "StaticSlidingWindowLayer",
    "DynamicIndexedLayer": "StaticIndexedLayer",
    "MiniMaxM3VLSparseCacheLayer": "MiniMaxM3VLSparseStaticCacheLayer",
    "LinearAttentionLayer": "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer": "LinearAttentionAndStaticFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer": (
        "LinearAttentionAndStaticSlidingWindowAttentionLayer"
    ),
    "DummyLayer": "DummyLayer",
}
SLIDING = ("DynamicSlidingWindowLayer", "LinearAttentionAndSlidingWindowAttentionLayer")


def check_classes(inventory: Inventory) -> None:
    """Raise UnsupportedModelError for a layer whose growth is not known here."""
    for index, layer in enumerate(inventory.layers):
        if layer.cache_class not in STATIC_CLASSES:
            raise UnsupportedModelError(
                f"layer {index} of {inventory.name!r} is kept in a {layer.cache_class}, whose bytes are not "
                f"known; known are {', '.join(STATIC_CLASSES)}"
            )


def growing(
    inventory: Inventory, row_tokens: Sequence[int], prompt: int | None, dtype: torch.dtype
) -> Figures:
    """Return what a DynamicCache of rows of these tokens keeps alive.

    Args:
        prompt: tokens of the longest row that came in the first forward, the others one by one; None: not all of them.
    """
    check_classes(inventory)
    total = Figures(replace(EMPTY, tokens=sum(row_tokens)))
    for layer, count in Counter(inventory.layers).items():
        columns = stored_columns(layer, max(row_tokens, default=0), prompt)
        total += growing_layer(layer, row_tokens, columns, dtype).times(count)
    return total


def behind_prefill(inventory: Inventory, row_tokens: Sequence[int], dtype: torch.dtype) -> int:
    """Return how many bytes more a DynamicCache keeps alive right behind a prefill than behind a decode step."""
    before, after = (
        growing(inventory, row_tokens, prompt, dtype).report.total
        for prompt in (max(row_tokens, default=0), None)
    )
    return before - after


def growing_layer(
    layer: CachedLayer, row_tokens: Sequence[int], held: int, dtype: torch.dtype
) -> Figures:
    """Return what a layer of a DynamicCache takes; rows are as long as the longest, padded on the left.

    Args:
        held: columns of keys and values that count: `stored_columns` or `kept_columns`.
    """
    rows, columns = len(row_tokens), max(row_tokens, default=0)
    per_token, per_index = layer.elements * dtype.itemsize, index_bytes(layer, dtype)
    other = rows * columns * per_index + state_bytes(layer, rows, dtype)
    if layer.cache_class in SLIDING:
        other += COUNTER  # its window, as a tensor
    lengths = Counter(row_tokens).items()
    empty = sum(n * (held - min(tokens, held)) for tokens, n in lengths) * per_token
    empty += (rows * columns - sum(row_tokens)) * per_index
    return Figures(replace(EMPTY, payload=rows * held * per_token, other=other), empty)


def index_bytes(layer: CachedLayer, dtype: torch.dtype) -> int:
    """Return the bytes per token of what an indexer keeps."""
    return layer.index_bytes(dtype) + layer.index_positions * torch.int64.itemsize


def kept_columns(layer: CachedLayer, columns: int) -> int:
    """Return the columns that a growing layer keeps of `columns`: all but those that the next query cannot see."""
    if layer.window is None or layer.window == 1:  # [-window + 1 :] of a window of 1 is all of it
        return columns
    return min(columns, layer.window - 1)


def stored_columns(layer: CachedLayer, columns: int, prompt: int | None) -> int:
    """Return the columns whose memory a growing layer of `columns` keeps alive.

    A sliding layer keeps a view of all that its last forward saw: of the whole prompt right behind a prefill, of
    `window` columns behind a decode step.
    """
    if layer.window is None or layer.window == 1 or prompt == columns:
        return columns
    return min(columns, layer.window)


def state_bytes(layer: CachedLayer, rows: int, dtype: torch.dtype) -> int:
    """Return the bytes of what does not grow."""
    return rows * sum(state.nbytes(dtype) for state in layer.states)
