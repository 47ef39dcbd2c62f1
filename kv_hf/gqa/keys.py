"""Queries and keys of a converted layer: how positions turn them, the merge of a group's keys, and the fit of their scores.

Channels that positions rotate are found by sending unit vectors through a layer; names and conventions (half-split,
interleaved, partial, none) are never guessed. A rotated plane allows a complex factor per head only, for positions must still
rotate it; channels that no position changes are as free as values.

To second order, the divergence of two softmaxes is half the variance of the scores' difference under the probabilities. So
E_t w_t Var_p(s'_t - s_t) is made small, in the weights of all queries (keys given) or of all keys (queries given): linear
problems, solved by conjugate gradients without ever forming their matrices.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..errors import ConversionError
from .stream import Tap

STEPS = 4  # conjugate gradients of each fit of scores
RIDGE = 0.01  # weight of the pull to the merged weights
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


# (kind, [1, tokens, rows]) -> [1, heads, tokens, head_dim]: what attention gets when a projection gives these rows
Send = Callable[[str, torch.Tensor], torch.Tensor]
TINY = 1e-4


@dataclass(frozen=True)
class Rotary:
    """The operations between a projection and the scores.

    A plane is a pair of channels (a, b), read as the complex number x[a] + i x[b]; position t multiplies it by a number.

    Attributes:
        planes: [planes, 2], channels.
        free: [channels], those that no position changes.
        key, query: [tokens, planes], complex64: the factors of each position.
        key_free, query_free: [tokens, free]: real ones of the free channels.
    """

    planes: torch.Tensor
    free: torch.Tensor
    key: torch.Tensor
    query: torch.Tensor
    key_free: torch.Tensor
    query_free: torch.Tensor

    def rotate(self, x: torch.Tensor, kind: str) -> torch.Tensor:
        """Multiply [.., tokens, head_dim] by the factors of "key" or "query"."""
        turn, free = (self.key, self.key_free) if kind == "key" else (self.query, self.query_free)
        out = torch.empty_like(x)
        if len(self.planes):
            a, b = self.planes.T
            out[..., a] = x[..., a] * turn.real - x[..., b] * turn.imag
            out[..., b] = x[..., a] * turn.imag + x[..., b] * turn.real
        if len(self.free):
            out[..., self.free] = x[..., self.free] * free
        return out


def probe_rotary(
    send: Send, tokens: int, heads: dict[str, int], dim: int, name: str
) -> Rotary | None:
    """Return how positions turn queries and keys; None where a norm lies between, so that they are not linear.

    Args:
        heads: kind -> heads of "query" and "key".
        name: of the model, for errors.
    Raises: ConversionError where it is no rotation of planes, the same for all heads.
    """

    def all_heads(kind: str, rows: torch.Tensor) -> torch.Tensor:
        return send(kind, rows.repeat(1, heads[kind])[None])[0]

    def sent(kind: str, rows: torch.Tensor) -> torch.Tensor:
        out = all_heads(kind, rows)
        if float((out - out[:1]).abs().max()) > TINY:
            raise ConversionError(f"{name}: positions turn the {kind} heads of a layer differently")
        return out[0]  # [tokens, dim]

    for kind in heads:
        ones = torch.linspace(0.5, 1.5, dim).repeat(tokens, 1)
        once, twice = all_heads(kind, ones), all_heads(kind, 2 * ones)
        if float((twice - 2 * once).abs().max()) > TINY * float(once.abs().max()):
            return None
    partner = _partners(functools.partial(sent, "key"), tokens, dim, name)
    pairs = [(a, b) for a, b in enumerate(partner) if a < b]
    planes = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2)
    free = torch.tensor([a for a, b in enumerate(partner) if a == b], dtype=torch.long)
    turns = [
        _factors(functools.partial(sent, kind), kind, tokens, dim, planes, free, name)
        for kind in ("key", "query")
    ]
    return Rotary(planes, free, turns[0][0], turns[1][0], turns[0][1], turns[1][1])


def _partners(
    sent: Callable[[torch.Tensor], torch.Tensor], tokens: int, dim: int, name: str
) -> list[int]:
    """Return the channel that each channel mixes with; itself for one that mixes with none."""
    mixed = torch.zeros(dim, dim)
    for begin in range(0, dim, max(1, min(tokens, dim) // 4)):
        channel = (torch.arange(tokens) + begin) % dim
        for c, row in zip(channel.tolist(), sent(torch.eye(dim)[channel]).abs(), strict=True):
            mixed[c] = torch.maximum(mixed[c], row)
    linked = mixed > 1e-6 * float(mixed.max())
    linked |= linked.T | torch.eye(dim, dtype=torch.bool)
    count = linked.sum(1)
    if int(count.max()) > 2:
        raise ConversionError(
            f"{name}: positions mix {int(count.max())} channels of a head, and only rotations of planes are known"
        )
    return [
        int(next((b for b in linked[a].nonzero().flatten() if b != a), torch.tensor(a)))
        for a in range(dim)
    ]


def _factors(
    sent: Callable[[torch.Tensor], torch.Tensor], kind: str, tokens: int, dim: int, planes: torch.Tensor,
    free: torch.Tensor, name: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the factors [tokens, planes] and [tokens, free] of queries or keys."""
    a, b = planes.T
    real, imag = torch.zeros(tokens, dim), torch.zeros(tokens, dim)
    real[:, a] = 1
    real[:, free] = 1
    imag[:, b] = 1
    one, i = sent(real), sent(imag)
    turn = torch.complex(one[:, a], one[:, b])
    other = torch.complex(i[:, a], i[:, b])
    wrong = float((other - 1j * turn).abs().max()) if len(planes) else 0.0
    if wrong > TINY:
        raise ConversionError(
            f"{name}: positions do not rotate the planes of {kind} heads (they are off by {wrong:.2g})"
        )
    return turn, one[:, free]


