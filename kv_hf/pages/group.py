"""Rows of a batch and the pages that they hold, planned once per forward for all layers of a group.

A group is a set of layers that see the same tokens; they share rows, page ids and reference counts, and
each owns its storage. A row's real tokens lie, in order, in three places:

    [ sinks: first `sink_tokens` ][ sealed pages of page_size tokens ][ tail: open, exact ]
      exact window, slots 0 ..      page ids in `Row.pages`             exact window, behind the sinks

Every change (append, reorder of rows, crop) is a step. The first layer that asks for it opens the step and
changes the bookkeeping; the others join the same step and follow with their own tensors. A forward reads
as sealed exactly the pages that were full when it began: its own new tokens are exact for all its queries.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from ..errors import CacheMismatchError, InterruptedForwardError
from ..spec import TABLE_DTYPE, reserved_pages, sealed_pages
from .pool import PagePool
from .step import Row, RowStep, SealJobs, Step, TableView


class PageGroup:
    """Bookkeeping of the layers that share one block table.

    Args:
        page_size, sink_tokens, recent_tokens, max_pages, reserve_tokens: as in CacheConfig.
    """

    def __init__(
        self,
        page_size: int,
        sink_tokens: int,
        recent_tokens: int,
        max_pages: int | None,
        reserve_tokens: int = 0,
    ) -> None:
        self.page_size = page_size
        self.sink_tokens = sink_tokens
        self.recent_tokens = recent_tokens
        self.pool = PagePool(max_pages)
        self.reserve = sealed_pages(
            reserve_tokens,
            page_size=page_size,
            sink_tokens=sink_tokens,
            recent_tokens=recent_tokens,
        )
        self.recording = False
        self._clear()

    def _clear(self) -> None:
        self.rows: tuple[Row, ...] = ()
        self.seen = 0
        self.confirmed = 0  # columns that a crop has left standing (past recording)
        self.epoch = 0
        self.step: Step | None = None
        self._joined: set[int] = set()
        self._members: set[int] | None = None
        self._padding_seen: list[int] | None = None
        self._table: tuple[tuple[tuple[int, ...], ...], torch.Tensor, torch.Tensor] | None = None

    @property
    def slots(self) -> int:
        """Exact tokens that a row's window has room for; a page more while past recording is on."""
        pages = 2 if self.recording else 1
        return self.sink_tokens + self.recent_tokens + pages * self.page_size

    def tokens(self, row: Row) -> int:
        """Return the real tokens of a row."""
        return row.exact + len(row.pages) * self.page_size

    def record_past(self) -> None:
        """Turn past recording on: from now on only columns that a crop has left standing are sealed."""
        if not self.recording:
            self.recording, self.confirmed = True, self.seen

    def end_recording(self) -> None:
        """Turn past recording off: full pages are sealed at once again."""
        self.recording = False

    def forget_padding(self) -> None:
        """Drop padding that was observed but not used yet (a forward without any mask follows)."""
        self._padding_seen = None

    def confirm(self) -> None:
        """Declare all columns seen so far final (a crop that removes nothing)."""
        self.confirmed = self.seen

    def reset(self) -> None:
        """Give back all pages and forget rows, lengths and padding."""
        for row in self.rows:
            self.pool.release(row.pages)
        self._clear()
        self.recording = False

    def needs_padding(self) -> bool:
        """True while some row has no real token yet, so that its padding is still to be learnt."""
        return not self.rows or any(self.tokens(row) == 0 for row in self.rows)

    def observe_padding(self, attention_mask: torch.Tensor) -> None:
        """Learn the left padding from a 2D mask [rows, columns] (0 or False = padding).

        Only rows without a real token are concerned; a mask seen later cannot change stored tokens.
        """
        if attention_mask.ndim == 2 and self.needs_padding():
            padded = attention_mask.to(torch.bool).cumsum(-1) == 0
            self._padding_seen = padded.sum(-1).tolist()

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
        if layer_epoch == self.epoch:
            self._check_all_joined()
            planned, rows = self._plan(op)
            self._commit(planned, rows)
        elif (
            layer_epoch != self.epoch - 1
            or self.step is None
            or self.step.op != op
            or layer in self._joined  # it joined, but its own work on this step failed
        ):
            raise InterruptedForwardError(
                f"layer {layer} cannot {op[0]} here: it has taken part in {layer_epoch} of {self.epoch} steps of "
                "this cache. An earlier forward stopped half-way, or layers were changed one without the others; "
                "call reset() and start again"
            )
        self._joined.add(layer)
        assert self.step is not None
        return self.step

    def _check_all_joined(self) -> None:
        if self._members is None and self.epoch == 1:
            self._members = set(self._joined)
        missing = (self._members or set()) - self._joined
        if missing:
            raise InterruptedForwardError(
                f"the last step of this cache stopped before layers {sorted(missing)} took part in it; "
                "the cache cannot be used further: call reset() and start again"
            )

    def _plan(self, op: tuple) -> tuple[Step, tuple[Row, ...]]:
        if op[0] == "append":
            return self._plan_append(op, op[1], op[2])
        if op[0] == "rows":
            return self._plan_rows(op, op[1:])
        return self._plan_crop(op, op[1])

    def _commit(self, step: Step, rows: tuple[Row, ...]) -> None:
        self.rows, self.seen, self.step = rows, step.seen_after, step
        if step.op[0] == "crop":
            self.confirmed = step.seen_after
        self.epoch += 1
        self._joined = set()

    def _plan_append(self, op: tuple, batch: int, q_len: int) -> tuple[Step, tuple[Row, ...]]:
        before, plans = self._plan_rows_of_append(batch, q_len)
        seen_after = self.seen + q_len
        ids = iter(self.pool.allocate(sum(first + last for _, first, last in plans)))
        steps, found, rows = [], [], []
        for row, (plan, first, last) in zip(before, plans, strict=True):
            sealed_first = tuple(next(ids) for _ in range(first))
            sealed = tuple(next(ids) for _ in range(last))
            steps.append(replace(plan, sealed_first=sealed_first, sealed=sealed))
            padding = min(row.padding, seen_after)
            found.append(Row(padding, row.pages + sealed_first, plan.exact_before + plan.new))
            rows.append(Row(padding, row.pages + sealed_first + sealed, plan.exact_after))
        rebuild = any(plan.sealed for plan in steps) or max(r.exact for r in found) > self.slots
        first_jobs, jobs = (
            SealJobs.build(pages, self.page_size, self.sink_tokens)
            for pages in ([row.sealed_first for row in steps], [row.sealed for row in steps])
        )
        step = Step(
            op,
            tuple(steps),
            self.seen,
            seen_after,
            rebuild,
            self.pool.num_ids,
            self.view(found),
            first_jobs,
            jobs,
            reserved_pages(batch, self.reserve, self.pool.max_pages),
        )
        return step, tuple(rows)

    def check_append(self, batch: int, q_len: int) -> None:
        """Raise what appending `q_len` columns to `batch` rows would raise; change nothing."""
        _, plans = self._plan_rows_of_append(batch, q_len)
        self.pool.check_room(sum(first + last for _, first, last in plans))

    def _plan_rows_of_append(
        self, batch: int, q_len: int
    ) -> tuple[tuple[Row, ...], list[tuple[RowStep, int, int]]]:
        """Return the rows as they are found, and for each its step and the pages to seal before and behind."""
        if batch < 1:
            raise CacheMismatchError("keys must have at least one row, got a batch of 0")
        if self.rows and batch != len(self.rows):
            raise CacheMismatchError(
                f"this cache holds a batch of {len(self.rows)} rows, got keys for {batch}; use a new cache, or "
                "reset() this one, for another batch size"
            )
        before = self._padded_rows(batch)
        seen_after = self.seen + q_len
        plans = []
        for index, row in enumerate(before):
            skip = max(0, min(row.padding, seen_after) - self.seen)
            first, last = self._pages_to_seal(row, q_len - skip)
            exact = row.exact - first * self.page_size
            run = exact + q_len - skip
            after = run - last * self.page_size
            plans.append((RowStep(index, exact, after, skip, q_len - skip), first, last))
        return before, plans

    def _pages_to_seal(self, row: Row, new: int) -> tuple[int, int]:
        """Return the pages of `row` to seal (before, behind) the append of `new` tokens.

        Behind the append every full page is sealed at once. While past recording is on, tokens may be taken
        back: then only confirmed ones are sealed, before the append, and others when the window would overflow.
        """
        held = self.sink_tokens + self.recent_tokens
        if not self.recording:
            return 0, max(0, row.exact + new - held) // self.page_size
        doubtful = min(row.exact, max(0, self.seen - max(self.confirmed, row.padding)))
        first = max(0, row.exact - doubtful - held) // self.page_size
        over = row.exact - first * self.page_size + new - self.slots
        return first, max(0, -(-over // self.page_size))

    def _padded_rows(self, batch: int) -> tuple[Row, ...]:
        """Return the rows as the step finds them, with the padding that was learnt since."""
        known = self._padding_seen
        usable = known is not None and len(known) == batch
        rows = []
        for index in range(batch):
            row = self.rows[index] if self.rows else Row(0, (), 0)
            if self.tokens(row) == 0:
                row = replace(row, padding=max(self.seen, known[index] if usable and known else 0))
            rows.append(row)
        return tuple(rows)

    def _plan_rows(self, op: tuple, sources: Sequence[int]) -> tuple[Step, tuple[Row, ...]]:
        if not sources:
            raise CacheMismatchError("at least one row must be kept, got an empty selection")
        wrong = [source for source in sources if not -len(self.rows) <= source < len(self.rows)]
        if wrong:
            raise CacheMismatchError(
                f"row index {wrong[0]} is out of range for a batch of {len(self.rows)} rows"
            )
        rows = tuple(self.rows[source] for source in sources)
        # a row that is continued once keeps its pages as they are: most rows of a beam search, in most steps
        uses = Counter(source % len(self.rows) for source in sources)
        for index, row in enumerate(self.rows):
            for _ in range(uses[index] - 1):
                self.pool.share(row.pages)
        for index, row in enumerate(self.rows):
            if not uses[index]:
                self.pool.release(row.pages)
        steps = tuple(
            RowStep(source % len(self.rows), row.exact, row.exact)
            for source, row in zip(sources, rows, strict=True)
        )
        self._padding_seen = None
        return Step(op, steps, self.seen, self.seen, False, self.pool.num_ids), rows

    def _plan_crop(self, op: tuple, count: int) -> tuple[Step, tuple[Row, ...]]:
        seen = max(0, self.seen - count)
        steps, rows = [], []
        for index, row in enumerate(self.rows):
            kept = max(0, seen - row.padding)
            pages, reopened = row.pages, None
            paged = len(pages) * self.page_size
            if kept < self.sink_tokens + paged:
                behind_sinks = max(0, kept - self.sink_tokens)
                whole, rest = divmod(behind_sinks, self.page_size)
                if rest:
                    reopened = (pages[whole], rest)
                self.pool.release(pages[whole:])
                pages = pages[:whole]
            exact = kept - len(pages) * self.page_size
            steps.append(RowStep(index, row.exact, exact, reopened=reopened))
            rows.append(Row(min(row.padding, seen), pages, exact))
        if seen == 0:
            self._padding_seen = None
        return Step(op, tuple(steps), self.seen, seen, False, self.pool.num_ids), tuple(rows)

    # -- reading ---------------------------------------------------------------------------------------

    def view(self, rows: Sequence[Row]) -> TableView:
        """Return where the tokens of `rows` lie, as tensors on the CPU.

        Pages change once per page_size tokens: between two changes the same table is handed out again.
        """
        pages = tuple(row.pages for row in rows)
        if self._table is None or self._table[0] != pages:
            counts = torch.tensor([len(row.pages) for row in rows], dtype=TABLE_DTYPE)
            self._table = (pages, self.block_table(rows), counts)
        return TableView(
            block_table=self._table[1],
            num_pages=self._table[2],
            exact_lens=torch.tensor([row.exact for row in rows], dtype=TABLE_DTYPE),
            padding=torch.tensor([row.padding for row in rows], dtype=TABLE_DTYPE),
        )

    def block_table(self, rows: Sequence[Row]) -> torch.Tensor:
        """Return the page ids of `rows` as [rows, most pages of a row], int32, filled up with 0."""
        width = max((len(row.pages) for row in rows), default=0)
        table = [list(row.pages) + [0] * (width - len(row.pages)) for row in rows]
        return torch.tensor(table, dtype=TABLE_DTYPE).reshape(len(rows), width)

    def check_integrity(self) -> None:
        """Raise ValueError unless reference counts equal what the rows hold and lengths add up."""
        self.pool.check_integrity(row.pages for row in self.rows)
        for index, row in enumerate(self.rows):
            if self.tokens(row) != max(0, self.seen - row.padding):
                raise ValueError(
                    f"row {index} holds {self.tokens(row)} tokens, expected {self.seen - row.padding}"
                )
            if row.exact > self.slots:
                raise ValueError(f"row {index} has {row.exact} exact tokens in {self.slots} slots")
