"""Writing both sides of a step, one after the other: the definition of what every backend writes."""

from collections.abc import Mapping
from typing import Any

import torch

from ...spec import PageSpec
from .attention import append_tokens, seal_pages

Pair = tuple[torch.Tensor, torch.Tensor]
Fields = Mapping[str, torch.Tensor]


def write_pair(
    windows: Pair,
    new: Pair,
    starts: torch.Tensor,
    skips: torch.Tensor,
    jobs: torch.Tensor | None,
    fields: tuple[Fields, Fields] | None,
    spec: PageSpec,
    damaged: torch.Tensor,
    launches: dict[Any, Any],
) -> None:
    """Append new tokens to both windows in place; where there are jobs, seal these pages from the windows.

    Args:
        windows: keys and values, [rows, heads, slots, head_dim].
        new: their new tokens, [rows, heads, q_len, head_dim].
        starts, skips: [rows], int32: first free slot, and leading new tokens that are left out.
        jobs: [n, 3], int32 (row, first slot, page id), or None.
        fields: tensors of both sides' pages; None where there are no jobs.
        damaged: uint8 scalar, set to 1 where numbers had to be made finite; never cleared, never read.
        launches: what the backend keeps for this layer.
    """
    if windows[0].is_meta:  # which hold nothing, and whose lengths cannot be read
        return
    for window, tokens in zip(windows, new, strict=True):
        append_tokens(window, tokens, starts, skips)
    if jobs is not None:
        assert fields is not None
        seal_pair(windows, jobs, fields, spec, damaged, launches)


def seal_pair(
    tokens: Pair,
    jobs: torch.Tensor,
    fields: tuple[Fields, Fields],
    spec: PageSpec,
    damaged: torch.Tensor,
    launches: dict[Any, Any],
) -> None:
    """Seal pages of both sides from `tokens` [rows, heads, slots, head_dim]; the arguments are those of `write_pair`."""
    if damaged.is_meta:
        return
    for side, own, pages in zip(spec.sides, tokens, fields, strict=True):
        damaged.logical_or_(seal_pages(own, jobs, pages, side))
