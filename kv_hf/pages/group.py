"""Rows of a batch and the pages that they hold, planned once per forward for all layers of a group.

A group is a set of layers that see the same tokens: all with full attention, or all with the same sliding
window. They share rows, page ids and reference counts, and each owns its storage (plan.py draws a row).

Every change (append, reorder of rows, crop) is a step. The first layer that asks for it opens the step and
changes the bookkeeping; the others join the same step and follow with their own tensors. A forward reads
as sealed exactly the pages that were full when it began: its own new tokens are exact for all its queries.

A step is worked out and room made for it before anything is changed. Stopped until then, by whatever exception, it
has never been. Stopped while it is put into force, a few assignments, it is found out: only reset() helps then.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np

from ..errors import CacheMismatchError, KVCacheError
from ..read_budget import ReadBudget, Reading
from ..spec import reserved_pages, sealed_pages
from .ahead import RoomAhead
from .append_plan import AppendPlan, RowSizes, crop_fits, plan_append, plan_crop, plan_rows
from .batch import NO_ROWS, Batch
from .group_state import GroupState, held_pages, renumbered
from .named_pages import NamedPages, PageNamer
from .padded_rows import PaddedRows
from .pool import PagePool
from .step import Grown, PageIds, Row, SealJobs, Step
from .step_tracker import StepTracker

# a step, the rows behind it, pages that no row holds then but its forward may read, and row -> pages before and after some
# were appended to it
Planned = tuple[Step, Batch, tuple[PageIds, ...], dict[int, Grown]]


class Store(Protocol):
    """A layer's tensors, as far as a step is concerned that is not in force yet."""

    def make_room(self, num_ids: int, reserved: int, ahead: int) -> None:
        """Make room for the page ids 0 .. num_ids - 1 and `reserved` pages; `ahead` where that takes growing."""
        ...


