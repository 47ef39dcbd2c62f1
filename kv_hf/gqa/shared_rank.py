"""The best common vector for several heads: a low-rank problem that second moments alone decide.

Heads x_1 .. x_m (stacked: x) are to be told from one vector y = down x of the size of one head, x_g ~ up_g y, so that
sum_g E (x_g - up_g y)^T M_g (x_g - up_g y) is least. With L = blockdiag(M)^(1/2) and K = E[x x^T], the eigenvectors U of
L K L give y = U^T L x and up = K L U (U^T L K L U)^-1. No covariance is inverted but that of y.
"""

import torch

FLOOR = 1e-12  # of the largest eigenvalue: what counts as nothing


def root(matrix: torch.Tensor) -> torch.Tensor:
    """Return the symmetric square root of positive semidefinite matrices [.., n, n]."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=0).sqrt()[..., None, :]) @ vectors.mT


def best_common(gram: torch.Tensor, readers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the maps to and from the best common vector of a group of heads.

    Args:
        gram: [m * dim, m * dim], float64: E[x x^T] of the stacked heads.
        readers: [m, dim, dim], M of each head.
    Returns: down [dim, m * dim], up [m, dim, dim]; y has the mean square of the heads, in a basis close to theirs.
    """
    m, dim = readers.shape[:2]
    roots = torch.block_diag(*root(readers))
    values, vectors = torch.linalg.eigh(roots @ gram @ roots)
    values, vectors = values[-dim:], vectors[:, -dim:]
    if not values[-1] > 0:  # heads that are zero, or that nobody reads
        return plain_mean(readers)
    kept = values > FLOOR * values[-1].clamp(min=1e-300)
    down = vectors.T @ roots
    up = (gram @ roots @ vectors) * torch.where(kept, 1 / values.clamp(min=1e-300), 0.0)
    wide = (down @ gram @ down.T).diagonal().mean().sqrt()
    scale = (gram.diagonal().mean().sqrt() / wide) if wide > 0 else torch.ones(())
    left, _, right = torch.linalg.svd(up.reshape(m, dim, dim).mean(0))
    turn = left @ right  # y in the basis in which the mean of `up` is symmetric
    return scale * turn @ down, (up @ turn.T).reshape(m, dim, dim) / scale


def procrustes_mean(
    gram: torch.Tensor, readers: torch.Tensor, rounds: int = 20
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return down [dim, m * dim] and up [m, dim, dim] of the mean of heads that orthogonal maps bring closest.

    Generalized Procrustes analysis on second moments; arguments and results as of `best_common`.
    """
    m, dim = readers.shape[:2]
    cross = gram.reshape(m, dim, m, dim)
    turns = torch.eye(dim, dtype=gram.dtype).repeat(m, 1, 1)
    for _ in range(rounds):
        for g in range(m):
            others = sum(turns[o] @ cross[o, :, g] for o in range(m) if o != g)
            if m > 1:
                left, _, right = torch.linalg.svd(others)
                turns[g] = left @ right
    return turns.transpose(0, 1).reshape(dim, m * dim) / m, turns.mT.contiguous()


def plain_mean(readers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return down [dim, m * dim] and up [m, dim, dim] of the plain mean of a group's heads; see `best_common`."""
    m, dim = readers.shape[:2]
    eye = torch.eye(dim, dtype=readers.dtype)
    return eye.repeat(1, m) / m, eye.repeat(m, 1, 1)


def loss(gram: torch.Tensor, readers: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> float:
    """Return sum_g E (x_g - up_g y)^T M_g (x_g - up_g y), which `best_common` minimizes.

    Args:
        gram: [m * dim, m * dim]; readers, up: [m, dim, dim]; down: [dim, m * dim].
    """
    m, dim = readers.shape[:2]
    left = torch.eye(m * dim, dtype=gram.dtype) - up.reshape(m * dim, dim) @ down
    error = (left @ gram @ left.T).reshape(m, dim, m, dim)
    return float(sum((readers[g] @ error[g, :, g]).trace() for g in range(m)))
