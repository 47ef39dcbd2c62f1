"""Growth of storage beyond the need of a step, if the length of the text is known.

Growing copies a layer's pages, and on a GPU it costs calls to the driver. Whoever knows the length of the text (generate(),
or PagedCache.expect_length) has storage grow in few large steps; a text that ends early leaves a bounded part unused.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..row_pages import RowPages, page_capacity, page_peaks
from .batch import Batch
from .plan import RowSizes
from .pool import PagePool

LEAST_AHEAD = 1024  # columns
MOST_AHEAD = 4096


@dataclass(frozen=True)
class Expected:
    """Columns of a text, padding included: those of its prompt, and most of the whole text."""

    prompt: int
    end: int

    def target(self, seen: int) -> int:
        """Return the columns to make room for where `seen` columns, or the prompt, need it; never beyond the end.

        As many columns ahead as there are, at least LEAST_AHEAD and at most MOST_AHEAD, or an eighth of those that
        there are where that is more.
        """
        sure = max(seen, min(self.prompt, self.end))
        ahead = max(LEAST_AHEAD, min(sure, MOST_AHEAD), sure // 8)
        return max(seen, min(self.end, sure + ahead))


def pages_to_come(sizes: RowPages, rows: Sequence[tuple[int, int]], new: int) -> int:
    """Return the most page ids that rows take beyond those that they hold, while each grows by `new` tokens.

    Args:
        rows: (tokens, pages held) of each row.
    """
    if sizes.window is None:
        return sum(max(0, sizes.sealed(tokens + new) - held) for tokens, held in rows)
    most = page_peaks(sizes, [tokens + new for tokens, _ in rows], new)[-1][1]
    return max(0, most - sum(held for _, held in rows))


class RoomAhead:
    """The number of pages that the storage of a group makes room for when it grows.

    Attributes:
        expected: how long the text will be; None where nobody has said it: then storage grows as the text does.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.expected: Expected | None = None
        self.clear()

    def expect(self, text: Expected) -> None:
        """Make room for a text of this length from now on."""
        self.expected = text

    def clear(self) -> None:
        """Begin with no page."""
        self._aim = 0

    def pages(self, sizes: RowSizes, rows: Batch, seen: int, num_ids: int) -> int:
        """Return the pages to make room for where storage grows anyway; 0 where no length is expected.

        Args:
            batch: the rows as they are behind `seen` columns; of their pages, those that have ids already.
            num_ids: ids that the step needs.
        """
        if self.expected is None:
            return 0
        if num_ids > self._aim:
            new = self.expected.target(seen) - seen
            of_row = RowPages(sizes.page_size, sizes.sink_tokens, sizes.recent_tokens, sizes.window)
            held = list(zip(sizes.all_tokens(rows).tolist(), rows.counts.tolist(), strict=True))
            ids = max(num_ids, self.pool.ids_with(pages_to_come(of_row, held, new)))
            most = self.pool.max_pages
            self._aim = page_capacity(ids if most is None else min(ids, most))
        return self._aim
