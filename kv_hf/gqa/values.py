"""The linear algebra of calibrated merges, and the merge of a layer's values and of the outputs that read them.

Attention gives head h the context C_h = P_h V of all old values of its group (stacked); the converted layer puts out
sum_h O_h A_g C_h. A begins with principal components. With A given, O is a ridge regression; with O given, A is a
least-squares problem of its own, solved by conjugate gradients.
"""

from collections.abc import Callable
from itertools import combinations

import torch

RIDGE = 0.01  # weight of the pull to the start, as a part of what the start itself gives
FLOOR = 1e-12  # of the largest eigenvalue: what counts as nothing
STEPS = 20  # conjugate gradients of the fit of values

# (x, window, whether to take off what is wanted) -> half the weighted squares of a linear function of x, on one window
Squares = Callable[[torch.Tensor, int, bool], torch.Tensor]
# one window: contexts of each head [heads, tokens, m * dim], and what all heads together shall put out [tokens, out]
Window = tuple[torch.Tensor, torch.Tensor]


def best_common(gram: torch.Tensor, readers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the maps to and from the best common vector y of a group of heads: sum_g E |x_g - up_g y|^2 under M_g is smallest.

    Args:
        gram: [m * dim, m * dim], float64: E[x x^T] of the stacked heads.
        readers: [m, dim, dim], M of each head.
    Returns: down [dim, m * dim], up [m, dim, dim]; y has the mean square of the heads, in a basis close to theirs.
    """
    m, dim = readers.shape[:2]
    roots = torch.block_diag(*root(readers))
    values, vectors = torch.linalg.eigh(roots @ gram @ roots)
    values, vectors = values[-dim:], vectors[:, -dim:]
    if not values[-1] > 0:  # heads that are zero, or that nobody reads: their mean
        eye = torch.eye(dim, dtype=readers.dtype)
        return eye.repeat(1, m) / m, eye.repeat(m, 1, 1)
    kept = values > FLOOR * values[-1]
    down = vectors.T @ roots
    up = (gram @ roots @ vectors) * torch.where(kept, 1 / values.clamp(min=1e-300), 0.0)
    wide = (down @ gram @ down.T).diagonal().mean().sqrt()
    scale = gram.diagonal().mean().sqrt() / wide
    left, _, right = torch.linalg.svd(up.reshape(m, dim, dim).mean(0))
    turn = left @ right  # y in the basis in which the mean of `up` is symmetric
    return scale * turn @ down, (up @ turn.T).reshape(m, dim, dim) / scale


def pair_cost(gram: torch.Tensor, readers: torch.Tensor) -> float:
    """Return what `best_common` loses of two heads, from the same `gram` [2 * dim, 2 * dim] and `readers` [2, dim, dim]."""
    roots = torch.block_diag(*root(readers))
    return float(torch.linalg.eigvalsh(roots @ gram @ roots)[: readers.shape[1]].sum().clamp(min=0))


def root(matrix: torch.Tensor) -> torch.Tensor:
    """Return the symmetric square root of positive semidefinite matrices [.., n, n]."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=0).sqrt()[..., None, :]) @ vectors.mT


def damped_inverse(square: torch.Tensor) -> torch.Tensor:
    """Return the inverse of positive semidefinite matrices [.., n, n], with a part of their mean diagonal added."""
    size = square.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].clamp(min=1e-20)
    return torch.linalg.inv(square + RIDGE * size * torch.eye(square.shape[-1], dtype=square.dtype))


def improve(
    squares: Squares,
    windows: int,
    start: torch.Tensor,
    precondition: Callable[[torch.Tensor], torch.Tensor],
    steps: int,
) -> torch.Tensor:
    """Return an x [any shape] with a smaller sum of `squares`, pulled to `start`, by conjugate gradients.

    Args:
        windows: how many there are; the gradients of one at a time are in memory.
        precondition: roughly the inverse of the matrix, which is never formed.
    """

    def gradient(x: torch.Tensor, wanted: bool) -> torch.Tensor:
        total = torch.zeros_like(x)
        for window in range(windows):
            with torch.enable_grad():
                own = x.detach().requires_grad_()
                total += torch.autograd.grad(squares(own, window, wanted), own)[0]
        return total

    size = start.square().sum().clamp(min=1e-30)
    pull = RIDGE * (start * gradient(start, False)).sum() / size
    x, rest = start.clone(), -gradient(start, True)
    z = way = precondition(rest)
    before = (rest * z).sum()
    for _ in range(steps):
        if before <= 0:
            break
        ahead = gradient(way, False) + pull * way
        step = before / (way * ahead).sum()
        x = x + step * way
        rest = rest - step * ahead
        z = precondition(rest)
        now = (rest * z).sum()
        way, before = z + now / before * way, now
    return x


