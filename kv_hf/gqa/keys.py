"""Queries and keys of a converted layer: how positions turn them, the merge of a group's keys, and the fit of their scores.

Channels that positions rotate are found by sending unit vectors through a layer; names and conventions (half-split,
interleaved, partial, none) are never guessed. A rotated plane allows a complex factor per head only, for positions must still
rotate it; channels that no position changes are as free as values.

To second order, the divergence of two softmaxes is half the variance of the scores' difference under the probabilities. So
E_t Var_p(s'_t - s_t) is made small, in the weights of all queries (keys given) or of all keys (queries given): linear
problems, solved by conjugate gradients (values.py).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .values import best_common, damped_inverse, improve

STEPS = 4  # conjugate gradients of each fit of scores
TINY = 1e-4  # that a rotation may be off, as a part of the largest number

# (kind, [tokens, rows]) -> [heads, tokens, head_dim]: what attention gets when a projection gives these rows
Send = Callable[[str, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Rotary:
    """The operations between a projection and the scores.

    A plane is a pair of channels (a, b), read as the complex number x[a] + i x[b]; position t multiplies it by a number.

    Attributes:
        planes: [planes, 2], channels.
        free: [channels], those that no position mixes with another one.
        partner: [head_dim], the other channel of each one's plane; itself for free ones.
        turns: "key" or "query" -> what a channel and what its partner are multiplied by, [tokens, head_dim] each.
    """

    planes: torch.Tensor
    free: torch.Tensor
    partner: torch.Tensor
    turns: dict[str, tuple[torch.Tensor, torch.Tensor]]

    def rotate(self, x: torch.Tensor, kind: str) -> torch.Tensor:
        """Return queries or keys [.., tokens, head_dim] as positions turn them."""
        own, other = self.turns[kind]
        return x * own + x[..., self.partner] * other


def probe_rotary(send: Send, tokens: int, heads: dict[str, int], dim: int) -> Rotary | None:
    """Return how positions turn queries and keys.

    Args:
        heads: kind -> heads of "query" and "key".
    Returns: None where they do anything else than rotate planes, the same for all heads: a norm, for one.
    """

    def sent(kind: str, row: torch.Tensor) -> torch.Tensor:
        return send(kind, row.repeat(1, heads[kind]))[0]

    mixed, unit = torch.zeros(dim, dim), torch.eye(dim)
    for begin in range(0, dim, max(1, min(tokens, dim) // 4)):
        channel = (torch.arange(tokens) + begin) % dim  # another one at each position
        mixed.index_add_(0, channel, sent("key", unit[channel]).abs())
    linked = mixed > 1e-6 * mixed.max()
    linked = (linked | linked.T).fill_diagonal_(False)
    if int(linked.sum(1).max()) > 1:
        return None
    channels = torch.arange(dim)
    partner = torch.where(linked.any(1), linked.int().argmax(1), channels)
    first = partner >= channels  # of each plane, and free ones
    planes = torch.stack([channels, partner], 1)[partner > channels]
    turns: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for kind in heads:
        one, other = (sent(kind, part.float().expand(tokens, dim)) for part in (first, ~first))
        turns[kind] = torch.where(first, one, other), torch.where(first, other, one)
    found = Rotary(planes, channels[partner == channels], partner, turns)
    for kind, count in heads.items():
        own, other = turns[kind]
        rows = torch.linspace(-1, 1, tokens * count * dim).cos().reshape(tokens, count, dim)
        got = send(kind, rows.flatten(1))
        errors = (got - found.rotate(rows.transpose(0, 1), kind), own - own[:, partner])
        skew = torch.where(partner == channels, 0.0, other + other[:, partner])
        if max(float(error.abs().max()) for error in (*errors, skew)) > TINY * float(
            got.abs().max()
        ):
            return None
    return found


def merge_keys(
    keys: torch.Tensor, queries: torch.Tensor, rotary: Rotary
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the maps of one group's keys and queries: first principal components, plane by plane.

    Args:
        keys: [m * dim, m * dim], float64: E[k k^T] of the group's stacked keys, where positions have turned them or not.
        queries: [m, dim, dim], float64: E[q q^T] summed over the query heads of each key head.
    Returns: down [dim, m * dim], k' = down k; up [m, dim, dim], k_g ~ up_g k' and so q'_h = up_g^T q_h.
    """
    m, dim = queries.shape[:2]
    cross = keys.reshape(m, dim, m, dim)
    down = torch.zeros(dim, m, dim, dtype=keys.dtype)
    up = torch.zeros(m, dim, dim, dtype=keys.dtype)
    a, b = rotary.planes.T
    if len(a):
        # E[z_g conj(z_l)] of each plane, z = k[a] + i k[b]: [planes, m, m]
        real = cross[:, a, :, a] + cross[:, b, :, b]
        gram = torch.complex(real, cross[:, b, :, a] - cross[:, a, :, b])
        width = (queries[:, a, a] + queries[:, b, b]).sqrt().T
        width = width.clamp(min=1e-6 * float(width.max()) + 1e-300)
        first = torch.linalg.eigh(width[:, :, None] * gram * width[:, None])[1][..., -1]
        into, back = first.conj() * width, first / width  # z' = sum_g into_g z_g, z_g ~ back_g z'
        # the size and the phase that make z' like a mean of the heads
        mean = back.mean(1, keepdim=True)
        scale = torch.polar(back.abs().mean(1, keepdim=True), mean.angle())
        into, back = into * scale, (back / scale).T
        down[a, :, a] = down[b, :, b] = into.real
        down[b, :, a], down[a, :, b] = into.imag, -into.imag
        up[:, a, a] = up[:, b, b] = back.real
        up[:, b, a], up[:, a, b] = back.imag, -back.imag
    free = rotary.free
    if len(free):
        gram = cross[:, free][:, :, :, free].reshape(m * len(free), -1)
        part = best_common(gram, queries[:, free][:, :, free])
        down[free[:, None, None], torch.arange(m)[:, None], free] = part[0].unflatten(1, (m, -1))
        up[:, free[:, None], free] = part[1]
    return down.flatten(1), up


