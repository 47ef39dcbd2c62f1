"""The rows of a batch that requests join and leave, of the layers that share a sliding window; plans parts of a forward."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..pages.pool import PagePool
from ..pages.rows import NO_ROWS, Batch, Rows, RowSizes, plan_append
from ..pages.step import Row, Step, Tables


class BatchRows(Rows):
    """Rows of requests, each of its own length; a forward adds tokens to some of them, and to each its own number.

    A part of a forward is a run of neighbouring rows that grow by as many tokens. It is planned as an append to a batch of
    its own, whose rows are padded on the left up to the longest: kernels read it as they read any batch.

    Args:
        sizes: where the tokens of a row lie.
        pool: of the page ids.
    """

    def __init__(self, sizes: RowSizes, pool: PagePool) -> None:
        super().__init__(sizes, pool)
        self.touched = True

    def length(self, index: int) -> int:
        """Return the tokens of a row, those of dropped pages included."""
        batch = self.batch
        held = int(batch.dropped[index]) + len(batch.pages[index])
        return int(batch.exact[index]) + held * self.page_size

    # -- rows that come, go and change places --------------------------------------------------------------

    def admit(self, row: Row) -> None:
        """Add `row` behind the others, and hold its pages."""
        with self.pool.lock:
            self.pool.share(row.pages)
            self.batch = Batch.of((*self.batch.rows, row))

    def admit_copy(self, row: Row) -> tuple[int, ...]:
        """Add a row like `row` behind the others, with pages of its own; return their ids, in order."""
        with self.pool.lock:
            pages = tuple(self.pool.allocate(len(row.pages)))
            self.batch = Batch.of((*self.batch.rows, replace(row, pages=pages)))
        return pages

    def arrange(self, order: Sequence[int]) -> None:
        """Let row i continue the former row order[i]; rows that are not named let go of their pages."""
        rows = self.batch.rows
        with self.pool.lock:
            for gone in set(range(len(rows))) - set(order):
                self.pool.release(rows[gone].pages)
            self.batch = Batch.of([rows[index] for index in order]) if order else NO_ROWS

    # -- forwards --------------------------------------------------------------------------------------------

    def grow(self, first: int, last: int, q_len: int) -> Step:
        """Let the rows first .. last - 1 grow by `q_len` tokens each; return what that does, the rows counted from 0.

        Raises: PagePoolExhaustedError with the rows unchanged.
        """
        part = self._part(first, last)
        seen = int((part.padding + self.lengths(part)).max())
        plan = plan_append(self.sizes, part, seen, q_len, 0)
        with self.pool.lock:
            ids = self.pool.allocate(plan.num_pages)
            tables = self._tables if last - first > 1 else Tables()
            step, after, leaving = self.step_of(plan, ids, tables)
            self._put(first, last, after)
            self._leaving = (*self._leaving, *leaving)
        return step

    def _part(self, first: int, last: int) -> Batch:
        """Return rows as a batch that is padded up to its longest row."""
        whole, chosen = self.batch, slice(first, last)
        exact, dropped = whole.exact[chosen], whole.dropped[chosen]
        nothing = np.zeros_like(exact)
        rows = Batch(nothing, exact, dropped, nothing, whole.pages[chosen])
        lengths = self.lengths(rows)
        return replace(rows, padding=lengths.max() - lengths)

    def _put(self, first: int, last: int, part: Batch) -> None:
        """Hold what the rows first .. last - 1 hold after an append."""
        whole, chosen = self.batch, slice(first, last)
        exact, dropped = whole.exact.copy(), whole.dropped.copy()
        exact[chosen], dropped[chosen] = part.exact, part.dropped
        held = (*whole.pages[:first], *part.pages, *whole.pages[last:])
        self.batch = replace(whole, exact=exact, dropped=dropped, pages=held)
