"""Rows of a group as tensors that kernels read. Changes no row."""

from collections.abc import Sequence

import torch

from ..spec import TABLE_DTYPE
from .step import Row, TableView


def block_table(rows: Sequence[Row]) -> torch.Tensor:
    """Return the page ids of `rows` as [rows, most pages of a row], int32, filled up with 0."""
    width = max((len(row.pages) for row in rows), default=0)
    table = [list(row.pages) + [0] * (width - len(row.pages)) for row in rows]
    return torch.tensor(table, dtype=TABLE_DTYPE).reshape(len(rows), width)


class Tables:
    """Makes views of rows; pages change once per page_size tokens: between two changes the same table is handed out."""

    def __init__(self) -> None:
        self._last: tuple[tuple[tuple[int, ...], ...], torch.Tensor, torch.Tensor] | None = None

    def forget(self) -> None:
        """Drop the last table."""
        self._last = None

    def view(self, rows: Sequence[Row], offset: int, page_size: int) -> TableView:
        """Return where the tokens of `rows` lie, as tensors on the CPU.

        Dropped pages are left out: a kernel that knows the sliding window reads the pages behind them as if they
        followed the sinks. That hides the sinks too, as the first page held begins in or before the window.
        """
        pages = tuple(row.pages for row in rows)
        last = self._last
        if last is None or last[0] != pages:
            counts = torch.tensor([len(row.pages) for row in rows], dtype=TABLE_DTYPE)
            self._last = last = (pages, block_table(rows), counts)
        skipped = [row.padding + row.dropped * page_size - offset for row in rows]
        return TableView(
            block_table=last[1],
            num_pages=last[2],
            exact_lens=torch.tensor([row.exact for row in rows], dtype=TABLE_DTYPE),
            padding=torch.tensor(skipped, dtype=TABLE_DTYPE),
            offset=offset,
        )
