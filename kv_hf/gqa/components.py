"""The linear algebra of calibrated merges: the best common vector of a group of heads, and the groups that lose least.

Keys are read by queries, values by outputs: a merge y = sum_g down_g x_g of heads x_g, which up_g y stands for, is the same
mathematics for both. Positions rotate some channels of keys, two by two. Such a plane is a complex number, and the merge
may multiply it by another one only, so that positions still rotate it.
"""

from itertools import combinations

import torch
from torch import Tensor

FLOOR = 1e-12  # of the largest eigenvalue: what counts as nothing


def root(matrix: Tensor) -> Tensor:
    """Return the square root of Hermitian positive semidefinite matrices [.., n, n]."""
    values, vectors = torch.linalg.eigh(matrix)
    sizes = values.clamp(min=0).sqrt().to(vectors.dtype)
    return vectors @ torch.diag_embed(sizes) @ vectors.mH


def best_common(gram: Tensor, readers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maps to and from the common vector y of a group of heads with the smallest sum_g E |x_g - up_g y|^2 under M_g.

    Args:
        gram: [m * dim, m * dim], E[x x^H] of the stacked heads, float64 or complex128.
        readers: [m, dim, dim], M of each head, of the same dtype.
    Returns: down and up, [m, dim, dim] each; y has the mean square of the heads, in a basis close to theirs.
    """
    m, dim = readers.shape[:2]
    roots = torch.block_diag(*root(readers))
    values, vectors = torch.linalg.eigh(roots @ gram @ roots)
    values = values[-dim:].clamp(min=0)
    vectors = vectors[:, -dim:]
    largest = values[-1]
    if not largest > 0:  # heads that are zero, or that nobody reads: their mean
        eye = torch.eye(dim, dtype=gram.dtype, device="cpu")
        mean = eye.expand(m, dim, dim)
        return mean / m, mean
    inverse = torch.where(values > FLOOR * largest, 1 / values, 0.0)
    down = vectors.mH @ roots
    up = gram @ roots @ vectors * inverse
    up = up.unflatten(0, (m, dim))
    left, _, right = torch.linalg.svd(up.mean(0))
    turn = left @ right  # y in the basis in which the mean of `up` is symmetric
    size = gram.diagonal().real.mean()
    scale = (size / values.mean()).sqrt()
    down = scale * turn @ down
    down = down.unflatten(1, (m, dim))
    return down.transpose(0, 1), up @ turn.mH / scale


def merge_heads(gram: Tensor, readers: Tensor, partner: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maps of one group's heads, as `best_common` does, from float64; planes that positions rotate stay planes.

    Args:
        partner: [dim], the other channel of each one's plane; itself for those that positions leave alone.
    """
    m, dim = readers.shape[:2]
    gram = gram.reshape(m, dim, m, dim)
    maps = torch.zeros(2, m, dim, dim, dtype=gram.dtype, device="cpu")
    channels = torch.arange(dim, device="cpu")
    free = channels[partner == channels]
    if len(free):
        square = gram[:, free][..., free]
        square = square.reshape(m * len(free), -1)
        found = best_common(square, readers[:, free][..., free])
        maps[:, :, free[:, None], free] = torch.stack(found)
    for a in channels[partner > channels]:
        b = partner[a]
        real = gram[:, a, :, a] + gram[:, b, :, b]
        imaginary = gram[:, b, :, a] - gram[:, a, :, b]
        square = torch.complex(real, imaginary)  # of z = x[a] + i x[b]
        reader = readers[:, a, a] + readers[:, b, b]
        found = best_common(square, reader.to(square.dtype)[:, None, None])
        factor = torch.stack(found).squeeze((2, 3))
        maps[:, :, a, a] = factor.real
        maps[:, :, b, b] = factor.real
        maps[:, :, b, a] = factor.imag
        maps[:, :, a, b] = -factor.imag
    return maps[0], maps[1]


def random_turns(heads: int, partner: Tensor) -> Tensor:
    """Return rotations [heads, dim, dim], float64, of each plane and of the channels that positions leave alone."""
    channels = torch.arange(len(partner), device="cpu")
    free = partner == channels
    mixed = free[:, None] & free
    mixed[channels, partner] = True
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(heads, *mixed.shape, generator=generator, device="cpu")
    skew = (noise - noise.mT).double()
    return torch.matrix_exp(mixed * skew)


def find_partners(key: Tensor, rows: Tensor, first: int) -> Tensor | None:
    """Return the channel [head_dim] that positions mix each channel with, itself for those that they leave alone.

    Args:
        key: [kv heads, tokens, head_dim], computed with gradients from `rows`.
        rows: [1, tokens, columns], what the projection gave; keys begin in column `first`, head by head.
    Returns: None where more than two channels are mixed: by a norm, for one.
    """
    heads, _, dim = key.shape
    mixed = torch.zeros(dim, dim, device="cpu")
    for channel in range(dim):
        asked = key[..., channel].sum()
        (slope,) = torch.autograd.grad(asked, rows, retain_graph=True)
        own = slope[0, :, first : first + heads * dim]
        by_head = own.abs().unflatten(1, (heads, dim))
        mixed[channel] = by_head.sum((0, 1))
    linked = mixed > 1e-6 * mixed.max()
    linked = linked | linked.T
    linked.fill_diagonal_(False)
    if (linked.sum(1) > 1).any():
        return None
    partner = torch.arange(dim, device="cpu")
    one, other = linked.nonzero().T
    partner[one] = other
    return partner


def choose_groups(gram: Tensor, readers: Tensor, groups: int) -> Tensor:
    """Return an order [heads] of the heads whose neighbours form groups that lose little: from neighbours, the best swaps.

    Args:
        gram: [heads * dim, heads * dim], float64: E[v v^T] of all heads' values.
        readers: [heads, dim, dim], O^T O of the query heads of each.
    """
    heads, dim = readers.shape[:2]
    pairs = [list(pair) for pair in combinations(range(heads), 2)]
    blocks = gram.reshape(heads, dim, heads, dim)
    roots = root(readers)
    cost = torch.zeros(heads, heads, dtype=gram.dtype, device="cpu")
    for pair in pairs:
        both = blocks[pair][:, :, pair]
        weight = torch.block_diag(*roots[pair])
        values = torch.linalg.eigvalsh(weight @ both.reshape(weight.shape) @ weight)
        cost[pair, pair[::-1]] = values[:dim].sum().clamp(min=0)

    def lost(group: Tensor) -> float:
        together = group[:, None] == group
        return float(cost[together].sum())

    def swapped(group: Tensor, pair: list[int]) -> Tensor:
        found = group.clone()
        found[pair] = group[pair[::-1]]
        return found

    group = torch.arange(heads, device="cpu") * groups // heads
    while True:
        better = min((swapped(group, pair) for pair in pairs), key=lost)
        if lost(better) >= lost(group) * (1 - 1e-9):
            return group.argsort(stable=True)
        group = better
