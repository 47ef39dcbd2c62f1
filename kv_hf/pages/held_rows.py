"""Rows of a batch that hold pages of a pool. Decides nothing about steps (group.py)."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

from .batch import NO_ROWS, Batch, Numbers
from .plan import RowSizes, check_sources
from .pool import PagePool
from .step import Grown, PageIds, Row, TableView
from .tables import Tables


class HeldRows:
    """Rows whose pages are counted in a pool; what they hold changes as a whole or not at all.

    Args:
        sizes: the numbers that decide where the tokens of a row lie.
        pool: page ids, which other holders may share.
    Attributes:
        batch: the rows, one for each sequence.
    """

    def __init__(self, sizes: RowSizes, pool: PagePool) -> None:
        self.sizes = sizes
        self.pool = pool
        self.batch = NO_ROWS
        self._leaving: tuple[PageIds, ...] = ()  # of no row, but the last forward may read them
        self._grown: dict[int, Grown] = {}
        self._tables = Tables()
        self.touched = False  # a layer has storage of the arena
        pool.register(self)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows, one object each."""
        return self.batch.rows

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.sizes.page_size

    @property
    def sink_tokens(self) -> int:
        """First tokens of each row, which stay exact."""
        return self.sizes.sink_tokens

    @property
    def window(self) -> int | None:
        """Tokens that a query sees, itself included; None for all."""
        return self.sizes.window

    @property
    def recording(self) -> bool:
        """Return whether past recording is on."""
        return self.sizes.recording

    @property
    def slots(self) -> int:
        """Exact tokens that a row's window has room for."""
        return self.sizes.slots

    @property
    def offset(self) -> int:
        """Columns in front of the first one that the next forward may see; 0 until a page was dropped."""
        batch = self.batch
        if self.window is None or not batch.dropped.any():
            return 0
        return int((batch.padding + batch.dropped * self.page_size).min())

    def touch(self) -> None:
        """Note that a layer of the group has storage of an arena, which nobody may take away then."""
        self.touched = True

    def tokens(self, row: Row) -> int:
        """Return the real tokens of a row, those of dropped pages included."""
        return self.sizes.tokens(row)

    def check_rows(self, sources: Sequence[int]) -> None:
        """Raise CacheMismatchError where rows cannot continue the former rows `sources`."""
        if len(self.batch):
            check_sources(len(self.batch), sources)

    def view(self) -> TableView:
        """Return where the tokens of the rows lie, as tensors on the CPU."""
        return self._view(self.batch, self.offset, self.batch.exact, self.batch.padding)

    def _view(
        self, batch: Batch, offset: int, exact: Numbers, padding: Numbers, *rest: Numbers
    ) -> TableView:
        """Return where the tokens of `batch` lie, of which `exact` are in the window; `rest`: starts and skips.

        Dropped pages are left out: a kernel that knows the sliding window reads the pages behind them as if they
        followed the sinks. Sinks are hidden as well: they lie before the first held page, which begins at or before the window.
        """
        tables = self._tables.show(batch.pages, self._grown)
        hidden = padding
        if self.window is not None:
            hidden = padding + batch.dropped * self.page_size - offset
        return TableView.build(tables, (batch.counts, exact, hidden, *rest), len(batch), offset)

    # -- holding -------------------------------------------------------------------------------------------

    def held_pages(self, pool: PagePool) -> list[tuple[int, ...]]:
        """Return the page ids that the rows hold (see PageHolder)."""
        return [*self.batch.pages, *self._leaving] if pool is self.pool else []

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy that holds no rows yet: pages are shared by `share_rows`, when the whole cache is copied."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        rest = {name: value for name, value in vars(self).items() if name != "batch"}
        vars(copied).update(copy.deepcopy({**rest, "_leaving": ()}, memo), batch=NO_ROWS)
        copied.pool.register(copied)
        return copied

    def share_rows(self, source: "HeldRows") -> None:
        """Hold the rows of `source`, which this group is a copy of."""
        with self.pool.lock:
            self.pool.open_change()
            self.batch = source.batch
            for pages in self.batch.pages:
                self.pool.share(pages)
            self.pool.close_change()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Register as a holder again: the pool may be another one here."""
        vars(self).update(state)
        self.pool.register(self)

    def let_go(self) -> None:
        """Hold nothing any more: for finalizers, which may run at any moment."""
        # nothing is called: neither another thread nor Ctrl-C comes between
        self.batch, self._leaving, self.pool.holder_gone = NO_ROWS, (), True

    def replace_pages(self, index: int, pages: tuple[int, ...]) -> None:
        """Let row `index` hold `pages`, which contain the same tokens, in place of its own; between two steps."""
        held = list(self.batch.pages)
        with self.pool.lock:
            self.pool.open_change()
            self.pool.share(pages)
            self.pool.release(held[index])
            held[index] = pages
            self.batch = replace(self.batch, pages=tuple(held))
            self.pool.close_change()
