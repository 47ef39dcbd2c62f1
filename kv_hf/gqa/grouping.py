"""Which kv heads to merge with which: groups of equal size with the least that a merge of two of their heads loses.

Query heads and output columns follow their kv head, so that a layer computes the same before it is merged.
"""

from itertools import combinations

import torch

from .rotary import Rotary
from .shared_rank import best_common, loss

ROUNDS = 50  # of swaps, at most; far fewer are needed


def pair_costs(
    keys: torch.Tensor, queries: torch.Tensor, values: torch.Tensor, readers: torch.Tensor, rotary: Rotary | None
) -> torch.Tensor:  # fmt: skip
    """Return what merging each pair of heads loses of keys and of values, each as a part of all: [kv heads, kv heads].

    Args:
        keys, values: [kv heads * dim, kv heads * dim], float64: E[x x^T] of all heads.
        queries: [kv heads, dim, dim]: E[q q^T] summed over the query heads of each.
        readers: [kv heads, dim, dim]: O^T O summed over them.
        rotary: None leaves the keys out.
    """
    heads = len(queries)
    of_values = values.reshape(heads, -1, heads, values.shape[0] // heads)
    of_keys = keys.reshape(heads, -1, heads, keys.shape[0] // heads)
    cost = torch.zeros(heads, heads, dtype=torch.float64)
    value_energy = sum(float((readers[g] @ of_values[g, :, g]).trace()) for g in range(heads))
    for g, o in combinations(range(heads), 2):
        pair = [g, o]
        gram = of_values[pair][:, :, pair].reshape(2 * values.shape[0] // heads, -1)
        cost[g, o] = loss(gram, readers[pair], *best_common(gram, readers[pair])) / max(
            value_energy, 1e-300
        )
    if rotary is not None and len(rotary.planes):
        cost += _key_costs(of_keys, queries, rotary)
    return cost + cost.T


def _key_costs(keys: torch.Tensor, queries: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    heads = len(queries)
    cost = torch.zeros(heads, heads, dtype=torch.float64)
    energy = 0.0
    for a, b in rotary.planes.tolist():
        real = keys[:, a, :, a] + keys[:, b, :, b]
        gram = torch.complex(real, keys[:, b, :, a] - keys[:, a, :, b])
        width = (queries[:, a, a] + queries[:, b, b]).sqrt()
        gram = width[:, None] * gram * width
        energy += float(gram.diagonal().real.sum())
        one, other = gram.diagonal().real[:, None], gram.diagonal().real
        gap = ((one - other).square() + 4 * gram.abs().square()).sqrt()
        cost += ((one + other - gap) / 2).triu(1)  # the smaller eigenvalue of each pair
    return cost / max(energy, 1e-300)


def choose_groups(cost: torch.Tensor, groups: int) -> torch.Tensor:
    """Return an order [heads] of the heads whose neighbours form groups that lose little: from neighbours, the best swaps.

    Args:
        cost: [heads, heads], the loss of merging each pair.
    """
    heads = len(cost)
    size = heads // groups
    order = list(range(heads))

    def total(group: list[int]) -> float:
        return float(cost[group][:, group].sum())

    for _ in range(ROUNDS):
        best, swap = 1e-12, None
        for i, j in combinations(range(heads), 2):
            if i // size == j // size:
                continue
            one, other = ([*order[k // size * size : (k // size + 1) * size]] for k in (i, j))
            before = total(one) + total(other)
            one[i % size], other[j % size] = order[j], order[i]
            gain = before - total(one) - total(other)
            if gain > best:
                best, swap = gain, (i, j)
        if swap is None:
            break
        i, j = swap
        order[i], order[j] = order[j], order[i]
    grouped = [sorted(order[g * size : (g + 1) * size]) for g in range(groups)]
    return torch.tensor([head for group in sorted(grouped) for head in group])
