"""Merging a layer's values, and the outputs that read them: solved group by group, then fitted together.

Attention gives head h the context C_h = P_h V of all old values of its group (stacked); the converted layer puts out
sum_h O_h A_g C_h. With A given, O is a ridge regression; with O given, A is a least-squares problem of its own. Contexts are
never formed: P and V stay as they are, products are in float32 within a window, their sums over windows in float64.
"""

from collections.abc import Callable
from itertools import combinations

import torch

from .keys import Rotary, best_common, conjugate_gradients, loss, plane_gram
from .stream import Tap

SWEEPS = 2  # rounds of fitting outputs and values in turn
RIDGE = 0.01  # weight of the pull to the merged ones
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
        gram = plane_gram(keys, a, b)
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


# one window: P [heads, tokens, tokens], V [groups, tokens, wide] and targets [tokens, out], in float32
Window = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def context_squares(windows: list[Window], group_of: torch.Tensor) -> torch.Tensor:
    """Return the sums of C C^T over all tokens and the heads of each group: [groups, wide, wide], float64."""
    groups, _, wide = windows[0][1].shape
    found = torch.zeros(groups, wide, wide, dtype=torch.float64)
    for weights, values, _ in windows:
        reads = torch.zeros(groups, *weights.shape[1:], dtype=weights.dtype)
        for p, group in zip(weights, group_of.tolist(), strict=True):
            reads[group] += p.T @ p
        found += values.mT @ (reads @ values)
    return found


def new_contexts(window: Window, down: torch.Tensor, group_of: torch.Tensor) -> torch.Tensor:
    """Return A_g C_h of all heads, [tokens, heads * dim]; `down` is A, [groups, dim, wide]."""
    weights, values, _ = window
    new = values @ down.mT.to(values.dtype)  # [groups, tokens, dim]
    return torch.cat([p @ new[g] for p, g in zip(weights, group_of.tolist(), strict=True)], 1)


def fit_outputs(
    windows: list[Window],
    down: torch.Tensor,
    output: torch.Tensor,
    group_of: torch.Tensor,
    ridge: float,
) -> torch.Tensor:
    """Return the outputs [out, heads * dim] that fit best, pulled to `output` of the same shape.

    Args:
        down: [groups, dim, wide]: new values from stacked old ones.
        ridge: times the mean of the contexts' squares: the weight of the pull.
    """
    square = torch.zeros(output.shape[1], output.shape[1], dtype=torch.float64)
    cross = torch.zeros(output.shape[1], len(output), dtype=torch.float64)
    for window in windows:
        flat = new_contexts(window, down, group_of)
        square += flat.T @ flat
        cross += flat.T @ window[2]
    pull = ridge * square.diagonal().mean()
    square.diagonal().add_(pull)
    return torch.linalg.solve(square, cross + pull * output.T).T


def fit_values(
    windows: list[Window],
    down: torch.Tensor,
    output: torch.Tensor,
    group_of: torch.Tensor,
    ridge: float,
    steps: int = 20,
) -> torch.Tensor:
    """Return values' maps [groups, dim, wide] that fit better, given the outputs [out, heads * dim]."""
    groups, dim, wide = down.shape
    heads, narrow = len(group_of), output.to(windows[0][2].dtype)

    def squares(x: torch.Tensor, window: int, wanted: bool) -> torch.Tensor:
        found = new_contexts(windows[window], x, group_of) @ narrow.T
        return (found - windows[window][2] if wanted else found).square().sum() / 2

    own = output.unflatten(1, (heads, dim))
    reads = torch.einsum("ohd,ohe->hde", own, own)
    grouped = torch.zeros(groups, dim, dim, dtype=down.dtype).index_add_(0, group_of, reads)
    sums = context_squares(windows, group_of)
    size = sums.diagonal(dim1=1, dim2=2).sum() / (heads * wide)
    pull = ridge * float(output.square().sum(0).mean() * size)
    left, right = _damped_inverse(grouped), _damped_inverse(sums)
    return conjugate_gradients(
        squares, len(windows), down, lambda rest: left @ rest @ right, pull, steps
    )


def _damped_inverse(square: torch.Tensor) -> torch.Tensor:
    size = square.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    return torch.linalg.inv(square + 1e-3 * size * torch.eye(square.shape[-1], dtype=square.dtype))


Run = Callable[[int], tuple[Tap, torch.Tensor, torch.Tensor]]


def merge_values(
    run: Run,
    count: int,
    readers: torch.Tensor,
    outputs: torch.Tensor,
    kv_of: torch.Tensor,
    new_of: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the values' maps [groups, dim, merged * dim] and the outputs [out, heads * dim] that go with them.

    Args:
        run: index of a window -> attention with the new keys and all old values: (what it saw, targets [tokens, out], what
            each token's rows are multiplied by [tokens]).
        count: windows.
        readers: [kv heads, dim, dim], O^T O of the query heads of each.
        outputs: [out, heads, dim], the old ones.
        kv_of, new_of: old kv head of each query head, new one of each old one.
    Returns: None where there is nothing to fit: no values, or nothing that reads them.
    """
    group_of = new_of[kv_of]
    groups = int(new_of.max()) + 1
    m = len(new_of) // groups
    windows: list[Window] = []
    for i in range(count):
        tap, target, level = run(i)
        value = tap.value[0].unflatten(0, (groups, -1)).transpose(1, 2).flatten(2)
        weights = tap.weights[0] * level[:, None]
        windows.append((weights, value.contiguous(), target * level[:, None]))
    tokens = sum(len(target) for _, _, target in windows)
    grams = context_squares(windows, group_of) / (tokens * len(group_of) / groups)
    if not readers.any() or not grams.any():
        return None
    solved = [best_common(grams[g], readers[g * m : (g + 1) * m]) for g in range(groups)]
    down = torch.stack([down for down, _ in solved])
    up = torch.cat([up for _, up in solved])[kv_of]
    output = torch.einsum("ohd,hde->ohe", outputs, up).flatten(1)
    for _ in range(SWEEPS):
        output = fit_outputs(windows, down, output, group_of, RIDGE)
        down = fit_values(windows, down, output, group_of, RIDGE)
    return down, fit_outputs(windows, down, output, group_of, RIDGE)
