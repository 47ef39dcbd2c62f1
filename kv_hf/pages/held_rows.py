"""Rows of a batch that hold pages of a pool. Decides nothing about steps (group.py)."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

from .plan import RowSizes, check_sources
from .pool import PagePool
from .step import Row, TableView
from .tables import Tables


class HeldRows:
    """Rows whose pages are counted in a pool; what they hold changes as a whole or not at all.

    Args:
        sizes: the numbers that decide where the tokens of a row lie.
        pool: page ids, which other holders may share.
    Attributes:
        rows: one for each sequence of the batch.
    """

    def __init__(self, sizes: RowSizes, pool: PagePool) -> None:
        self.sizes = sizes
        self.pool = pool
        self.rows: tuple[Row, ...] = ()
        self._leaving: tuple[
            tuple[int, ...], ...
        ] = ()  # of no row, but the last forward may read them
        self._tables = Tables()
        pool.register(self)

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
        """Whether past recording is on."""
        return self.sizes.recording

    @property
    def slots(self) -> int:
        """Exact tokens that a row's window has room for."""
        return self.sizes.slots

    @property
    def offset(self) -> int:
        """Columns in front of the first one that the next forward may see; 0 until a page was dropped."""
        if not any(row.dropped for row in self.rows):
            return 0
        return min(row.padding + row.dropped * self.page_size for row in self.rows)

    def tokens(self, row: Row) -> int:
        """Return the real tokens of a row, those of dropped pages included."""
        return self.sizes.tokens(row)

    def check_rows(self, sources: Sequence[int]) -> None:
        """Raise CacheMismatchError where rows cannot continue the former rows `sources`."""
        if self.rows:
            check_sources(len(self.rows), sources)

    def view(self, rows: Sequence[Row], offset: int | None = None) -> TableView:
        """Return where the tokens of `rows` lie, as tensors on the CPU."""
        return self._tables.view(rows, self.offset if offset is None else offset, self.page_size)

    # -- holding -------------------------------------------------------------------------------------------

    def held_pages(self, pool: PagePool) -> list[tuple[int, ...]]:
        """Return the page ids that the rows hold (see PageHolder)."""
        return [row.pages for row in self.rows] + [*self._leaving] if pool is self.pool else []

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy that holds no rows yet: pages are shared by `share_rows`, when the whole cache is copied."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        rest = {name: value for name, value in vars(self).items() if name != "rows"}
        vars(copied).update(copy.deepcopy({**rest, "_leaving": ()}, memo), rows=())
        copied.pool.register(copied)
        return copied

    def share_rows(self, source: "HeldRows") -> None:
        """Hold the rows of `source`, which this group is a copy of."""
        with self.pool.lock:
            self.pool.open_change()
            self.rows = source.rows
            for row in self.rows:
                self.pool.share(row.pages)
            self.pool.close_change()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Register as a holder again: the pool may be another one here."""
        vars(self).update(state)
        self.pool.register(self)

    def let_go(self) -> None:
        """Hold nothing any more: for finalizers, which may run at any moment."""
        # nothing is called: neither another thread nor Ctrl-C comes between
        self.rows, self._leaving, self.pool.holder_gone = (), (), True

    def replace_pages(self, index: int, pages: tuple[int, ...]) -> None:
        """Let row `index` hold `pages`, which contain the same tokens, in place of its own; between two steps."""
        rows = list(self.rows)
        with self.pool.lock:
            self.pool.open_change()
            self.pool.share(pages)
            self.pool.release(rows[index].pages)
            rows[index] = replace(rows[index], pages=pages)
            self.rows = tuple(rows)
            self.pool.close_change()
