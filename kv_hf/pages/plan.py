"""Plans of appends and crops, row by row, made without changing anything.

A row's real tokens lie, in order, in these places:

    [ sinks: first `sink_tokens` ][ dropped pages ][ sealed pages ][ tail: open, exact ]
      exact window, slots 0 ..      given back       page ids        exact window, behind the sinks

Pages are dropped in sliding groups only: as soon as no later query can see a token of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..errors import CacheMismatchError
from .batch import Batch, Numbers
from .step import PageIds, Row, RowStep


@dataclass(frozen=True)
class RowSizes:
    """The numbers that decide where the tokens of a row lie.

    Attributes:
        page_size, sink_tokens, recent_tokens: as in CacheConfig.
        window: tokens that a query sees, itself included (sliding windows); None for all.
        recording: whether tokens may be taken back (past recording), so that only confirmed ones are sealed.
    """

    page_size: int
    sink_tokens: int
    recent_tokens: int
    window: int | None = None
    recording: bool = False

    @cached_property
    def held(self) -> int:
        """Exact tokens that are never sealed as long as the row does not grow."""
        return self.sink_tokens + self.recent_tokens

    @cached_property
    def slots(self) -> int:
        """Exact tokens that a row's window has room for; a page more while past recording is on."""
        return self.held + (2 if self.recording else 1) * self.page_size

    def tokens(self, row: Row) -> int:
        """Return the real tokens of a row, dropped ones included."""
        return row.exact + (row.dropped + len(row.pages)) * self.page_size

    def all_tokens(self, batch: Batch) -> Numbers:
        """Return [rows], the real tokens of each row, dropped ones included."""
        return batch.exact + (batch.dropped + batch.counts) * self.page_size

    def out_of_sight(self, padding: int, seen: int) -> int:
        """Return how many pages of a row, from its first on, no query at column `seen` or later can see."""
        if self.window is None:
            return 0
        return max(0, seen - self.window + 1 - padding - self.sink_tokens) // self.page_size


@dataclass(frozen=True, eq=False)
class AppendPlan:
    """An append to all rows: what it does, how many page ids it takes, and what the rows then hold; arrays [rows].

    Attributes:
        padding, dropped, ahead: as in Row, behind the step.
        exact_before, exact_after, skip, new, passed: as in RowStep.
        first, last: pages to seal before and behind the append.
        plain: the append adds its tokens to the window of every row, and does nothing else.
    """

    padding: Numbers
    dropped: Numbers
    ahead: Numbers
    exact_before: Numbers
    exact_after: Numbers
    skip: Numbers
    new: Numbers
    passed: Numbers
    first: Numbers
    last: Numbers
    plain: bool = False

    @cached_property
    def num_pages(self) -> int:
        """Page ids that the append takes."""
        return 0 if self.plain else int(self.first.sum() + self.last.sum())

    @cached_property
    def exact_read(self) -> Numbers:
        """[rows], exact tokens that the forward reads, its own included."""
        return self.exact_after if self.plain else self.exact_before + self.new

    def after(self, before: Batch) -> Batch:
        """Return the rows behind a plain append to `before`: they hold the pages that they held."""
        rows = replace(before, exact=self.exact_after)
        vars(rows)["counts"] = before.counts
        return rows

    def steps(self, first: Sequence[PageIds], last: Sequence[PageIds]) -> tuple[RowStep, ...]:
        """Return the step of each row, whose pages are named `first` and `last`."""
        columns = (self.exact_before, self.exact_after, self.skip, self.new, self.passed)
        numbers = zip(*(column.tolist() for column in columns), strict=True)
        return tuple(
            RowStep(index, before, after, skip, new, sealed, None, sealed_first, passed)
            for index, (sealed_first, sealed, (before, after, skip, new, passed)) in enumerate(
                zip(first, last, numbers, strict=True)
            )
        )


