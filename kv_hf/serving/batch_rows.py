"""The rows of a batch that requests join and leave, of the layers that share a sliding window; plans parts of a forward."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from ..pages.append_plan import AppendPlan, RowSizes, plan_append
from ..pages.batch import NO_ROWS, Batch
from ..pages.held_rows import HeldRows
from ..pages.named_pages import NamedPages, PageNamer
from ..pages.pool import PagePool
from ..pages.step import PageIds, Row, SealJobs, Step, TableView
from ..pages.tables import Tables


class BatchRows(HeldRows):
    """Rows of requests, each of its own length; a forward adds tokens to some of them, and to each its own number.

    A part of a forward is a run of neighbouring rows that grow by as many tokens. It is planned as an append to a batch of
    its own, whose rows are padded on the left up to the longest: kernels read it as they read any batch.

    Args:
        sizes: where the tokens of a row lie.
        pool: of the page ids.
    """

    def __init__(self, sizes: RowSizes, pool: PagePool) -> None:
        super().__init__(sizes, pool)
        self.touch()

    def __len__(self) -> int:
        return len(self.batch)

    def length(self, index: int) -> int:
        """Return the tokens of a row, those of dropped pages included."""
        batch = self.batch
        held = int(batch.dropped[index]) + len(batch.pages[index])
        return int(batch.exact[index]) + held * self.page_size

    # -- rows that come, go and change places --------------------------------------------------------------

    def admit(self, row: Row) -> None:
        """Add `row` behind the others, and hold its pages."""
        with self.pool.lock:
            self.pool.open_change()
            self.pool.share(row.pages)
            self.batch = Batch.of((*self.batch.rows, row))
            self.pool.close_change()

    def admit_copy(self, row: Row) -> tuple[int, ...]:
        """Add a row like `row` behind the others, with pages of its own; return their ids, in order."""
        with self.pool.lock:
            self.pool.open_change()
            pages = tuple(self.pool.allocate(len(row.pages)))
            self.batch = Batch.of((*self.batch.rows, replace(row, pages=pages)))
            self.pool.close_change()
        return pages

    def arrange(self, order: Sequence[int]) -> None:
        """Let row i continue the former row order[i]; rows that are not named let go of their pages."""
        rows = self.batch.rows
        with self.pool.lock:
            self.pool.open_change()
            for gone in set(range(len(rows))) - set(order):
                self.pool.release(rows[gone].pages)
            self.batch = Batch.of([rows[index] for index in order]) if order else NO_ROWS
            self.pool.close_change()

    # -- forwards --------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Let go of the pages that the last forward read, and nobody else will."""
        if self._leaving:
            with self.pool.lock:
                self.pool.open_change()
                for held in self._leaving:
                    self.pool.release(held)
                self._leaving = ()
                self.pool.close_change()

    def plan(self, first: int, last: int, q_len: int) -> Step:
        """Let the rows first .. last - 1 grow by `q_len` tokens each; return what that does, the rows counted from 0.

        Raises: PagePoolExhaustedError with the rows unchanged.
        """
        rows, seen = self._part(first, last)
        with self.pool.lock:
            self.pool.open_change()
            plan = plan_append(self.sizes, rows, seen, q_len, 0)
            pages = self._name_pages(rows, plan)
            self._put(first, last, plan, pages.kept)
            self._leaving = (*self._leaving, *pages.leaving)
            self.pool.close_change()
        return self._step(
            rows, seen, q_len, plan, pages, self._tables if last - first > 1 else Tables()
        )

    def _part(self, first: int, last: int) -> tuple[Batch, int]:
        """Return rows as a batch that is padded up to its longest row, and its columns."""
        whole, chosen = self.batch, slice(first, last)
        exact, dropped = whole.exact[chosen], whole.dropped[chosen]
        ahead = np.zeros_like(exact)
        rows = Batch(ahead, exact, dropped, ahead, whole.pages[chosen])
        lengths = self.sizes.all_tokens(rows)
        seen = int(lengths.max())
        padded = replace(rows, padding=seen - lengths)
        vars(padded)["counts"] = rows.counts
        return padded, seen

    def _put(self, first: int, last: int, plan: AppendPlan, pages: tuple[PageIds, ...]) -> None:
        """Hold what the rows first .. last - 1 hold behind the append."""
        whole, chosen = self.batch, slice(first, last)
        exact, dropped = whole.exact.copy(), whole.dropped.copy()
        exact[chosen], dropped[chosen] = plan.exact_after, plan.dropped
        held = (*whole.pages[:first], *pages, *whole.pages[last:])
        self.batch = replace(whole, exact=exact, dropped=dropped, pages=held)

    def _name_pages(self, rows: Batch, plan: AppendPlan) -> NamedPages:
        """Hand out page ids for what the append seals."""
        gone = plan.dropped - rows.dropped - plan.passed
        changed = np.flatnonzero((plan.last > 0) | (gone > 0)).tolist()
        if not changed:
            return NamedPages.unchanged(rows.pages)
        namer = PageNamer(rows.pages, iter(self.pool.allocate(plan.num_pages)))
        for row in changed:
            namer.change(row, 0, int(plan.last[row]), int(gone[row]))
        return namer.done()

    def _step(
        self,
        rows: Batch,
        seen: int,
        q_len: int,
        plan: AppendPlan,
        pages: NamedPages,
        tables: Tables,
    ) -> Step:
        moving = (plan.last + plan.passed > 0) & (plan.exact_after > self.sink_tokens)
        fits = int(plan.exact_read.max()) <= self.slots
        return Step(
            ("append", len(rows), q_len),
            seen,
            seen + q_len,
            self.pool.num_ids,
            partial(plan.steps, pages.first, pages.last),
            rebuild=not fits or bool((plan.last + plan.passed).any()),
            moves_rest=bool(moving.any()),
            fits=fits,
            view=self._view_of(replace(rows, pages=pages.found), plan, pages, tables),
            seal=SealJobs.build(pages.last, self.page_size, self.sink_tokens, plan.passed),
        )

    def _view_of(
        self, rows: Batch, plan: AppendPlan, pages: NamedPages, tables: Tables
    ) -> TableView:
        """Return where the tokens lie that the part reads (see HeldRows._view, which shows all rows)."""
        shown = tables.show(rows.pages, pages.grown)
        padding, offset = plan.padding, 0
        if self.window is not None and rows.dropped.any():
            offset = int((rows.padding + rows.dropped * self.page_size).min())
        if self.window is not None:
            padding = padding + rows.dropped * self.page_size - offset
        columns = (rows.counts, plan.exact_read, padding, plan.exact_before, plan.skip)
        return TableView.build(shown, columns, len(rows), offset)
