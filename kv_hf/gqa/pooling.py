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
    pooled = torch.empty_like(grouped[:, 0], memory_format=torch.contiguous_format)
    for group, members in zip(pooled, grouped, strict=True):  # one group's float64 at a time
        total = members[0].double()
        for head in members[1:]:
            total += head
        group.copy_(total.div_(len(members)))
    return pooled