def merge_keys(
    keys: torch.Tensor, queries: torch.Tensor, rotary: Rotary
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the maps of one group's keys and queries.

    Args:
        keys: [m * dim, m * dim], float64: E[k k^T] of the group's stacked keys, where positions have turned them or not.
        queries: [m, dim, dim], float64: E[q q^T] summed over the query heads of each key head.
    Returns: down [dim, m * dim], k' = down k; up [m, dim, dim], k_g ~ up_g k' and so q'_h = up_g^T q_h.
    """
    m, dim = queries.shape[:2]
    down = torch.zeros(dim, m, dim, dtype=keys.dtype)
    up = torch.zeros(m, dim, dim, dtype=keys.dtype)
    cross = keys.reshape(m, dim, m, dim)
    for a, b in rotary.planes.tolist():
        gram = plane_gram(cross, a, b)
        width = torch.stack([q[a, a] + q[b, b] for q in queries]).sqrt()
        first, second = _plane_pca(gram, width)
        _put(down, a, b, first)
        for g in range(m):
            up[g, a, a] = up[g, b, b] = second[g].real
            up[g, b, a], up[g, a, b] = second[g].imag, -second[g].imag
    free = rotary.free
    if len(free):
        gram = cross[:, free][:, :, :, free].reshape(m * len(free), -1)
        readers = queries[:, free][:, :, free]
        part_down, part_up = best_common(gram, readers)
        grid = part_down.reshape(len(free), m, len(free))
        for row, channel in enumerate(free.tolist()):
            down[channel, :, free] = grid[row]
            up[:, channel, free] = part_up[:, row]
    return down.reshape(dim, m * dim), up


def plane_gram(cross: torch.Tensor, a: int, b: int) -> torch.Tensor:
    """Return E[z_g conj(z_l)] of a plane, z = k[a] + i k[b], as [m, m]."""
    real = cross[:, a, :, a] + cross[:, b, :, b]
    imag = cross[:, b, :, a] - cross[:, a, :, b]
    return torch.complex(real, imag)


def _put(down: torch.Tensor, a: int, b: int, factors: torch.Tensor) -> None:
    """Write z' = sum_g factors_g z_g into a real map [dim, m, dim]."""
    down[a, :, a] = down[b, :, b] = factors.real
    down[b, :, a], down[a, :, b] = factors.imag, -factors.imag


def _plane_pca(gram: torch.Tensor, width: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return c and b with z' = sum_g c_g z_g and z_g ~ b_g z', best for errors weighted by `width` squared."""
    width = width.clamp(min=1e-6 * float(width.max()) + 1e-300)
    u = torch.linalg.eigh(width[:, None] * gram * width)[1][:, -1]
    c = u.conj() * width
    b = u / width
    # the size and the phase that make z' like a mean of the heads
    scale = b.mean()
    scale = scale / scale.abs() * b.abs().mean() if scale.abs() > 0 else b.abs().mean().to(b.dtype)
    return c * scale, b / scale


# (x, window, whether to take off what is wanted) -> half the weighted squares of a linear function of x, on one window
Squares = Callable[[torch.Tensor, int, bool], torch.Tensor]


def conjugate_gradients(
    squares: Squares,
    windows: int,
    start: torch.Tensor,
    precondition: Callable[[torch.Tensor], torch.Tensor],
    pull: torch.Tensor | float,
    steps: int,
    free: torch.Tensor | float = 1.0,
) -> torch.Tensor:
    """Return an x [any shape] with a smaller sum of `squares`, with `pull` times its distance from `start` added.

    Args:
        windows: how many there are; the gradients of one at a time are in memory.
        precondition: roughly the inverse of the matrix, which is never formed.
        free: 0 for the numbers of x that stay as they are, else 1.
    """

    def gradient(x: torch.Tensor, wanted: bool) -> torch.Tensor:
        total = torch.zeros_like(x)
        for window in range(windows):
            with torch.enable_grad():
                own = x.detach().requires_grad_()
                total += torch.autograd.grad(squares(own, window, wanted), own)[0]
        return total * free

    x, rest = start.clone(), -gradient(start, True)
    z = way = precondition(rest) * free
    before = (rest * z).sum()
    for _ in range(steps):
        if before <= 0:
            break
        ahead = gradient(way, False) + pull * way
        step = before / (way * ahead).sum()
        x = x + step * way
        rest = rest - step * ahead
        z = precondition(rest) * free
        now = (rest * z).sum()
        way, before = z + now / before * way, now
    return x


@dataclass
class ScoreData:
    """The data that scores are fitted on, window by window.

    Attributes:
        inputs: [windows, tokens, inputs] of the projections, with a last one of ones where they have biases.
        taps: of the original, one per window.
        importance: [windows, tokens], the cost of an error in a token's probabilities.
        kv_of, group_of: [heads], the original and the new kv head of each query head.
        rotary: of the layer.
    """

    inputs: torch.Tensor
    taps: list[Tap]
    importance: torch.Tensor
    kv_of: torch.Tensor
    group_of: torch.Tensor
    rotary: Rotary

    def project(self, window: int, weight: torch.Tensor, kind: str) -> torch.Tensor:
        """Return each query head's queries or keys [heads, tokens, dim] of weights [.., dim, inputs], behind the rotation."""
        rows = self.rotary.rotate(torch.einsum("ti,hdi->htd", self.inputs[window], weight), kind)
        return rows if kind == "query" else rows[self.group_of]

    def width(self, kind: str, others: list[torch.Tensor]) -> torch.Tensor:
        """Return how much each channel of queries (or keys) counts, by the keys (or queries) that meet it: [heads, dim]."""
        found = torch.zeros(len(self.kv_of), others[0].shape[-1])
        for tap, other, worth in zip(self.taps, others, self.importance, strict=True):
            p, size = tap.weights[0], other.square()
            if kind == "query":  # keys count by their variance
                size = (p @ size - (p @ other).square()).clamp(min=0)
            found += tap.scaling**2 * (size * worth[:, None]).mean(1)
        groups = int(self.group_of.max()) + 1
        grouped = torch.zeros(groups, found.shape[1]).index_add_(0, self.group_of, found)
        return found if kind == "query" else grouped


def fit_scores(
    data: ScoreData, kind: str, query: torch.Tensor, key: torch.Tensor, unbiased: bool = False
) -> torch.Tensor:
    """Return query weights [heads, dim, inputs] or key weights [groups, dim, inputs] (`kind`) that fit better to the other.

    Args:
        unbiased: keeps the last column as it is.
    """
    start, fixed = (query, key) if kind == "query" else (key, query)
    other = "key" if kind == "query" else "query"
    others = [data.project(w, fixed, other) for w in range(len(data.inputs))]

    def squares(x: torch.Tensor, w: int, wanted: bool) -> torch.Tensor:
        pair = {kind: data.project(w, x, kind), other: others[w]}
        scores, tap = pair["query"] @ pair["key"].mT, data.taps[w]
        if wanted:
            scores = scores - tap.query[0] @ tap.key[0][data.kv_of].mT
        centred = scores - (tap.weights[0] * scores).sum(-1, keepdim=True)
        variance = (tap.weights[0] * centred.square()).sum(-1)
        return (variance * data.importance[w]).sum() * tap.scaling**2 / 2

    pull, precondition = _precondition(data, data.width(kind, others))
    free = torch.ones(start.shape[-1])
    free[-1] = not unbiased
    return conjugate_gradients(squares, len(others), start, precondition, pull, STEPS, free)


def _precondition(data: ScoreData, width: torch.Tensor):  # type: ignore[no-untyped-def]
    """Return the pull to the start [heads, 1, 1] and an inverse of (width x inputs' moments + pull), roughly."""
    flat = data.inputs.flatten(0, 1)
    square = flat.T @ flat
    for a, b in data.rotary.planes.tolist():
        width[:, a] = width[:, b] = (width[:, a] + width[:, b]) / 2
    size = width.mean(1, keepdim=True)
    width = width.clamp(min=1e-2 * float(size.mean()) + 1e-20)
    level = float(square.diagonal().mean())
    pull = (RIDGE * size * level)[..., None]
    values, vectors = torch.linalg.eigh(square.double())
    values, vectors = values.clamp(min=0).float(), vectors.float()
    scale = width[..., None] * values + pull + 1e-4 * width[..., None] * level

    def precondition(rest: torch.Tensor) -> torch.Tensor:
        return (rest @ vectors / scale) @ vectors.T

    return pull, precondition