class PageGroup(PaddedRows):
    """Bookkeeping of the layers that share one block table.

    Args:
        page_size, sink_tokens, recent_tokens, max_pages, reserve_tokens: as in CacheConfig.
        window: tokens that a query of these layers sees, itself included; pages behind it are given back. None
            keeps all.
        pool: page ids shared with other caches, in place of a pool of its own with `max_pages`.
        budget: how much of a row a step of few queries reads, None for everything.
    Attributes:
        reading: how much of a row the next forward reads.
        stores: layer -> its tensors, of the layers that have any.
        ahead: how far storage grows beyond need.
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
        budget: ReadBudget | None = None,
    ) -> None:
        own = PagePool(max_pages) if pool is None else pool
        super().__init__(RowSizes(page_size, sink_tokens, recent_tokens, window), own)
        sizes = {
            "page_size": page_size,
            "sink_tokens": sink_tokens,
            "recent_tokens": recent_tokens,
        }
        self.reserve = sealed_pages(reserve_tokens, **sizes)
        if window is not None:
            self.reserve = min(self.reserve, window // page_size + 2)
        self.reading = Reading(budget)
        self.tracker = StepTracker()
        self.ahead = RoomAhead(self.pool)
        self._clear()

    @property
    def epoch(self) -> int:
        """Steps opened so far."""
        return self.tracker.epoch

    def _clear(self) -> None:
        self.touched = False  # a layer has storage of the arena
        self.batch, self._leaving = NO_ROWS, ()
        self._grown: dict[int, Grown] = {}
        self.seen = 0
        self.confirmed = 0  # columns that a crop has left standing (past recording)
        self._padding_seen: list[int] | None = None
        self.stores: dict[int, Store] = {}
        self._room = 0  # pages that room was made for
        self.ahead.clear()
        self._tables.forget()
        self.tracker.clear()

    def record_past(self) -> None:
        """Turn past recording on: from now on only columns that a crop has left standing are sealed."""
        if not self.recording:
            self.sizes, self.confirmed = replace(self.sizes, recording=True), self.seen

    def end_recording(self) -> None:
        """Turn past recording off: full pages are sealed at once again."""
        self.sizes = replace(self.sizes, recording=False)

    def confirm(self) -> None:
        """Declare all columns seen so far final (a crop that removes nothing)."""
        self.confirmed = self.seen
        self.reading.note_end()

    def reset(self) -> None:
        """Give back all pages and forget rows, lengths and padding."""
        with self.pool.lock:
            self.pool.open_change()
            self.tracker.begin_opening()
            for held in self.held_pages(self.pool):
                self.pool.release(held)
            self._clear()
            self.end_recording()
            self.tracker.end_opening()
            self.pool.close_change()

    def join(self, layer: int, store: Store) -> None:
        """Let the tensors of `layer` grow with the steps to come."""
        self.stores[layer] = store

    def state(self) -> GroupState:
        """Return rows and lengths as they are between two steps; see `restore`."""
        rows = self.rows
        return GroupState(
            self.window, len(held_pages(rows)), renumbered(rows),
            self.seen, self.confirmed, self.recording, self._padding_seen,
        )  # fmt: skip

    def restore(self, state: GroupState, layers: Iterable[int]) -> None:
        """Let this group, which is empty and new, stand where another one stood, behind a step that `layers` did.

        Its pool hands out the ids 0 .. num_pages - 1 for it. Stopped half-way, the group is of no use, and what it holds
        of the pool is counted anew.
        """
        with self.pool.lock:
            self.pool.open_change()
            ids = self.pool.allocate(state.num_pages)
            self.batch = Batch.of(state.rows)
            for row in state.rows:
                self.pool.share(row.pages)
            self.pool.release(ids)
            self.pool.close_change()
        self.seen, self.confirmed = state.seen, state.confirmed
        self.sizes = replace(self.sizes, recording=state.recording)
        self._padding_seen = state.padding_seen
        self.tracker.resume(layers)

    def adopt(self, rows: Sequence[Row], seen: int) -> None:
        """Begin with rows whose pages others hold too, as if `seen` columns had gone through an empty group."""
        with self.pool.lock:
            self.pool.open_change()
            for row in rows:
                self.pool.share(row.pages)
            self.batch, self.seen = Batch.of(rows), seen
            self.pool.close_change()

    # -- steps -----------------------------------------------------------------------------------------

    def append(self, layer: int, layer_epoch: int, rows: int, q_len: int) -> Step:
        """Open or join the step that appends `q_len` columns to `rows` rows."""
        op = ("append", rows, q_len)
        return self.tracker.follow(layer, layer_epoch, op) or self._enter(layer, layer_epoch, op)

    def select_rows(self, layer: int, layer_epoch: int, sources: Sequence[int]) -> Step:
        """Open or join the step after which row i continues the former row `sources[i]`."""
        return self._enter(layer, layer_epoch, ("rows", *sources))

    def crop(self, layer: int, layer_epoch: int, count: int) -> Step:
        """Open or join the step that removes the last `count` columns."""
        return self._enter(layer, layer_epoch, ("crop", count))

    def _enter(self, layer: int, layer_epoch: int, op: tuple) -> Step:
        if self.tracker.begins(layer, layer_epoch, op):
            self._open(op)
        return self.tracker.join(layer)

    def _open(self, op: tuple) -> None:
        with self.pool.lock:
            self.pool.open_change()  # until it is closed, counts are those of rows that are not in force
            try:
                step, batch, leaving, grown = self._plan(op)
                self._make_room(step.num_ids, step.reserved, step.ahead)
            except KVCacheError:
                self._padding_seen = None  # of a forward that never was
                self.pool.recount()
                raise
            if op[0] == "append":
                self.reading.note_forward()
            else:
                self.reading.note_end()
            self.tracker.begin_opening()
            self.tracker.open(step)
            self.batch, self.seen, self._leaving = batch, step.seen_after, leaving
            self._grown = grown
            if op[0] == "crop":
                self.confirmed = step.seen_after
            if (
                op[0] != "append" or not step.seen_after
            ):  # of columns that are gone, or of other rows
                self._padding_seen = None
            self.tracker.end_opening()
            self.pool.close_change()

    def _make_room(self, num_ids: int, reserved: int, ahead: int) -> None:
        """Let the tensors of all layers grow, one after the other, while the step can still be refused."""
        if (room := max(num_ids, reserved)) > self._room:
            for store in self.stores.values():
                store.make_room(num_ids, reserved, ahead)
            self._room = room

    def _plan(self, op: tuple) -> Planned:
        """Plan the step; see Planned."""
        for held in self._leaving:
            self.pool.release(held)
        if op[0] == "append":
            return self._plan_append(op, op[1], op[2])
        planned = self._plan_rows(op, op[1:]) if op[0] == "rows" else self._plan_crop(op, op[1])
        return planned[0], Batch.of(planned[1]), (), {}

    def _plan_append(self, op: tuple, batch: int, q_len: int) -> Planned:
        before, plan = self._plan_rows_of_append(batch, q_len)
        seen_after = self.seen + q_len
        if plan.plain:
            return self._plain_step(op, before, plan), plan.after(before), (), {}
        pages = self._name_pages(before, plan)
        found = replace(before, pages=pages.found)
        after = Batch(plan.padding, plan.exact_after, plan.dropped, plan.ahead, pages.kept)
        moving = (plan.last + plan.passed > 0) & (plan.exact_after > self.sink_tokens)
        fits = int(plan.exact_read.max()) <= self.slots
        step = Step(
            op,
            self.seen,
            seen_after,
            self.pool.num_ids,
            partial(plan.steps, pages.first, pages.last),
            rebuild=not fits or bool((plan.last + plan.passed).any()),
            moves_rest=bool(moving.any()),
            fits=fits,
            view=self._view(
                found, self.offset, plan.exact_read, plan.padding, plan.exact_before, plan.skip
            ),
            seal_first=SealJobs.build(pages.first, self.page_size, self.sink_tokens),
            seal=SealJobs.build(pages.last, self.page_size, self.sink_tokens, plan.passed),
            reserved=reserved_pages(batch, self.reserve, self.pool.max_pages),
            ahead=self.ahead.pages(self.sizes, after, seen_after, self.pool.num_ids),
        )
        leaving = pages.leaving
        if leaving and len(self.pool.holders) == 1:
            # nobody else seals pages: their bytes change at the earliest one step later
            for held in leaving:
                self.pool.release(held)
            leaving = ()
        return step, after, leaving, pages.grown

    def _plain_step(self, op: tuple, rows: Batch, plan: AppendPlan) -> Step:
        """Return the step of an append that adds to all windows and does nothing else."""
        seen_after, num_ids = self.seen + op[2], self.pool.num_ids
        none: tuple[PageIds, ...] = ((),) * len(rows)
        return Step(
            op,
            self.seen,
            seen_after,
            num_ids,
            partial(plan.steps, none, none),
            view=self._view(rows, 0, plan.exact_after, rows.padding, rows.exact, plan.skip),
            reserved=reserved_pages(op[1], self.reserve, self.pool.max_pages),
            ahead=self.ahead.pages(self.sizes, rows, seen_after, num_ids),
        )

    def _name_pages(self, before: Batch, plan: AppendPlan) -> NamedPages:
        """Hand out page ids for what the append seals."""
        gone = plan.dropped - before.dropped - plan.passed
        changed = np.flatnonzero((plan.first > 0) | (plan.last > 0) | (gone > 0)).tolist()
        if not changed:
            return NamedPages.unchanged(before.pages)
        namer = PageNamer(before.pages, iter(self.pool.allocate(plan.num_pages)))
        for row in changed:
            namer.change(row, int(plan.first[row]), int(plan.last[row]), int(gone[row]))
        return namer.done()

    def check_append(self, batch: int, q_len: int) -> int:
        """Raise what appending `q_len` columns to `batch` rows would; return the pages that it takes."""
        self.tracker.check_opened()
        return self._check_room(self._plan_rows_of_append(batch, q_len)[1])

    def _check_room(self, plan: AppendPlan) -> int:
        """Return the pages that the plan takes. Raises PagePoolExhaustedError."""
        with self.pool.lock:
            self.pool.settle()
            freed = sum(self.pool.count(page) == 1 for pages in self._leaving for page in pages)
            self.pool.check_room(plan.num_pages - freed)
        return plan.num_pages

    def prepare_append(self, batch: int, q_len: int) -> None:
        """Raise what the append would, and make the room that it takes: for groups whose layers come later."""
        self.tracker.check_done()
        before, plan = self._plan_rows_of_append(batch, q_len)
        count = self._check_room(plan)
        reserved = reserved_pages(batch, self.reserve, self.pool.max_pages)
        if count:
            num_ids = self.pool.ids_after(count)
            after = replace(before, exact=before.exact + plan.new)
            ahead = self.ahead.pages(self.sizes, after, self.seen + q_len, num_ids)
            self._make_room(num_ids, reserved, ahead)

    def _plan_rows_of_append(self, batch: int, q_len: int) -> tuple[Batch, AppendPlan]:
        """Return the rows as they are found, and the plan of the append."""
        if batch < 1:
            raise CacheMismatchError("keys must have at least one row, got a batch of 0")
        if len(self.batch) and batch != len(self.batch):
            raise CacheMismatchError(
                f"this cache holds a batch of {len(self.batch)} rows, got keys for {batch}; use a new cache, or "
                "reset() this one, for another batch size"
            )
        before = self._padded_rows(batch)
        return before, plan_append(self.sizes, before, self.seen, q_len, self.confirmed)

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
        return Step(op, self.seen, self.seen, self.pool.num_ids, partial(tuple, steps)), rows

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
        steps, rows = (tuple(part) for part in zip(*planned, strict=True))
        return Step(op, self.seen, seen, self.pool.num_ids, partial(tuple, steps)), rows

    def check_integrity(self) -> None:
        """Raise ValueError unless reference counts equal what the rows hold and lengths add up."""
        self.tracker.check_done()
        self.pool.check_integrity()
        for index, row in enumerate(self.rows):
            if self.tokens(row) != max(0, self.seen - row.padding + row.ahead):
                raise ValueError(
                    f"row {index} holds {self.tokens(row)} tokens, expected {self.seen - row.padding}"
                )
            slots = self.sizes.kept + 2 * self.page_size  # past recording may just have ended
            if row.exact > slots:
                raise ValueError(f"row {index} has {row.exact} exact tokens in {slots} slots")
            if row.dropped > self.sizes.out_of_sight(self.seen - row.padding):
                raise ValueError(f"row {index} has given back a page that its next query can see")
