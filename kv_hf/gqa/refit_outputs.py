"""Values and outputs of a converted layer, fitted to what attention puts out: alternating least squares.

Attention gives head h the context C_h = sum_t p_t v_t of all old values of its group (stacked); the converted layer puts out
sum_h O_h A_g C_h. With A given, O is a ridge regression; with O given, A is a least-squares problem of its own. Sums over
tokens of products of C and of the target are all that is needed: of a matrix (OutputMoments), or, where that would be the
larger one, of the probabilities and the values that C is made of (refit_factors.OutputFactors).
"""

from typing import Protocol

import torch


class Sums(Protocol):
    """The sums over tokens of contexts C and targets y that the fits need, in float64.

    Attributes:
        heads, wide: query heads, and the numbers of a head's context.
        energy: the sum of y's squares.
        count: tokens.
    """

    heads: int
    wide: int
    energy: float
    count: int

    def squares(self, group_of: torch.Tensor, groups: int) -> torch.Tensor:
        """Return C_h C_h^T of the heads of each group: [groups, wide, wide]."""

    def merged(
        self, down: torch.Tensor, group_of: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return X X^T and X y^T of X_h = A_g C_h: [heads * dim, heads * dim] and [heads * dim, out]."""

    def spread(
        self, down: torch.Tensor, gram: torch.Tensor, group_of: torch.Tensor
    ) -> torch.Tensor:
        """Return (gram X)_h C_h^T summed over the heads of each group [groups, dim, wide]; `gram` is square."""

    def goal(self, output: torch.Tensor, group_of: torch.Tensor, groups: int) -> torch.Tensor:
        """Return (O_h^T y) C_h^T summed over the heads of each group [groups, dim, wide]."""


class OutputMoments:
    """Sums of C C^T and C y^T, as matrices.

    Args:
        heads: query heads; wide: numbers of a head's context; out: numbers of the target.
    """

    def __init__(self, heads: int, wide: int, out: int) -> None:
        self.heads, self.wide, self.count = heads, wide, 0
        self.contexts = torch.zeros(heads * wide, heads * wide, dtype=torch.float64)
        self.targets = torch.zeros(heads * wide, out, dtype=torch.float64)
        self.energy = 0.0

    def add(self, contexts: torch.Tensor, target: torch.Tensor) -> None:
        """Add contexts [tokens, heads, wide] and targets [tokens, out]."""
        flat = contexts.flatten(1)
        self.contexts += flat.T @ flat
        self.targets += flat.T @ target
        self.energy += float(target.double().square().sum())
        self.count += len(flat)

    def squares(self, group_of: torch.Tensor, groups: int) -> torch.Tensor:
        """Return the sums [groups, wide, wide] of Sums.squares."""
        blocks = self.contexts.reshape(self.heads, self.wide, self.heads, self.wide)
        found = torch.zeros(groups, self.wide, self.wide, dtype=torch.float64)
        return found.index_add_(
            0, group_of, torch.stack([blocks[h, :, h] for h in range(self.heads)])
        )

    def merged(
        self, down: torch.Tensor, group_of: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums [heads * dim, heads * dim] and [heads * dim, out] of Sums.merged; `down` is [groups, dim, wide]."""
        maps = torch.block_diag(*down[group_of])
        return maps @ self.contexts @ maps.T, maps @ self.targets

    def spread(
        self, down: torch.Tensor, gram: torch.Tensor, group_of: torch.Tensor
    ) -> torch.Tensor:
        """Return the sums [groups, dim, wide] of Sums.spread; `gram` is [heads * dim, heads * dim]."""
        heads, wide, dim = self.heads, self.wide, down.shape[1]
        contexts = self.contexts.reshape(heads, wide, heads * wide)
        mixed = torch.einsum("hdw,hwx->hdx", down[group_of], contexts)
        each = torch.einsum(
            "hde,ehw->hdw",
            gram.reshape(heads, dim, heads * dim),
            mixed.reshape(heads * dim, heads, wide),
        )
        return torch.zeros_like(down).index_add_(0, group_of, each)

    def goal(self, output: torch.Tensor, group_of: torch.Tensor, groups: int) -> torch.Tensor:
        """Return the sums [groups, dim, wide] of Sums.goal; `output` is [out, heads * dim]."""
        each = torch.einsum(
            "ohd,hwo->hdw",
            output.reshape(len(output), self.heads, -1),
            self.targets.reshape(self.heads, self.wide, -1),
        )
        found = torch.zeros(groups, *each.shape[1:], dtype=each.dtype)
        return found.index_add_(0, group_of, each)


def mean_squares(sums: Sums, group_of: torch.Tensor, groups: int) -> torch.Tensor:
    """Return the mean of E[C C^T] over the heads of each group: [groups, wide, wide]."""
    return sums.squares(group_of, groups) / (sums.count * len(group_of) / groups)


def fit_outputs(
    sums: Sums,
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
    sums: Sums,
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


def conjugate_gradients(apply, rest, start, precondition, steps, unbiased=False):  # type: ignore[no-untyped-def]
    """Return x closer to the solution of apply(x) = apply(start) + rest, after `steps` steps; tensors of any one shape.

    `unbiased` keeps the last column of x as it is.
    """

    def within(y):  # type: ignore[no-untyped-def]
        return torch.cat([y[..., :-1], torch.zeros_like(y[..., -1:])], -1) if unbiased else y

    x = start.clone()
    rest = within(rest)
    z = within(precondition(rest))
    way = z
    before = (rest * z).sum()
    for _ in range(steps):
        if before <= 0:
            break
        ahead = within(apply(way))
        step = before / (way * ahead).sum()
        x = x + step * way
        rest = rest - step * ahead
        z = within(precondition(rest))
        now = (rest * z).sum()
        way, before = z + now / before * way, now
    return x


def output_loss(
    sums: Sums, down: torch.Tensor, output: torch.Tensor, group_of: torch.Tensor
) -> float:
    """Return E |y - sum_h O_h A_g C_h|^2 / E |y|^2; 0 if y is 0.

    Args:
        down: A, [groups, dim, wide]; output: O, [out, heads * dim]; group_of: [heads].
    """
    square, cross = sums.merged(down, group_of)
    error = float(((output @ square) * output).sum() - 2 * (output.T * cross).sum())
    return (error + sums.energy) / sums.energy if sums.energy else 0.0
