"""Bytes of transformers' DynamicCache, layer by layer."""

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


def check_classes(inventory: Inventory) -> None:
    """Raise UnsupportedModelError for a layer whose growth is not known here."""
    for index, layer in enumerate(inventory.layers):
        if layer.cache_class not in STATIC_CLASSES:
            raise UnsupportedModelError(
                f"layer {index} of {inventory.name!r} is kept in a {layer.cache_class}, whose bytes are not "
                f"known; known are {', '.join(STATIC_CLASSES)}"
            )


def growing(inventory: Inventory, row_tokens: Sequence[int], dtype: torch.dtype) -> Figures:
    """Return what a DynamicCache of rows of these tokens takes."""
    check_classes(inventory)
    total = Figures(replace(EMPTY, tokens=sum(row_tokens)))
    for layer in inventory.layers:
        total += growing_layer(layer, row_tokens, dtype)
    return total


def growing_layer(layer: CachedLayer, row_tokens: Sequence[int], dtype: torch.dtype) -> Figures:
    """Return what a layer of a DynamicCache takes; rows are as long as the longest, padded on the left."""
    rows, columns = len(row_tokens), max(row_tokens, default=0)
    per_token = layer.elements * dtype.itemsize
    held = kept_columns(layer, columns)
    payload = rows * held * per_token
    index = rows * columns * layer.index_dim * dtype.itemsize
    other = index + state_bytes(layer, rows, dtype)
    if layer.window is not None:
        other += COUNTER  # its window, as a tensor
    empty = sum(held - min(tokens, held) for tokens in row_tokens) * per_token
    empty += sum(columns - tokens for tokens in row_tokens) * layer.index_dim * dtype.itemsize
    return Figures(replace(EMPTY, payload=payload, other=other), empty)


def kept_columns(layer: CachedLayer, columns: int) -> int:
    """Return the columns that a growing layer keeps of `columns`: all but those that the next query cannot see."""
    if layer.window is None or layer.window == 1:  # [-window + 1 :] of a window of 1 is all of it
        return columns
    return min(columns, layer.window - 1)


def state_bytes(layer: CachedLayer, rows: int, dtype: torch.dtype) -> int:
    """Return the bytes of what does not grow."""
    return rows * sum(state.nbytes(dtype) for state in layer.states)
