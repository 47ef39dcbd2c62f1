"""The parts of a cache that a prefix store needs: its rows, their pages, and the exact tokens in front of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..pages.step import Row


@dataclass(frozen=True)
class HeldRow:
    """One row of a cache: the tokens that it holds, and the ids of its sealed pages, in order."""

    tokens: int
    pages: tuple[int, ...]


class PageSharer(Protocol):
    """The methods that a store needs of a cache; sharing.py implements them."""

    @property
    def prefix_store(self) -> Any:
        """The store that the cache was made with."""
        ...

    @property
    def prefix_spaces(self) -> tuple[str | None, ...]:
        """The spaces in which the tokens that it holds were computed."""
        ...

    @property
    def computed_by(self) -> tuple[Any, ...]:
        """The states of adapters by which they were computed, for messages."""
        ...

    def get_seq_length(self) -> int:
        """Return the columns seen."""
        ...

    def held_rows(self) -> Sequence[HeldRow]:
        """Return the rows. Raises InterruptedForwardError after a forward that stopped half-way."""
        ...

    def begin_with(self, rows: Sequence[Row], sinks: Sequence[Any], seen: int) -> None:
        """Begin with rows whose pages are in the store's arena; `sinks` of each row as `sinks_of` gave them, or None."""
        ...

    def sinks_of(self, row: int) -> Any:
        """Return copies of the exact first tokens of a row."""
        ...

    def share_pages(self, row: int, pages: tuple[int, ...]) -> None:
        """Let a row hold `pages`, which contain the same tokens, in place of its own."""
        ...
