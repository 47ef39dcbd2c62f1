"""The rows of a batch at one moment, as arrays: what a step costs in Python hardly grows with the batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from .step import Row

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of a batch; nothing in it is changed once it is made.

    Attributes:
        padding, exact, dropped, ahead: [rows], as in Row.
        pages: page ids of each row.
    """

    padding: Numbers
    exact: Numbers
    dropped: Numbers
    ahead: Numbers
    pages: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "Batch":
        """Return the batch of `rows`."""
        numbers = [(row.padding, row.exact, row.dropped, row.ahead) for row in rows]
        padding, exact, dropped, ahead = np.array(numbers, dtype=np.int64).reshape(len(rows), 4).T
        batch = cls(padding, exact, dropped, ahead, tuple(row.pages for row in rows))
        vars(batch)["rows"] = tuple(rows)
        return batch

    def __len__(self) -> int:
        return len(self.pages)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The rows, one object each; made when somebody asks."""
        columns = (self.padding, self.exact, self.dropped, self.ahead)
        numbers = zip(*(column.tolist() for column in columns), strict=True)
        return tuple(
            Row(padding, pages, exact, dropped, ahead)
            for pages, (padding, exact, dropped, ahead) in zip(self.pages, numbers, strict=True)
        )

    @cached_property
    def counts(self) -> Numbers:
        """[rows], sealed pages that each row holds."""
        return np.fromiter(map(len, self.pages), np.int64, len(self.pages))


NO_ROWS = Batch.of(())