def plan_append(sizes: RowSizes, batch: Batch, seen: int, q_len: int, confirmed: int) -> AppendPlan:
    """Plan the append of `q_len` columns to all rows of `batch`.

    Behind the append every full page is sealed at once. While past recording is on, tokens may be taken
    back: then only confirmed ones are sealed, before the append, and others when the window would overflow.

    Args:
        batch: the rows as they are found.
        seen: columns before the append.
        confirmed: columns that a crop has left standing (past recording).
    """
    if sizes.window is None and not sizes.recording and _grows_alike(sizes, batch, seen, q_len):
        nothing = np.zeros_like(batch.exact)
        plain = dict.fromkeys(("ahead", "skip", "passed", "first", "last"), nothing)
        return AppendPlan(
            padding=batch.padding,
            dropped=batch.dropped,
            exact_before=batch.exact,
            exact_after=batch.exact + q_len,
            new=nothing + q_len,
            plain=True,
            **plain,
        )
    size, seen_after = sizes.page_size, seen + q_len
    padding = np.minimum(batch.padding, seen_after)
    skip = np.maximum(np.maximum(0, padding - seen), np.minimum(batch.ahead, q_len))
    new = q_len - skip
    exact = batch.exact
    if sizes.recording:
        doubtful = np.minimum(exact, np.maximum(0, seen - np.maximum(confirmed, batch.padding)))
        first = np.maximum(0, exact - doubtful - sizes.held) // size
        exact = exact - first * size
        last = np.maximum(0, -((sizes.slots - exact - new) // size))
    else:
        first = np.zeros_like(exact)
        last = np.maximum(0, exact + new - sizes.held) // size
    dropped, passed = batch.dropped, np.zeros_like(exact)
    if sizes.window is not None:
        before = dropped + batch.counts + first
        horizon = min(seen_after, confirmed) if sizes.recording else seen_after
        hidden = np.maximum(0, horizon - sizes.window + 1 - padding - sizes.sink_tokens) // size
        dropped = np.maximum(dropped, np.minimum(hidden, before + last))
        passed = np.maximum(0, dropped - before)
    return AppendPlan(
        padding=padding,
        dropped=dropped,
        ahead=np.maximum(0, batch.ahead - q_len),
        exact_before=exact,
        exact_after=exact + new - last * size,
        skip=skip,
        new=new,
        passed=passed,
        first=first,
        last=last - passed,
    )


def _grows_alike(sizes: RowSizes, batch: Batch, seen: int, q_len: int) -> bool:
    """Say whether all that an append does is to add `q_len` tokens to the window of every row: most steps are such."""
    return (
        int(batch.padding.max()) <= seen
        and not batch.ahead.any()
        and int(batch.exact.max()) + q_len < sizes.held + sizes.page_size
    )


def check_sources(rows: int, sources: Sequence[int]) -> None:
    """Raise CacheMismatchError for an empty selection of `rows` rows, and for a row that does not exist."""
    if not sources:
        raise CacheMismatchError("at least one row must be kept, got an empty selection")
    wrong = [source for source in sources if not -rows <= source < rows]
    if wrong:
        raise CacheMismatchError(f"row index {wrong[0]} is out of range for a batch of {rows} rows")


def plan_rows(
    rows: Sequence[Row], sources: Sequence[int]
) -> tuple[tuple[RowStep, ...], tuple[Row, ...]]:
    """Plan that row i continues the former row `sources[i]`; return the steps and the rows.

    Raises: CacheMismatchError for an empty selection and for a row that does not exist.
    """
    check_sources(len(rows), sources)
    chosen = [source % len(rows) for source in sources]
    steps = tuple(RowStep(source, rows[source].exact, rows[source].exact) for source in chosen)
    return steps, tuple(rows[source] for source in chosen)


def plan_crop(sizes: RowSizes, index: int, row: Row, seen: int) -> tuple[RowStep, Row]:
    """Plan the crop of `row` to `seen` columns; return the step and the row without the pages it loses."""
    kept = max(0, seen - row.padding)
    pages, reopened = row.pages, None
    in_front = sizes.sink_tokens + row.dropped * sizes.page_size
    if kept < in_front + len(pages) * sizes.page_size:
        whole, rest = divmod(max(0, kept - in_front), sizes.page_size)
        if rest:
            reopened = (pages[whole], rest)
        pages = pages[:whole]
    exact = kept - (row.dropped + len(pages)) * sizes.page_size
    step = RowStep(index, row.exact, exact, reopened=reopened)
    return step, Row(min(row.padding, seen), pages, exact, row.dropped)


def crop_fits(sizes: RowSizes, row: Row, seen: int) -> bool:
    """Say whether everything that a query at column `seen` can see of `row` is still held."""
    return row.dropped <= sizes.out_of_sight(row.padding, seen)
