"""Values and outputs of a converted layer, fitted to what attention puts out: alternating least squares.

Attention gives head h the context C_h = sum_t p_t v_t of all old values of its group (stacked); the converted layer puts out
sum_h O_h A_g C_h. With A given, O is a ridge regression; with O given, A is a least-squares problem of its own. Second moments
of C and of the target are all that is needed.
"""

import torch


class OutputMoments:
    """E[C C^T] and E[C y^T], in float64, of what was added.

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
        self.contexts += (flat.T @ flat).double()
        self.targets += (flat.T @ target).double()
        self.energy += float(target.double().square().sum())
        self.count += len(flat)

    def own(self, group_of: torch.Tensor, groups: int) -> torch.Tensor:
        """Return the mean of E[C C^T] over the heads of each group: [groups, wide, wide]."""
        blocks = self.contexts.reshape(self.heads, self.wide, self.heads, self.wide)
        found = torch.zeros(groups, self.wide, self.wide, dtype=torch.float64)
        found.index_add_(0, group_of, torch.stack([blocks[h, :, h] for h in range(self.heads)]))
        return found / (self.count * len(group_of) / groups)


def block_maps(down: torch.Tensor, group_of: torch.Tensor) -> torch.Tensor:
    """Return A of every head as one matrix [heads * dim, heads * wide] from those of the groups [groups, dim, wide]."""
    return torch.block_diag(*down[group_of])


def fit_outputs(
    moments: OutputMoments,
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
    maps = block_maps(down, group_of)
    square = maps @ moments.contexts @ maps.T
    cross = maps @ moments.targets
    pull = ridge * square.diagonal().mean()
    square = square + pull * torch.eye(len(square), dtype=square.dtype)
    return torch.linalg.solve(square, cross + pull * output.T).T


def fit_values(
    moments: OutputMoments,
    down: torch.Tensor,
    output: torch.Tensor,
    group_of: torch.Tensor,
    ridge: float,
    steps: int = 20,
) -> torch.Tensor:
    """Return values' maps [groups, dim, wide] that fit better, given the outputs [out, heads * dim]: conjugate gradients."""
    groups, dim, wide = down.shape
    heads = moments.heads
    gram = (output.T @ output).reshape(heads, dim, heads * dim)
    contexts = moments.contexts.reshape(heads, wide, heads * wide)
    pull = ridge * float(
        gram.reshape(heads * dim, -1).diagonal().mean() * moments.contexts.diagonal().mean()
    )

    def apply(x: torch.Tensor) -> torch.Tensor:
        own = x[group_of]  # [heads, dim, wide]
        mixed = torch.einsum("hdw,hwx->hdx", own, contexts).reshape(heads * dim, heads, wide)
        each = torch.einsum("hde,ehw->hdw", gram, mixed)
        return torch.zeros_like(x).index_add_(0, group_of, each) + pull * x

    goal = torch.einsum(
        "ohd,hwo->hdw", output.reshape(-1, heads, dim), moments.targets.reshape(heads, wide, -1)
    )
    goal = torch.zeros_like(down).index_add_(0, group_of, goal) + pull * down
    squares = torch.zeros(groups, wide, wide, dtype=down.dtype).index_add_(
        0,
        group_of,
        torch.stack([contexts[h].reshape(wide, heads, wide)[:, h] for h in range(heads)]),
    )
    reads = torch.zeros(groups, dim, dim, dtype=down.dtype).index_add_(
        0, group_of, torch.stack([gram[h].reshape(dim, heads, dim)[:, h] for h in range(heads)])
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
    moments: OutputMoments, down: torch.Tensor, output: torch.Tensor, group_of: torch.Tensor
) -> float:
    """Return E |y - sum_h O_h A_g C_h|^2 / E |y|^2."""
    full = output @ block_maps(down, group_of)
    error = ((full @ moments.contexts) * full).sum() - 2 * (full.T * moments.targets).sum()
    return (float(error) + moments.energy) / moments.energy
