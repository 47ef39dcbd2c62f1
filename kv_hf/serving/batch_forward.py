"""One forward of continuous batching: which rows grow, by which of its tokens, and what that does to each kind of layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..pages.step import Step


@dataclass(frozen=True)
class Part:
    """Neighbouring rows that grow by as many tokens of a forward.

    Attributes:
        first: row.
        rows: how many.
        q_len: tokens of each row.
        tokens: where they lie in the forward, [rows * q_len], int64, on the device; or a slice.
        prompt: whether they may be of a prompt, and read everything.
    """

    first: int
    rows: int
    q_len: int
    tokens: torch.Tensor | slice
    prompt: bool

    def cut(self, states: torch.Tensor) -> torch.Tensor:
        """Return the part of queries, keys or values [1, heads, tokens, head_dim] as [rows, heads, q_len, head_dim]."""
        heads, head_dim = states.shape[1], states.shape[3]
        found = states[0, :, self.tokens] if isinstance(self.tokens, slice) else None
        if found is None:
            assert isinstance(self.tokens, torch.Tensor)
            found = states[0].index_select(1, self.tokens)
        if self.rows == 1:
            return found[None]
        return found.reshape(heads, self.rows, self.q_len, head_dim).transpose(0, 1).contiguous()

    def put(self, out: torch.Tensor, attended: torch.Tensor) -> None:
        """Write attention [rows, q_len, heads, head_dim] to the places of its tokens in `out` [1, tokens, heads, head_dim]."""
        out[0, self.tokens] = attended.reshape(-1, *attended.shape[2:])


@dataclass(frozen=True)
class Forward:
    """The parts of one forward.

    Attributes:
        parts: all tokens of the forward, each in one part.
        steps: sliding window (None: full attention) -> the change of the rows of each part.
        tokens: of all parts.
    """

    parts: Sequence[Part]
    steps: Mapping[int | None, Sequence[Step]]
    tokens: int


def run_of(places: Sequence[int], device: torch.device) -> torch.Tensor | slice:
    """Return places in a forward as a slice where they follow each other, else as int64 [n] on `device`."""
    first = places[0]
    if list(places) == list(range(first, first + len(places))):
        return slice(first, first + len(places))
    return torch.tensor(places, dtype=torch.int64).to(device, non_blocking=True)
