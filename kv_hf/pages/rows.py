"""The rows of a batch and the pages that they hold: where tokens go, planned for all layers of a sliding window at once.

Layers that see the same tokens (all with full attention, or all with the same window) share one `Rows`: row lengths, page
ids. Each layer owns its tensors and follows the steps that are planned here (forward.py). A forward reads
as sealed exactly the pages that were full when it began: its own new tokens are exact for all its queries.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, Self

import numpy as np
import torch

from ..errors import CacheMismatchError
from ..geometry import Geometry
from ..read_budget import ReadBudget, Reading
from ..row_pages import page_capacity
from .moved import give_back_replaced
from .pool import PagePool
from .step import Numbers, PageIds, Row, Step, Tables, TableView, seal_jobs


@dataclass(frozen=True)
class RowSizes(Geometry):
    """The numbers that decide where the tokens of rows lie.

    Attributes:
        recording: whether tokens may be taken back (past recording), so that only confirmed ones are sealed.
    """

    recording: bool = False

    @cached_property
    def slots(self) -> int:
        """Exact tokens that a row's window has room for; a page more while past recording is on."""
        return self.kept + (2 if self.recording else 1) * self.page_size


@dataclass(frozen=True, eq=False)
class Batch:
    """The rows of a batch at one moment, as arrays: a step costs hardly more Python when the batch is larger.

    Attributes:
        padding, exact, dropped, unseen: [rows], as in Row.
        pages: page ids of each row.
    """

    padding: Numbers
    exact: Numbers
    dropped: Numbers
    unseen: Numbers
    pages: tuple[PageIds, ...]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "Batch":
        """Return the batch of `rows`."""
        numbers = [(row.padding, row.exact, row.dropped, row.unseen) for row in rows]
        padding, exact, dropped, unseen = np.array(numbers, dtype=np.int64).reshape(len(rows), 4).T
        return cls(padding, exact, dropped, unseen, tuple(row.pages for row in rows))

    def __len__(self) -> int:
        return len(self.pages)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The rows, one object each; made when somebody asks."""
        columns = (self.padding, self.exact, self.dropped, self.unseen)
        numbers = zip(*(column.tolist() for column in columns), strict=True)
        return tuple(
            Row(padding, pages, exact, dropped, unseen)
            for pages, (padding, exact, dropped, unseen) in zip(self.pages, numbers, strict=True)
        )

    @cached_property
    def counts(self) -> Numbers:
        """[rows], sealed pages that each row holds."""
        return np.fromiter(map(len, self.pages), np.int64, len(self.pages))

    @cached_property
    def longest(self) -> int:
        """Most exact tokens of a row."""
        return int(self.exact.max())

    @cached_property
    def skips_none(self) -> bool:
        """Whether every row appends all new columns: it is past its padding, and holds no token of a column to come."""
        return bool(self.pages) and bool(self.exact.min() > 0) and not self.unseen.any()


NO_ROWS = Batch.of(())


@dataclass(frozen=True)
class RowsState:
    """The rows of a window as plain numbers, with page ids of their own, from which a copy elsewhere goes on.

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
    """Return the different pages that rows hold, in the order of rows and tokens: place i is page i of a RowsState."""
    return list(dict.fromkeys(page for row in rows for page in row.pages))


@dataclass(eq=False)
class Append:
    """An append of columns to rows, planned and not in force: arrays [rows].

    Attributes:
        before, after: the rows as they are found, and as they will be but for their pages.
        step: what it does, as far as no page id says it.
        first, last: pages to seal before and after the new tokens arrive.
        passed: full pages that no later query can see: not sealed, in front of `last`.
    """

    before: Batch
    after: Batch
    step: Step
    first: Numbers
    last: Numbers
    passed: Numbers

    @property
    def num_pages(self) -> int:
        """Page ids that it takes."""
        return 0 if self.step.plain else int(self.first.sum() + self.last.sum())