@dataclass(frozen=True)
class Scores:
    """What the scores of one window are fitted on.

    Attributes:
        inputs: [tokens, inputs + 1] of the projections, with a last one of ones for biases.
        query, key: [heads, tokens, dim], the original's, turned by positions.
        weights: [heads, tokens, tokens], the original's probabilities.
        now_query, now_key: [heads, tokens, dim] and [kv heads, tokens, dim], those of the converted model so far.
    """

    inputs: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    weights: torch.Tensor
    now_query: torch.Tensor
    now_key: torch.Tensor


def fit_scores(
    windows: list[Scores],
    rotary: Rotary,
    kind: str,
    heads: dict[str, torch.Tensor],
    group_of: torch.Tensor,
) -> torch.Tensor:
    """Return weights of a kind that fit better to the other one's: [heads or groups, dim, inputs], with a bias if it has one.

    Args:
        kind: "query" or "key".
        heads: the weights of both, float32.
        group_of: [heads], the kv head of each query head.
    """

    def project(window: Scores, weight: torch.Tensor, kind: str) -> torch.Tensor:
        inputs = window.inputs[:, : weight.shape[-1]]
        rows = rotary.rotate(torch.einsum("ti,hdi->htd", inputs, weight), kind)
        return rows if kind == "query" else rows[group_of]

    other = "key" if kind == "query" else "query"
    fixed = [project(window, heads[other], other) for window in windows]

    def squares(x: torch.Tensor, i: int, wanted: bool) -> torch.Tensor:
        window = windows[i]
        pair = {kind: project(window, x, kind), other: fixed[i]}
        scores = pair["query"] @ pair["key"].mT
        if wanted:
            scores = scores - window.query @ window.key.mT
        centred = scores - (window.weights * scores).sum(-1, keepdim=True)
        return (window.weights * centred.square()).sum() / 2

    start = heads[kind]
    inputs = torch.cat([window.inputs[:, : start.shape[-1]] for window in windows])
    inverse = damped_inverse((inputs.T @ inputs).double()).float()
    return improve(squares, len(windows), start, lambda rest: rest @ inverse, STEPS)
