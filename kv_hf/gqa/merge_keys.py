"""Merging the key heads of a group: the maps that may lie in key weights, and their counterparts in query weights.

A rotated plane allows a complex factor per head only, for positions must still rotate it; channels that no position changes
are as free as values.
"""

import torch

from .rotary import Rotary
from .shared_rank import best_common, plain_mean, procrustes_mean


def merge_keys(
    keys: torch.Tensor, queries: torch.Tensor, rotary: Rotary, method: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the maps of one group's keys and queries.

    Args:
        keys: [m * dim, m * dim], float64: E[k k^T] of the group's stacked keys, where positions have turned them or not.
        queries: [m, dim, dim], float64: E[q q^T] summed over the query heads of each key head.
        method: "mean", "align" or "svd".
    Returns: down [dim, m * dim], k' = down k; up [m, dim, dim], k_g ~ up_g k' and so q'_h = up_g^T q_h.
    """
    m, dim = queries.shape[:2]
    if method == "mean":
        return plain_mean(queries)
    down = torch.zeros(dim, m, dim, dtype=keys.dtype)
    up = torch.zeros(m, dim, dim, dtype=keys.dtype)
    cross = keys.reshape(m, dim, m, dim)
    for a, b in rotary.planes.tolist():
        gram = _complex_gram(cross, a, b)
        width = torch.stack([q[a, a] + q[b, b] for q in queries]).sqrt()
        first, second = _plane_mean(gram) if method == "align" else _plane_pca(gram, width)
        _put(down, a, b, first)
        for g in range(m):
            up[g, a, a] = up[g, b, b] = second[g].real
            up[g, b, a], up[g, a, b] = second[g].imag, -second[g].imag
    free = rotary.free
    if len(free):
        gram = cross[:, free][:, :, :, free].reshape(m * len(free), -1)
        readers = queries[:, free][:, :, free]
        solve = procrustes_mean if method == "align" else best_common
        part_down, part_up = solve(gram, readers)
        grid = part_down.reshape(len(free), m, len(free))
        for row, channel in enumerate(free.tolist()):
            down[channel, :, free] = grid[row]
            up[:, channel, free] = part_up[:, row]
    return down.reshape(dim, m * dim), up


def _complex_gram(cross: torch.Tensor, a: int, b: int) -> torch.Tensor:
    """Return E[z_g conj(z_l)] of a plane, z = k[a] + i k[b], as [m, m]."""
    real = cross[:, a, :, a] + cross[:, b, :, b]
    imag = cross[:, b, :, a] - cross[:, a, :, b]
    return torch.complex(real, imag)


def _put(down: torch.Tensor, a: int, b: int, factors: torch.Tensor) -> None:
    """Write z' = sum_g factors_g z_g into a real map [dim, m, dim]."""
    down[a, :, a] = down[b, :, b] = factors.real
    down[b, :, a], down[a, :, b] = factors.imag, -factors.imag


def _plane_pca(gram: torch.Tensor, width: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return c and b with z' = sum_g c_g z_g and z_g ~ b_g z', best for errors weighted by `width` squared."""
    width = width.clamp(min=1e-6 * float(width.max()) + 1e-300)
    u = torch.linalg.eigh(width[:, None] * gram * width)[1][:, -1]
    c = u.conj() * width
    b = u / width
    # the size and the phase that make z' like a mean of the heads
    scale = b.mean()
    scale = scale / scale.abs() * b.abs().mean() if scale.abs() > 0 else b.abs().mean().to(b.dtype)
    return c * scale, b / scale


def _plane_mean(gram: torch.Tensor, rounds: int = 50) -> tuple[torch.Tensor, torch.Tensor]:
    """Return c and b of the mean of the heads, each turned so that they are closest to each other."""
    m = len(gram)
    turns = torch.ones(m, dtype=gram.dtype)
    for _ in range(rounds):
        for g in range(m):
            others = turns @ gram[:, g] - turns[g] * gram[g, g]
            if others.abs() > 0:
                turns[g] = others / others.abs()
    return turns / m, turns.conj()
