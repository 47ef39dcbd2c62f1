"""The linear algebra of calibrated merges: the best common vector of a group of heads, and the groups that lose least.

Keys are read by queries, values by outputs: a merge y = sum_g down_g x_g of heads x_g, which up_g y stands for, is the same
mathematics for both. Positions rotate some channels of keys, two by two. Such a plane is a complex number, and the merge
may multiply it by another one only, so that positions still rotate it.
"""

from itertools import combinations

import torch

FLOOR = 1e-12  # of the largest eigenvalue: what counts as nothing


def root(matrix: torch.Tensor) -> torch.Tensor:
    """Return the square root of Hermitian positive semidefinite matrices [.., n, n]."""
    values, vectors = torch.linalg.eigh(matrix)
    sizes = values.clamp(min=0).sqrt().to(vectors.dtype)
    return vectors @ torch.diag_embed(sizes) @ vectors.mH


def best_common(gram: torch.Tensor, readers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the maps to and from the common vector y of a group of heads with the smallest sum_g E |x_g - up_g y|^2 under M_g.

    Args:
        gram: [m * dim, m * dim], E[x x^H] of the stacked heads, float64 or complex128.
        readers: [m, dim, dim], M of each head, of the same dtype.
    Returns: down and up, [m, dim, dim] each; y has the mean square of the heads, in a basis close to theirs.
    """
    m, dim = readers.shape[:2]
    roots = torch.block_diag(*root(readers))
    values, vectors = torch.linalg.eigh(roots @ gram @ roots)
    values, vectors = values[-dim:], vectors[:, -dim:]
    if not values[-1] > 0:  # heads that are zero, or that nobody reads: their mean
        eye = torch.eye(dim, dtype=readers.dtype).repeat(m, 1, 1)
        return eye / m, eye
    inverse = torch.where(values > FLOOR * values[-1], 1 / values, 0.0)
    down = vectors.mH @ roots
    up = (gram @ roots @ vectors * inverse).unflatten(0, (m, dim))
    left, _, right = torch.linalg.svd(up.mean(0))
    turn = left @ right  # y in the basis in which the mean of `up` is symmetric
    scale = (gram.diagonal().real.mean() / values.clamp(min=0).mean()).sqrt()
    down = scale * turn @ down
    return down.unflatten(1, (m, dim)).transpose(0, 1), up @ turn.mH / scale


def merge_heads(
    gram: torch.Tensor, readers: torch.Tensor, partner: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the maps of one group's heads, as `best_common` does, from float64; planes that positions rotate stay planes.

    Args:
        partner: [dim], the other channel of each one's plane; itself for those that positions leave alone.
    """
    m, dim = readers.shape[:2]
    gram = gram.reshape(m, dim, m, dim)
    maps = torch.zeros(2, m, dim, dim, dtype=gram.dtype)
    channels = torch.arange(dim)
    free = channels[partner == channels]
    if len(free):
        own = gram[:, free][..., free].reshape(m * len(free), -1)
        found = best_common(own, readers[:, free][..., free])
        maps[:, :, free[:, None], free] = torch.stack(found)
    for a in channels[partner > channels]:
        plane = torch.stack([a, partner[a]])
        parts = gram[:, plane][..., plane]  # of z = x[a] + i x[b]
        real = parts[:, 0, :, 0] + parts[:, 1, :, 1]
        imaginary = parts[:, 1, :, 0] - parts[:, 0, :, 1]
        weight = readers[:, plane, plane].sum(1)[:, None, None]
        found = best_common(torch.complex(real, imaginary), torch.complex(weight, 0 * weight))
        factor = torch.stack(found).flatten(2)  # [2, m, 1]
        columns = torch.stack([factor, 1j * factor], -1).squeeze(2)
        maps[:, :, plane[:, None], plane] = torch.view_as_real(columns).mT
    return maps[0], maps[1]


def random_turns(heads: int, partner: torch.Tensor) -> torch.Tensor:
    """Return rotations [heads, dim, dim], float64, of each plane and of the channels that positions leave alone."""
    channels = torch.arange(len(partner))
    free = partner == channels
    mixed = (free[:, None] & free) | (partner[:, None] == channels)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(heads, *mixed.shape, generator=generator, dtype=torch.float64)
    return torch.matrix_exp(mixed * (noise - noise.mT))


def find_partners(key: torch.Tensor, rows: torch.Tensor, first: int) -> torch.Tensor | None:
    """Return the channel [head_dim] that positions mix each channel with, itself for those that they leave alone.

    Args:
        key: [kv heads, tokens, head_dim], computed with gradients from `rows`.
        rows: [1, tokens, columns], what the projection gave; keys begin in column `first`, head by head.
    Returns: None where more than two channels are mixed: by a norm, for one.
    """
    heads, _, dim = key.shape
    mixed = torch.zeros(dim, dim)
    for channel in range(dim):
        (slope,) = torch.autograd.grad(key[..., channel].sum(), rows, retain_graph=True)
        own = slope[0, :, first : first + heads * dim]
        mixed[channel] = own.abs().unflatten(1, (heads, dim)).sum((0, 1))
    linked = mixed > 1e-6 * mixed.max()
    linked = (linked | linked.T).fill_diagonal_(False)
    if int(linked.sum(1).max()) > 1:
        return None
    return torch.where(linked.any(1), linked.int().argmax(1), torch.arange(dim))


def choose_groups(gram: torch.Tensor, readers: torch.Tensor, groups: int) -> torch.Tensor:
    """Return an order [heads] of the heads whose neighbours form groups that lose little: from neighbours, the best swaps.

    Args:
        gram: [heads * dim, heads * dim], float64: E[v v^T] of all heads' values.
        readers: [heads, dim, dim], O^T O of the query heads of each.
    """
    heads, dim = readers.shape[:2]
    parts = gram.reshape(heads, dim, heads, dim)
    roots = root(readers)
    cost = torch.zeros(heads, heads, dtype=gram.dtype)
    for pair in map(list, combinations(range(heads), 2)):
        both = parts[pair][:, :, pair].reshape(2 * dim, -1)
        weight = torch.block_diag(*roots[pair])
        lost = torch.linalg.eigvalsh(weight @ both @ weight)[:dim].sum()
        cost[pair, pair[::-1]] = lost.clamp(min=0)
    group = torch.arange(heads) * groups // heads
    together = group[:, None] == group

    def total(order: list[int]) -> float:
        return float(cost[order][:, order][together].sum())

    swaps = [{i: j, j: i} for i, j in combinations(range(heads), 2)]
    order = list(range(heads))
    while True:
        every = [[order[swap.get(i, i)] for i in range(heads)] for swap in swaps]
        better = min(every, key=total)
        if total(better) >= total(order) * (1 - 1e-9):
            break
        order = better
    return torch.tensor(order).unflatten(0, (groups, -1)).sort(1).values.flatten()
