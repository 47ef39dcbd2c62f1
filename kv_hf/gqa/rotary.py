"""The channels of a head that position embeddings rotate: found by sending unit vectors through a layer.

Names and conventions (half-split, interleaved, partial, none) are never guessed. What is no rotation of planes, the same
for all heads, is refused.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..errors import ConversionError

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

    def rotate(self, x: torch.Tensor, kind: str, back: bool = False) -> torch.Tensor:
        """Multiply [.., tokens, head_dim] by the factors of "key" or "query" (`back`: by the adjoint)."""
        turn, free = (self.key, self.key_free) if kind == "key" else (self.query, self.query_free)
        out = torch.empty_like(x)
        if len(self.planes):
            a, b = self.planes.T
            re, im = turn.real, -turn.imag if back else turn.imag
            out[..., a] = x[..., a] * re - x[..., b] * im
            out[..., b] = x[..., a] * im + x[..., b] * re
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
