"""Columns of a table about what is found again in contexts of 8,192 tokens, beside KL."""

from collections.abc import Sequence
from typing import Any

from kv_hf.evaluation.retrieval.rate import Rate, newest_rows, rates

LONG = 8192  # tokens of a context that rates and drift are reported of
# task -> column
RECALLED = {"single": "needle found at 8k", "copy": "list copied at 8k"}


class Recall:
    """What is found again in contexts of 8,192 tokens of one model: columns of a table.

    Attributes:
        heads: of the tasks of RECALLED that were asked; none where none was.
        rows: behind the rates of these tasks.
    """

    def __init__(self, rows: Sequence[dict[str, Any]], model: str) -> None:
        found = rates(rows, LONG)
        self._rates = {key[1:]: rate for key, rate in found.items() if key[0] == model}
        self._tasks = [task for task in RECALLED if any(task == asked for asked, _ in self._rates)]
        self.heads = [RECALLED[task] for task in self._tasks]
        self.rows = [
            row
            for row in newest_rows(rows)
            if row["model"] == model and row["length"] == LONG and row["task"] in self._tasks
        ]

    def cells(self, cache: str) -> list[str]:
        """Return the rates of a cache with their 95 % intervals."""
        return [rate_cell(self._rates.get((task, cache))) for task in self._tasks]

    def words(self, cache: str) -> str:
        """Return the rates of a cache in one cell."""
        shown = zip(self._tasks, self.cells(cache), strict=True)
        return ", ".join(f"`{task}` {cell}" for task, cell in shown if cell != "-") or "-"


def rate_cell(rate: Rate | None) -> str:
    """Return a rate with its 95 % interval, in percent; a dash without one."""
    if rate is None:
        return "-"
    low, high = rate.interval()
    return f"{100 * rate.share:.0f} % ({100 * low:.0f} to {100 * high:.0f})"
