"""The page ids that an append takes, row by row. Counts nothing: the ids are handed out by the pool."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from .step import Grown, PageIds


@dataclass
class NamedPages:
    """Pages of all rows while ids are given to those that an append seals.

    Attributes:
        first, last: sealed before and behind the append.
        found: what the forward reads as sealed.
        kept: held behind the step.
        leaving: held no more, but the forward may read them.
        grown: row -> what it held before and after `last` was appended to it.
    """

    first: tuple[PageIds, ...] | list[PageIds]
    last: tuple[PageIds, ...] | list[PageIds]
    found: tuple[PageIds, ...]
    kept: tuple[PageIds, ...]
    leaving: tuple[PageIds, ...]
    grown: dict[int, Grown]

    @classmethod
    def unchanged(cls, pages: tuple[PageIds, ...]) -> "NamedPages":
        """Return what is named where no row takes or drops a page; the table that was shown stays the same object."""
        none: tuple[PageIds, ...] = ((),) * len(pages)
        return cls(none, none, pages, pages, (), {})


class PageNamer:
    """Gives ids to the pages of an append, one changed row after the other."""

    def __init__(self, pages: tuple[PageIds, ...], ids: Iterator[int]) -> None:
        self._before, self._ids = pages, ids
        self._found, self._kept = list(pages), list(pages)
        self._first: list[PageIds] = [()] * len(pages)
        self._last: list[PageIds] = [()] * len(pages)
        self._leaving: list[PageIds] = []
        self._grown: dict[int, Grown] = {}

    def change(self, row: int, first: int, last: int, gone: int) -> None:
        """Let `row` seal so many pages before and behind the append, and drop `gone`."""
        self._first[row] = tuple(islice(self._ids, first))
        self._last[row] = tuple(islice(self._ids, last))
        held = self._before[row] + self._first[row]
        self._found[row] = held
        self._kept[row] = held[gone:] + self._last[row]
        if gone:
            self._leaving.append(held[:gone])
        else:
            self._grown[row] = held, self._kept[row]

    def done(self) -> NamedPages:
        """Return the pages of all rows."""
        found = tuple(self._found)
        if not any(self._first):
            found = self._before
        return NamedPages(
            self._first, self._last, found, tuple(self._kept), tuple(self._leaving), self._grown
        )
