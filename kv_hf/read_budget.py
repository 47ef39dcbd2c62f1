"""How much of a row a decode step reads where it chooses pages: a budget. Knows no cache, no kernel and no page."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

NEWEST_PAGES = 1  # of each row, which are read whatever their summaries say
# tokens of a row from which on pages are chosen, unless the option `read` says otherwise
READ_FROM = 4096


@dataclass(frozen=True)
class ReadBudget:
    """What a query may read of a row; its exact window (sinks, the open page) is read always and counts within `pages`' tokens.

    Of a row with fewer than `from_tokens` tokens everything is read. Of any other row those pages are read in which
    attention has the most mass, as far as their summaries tell (page_summary.py), and the newest NEWEST_PAGES.

    Attributes:
        pages: most pages of a row that are read, or None.
        share: most pages of a row that are read, as a part of those it has, between 0 and 1, or None.
        from_tokens: tokens of a row, those of the query included, from which on pages are chosen.
    Source: choosing pages by what a step asks, Quest (arXiv 2406.10774).
    """

    pages: int | None = None
    share: float | None = None
    from_tokens: int = READ_FROM

    def most(self, pages: int) -> int:
        """Return how many pages are read at most of a row that has `pages` and whose pages are chosen."""
        most = pages
        if self.pages is not None:
            most = min(most, self.pages)
        if self.share is not None:
            most = min(most, share_of(self.share, pages))
        return min(pages, max(most, NEWEST_PAGES))

    def width(self, pages: int, page_size: int) -> int:
        """Return how many pages are read at most of any row that has up to `pages`: columns of the table of choices."""
        short = min(pages, max(0, self.from_tokens - 1) // page_size)
        return max(self.most(pages), short)

    def batch_width(self, pages: int, rows: int, page_size: int) -> int:
        """Return how many pages are read at most of a batch that has `pages` in all, and none of which is read as a whole."""
        return min(pages, rows * self.width(pages, page_size))

    def chooses(self, pages: int, seen: int) -> bool:
        """Say whether any row of up to `pages` pages and `seen` columns may be read in part."""
        if not pages or seen < self.from_tokens:
            return False
        return self.most(pages) < pages


def share_of(share: float, pages: int) -> int:
    """Return the whole pages that a share of `pages` is: share * pages in fp64, rounded down."""
    return math.floor(share * pages)


def pages_for(tokens: int, kept_tokens: int, page_size: int) -> int:
    """Return the pages that can be read so that a step of one token reads at most `tokens`, with a full exact window beside them.

    Candidates of assisted decoding, and pages that are not sealed before they stand, come on top.

    Args:
        kept_tokens: sinks and recent tokens; the window holds an open page besides.
    """
    return (tokens - kept_tokens) // page_size - 1


class _Next(Enum):
    """Whether a forward that is to read everything is none, yet to come, or the last one that began."""

    NONE = 0
    TO_COME = 1
    BEGUN = 2


class Reading:
    """What the steps of one group of layers read: its budget, but everything while a prompt is read.

    Args:
        budget: None for everything.
    """

    def __init__(self, budget: ReadBudget | None) -> None:
        self._budget = budget
        self._whole = 0
        self._next = _Next.NONE

    @property
    def budget(self) -> ReadBudget | None:
        """What the next forward, or the one in progress, may read; None: everything."""
        return None if self._whole or self._next is not _Next.NONE else self._budget

    def next_of_everything(self) -> None:
        """Have the next forward read everything, however few queries it has."""
        self._next = _Next.TO_COME

    def note_forward(self) -> None:
        """Note that a forward begins."""
        if self._next is not _Next.NONE:
            self._next = _Next.BEGUN if self._next is _Next.TO_COME else _Next.NONE

    def note_end(self) -> None:
        """Note that the last forward is over: other steps follow."""
        if self._next is _Next.BEGUN:
            self._next = _Next.NONE

    @property
    def usual(self) -> ReadBudget | None:
        """What steps may read, whatever a prompt reads just now; None: everything."""
        return self._budget

    @contextmanager
    def of_everything(self) -> Iterator[None]:
        """Have the forwards within read everything, however few queries they have."""
        self._whole += 1
        try:
            yield
        finally:
            self._whole -= 1