def plan_append(sizes: RowSizes, batch: Batch, seen: int, q_len: int, confirmed: int) -> Append:
    """Plan the append of `q_len` columns to all rows of `batch`; nothing is changed.

    After the append every full page is sealed at once. While past recording is on, tokens may be taken back: then only
    confirmed ones are sealed, before the append, and others when the window would overflow.

    Args:
        batch: the rows as they are found.
        seen: columns before the append.
        confirmed: columns that a crop has left standing (past recording).
    """
    exact, seen_after = batch.exact, seen + q_len
    step = Step(seen, seen_after, len(batch.pages), exact_before=exact)
    if (
        sizes.window is None
        and not sizes.recording
        and batch.skips_none
        and batch.longest + q_len < sizes.kept + sizes.page_size
    ):
        nothing = batch.unseen  # all zero
        step.plain = True  # it adds its tokens to the window of every row, and does nothing else
        step.skip, step.new = nothing, nothing + q_len
        after = Batch(batch.padding, exact + q_len, batch.dropped, nothing, batch.pages)
        longest = batch.longest + q_len
        vars(after).update(counts=batch.counts, longest=longest, skips_none=True)
        return Append(batch, after, step, nothing, nothing, nothing)
    size, nothing = sizes.page_size, np.zeros_like(exact)
    padding = np.minimum(batch.padding, seen_after)
    skip = np.maximum(np.maximum(0, padding - seen), np.minimum(batch.unseen, q_len))
    new, first = q_len - skip, nothing
    if sizes.recording:
        unconfirmed = np.minimum(exact, np.maximum(0, seen - np.maximum(confirmed, batch.padding)))
        first = sizes.sealed(exact - unconfirmed)
        exact = exact - first * size
        last = np.maximum(0, -((sizes.slots - exact - new) // size))
    else:
        last = sizes.sealed(exact + new)
    before = batch.dropped + batch.counts + first
    horizon = min(seen_after, confirmed) if sizes.recording else seen_after
    dropped = np.maximum(batch.dropped, sizes.dropped(horizon - padding, before + last))
    passed = np.maximum(0, dropped - before)
    step.exact_before, step.skip, step.new = exact, skip, new
    unseen = np.maximum(0, batch.unseen - q_len)
    after = Batch(padding, exact + new - last * size, dropped, unseen, batch.pages)
    return Append(batch, after, step, first, last - passed, passed)


class Rows:
    """The rows of all layers that see the same tokens.

    Args:
        sizes: the numbers that decide where the tokens of a row lie.
        pool: page ids, which other caches may share.
        budget: how much of a row a step of few queries reads, None for everything.
        max_length: columns (padding included) that a row has room for from the first forward on, and no more; None: storage
            grows with the text.
    Attributes:
        batch: the rows, one for each sequence.
        seen: columns so far, padding included.
        confirmed: columns that a crop has left standing (past recording).
        step: the last change.
        reading: how much of a row the next forward reads.
        stores: layer -> its tensors, of the layers that have any.
        has_storage: whether a layer has storage of pages, which nobody may take away then.
    """

    def __init__(
        self,
        sizes: RowSizes,
        pool: PagePool,
        budget: ReadBudget | None = None,
        max_length: int | None = None,
    ) -> None:
        self.sizes = sizes
        self.pool = pool
        self.max_length = max_length
        self.reserve = sizes.reserved(max_length)
        self.reading = Reading(budget)
        self._clear()
        pool.register(self)

    def _clear(self) -> None:
        self.batch = NO_ROWS
        self.seen = self.confirmed = 0
        self.step: Any = None  # a Step, once there was one
        self.stores: dict[int, Any] = {}  # each has `pages` and make_room(pages)
        self.has_storage = False
        self._leaving: tuple[PageIds, ...] = ()  # of no row, but the last forward may read them
        self._padding_seen: list[int] | None = None
        self._tables = Tables()
        self._room = -1  # pages that room was made for
        self._viewed: tuple[PageIds, ...] = ()  # in the view of the last step

    # -- what they are -------------------------------------------------------------------------------------

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows, one object each."""
        return self.batch.rows

    def __len__(self) -> int:
        return len(self.batch)

    @property
    def window(self) -> int | None:
        """Tokens that a query sees, itself included; None for all."""
        return self.sizes.window

    @property
    def offset(self) -> int:
        """Columns in front of the first one that the next forward may see; 0 until a page was dropped, and with max_length."""
        return self._offset(self.batch)

    def _offset(self, batch: Batch) -> int:
        if self.window is None or self.max_length is not None or not batch.dropped.any():
            return 0
        return int((batch.padding + batch.dropped * self.sizes.page_size).min())

    def lengths(self, batch: Batch | None = None) -> Numbers:
        """Return [rows], the real tokens of each row of `batch` (None: of these), dropped ones included."""
        batch = self.batch if batch is None else batch
        return batch.exact + (batch.dropped + batch.counts) * self.sizes.page_size

    def view(self) -> TableView:
        """Return where the tokens of the rows lie now, as tensors on the CPU."""
        return self._view(self._tables, self.batch, self.batch.exact, self.batch.padding)

    def _view(
        self,
        tables: Tables,
        batch: Batch,
        exact: Numbers,
        padding: Numbers,
        *rest: Numbers,
    ) -> TableView:
        """Return where the tokens of `batch` lie, of which `exact` are in the window; `rest`: starts and skips.

        Dropped pages are left out: a kernel that knows the sliding window reads the pages after them as if they
        followed the sinks. Sinks are hidden as well: they lie before the first held page, which begins at or before the window.
        """
        offset = self._offset(batch)
        padding = padding + batch.dropped * self.sizes.page_size - offset
        columns = (batch.counts, exact, padding, *rest)
        return TableView.build(tables.of(batch.pages), columns, len(batch), offset)

    # -- left padding --------------------------------------------------------------------------------------

    def needs_padding(self) -> bool:
        """True while some row has no real token yet, so that its padding is still to be learnt."""
        return not len(self.batch) or not self.lengths().all()

    def observe_padding(self, attention_mask: torch.Tensor) -> None:
        """Learn the left padding from a 2D mask [rows, columns] (0 or False = padding).

        Only rows without a real token are concerned; a mask seen later cannot change stored tokens.
        """
        if attention_mask.ndim == 2 and self.needs_padding():
            padded = attention_mask.to(torch.bool).cumsum(-1) == 0
            self._padding_seen = padded.sum(-1).tolist()

    def forget_padding(self) -> None:
        """Drop padding that was observed but not used yet (a forward without any mask follows)."""
        self._padding_seen = None

    def _padded(self, count: int) -> Batch:
        """Return the rows as the next append finds them, with the padding that was learnt since the last."""
        if self.batch.skips_none:
            return self.batch
        rows = self.batch if len(self.batch) else Batch.of((Row(0, (), 0),) * count)
        empty = self.lengths(rows) == 0
        known = self._padding_seen
        padding = known if known is not None and len(known) == count else [0] * count
        learnt = np.maximum(self.seen, np.array(padding, dtype=np.int64))
        return replace(rows, padding=np.where(empty, learnt, rows.padding))

    # -- appends: planned for all windows of a cache before one is in force (forward.py) -------------------

    def plan(self, count: int, q_len: int) -> Append:
        """Plan the append of `q_len` columns to `count` rows; pages that only the last forward read are free then.

        Raises: CacheMismatchError for another number of rows.
        """
        if count < 1:
            raise CacheMismatchError("keys must have at least one row, got a batch of 0")
        held = len(self.batch.pages)
        if held and count != held:
            raise CacheMismatchError(
                f"this cache holds a batch of {held} rows, got keys for {count}; use a new cache, or "
                "reset() this one, for another batch size"
            )
        if self.max_length is not None and self.seen + q_len > self.max_length:
            raise CacheMismatchError(
                f"max_length={self.max_length} is reached: {self.seen} columns are held and {q_len} more were given; the "
                "cache is unchanged. Make it with a larger max_length"
            )
        self._leaving = ()
        return plan_append(self.sizes, self._padded(count), self.seen, q_len, self.confirmed)

    def forget_read(self) -> None:
        """Let go of the pages that the last forward read, and nobody else will."""
        self._leaving = ()

    def capacity(self, rows: int, lacking: int = 0) -> int:
        """Return the pages that storage has room for, once all ids so far, and those `lacking`, were handed out to `rows` rows.

        With max_length the pool's ids, which are made in the same steps, never pass the room of the first forward.
        """
        handed_out = self.pool.num_ids + lacking
        return page_capacity(max(handed_out, rows * self.reserve))

    def make_room(self, plan: Append, ids: Sequence[int]) -> None:
        """Let the tensors of all layers grow for a plan whose page ids are handed out, while it can still be refused."""
        if not ids and self._room >= 0:
            return
        capacity = self.capacity(len(plan.before))
        if capacity > self._room:
            for store in self.stores.values():
                store.make_room(capacity)
            if self._room > 0:
                give_back_replaced()
            self._room = capacity

    def commit(self, plan: Append, ids: Sequence[int]) -> None:
        """Put a plan into force, whose new pages are `ids`."""
        step, self.batch, leaving = self.step_of(plan, ids, self._tables)
        # where nobody else seals pages, their bytes change at the earliest one step later
        self._leaving = leaving if len(self.pool.owners) > 1 else ()
        self.seen, self.step = step.seen_after, step
        if self._padding_seen is not None and not self.needs_padding():
            self._padding_seen = None
        self.reading.note_forward()
        step.budget = self.reading.budget

    def step_of(
        self, plan: Append, ids: Sequence[int], tables: Tables
    ) -> tuple[Step, Batch, tuple[PageIds, ...]]:
        """Return the step of a plan whose new pages are `ids`, the rows after it, and pages of no row that its forward may read."""
        before, after, step = plan.before, plan.after, plan.step
        step.capacity = max(self._room, self.capacity(step.rows)) if ids else self._room
        if step.plain:
            last = self.step
            if last is not None and last.plain and self.batch.pages is before.pages is self._viewed:
                step.view = last.view.advance(after.exact, before.exact)
            else:
                step.view = self._view(
                    tables, before, after.exact, before.padding, before.exact, step.skip
                )
                self._viewed = before.pages
            step.columns = self.max_length or step.seen_after
            return step, after, ()
        size = self.sizes.page_size
        found, kept = list(before.pages), list(before.pages)
        leaving = []
        first = {}
        last = {}
        gone = after.dropped - before.dropped - plan.passed
        given = iter(ids)
        for row in np.flatnonzero(plan.first + plan.last + gone).tolist():
            first[row] = tuple(islice(given, plan.first[row]))
            last[row] = tuple(islice(given, plan.last[row]))
            found[row] = before.pages[row] + first[row]
            kept[row] = found[row][gone[row] :] + last[row]
            leaving.append(found[row][: gone[row]])
        reads = replace(before, pages=tuple(found)) if plan.first.any() else before
        exact_read = step.exact_before + step.new
        step.view = self._view(
            tables, reads, exact_read, after.padding, step.exact_before, step.skip
        )
        step.columns = self.max_length or step.seen_after - step.view.offset
        step.leaving = (plan.last + plan.passed) * size
        step.fits = int(exact_read.max()) <= self.sizes.slots
        step.moves_rest = bool(((step.leaving > 0) & (after.exact > self.sizes.sink_tokens)).any())
        step.first = seal_jobs(first, before.pages, self.sizes, np.zeros_like(plan.passed))
        step.first_leaving = plan.first * size
        step.seal = seal_jobs(last, found, self.sizes, plan.passed)
        stays = step.fits and not step.moves_rest
        step.plain, self._viewed = stays and step.seal is None and step.first is None, ()
        return step, replace(after, pages=tuple(kept)) if first else after, tuple(leaving)

    # -- past recording ------------------------------------------------------------------------------------

    def record_past(self) -> None:
        """Turn past recording on: from now on only columns that a crop has left standing are sealed."""
        if not self.sizes.recording:
            self.sizes, self.confirmed = replace(self.sizes, recording=True), self.seen

    def end_recording(self) -> None:
        """Turn past recording off: full pages are sealed at once again."""
        self.sizes = replace(self.sizes, recording=False)

    def confirm(self) -> None:
        """Declare all columns seen so far final (a crop that removes nothing)."""
        self.confirmed = self.seen
        self.reading.note_end()

    # -- other changes -------------------------------------------------------------------------------------

    def check_rows(self, sources: Sequence[int]) -> None:
        """Raise CacheMismatchError where rows cannot continue the former rows `sources`."""
        count = len(self.batch)
        if not count:
            return
        if not sources:
            raise CacheMismatchError("at least one row must be kept, got an empty selection")
        wrong = [source for source in sources if not -count <= source < count]
        if wrong:
            raise CacheMismatchError(
                f"row index {wrong[0]} is out of range for a batch of {count} rows"
            )

    def select(self, sources: Sequence[int]) -> None:
        """Let row i continue the former row sources[i]; sealed pages are shared. `check_rows` has passed."""
        rows, chosen = self.rows, [source % len(self) for source in sources]
        with self.pool.lock:
            self.batch, self._leaving = Batch.of([rows[source] for source in chosen]), ()
        self.step = Step(self.seen, self.seen, len(chosen), sources=chosen)
        self._padding_seen = None
        self.reading.note_end()

    def check_crop(self, count: int) -> None:
        """Raise CacheMismatchError when a crop of `count` columns needs pages that left the sliding window."""
        seen = max(0, self.seen - count)
        if (self.batch.dropped > self.sizes.out_of_sight(seen - self.batch.padding)).any():
            raise CacheMismatchError(
                f"a crop of {count} tokens needs tokens that have left the sliding window of {self.window} and "
                "were given back; call cache.activate_past_recording() before forwards that may be rolled back"
            )

    def crop(self, count: int) -> None:
        """Remove the last `count` columns. `check_crop` has passed."""
        batch, size, seen = self.batch, self.sizes.page_size, max(0, self.seen - count)
        exact = np.maximum(0, seen - batch.padding) - batch.dropped * size
        behind = np.maximum(0, exact - self.sizes.sink_tokens)
        whole = np.minimum(batch.counts, behind // size)
        # of a row that loses pages, the first of them is decoded back where some of its tokens are left
        cut = whole < batch.counts
        pages = tuple(held[:left] for held, left in zip(batch.pages, whole.tolist(), strict=True))
        reopened = [
            (row, batch.pages[row][whole[row]], int(behind[row] % size))
            for row in np.flatnonzero(cut & (behind % size > 0)).tolist()
        ]
        with self.pool.lock:
            if cut.any():  # nobody else may seal into what is still to be decoded
                decoded = tuple((page,) for _, page, _ in reopened)
                self._leaving = decoded if len(self.pool.owners) > 1 else ()
            padding, none = np.minimum(batch.padding, seen), np.zeros_like(whole)
            self.batch = Batch(padding, exact - whole * size, batch.dropped, none, pages)
        everyone = range(len(pages))
        self.step = Step(self.seen, seen, len(pages), sources=everyone, reopened=reopened)
        self.step.keeps_pages = not cut.any()
        self.seen = self.confirmed = seen
        self._padding_seen = None
        self.reading.note_end()

    def reset(self) -> None:
        """Give back all pages and forget rows, lengths and padding; past recording stays as it is, as in transformers' layers."""
        with self.pool.lock:
            self._clear()

    def adopt(self, rows: Sequence[Row], seen: int) -> None:
        """Begin with rows whose pages others hold too, as if `seen` columns had gone through empty rows; under the pool's lock."""
        self.batch, self.seen = Batch.of(rows), seen

    def replace_pages(self, index: int, pages: PageIds) -> None:
        """Let row `index` hold `pages`, which contain the same tokens, in place of its own; between two steps."""
        held = list(self.batch.pages)
        held[index] = pages
        with self.pool.lock:
            self.batch = replace(self.batch, pages=tuple(held))

    # -- states and copies ---------------------------------------------------------------------------------

    def state(self) -> RowsState:
        """Return rows and lengths as they are between two steps; see `restore`."""
        new = {page: place for place, page in enumerate(held_pages(self.rows))}
        rows = [replace(row, pages=tuple(new[page] for page in row.pages)) for row in self.rows]
        numbers = self.seen, self.confirmed, self.sizes.recording, self._padding_seen
        return RowsState(self.window, len(new), tuple(rows), *numbers)

    def restore(self, state: RowsState) -> None:
        """Let these rows, which are empty and new, stand where others stood; the pool hands out the ids 0 .. num_pages - 1."""
        with self.pool.lock:
            self.pool.allocate(state.num_pages)
            self.batch = Batch.of(state.rows)
        self.seen, self.confirmed = state.seen, state.confirmed
        self.sizes = replace(self.sizes, recording=state.recording)
        self._padding_seen = state.padding_seen

    def held_pages(self) -> list[PageIds]:
        """Return the page ids that the rows hold (see PagePool.register)."""
        return [*self.batch.pages, *self._leaving]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy that holds the same pages, which never change."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        rest = {**vars(self), "batch": NO_ROWS, "step": None, "_leaving": ()}
        vars(copied).update(copy.deepcopy(rest, memo), batch=self.batch)
        copied.pool.register(copied)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """Leave the last step out: it refers to tensors of this process."""
        return {**vars(self), "step": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Register as an owner again: the pool may be another one here."""
        vars(self).update(state)
        self.pool.register(self)

    def check_integrity(self) -> None:
        """Raise ValueError unless the pool knows the pages that the rows hold, and lengths add up."""
        self.pool.check_integrity()
        most = max((max(pages) for pages in self.batch.pages if pages), default=-1)
        for layer, store in self.stores.items():
            if store.pages.capacity <= most:
                raise ValueError(f"layer {layer} has no room for a page of the block table")
        for index, (row, held) in enumerate(zip(self.rows, self.lengths(), strict=True)):
            if held != max(0, self.seen - row.padding + row.unseen):
                raise ValueError(
                    f"row {index} holds {held} tokens, expected {self.seen - row.padding}"
                )
            slots = self.sizes.kept + 2 * self.sizes.page_size  # past recording may just have ended
            if row.exact > slots:
                raise ValueError(f"row {index} has {row.exact} exact tokens in {slots} slots")
            if row.dropped > self.sizes.out_of_sight(self.seen - row.padding):
                raise ValueError(f"row {index} has given back a page that its next query can see")
