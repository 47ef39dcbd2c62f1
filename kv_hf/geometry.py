"""Which token of a row lies where: the only definition. Knows no cache, no page id and no tensor of one.

The real tokens of a row, counted from 0, lie in order in these places:

    [ sinks: first `sink_tokens` ][ dropped pages ][ sealed pages ][ tail: open, exact ]
      exact window, slots 0 ..      given back       page, slot      exact window, behind the sinks

Pages are dropped in sliding groups only: as soon as no later query can see a token of them, but for a row's newest page, which says
in which order the channels of the next one lie.
Counts of tokens may be numbers, arrays or tensors; results are of the same kind.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

Count = TypeVar("Count", int, Any)  # a number, an int64 array, or a tensor of integers


def full_pages(tokens: Count, page_size: int) -> Count:
    """Return the whole pages that `tokens` fill; none where the number is negative."""
    if isinstance(tokens, torch.Tensor):
        return tokens.clamp(min=0) // page_size
    if isinstance(tokens, np.ndarray):
        return np.maximum(0, tokens) // page_size
    return max(0, tokens) // page_size


def page_start(page: Count, *, page_size: int, sink_tokens: int) -> Count:
    """Return the first token of a row's page number `page`; the window's slot of it before page 0 is sealed."""
    return sink_tokens + page * page_size


def window_token(slot: Count, pages: Count, *, page_size: int, sink_tokens: int) -> Count:
    """Return which token lies in a slot of the window of a row with `pages` pages behind its sinks."""
    return slot + pages * page_size * (slot >= sink_tokens)


class Place(NamedTuple):
    """Where a token lies: in a slot of the exact window, where `page` is None, or of the row's page of that number."""

    page: int | None
    slot: int


def place_of(token: int, pages: int, *, page_size: int, sink_tokens: int) -> Place:
    """Return where a token lies of a row with `pages` pages behind its sinks, those given back included."""
    page, slot = divmod(token - sink_tokens, page_size)
    if token < sink_tokens:
        return Place(None, token)
    return Place(page, slot) if page < pages else Place(None, token - pages * page_size)


@dataclass(frozen=True)
class Geometry:
    """The numbers that decide where the tokens of a row lie.

    Attributes:
        page_size, sink_tokens, recent_tokens: as in CacheConfig.
        window: tokens that a query sees, itself included; pages behind it are given back. None keeps all.
    """

    page_size: int
    sink_tokens: int
    recent_tokens: int
    window: int | None = None

    @property
    def kept(self) -> int:
        """Exact tokens that are never sealed as long as the row does not grow."""
        return self.sink_tokens + self.recent_tokens

    @property
    def slots(self) -> int:
        """Exact tokens that a row's window has room for: the kept ones and an open page."""
        return self.kept + self.page_size

    def sealed(self, tokens: Count) -> Count:
        """Return the pages that a row of `tokens` real tokens has sealed, those given back or passed over included.

        The pages that a window of `tokens` exact tokens is to seal are as many.
        """
        return full_pages(tokens - self.kept, self.page_size)

    def exact(self, tokens: Count) -> Count:
        """Return the tokens that are in no page of a row of `tokens` real tokens."""
        return tokens - self.sealed(tokens) * self.page_size

    def dropped(self, tokens: Count, sealed: Count) -> Count:
        """Return how many of a row's `sealed` pages are given back, or never sealed, at `tokens` tokens: not the newest."""
        hidden, others = self.out_of_sight(tokens), full_pages(sealed - 1, 1)
        # the smaller of both, for every kind of number
        return hidden - full_pages(hidden - others, 1)

    def out_of_sight(self, tokens: Count) -> Count:
        """Return how many pages, from the first on, no query at token `tokens` or behind it can see."""
        if self.window is None:
            return tokens * 0
        return full_pages(tokens - self.window + 1 - self.sink_tokens, self.page_size)

    def reserved(self, max_length: int | None) -> int:
        """Return the pages per row that `max_length` makes room for at the first forward, 0 without it."""
        pages = self.sealed(max_length or 0)
        return pages if self.window is None else min(pages, self.window // self.page_size + 2)
