"""The state of a group of rows as plain numbers, from which a copy in another place goes on. Knows no tensor."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .step import Row


@dataclass(frozen=True)
class GroupState:
    """The rows of a group of layers, with page ids of their own.

    Attributes:
        window: tokens that a query sees, itself included; None for all.
        num_pages: different pages that the rows hold; their ids are 0 .. num_pages - 1.
        rows: one for each sequence.
        seen: columns so far, padding included.
        confirmed: columns that a crop has left standing.
        recording: whether past recording is on.
        padding_seen: left padding that was learnt for a forward that has not come yet; None without.
    """

    window: int | None
    num_pages: int
    rows: tuple[Row, ...]
    seen: int
    confirmed: int
    recording: bool
    padding_seen: list[int] | None

    @property
    def longest(self) -> int:
        """Most exact tokens of a row."""
        return max(row.exact for row in self.rows)


def held_pages(rows: Sequence[Row]) -> list[int]:
    """Return the different pages that rows hold, in the order of rows and tokens: place i is page i of a GroupState."""
    return list(dict.fromkeys(page for row in rows for page in row.pages))


def renumbered(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Return the rows with their places in `held_pages` as page ids."""
    new = {page: place for place, page in enumerate(held_pages(rows))}
    return tuple(replace(row, pages=tuple(new[page] for page in row.pages)) for row in rows)
