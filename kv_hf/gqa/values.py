"""Merging a layer's values, and the outputs that read them: solved group by group, then fitted together.

Attention gives head h the context C_h = P_h V of all old values of its group (stacked); the converted layer puts out
sum_h O_h A_g C_h. With A given, O is a ridge regression; with O given, A is a least-squares problem of its own. Contexts are
never formed: P and V stay as they are, products are in float32 within a window, their sums over windows in float64.
"""

from collections.abc import Callable
from itertools import combinations

import torch

from .keys import Rotary, best_common, conjugate_gradients, loss
from .stream import Tap

SWEEPS, RIDGE = (
    2,
    0.01,
)  # rounds of fitting outputs and values in turn, and the weight of the pull to the merged ones
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


class OutputFactors:
    """The sums of P, V and targets y over all tokens, computed from P and V.

    Args:
        heads: query heads; wide: numbers of a head's context.
    """

    def __init__(self, heads: int, wide: int) -> None:
        self.heads, self.wide, self.count = heads, wide, 0
        self.windows: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.energy = 0.0

    def add(self, weights: torch.Tensor, values: torch.Tensor, target: torch.Tensor) -> None:
        """Add a window: P [heads, tokens, tokens], V [groups, tokens, wide] and targets [tokens, out], in float32."""
        self.windows.append((weights, values, target))
        self.energy += float(target.double().square().sum())
        self.count += len(target)

    def squares(self, group_of: torch.Tensor, groups: int) -> torch.Tensor:
        """Return the sums [groups, wide, wide]."""
        found = torch.zeros(groups, self.wide, self.wide, dtype=torch.float64)
        for weights, values, _ in self.windows:
            for group in range(groups):
                reads = torch.zeros_like(weights[0])
                for h in members(group_of, group):
                    reads += weights[h].T @ weights[h]
                found[group] += values[group].T @ (reads @ values[group])
        return found

    def merged(
        self, down: torch.Tensor, group_of: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums [heads * dim, heads * dim] and [heads * dim, out]; `down` is [groups, dim, wide]."""
        size = self.heads * down.shape[1]
        square = torch.zeros(size, size, dtype=torch.float64)
        cross = torch.zeros(size, self.windows[0][2].shape[1], dtype=torch.float64)
        for weights, values, target in self.windows:
            flat = _contexts(weights, values, down, group_of)
            square += flat.T @ flat
            cross += flat.T @ target
        return square, cross

    def spread(
        self, down: torch.Tensor, gram: torch.Tensor, group_of: torch.Tensor
    ) -> torch.Tensor:
        """Return the sums [groups, dim, wide]; `gram` is [heads * dim, heads * dim]."""
        found = torch.zeros_like(down)
        for weights, values, _ in self.windows:
            flat = _contexts(weights, values, down, group_of)
            self._collect(found, flat @ gram.to(flat.dtype), weights, values, group_of)
        return found

    def goal(self, output: torch.Tensor, group_of: torch.Tensor, groups: int) -> torch.Tensor:
        """Return the sums [groups, dim, wide]; `output` is [out, heads * dim]."""
        dim = output.shape[1] // self.heads
        found = torch.zeros(groups, dim, self.wide, dtype=torch.float64)
        for weights, values, target in self.windows:
            self._collect(found, target @ output.to(target.dtype), weights, values, group_of)
        return found

    def _collect(
        self, found: torch.Tensor, flat: torch.Tensor, weights: torch.Tensor, values: torch.Tensor,
        group_of: torch.Tensor,
    ) -> None:  # fmt: skip
        """Add (flat_h)^T C_h to the group of each head; flat is [tokens, heads * dim]."""
        each = flat.unflatten(1, (self.heads, -1))
        for group in range(len(found)):
            back = torch.zeros_like(each[:, 0])
            for h in members(group_of, group):
                back += weights[h].T @ each[:, h]
            found[group] += back.T @ values[group]


def members(group_of: torch.Tensor, group: int) -> list[int]:
    """Return the query heads of a group; `group_of` is [heads]."""
    return [h for h, of in enumerate(group_of.tolist()) if of == group]


def _contexts(
    weights: torch.Tensor, values: torch.Tensor, down: torch.Tensor, group_of: torch.Tensor
) -> torch.Tensor:
    """Return X_h = A_g C_h of all heads, [tokens, heads * dim]."""
    new = values @ down.mT.to(values.dtype)  # [groups, tokens, dim]
    return torch.cat([p @ new[g] for p, g in zip(weights, group_of.tolist(), strict=True)], 1)


def mean_squares(sums: OutputFactors, group_of: torch.Tensor, groups: int) -> torch.Tensor:
    """Return the mean of E[C C^T] over the heads of each group: [groups, wide, wide]."""
    return sums.squares(group_of, groups) / (sums.count * len(group_of) / groups)


def fit_outputs(
    sums: OutputFactors,
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
    square, cross = sums.merged(down, group_of)
    pull = ridge * square.diagonal().mean()
    square.diagonal().add_(pull)
    return torch.linalg.solve(square, cross + pull * output.T).T


def fit_values(
    sums: OutputFactors,
    down: torch.Tensor,
    output: torch.Tensor,
    group_of: torch.Tensor,
    ridge: float,
    steps: int = 20,
) -> torch.Tensor:
    """Return values' maps [groups, dim, wide] that fit better, given the outputs [out, heads * dim]: conjugate gradients."""
    groups, dim, _ = down.shape
    heads = sums.heads
    gram = output.T @ output
    squares = sums.squares(group_of, groups)
    size = squares.diagonal(dim1=1, dim2=2).sum() / (heads * sums.wide)
    pull = ridge * float(gram.diagonal().mean() * size)

    def apply(x: torch.Tensor) -> torch.Tensor:
        return sums.spread(x, gram, group_of) + pull * x

    goal = sums.goal(output, group_of, groups) + pull * down
    own = gram.reshape(heads, dim, heads, dim)
    reads = torch.zeros(groups, dim, dim, dtype=down.dtype).index_add_(
        0, group_of, torch.stack([own[h, :, h] for h in range(heads)])
    )
    inverse = _damped_inverse(squares), _damped_inverse(reads)
    return conjugate_gradients(
        apply, goal - apply(down), down, lambda r: inverse[1] @ r @ inverse[0], steps
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
    found: OutputFactors | None = None
    for i in range(count):
        tap, target, level = run(i)
        value = tap.value[0].unflatten(0, (groups, -1)).transpose(1, 2).flatten(2)
        found = found or OutputFactors(len(kv_of), value.shape[-1])
        found.add(tap.weights[0] * level[:, None], value.contiguous(), target * level[:, None])
    assert found is not None
    grams = mean_squares(found, group_of, groups)
    if not readers.any() or not grams.any():
        return None
    solved = [best_common(grams[g], readers[g * m : (g + 1) * m]) for g in range(groups)]
    del grams
    down = torch.stack([down for down, _ in solved])
    up = torch.cat([up for _, up in solved])[kv_of]
    output = torch.einsum("ohd,hde->ohe", outputs, up).flatten(1)
    for _ in range(SWEEPS):
        output = fit_outputs(found, down, output, group_of, RIDGE)
        down = fit_values(found, down, output, group_of, RIDGE)
    return down, fit_outputs(found, down, output, group_of, RIDGE)