def choose_groups(gram: torch.Tensor, readers: torch.Tensor, groups: int) -> torch.Tensor:
    """Return an order [heads] of the heads whose neighbours form groups that lose little: from neighbours, the best swaps.

    Args:
        gram: [heads * dim, heads * dim], float64: E[v v^T] of all heads' values.
        readers: [heads, dim, dim], O^T O of the query heads of each.
    """
    heads, dim = readers.shape[:2]
    parts = gram.reshape(heads, dim, heads, dim)
    cost = torch.zeros(heads, heads, dtype=gram.dtype)
    for one, other in combinations(range(heads), 2):
        pair = [one, other]
        both = parts[pair][:, :, pair].reshape(2 * dim, -1)
        cost[one, other] = cost[other, one] = pair_cost(both, readers[pair])
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


def new_contexts(contexts: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Return A_g C_h of all heads, [tokens, heads * dim]; `down` is A of each head, [heads, dim, m * dim]."""
    return torch.einsum("htw,hdw->thd", contexts, down.to(contexts.dtype)).flatten(1)


def fit_outputs(windows: list[Window], down: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Return the outputs [heads * dim, out] that fit best, pulled to `output` of the same shape.

    Args:
        down: [heads, dim, m * dim], each head's new values from stacked old ones.
    """
    size = len(output)
    square = torch.zeros(size, size, dtype=output.dtype)
    cross = torch.zeros_like(output)
    for contexts, target in windows:
        flat = new_contexts(contexts, down)
        square += flat.T @ flat
        cross += flat.T @ target
    pull = RIDGE * square.diagonal().mean()
    square.diagonal().add_(pull)
    return torch.linalg.solve(square, cross + pull * output)


def fit_values(
    windows: list[Window], down: torch.Tensor, output: torch.Tensor, group_of: torch.Tensor
) -> torch.Tensor:
    """Return values' maps [groups, dim, m * dim] that fit better, given the outputs [heads * dim, out]."""
    narrow = output.to(windows[0][1].dtype)

    def squares(x: torch.Tensor, i: int, wanted: bool) -> torch.Tensor:
        contexts, target = windows[i]
        found = new_contexts(contexts, x[group_of]) @ narrow
        return (found - target if wanted else found).square().sum() / 2

    each = output.unflatten(0, (len(group_of), -1))
    reads = torch.zeros(len(down), *2 * down.shape[1:2], dtype=down.dtype)
    reads.index_add_(0, group_of, each @ each.mT)
    left, right = damped_inverse(reads), damped_inverse(second_moments(windows, group_of))
    return improve(squares, len(windows), down, lambda rest: left @ rest @ right, STEPS)


def second_moments(windows: list[Window], group_of: torch.Tensor) -> torch.Tensor:
    """Return the mean of C C^T over all tokens and the heads of each group: [groups, m * dim, m * dim], float64."""
    groups, wide = int(group_of.max()) + 1, windows[0][0].shape[2]
    found = torch.zeros(groups, wide, wide, dtype=torch.float64)
    for contexts, _ in windows:
        found.index_add_(0, group_of, (contexts.mT @ contexts).double())
    return found * groups / (len(group_of) * sum(len(target) for _, target in windows))


def merge_values(
    windows: list[Window], output: torch.Tensor, kv_of: torch.Tensor, new_of: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the values' maps [groups, dim, m * dim] and the outputs [heads, dim, out] that go with them.

    Args:
        output: [heads, dim, out], the old ones, float64.
        kv_of, new_of: old kv head of each query head, new one of each old one.
    Returns: None where there is nothing to fit: no values, or nothing that reads them.
    """
    group_of = new_of[kv_of]
    readers = readers_of(output, kv_of)
    grams = second_moments(windows, group_of)
    if not readers.any() or not grams.any():
        return None
    grouped = readers.unflatten(0, (len(grams), -1))
    solved = [best_common(gram, each) for gram, each in zip(grams, grouped, strict=True)]
    down = torch.stack([down for down, _ in solved])
    up = torch.cat([up for _, up in solved])[kv_of]
    flat = (up.mT @ output).flatten(0, 1)
    flat = fit_outputs(windows, down[group_of], flat)
    down = fit_values(windows, down, flat, group_of)
    flat = fit_outputs(windows, down[group_of], flat)
    return down, flat.unflatten(0, (len(kv_of), -1))


def readers_of(output: torch.Tensor, kv_of: torch.Tensor) -> torch.Tensor:
    """Return O^T O of outputs [heads, dim, out], summed for each old kv head: [kv heads, dim, dim]."""
    found = torch.zeros(int(kv_of.max()) + 1, *2 * output.shape[1:2], dtype=output.dtype)
    return found.index_add_(0, kv_of, output @ output.mT)
