"""What an append or a crop does to each row, worked out without changing anything.

A row's real tokens lie, in order, in these places:

    [ sinks: first `sink_tokens` ][ dropped pages ][ sealed pages ][ tail: open, exact ]
      exact window, slots 0 ..      given back       page ids        exact window, behind the sinks

Pages are dropped in sliding groups only: as soon as no later query can see a token of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import CacheMismatchError
from .step import Row, RowStep


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

    @property
    def held(self) -> int:
        """Exact tokens that are never sealed as long as the row does not grow."""
        return self.sink_tokens + self.recent_tokens

    @property
    def slots(self) -> int:
        """Exact tokens that a row's window has room for; a page more while past recording is on."""
        return self.held + (2 if self.recording else 1) * self.page_size

    def tokens(self, row: Row) -> int:
        """Return the real tokens of a row, dropped ones included."""
        return row.exact + (row.dropped + len(row.pages)) * self.page_size

    def out_of_sight(self, padding: int, seen: int) -> int:
        """Return how many pages of a row, from its first on, no query at column `seen` or later can see."""
        if self.window is None:
            return 0
        return max(0, seen - self.window + 1 - padding - self.sink_tokens) // self.page_size


@dataclass(frozen=True)
class RowPlan:
    """An append to one row: what it does, how many page ids it takes, and what the row then holds.

    Attributes:
        step: the step, still without page ids.
        first, last: pages to seal before and behind the append.
        padding: columns of padding afterwards.
        dropped: pages that are dropped when the step ends.
        ahead: tokens that the row then still holds beyond the columns seen.
    """

    step: RowStep
    first: int
    last: int
    padding: int
    dropped: int
    ahead: int


def plan_append(
    sizes: RowSizes, index: int, row: Row, seen: int, q_len: int, confirmed: int
) -> RowPlan:
    """Plan the append of `q_len` columns to `row`.

    Behind the append every full page is sealed at once. While past recording is on, tokens may be taken
    back: then only confirmed ones are sealed, before the append, and others when the window would overflow.

    Args:
        index: of the row in the batch.
        row: the row as it is found.
        seen: columns before the append.
        confirmed: columns that a crop has left standing (past recording).
    """
    seen_after = seen + q_len
    padding = min(row.padding, seen_after)
    skip = max(0, padding - seen, min(row.ahead, q_len))
    new = q_len - skip
    first = 0
    if sizes.recording:
        doubtful = min(row.exact, max(0, seen - max(confirmed, row.padding)))
        first = max(0, row.exact - doubtful - sizes.held) // sizes.page_size
    exact = row.exact - first * sizes.page_size
    if sizes.recording:
        last = max(0, -(-(exact + new - sizes.slots) // sizes.page_size))
    else:
        last = max(0, exact + new - sizes.held) // sizes.page_size
    before = row.dropped + len(row.pages) + first
    horizon = min(seen_after, confirmed) if sizes.recording else seen_after
    dropped = max(row.dropped, min(sizes.out_of_sight(padding, horizon), before + last))
    passed = max(0, dropped - before)
    after = exact + new - last * sizes.page_size
    step = RowStep(index, exact, after, skip, new, passed=passed)
    return RowPlan(step, first, last - passed, padding, dropped, max(0, row.ahead - q_len))


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
