"""Models with the outputs of another one and keys or values that are hard to store: scaled in one projection, undone in the next."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch

Change = Callable[[Any], None]


def stressed(model: Any, *changes: Change) -> Any:
    """Return a copy of a Llama-like model, changed."""
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for change in changes:
            change(copied)
    return copied


def value_channel(factor: float, channel: int = 3, layers: Iterable[int] | None = None) -> Change:
    """Multiply one value channel of the first kv head, and divide it out again behind attention."""

    def change(model: Any) -> None:
        dim, group = _sizes(model)
        for attention in _attentions(model, layers):
            _scale_rows(attention.v_proj, [channel], factor)
            columns = [head * dim + channel for head in range(group)]
            attention.o_proj.weight[:, columns] /= factor

    return change


def key_pairs(
    factor: float, pairs: Iterable[int] = (1, 5), layers: Iterable[int] | None = None
) -> Change:
    """Multiply RoPE pairs of the first kv head's keys, and divide them out of its queries."""

    def change(model: Any) -> None:
        dim, group = _sizes(model)
        channels = [place for pair in pairs for place in (pair, pair + dim // 2)]
        for attention in _attentions(model, layers):
            _scale_rows(attention.k_proj, channels, factor)
            rows = [head * dim + channel for head in range(group) for channel in channels]
            _scale_rows(attention.q_proj, rows, 1 / factor)

    return change


def all_values(factor: float, layers: Iterable[int] | None = None) -> Change:
    """Multiply all values, and divide them out again behind attention."""

    def change(model: Any) -> None:
        for attention in _attentions(model, layers):
            _scale_rows(attention.v_proj, slice(None), factor)
            attention.o_proj.weight /= factor

    return change


def key_bias(size: float, channels: Iterable[int]) -> Change:
    """Add a constant to key channels of every head; the outputs are not those of the given model."""

    def change(model: Any) -> None:
        dim, _ = _sizes(model)
        for attention in _attentions(model, None):
            width = attention.k_proj.weight.shape[0]
            bias = torch.zeros(width)
            bias[[first + channel for first in range(0, width, dim) for channel in channels]] = size
            attention.k_proj.bias = torch.nn.Parameter(bias)

    return change


def _scale_rows(projection: Any, rows: Any, factor: float) -> None:
    projection.weight[rows] *= factor
    if projection.bias is not None:
        projection.bias[rows] *= factor


def _sizes(model: Any) -> tuple[int, int]:
    """Return (channels of a head, query heads of a kv head)."""
    config = model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return dim, config.num_attention_heads // config.num_key_value_heads


def _attentions(model: Any, layers: Iterable[int] | None) -> list[Any]:
    blocks = model.model.layers
    chosen = range(len(blocks)) if layers is None else layers
    return [blocks[index].self_attn for index in chosen]
