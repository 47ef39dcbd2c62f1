"""The rows of a cache as a prefix store sees them: their pages, and the exact tokens in front of these. Knows no tokens' ids."""

from collections.abc import Sequence

import torch

from ..pages.step import Row
from .copies import Copyable
from .page_sharer import HeldRow

Sinks = Sequence[tuple[torch.Tensor, torch.Tensor]]  # of each layer: exact first keys and values


class SharingCache(Copyable):
    """A cache whose rows may begin with pages of a store, and whose pages a store may keep (PageSharer)."""

    def held_rows(self) -> list[HeldRow]:
        """Return tokens and pages of each row. Raises InterruptedForwardError after a forward that stopped half-way."""
        self.check_done()
        group = self.group
        return [HeldRow(group.tokens(row), row.pages) for row in group.rows]

    def begin_with(self, rows: Sequence[Row], sinks: Sequence[Sinks | None], seen: int) -> None:
        """Let this cache, which is empty, begin with `rows`, whose pages are in its storage, and have seen `seen` columns.

        Stopped half-way, by whatever exception, it holds no more pages than its rows do, and asks for reset().

        Args:
            sinks: for each row, and then each layer, its exact first keys and values; None for a row without pages.
        """
        self.halfway = True
        self.group.adopt(rows, seen)
        for place, layer in enumerate(self.paged_layers):
            layer.adopt([None if one is None else one[place] for one in sinks], seen)
        self.halfway = False

    def sinks_of(self, row: int) -> Sinks:
        """Return copies of the exact first keys and values of a row, for each layer."""
        return [layer.sinks_of(row) for layer in self.paged_layers]

    def share_pages(self, row: int, pages: tuple[int, ...]) -> None:
        """Let a row hold `pages`, which contain the same tokens, in place of its own; between two forwards.

        Handles of before become stale first, as they know the pages that the row lets go of.
        """
        for layer in self.paged_layers:
            layer.outdate()
        self.group.replace_pages(row, pages)
