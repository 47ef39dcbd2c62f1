"""Merging heads without data: the mean of a group of heads, or the first of them.

Source: Grouped-query attention (Ainslie et al., arXiv 2305.13245). Sums run in float64 and are rounded once, so that heads
that are equal give back exactly what they were.
"""

import torch

METHODS = ("mean", "first")


def pool_heads(heads: torch.Tensor, groups: int, method: str) -> torch.Tensor:
    """Merge neighbouring heads.

    Args:
        heads: [kv heads, rows, ..], any float dtype.
        groups: heads that remain; divides the first dimension.
        method: "mean" or "first".
    Returns: [groups, rows, ..] in the dtype of `heads`.
    """
    grouped = heads.reshape(groups, -1, *heads.shape[1:])
    if method == "first":
        return grouped[:, 0].contiguous()
    return grouped.double().mean(1).to(heads.dtype)
