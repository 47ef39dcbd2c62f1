"""The linear algebra of calibrated merges: principal components of several heads, and conjugate gradients."""

from collections.abc import Callable

import torch

RIDGE = 0.01  # weight of the pull to the start
FLOOR = 1e-12  # of the largest eigenvalue: what counts as nothing

# (x, window, whether to take off what is wanted) -> half the weighted squares of a linear function of x, on one window
Squares = Callable[[torch.Tensor, int, bool], torch.Tensor]


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
    """Return what `best_common` loses of two heads."""
    roots = torch.block_diag(*root(readers))
    return float(torch.linalg.eigvalsh(roots @ gram @ roots)[: readers.shape[1]].sum())


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
    ridge: float = RIDGE,
) -> torch.Tensor:
    """Return an x [any shape] with a smaller sum of `squares`, pulled to `start`, by conjugate gradients.

    Args:
        windows: how many there are; the gradients of one at a time are in memory.
        precondition: roughly the inverse of the matrix, which is never formed.
        ridge: weight of the pull, as a part of the squares that `start` itself gives.
    """

    def gradient(x: torch.Tensor, wanted: bool) -> torch.Tensor:
        total = torch.zeros_like(x)
        for window in range(windows):
            with torch.enable_grad():
                own = x.detach().requires_grad_()
                total += torch.autograd.grad(squares(own, window, wanted), own)[0]
        return total

    size = start.square().sum().clamp(min=1e-30)
    pull = ridge * (start * gradient(start, False)).sum() / size
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
