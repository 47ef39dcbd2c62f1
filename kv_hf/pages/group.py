"""Rows of a batch and the pages that they hold, planned once per forward for all layers of a group.

A group is a set of layers that see the same tokens: all with full attention, or all with the same sliding
window. They share rows, page ids and reference counts, and each owns its storage (plan.py draws a row).

Every change (append, reorder of rows, crop) is a step. The first layer that asks for it opens the step and
changes the bookkeeping; the others join the same step and follow with their own tensors. A forward reads
as sealed exactly the pages that were full when it began: its own new tokens are exact for all its queries.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..errors import CacheMismatchError, KVCacheError
from ..spec import TABLE_DTYPE, reserved_pages, sealed_pages
from .lockstep import Lockstep
from .plan import RowPlan, RowSizes, crop_fits, plan_append, plan_crop, plan_rows
from .pool import PagePool
from .step import Row, SealJobs, Step, TableView


class PageGroup:
    """Bookkeeping of the layers that share one block table.

    Args:
        page_size, sink_tokens, recent_tokens, max_pages, reserve_tokens: as in CacheConfig.
        window: tokens that a query of these layers sees, itself included; pages behind it are given back. None
            keeps all.
        pool: page ids shared with other caches, in place of a pool of its own with `max_pages`.
    """

    def __init__(
        self,
        page_size: int,
        sink_tokens: int,
        recent_tokens: int,
        max_pages: int | None,
        reserve_tokens: int = 0,
        window: int | None = None,
        pool: PagePool | None = None,
    ) -> None:
        self.sizes = RowSizes(page_size, sink_tokens, recent_tokens, window)
        self.pool = PagePool(max_pages) if pool is None else pool
        self.pool.holders.add(self)
        sizes = {
            "page_size": page_size,
            "sink_tokens": sink_tokens,
            "recent_tokens": recent_tokens,
        }
        self.reserve = sealed_pages(reserve_tokens, **sizes)
        if window is not None:
            self.reserve = min(self.reserve, window // page_size + 2)
        self.lockstep = Lockstep()
        self._clear()

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
    def epoch(self) -> int:
        """Steps opened so far."""
        return self.lockstep.epoch

    @property
    def recording(self) -> bool:
        """Whether past recording is on."""
        return self.sizes.recording

    def _clear(self) -> None:
        self.touched = False  # a layer has storage of the arena
        self.rows: tuple[Row, ...] = ()
        self.seen = 0
        self.confirmed = 0  # columns that a crop has left standing (past recording)
        self.lockstep.clear()
        self._padding_seen: list[int] | None = None
        self._padding_columns: int | None = None
        self._table: tuple[tuple[tuple[int, ...], ...], torch.Tensor, torch.Tensor] | None = None

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

    def record_past(self) -> None:
        """Turn past recording on: from now on only columns that a crop has left standing are sealed."""
        if not self.recording:
            self.sizes, self.confirmed = replace(self.sizes, recording=True), self.seen

    def end_recording(self) -> None:
        """Turn past recording off: full pages are sealed at once again."""
        self.sizes = replace(self.sizes, recording=False)

    def forget_padding(self) -> None:
        """Drop padding that was observed but not used yet (a forward without any mask follows)."""
        self._padding_seen = None

    def confirm(self) -> None:
        """Declare all columns seen so far final (a crop that removes nothing)."""
        self.confirmed = self.seen

    def held_pages(self, pool: PagePool) -> list[tuple[int, ...]]:
        """Return the page ids that the rows hold (see PageHolder)."""
        return [row.pages for row in self.rows] if pool is self.pool else []

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Register as a holder again: the pool may be another one here."""
        vars(self).update(state)
        self.pool.holders.add(self)

    def reset(self) -> None:
        """Give back all pages and forget rows, lengths and padding."""
        for row in self.rows:
            self.pool.release(row.pages)
        self._clear()
        self.end_recording()

    def needs_padding(self) -> bool:
        """True while some row has no real token yet, so that its padding is still to be learnt."""
        return not self.rows or any(self.tokens(row) == 0 for row in self.rows)

    def observe_padding(self, attention_mask: torch.Tensor, columns: int | None = None) -> None:
        """Learn the left padding from a 2D mask [rows, columns] (0 or False = padding).

        Only rows without a real token are concerned; a mask seen later cannot change stored tokens.

        Args:
            columns: of the first forward, where the mask may be of other columns than the model then passes (virtual
                tokens or an image are put in front): a forward of another length is taken to have no padding.
        """
        if attention_mask.ndim == 2 and self.needs_padding():
            padded = attention_mask.to(torch.bool).cumsum(-1) == 0
            self._padding_seen, self._padding_columns = padded.sum(-1).tolist(), columns

    def adopt(self, rows: Sequence[Row], seen: int) -> None:
        """Begin with rows whose pages others hold too, as if `seen` columns had gone through an empty group."""
        for row in rows:
            self.pool.share(row.pages)
        self.rows, self.seen = tuple(rows), seen

    # -- steps -----------------------------------------------------------------------------------------

    def append(self, layer: int, layer_epoch: int, rows: int, q_len: int) -> Step:
        """Open or join the step that appends `q_len` columns to `rows` rows."""
        return self._enter(layer, layer_epoch, ("append", rows, q_len))

    def select_rows(self, layer: int, layer_epoch: int, sources: Sequence[int]) -> Step:
        """Open or join the step after which row i continues the former row `sources[i]`."""
        return self._enter(layer, layer_epoch, ("rows", *sources))

    def crop(self, layer: int, layer_epoch: int, count: int) -> Step:
        """Open or join the step that removes the last `count` columns."""
        return self._enter(layer, layer_epoch, ("crop", count))

    def _enter(self, layer: int, layer_epoch: int, op: tuple) -> Step:
        return self.lockstep.enter(layer, layer_epoch, op, self._open)

    def _open(self, op: tuple) -> Step:
        with self.pool.lock:
            try:
                step, rows = self._plan(op)
            except KVCacheError:
                self._padding_seen = None  # of a forward that never was
                raise
            self.rows, self.seen = rows, step.seen_after
            if op[0] == "crop":
                self.confirmed = step.seen_after
        return step

    def _plan(self, op: tuple) -> tuple[Step, tuple[Row, ...]]:
        if op[0] == "append":
            return self._plan_append(op, op[1], op[2])
        if op[0] == "rows":
            return self._plan_rows(op, op[1:])
        return self._plan_crop(op, op[1])

    def _plan_append(self, op: tuple, batch: int, q_len: int) -> tuple[Step, tuple[Row, ...]]:
        before, plans = self._plan_rows_of_append(batch, q_len)
        seen_after = self.seen + q_len
        ids = iter(self.pool.allocate(sum(plan.first + plan.last for plan in plans)))
        steps, found, rows = [], [], []
        for row, plan in zip(before, plans, strict=True):
            sealed_first = tuple(next(ids) for _ in range(plan.first))
            sealed = tuple(next(ids) for _ in range(plan.last))
            row_step = replace(plan.step, sealed_first=sealed_first, sealed=sealed)
            steps.append(row_step)
            held = row.pages + sealed_first
            found.append(Row(plan.padding, held, row_step.exact_before + row_step.new, row.dropped))
            # this forward may still read what it drops: a page's bytes change at the earliest one step later
            gone = plan.dropped - row.dropped - row_step.passed
            self.pool.release(held[:gone])
            kept = held[gone:] + sealed
            rows.append(Row(plan.padding, kept, row_step.exact_after, plan.dropped, plan.ahead))
        rebuild = any(step.sealed or step.passed for step in steps)
        first_jobs, jobs = (
            SealJobs.build(pages, self.page_size, self.sink_tokens, passed)
            for pages, passed in (
                ([step.sealed_first for step in steps], None),
                ([step.sealed for step in steps], [step.passed for step in steps]),
            )
        )
        step = Step(
            op,
            tuple(steps),
            self.seen,
            seen_after,
            rebuild or max(row.exact for row in found) > self.slots,
            self.pool.num_ids,
            self.view(found, self.offset),
            first_jobs,
            jobs,
            reserved_pages(batch, self.reserve, self.pool.max_pages),
        )
        return step, tuple(rows)

    def check_append(self, batch: int, q_len: int) -> int:
        """Raise what appending `q_len` columns to `batch` rows would; return the pages that it takes."""
        _, plans = self._plan_rows_of_append(batch, q_len)
        count = sum(plan.first + plan.last for plan in plans)
        self.pool.check_room(count)
        return count

    def _plan_rows_of_append(self, batch: int, q_len: int) -> tuple[tuple[Row, ...], list[RowPlan]]:
        """Return the rows as they are found, and the plan of each."""
        if batch < 1:
            raise CacheMismatchError("keys must have at least one row, got a batch of 0")
        if self.rows and batch != len(self.rows):
            raise CacheMismatchError(
                f"this cache holds a batch of {len(self.rows)} rows, got keys for {batch}; use a new cache, or "
                "reset() this one, for another batch size"
            )
        before = self._padded_rows(batch, q_len)
        plans = [
            plan_append(self.sizes, index, row, self.seen, q_len, self.confirmed)
            for index, row in enumerate(before)
        ]
        return before, plans

    def _padded_rows(self, batch: int, q_len: int) -> tuple[Row, ...]:
        """Return the rows as the step finds them, with the padding that was learnt since."""
        known = self._padding_seen
        fits = self.seen or self._padding_columns in (None, q_len)
        padding = known if known is not None and len(known) == batch and fits else [0] * batch
        rows = self.rows or (Row(0, (), 0),) * batch
        return tuple(
            row if self.tokens(row) else replace(row, padding=max(self.seen, columns))
            for row, columns in zip(rows, padding, strict=True)
        )

    def _plan_rows(self, op: tuple, sources: Sequence[int]) -> tuple[Step, tuple[Row, ...]]:
        steps, rows = plan_rows(self.rows, sources)
        # a row that is continued once keeps its pages as they are: most rows of a beam search, in most steps
        uses = Counter(step.source for step in steps)
        for index, row in enumerate(self.rows):
            for _ in range(uses[index] - 1):
                self.pool.share(row.pages)
        for index, row in enumerate(self.rows):
            if not uses[index]:
                self.pool.release(row.pages)
        self._padding_seen = None
        return Step(op, steps, self.seen, self.seen, False, self.pool.num_ids), rows

    def check_crop(self, count: int) -> None:
        """Raise CacheMismatchError when a crop of `count` columns needs pages that left the sliding window."""
        seen = max(0, self.seen - count)
        if not all(crop_fits(self.sizes, row, seen) for row in self.rows):
            raise CacheMismatchError(
                f"a crop of {count} tokens needs tokens that have left the sliding window of {self.window} and "
                "were given back; call cache.activate_past_recording() before forwards that may be rolled back"
            )

    def _plan_crop(self, op: tuple, count: int) -> tuple[Step, tuple[Row, ...]]:
        self.check_crop(count)
        seen = max(0, self.seen - count)
        planned = [plan_crop(self.sizes, i, row, seen) for i, row in enumerate(self.rows)]
        for row, (_, kept) in zip(self.rows, planned, strict=True):
            self.pool.release(row.pages[len(kept.pages) :])
        if seen == 0:
            self._padding_seen = None
        steps, rows = (tuple(part) for part in zip(*planned, strict=True))
        return Step(op, steps, self.seen, seen, False, self.pool.num_ids), rows

    # -- reading ---------------------------------------------------------------------------------------

    def view(self, rows: Sequence[Row], offset: int | None = None) -> TableView:
        """Return where the tokens of `rows` lie, as tensors on the CPU.

        Dropped pages are left out: a kernel that knows the sliding window reads the pages behind them as if they
        followed the sinks. That hides the sinks too, as the first page held begins in or before the window.
        Pages change once per page_size tokens: between two changes the same table is handed out again.
        """
        offset = self.offset if offset is None else offset
        pages = tuple(row.pages for row in rows)
        if self._table is None or self._table[0] != pages:
            counts = torch.tensor([len(row.pages) for row in rows], dtype=TABLE_DTYPE)
            self._table = (pages, self.block_table(rows), counts)
        skipped = [row.padding + row.dropped * self.page_size - offset for row in rows]
        return TableView(
            block_table=self._table[1],
            num_pages=self._table[2],
            exact_lens=torch.tensor([row.exact for row in rows], dtype=TABLE_DTYPE),
            padding=torch.tensor(skipped, dtype=TABLE_DTYPE),
            offset=offset,
        )

    def block_table(self, rows: Sequence[Row]) -> torch.Tensor:
        """Return the page ids of `rows` as [rows, most pages of a row], int32, filled up with 0."""
        width = max((len(row.pages) for row in rows), default=0)
        table = [list(row.pages) + [0] * (width - len(row.pages)) for row in rows]
        return torch.tensor(table, dtype=TABLE_DTYPE).reshape(len(rows), width)

    def check_integrity(self) -> None:
        """Raise ValueError unless reference counts equal what the rows hold and lengths add up."""
        self.pool.check_integrity()
        for index, row in enumerate(self.rows):
            if self.tokens(row) != max(0, self.seen - row.padding + row.ahead):
                raise ValueError(
                    f"row {index} holds {self.tokens(row)} tokens, expected {self.seen - row.padding}"
                )
            slots = self.sizes.held + 2 * self.page_size  # past recording may just have ended
            if row.exact > slots:
                raise ValueError(f"row {index} has {row.exact} exact tokens in {slots} slots")
            if row.dropped > self.sizes.out_of_sight(row.padding, self.seen):
                raise ValueError(f"row {index} has given back a page that its next query can see")
