"""Block tables of a group on every device that reads them. New pages are written in place. Changes no row."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..spec import TABLE_DTYPE
from .moved import moved, persistent_tensors
from .step import Grown, PageIds, Row

Pages = tuple[PageIds, ...]
CPU = torch.device("cpu")
NO_TABLE = np.zeros((0, 0), dtype=np.int32)


def block_table(rows: Sequence[Row]) -> torch.Tensor:
    """Return the page ids of `rows` as [rows, most pages of a row], int32, filled up with 0."""
    return _table([row.pages for row in rows])


def _table(pages: Sequence[Sequence[int]]) -> torch.Tensor:
    width = max(map(len, pages), default=0)
    table = [[*row, *(0,) * (width - len(row))] for row in pages]
    return torch.tensor(table, dtype=TABLE_DTYPE).reshape(len(pages), width)


class Tables:
    """The block table of the last rows that were shown, on the CPU and where else it was asked for.

    A page that is appended to a row is written into the table that is there: kernels of earlier steps read no further
    than to the pages that the row had. A row that changed otherwise, or a wider table, makes new tensors.
    """

    def __init__(self) -> None:
        self.forget()

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: where a pickle is read, tables are made anew."""
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.forget()

    def forget(self) -> None:
        """Drop the last table."""
        self._pages: Pages | None = None
        self._on: dict[torch.device, torch.Tensor] = {}
        self._host = NO_TABLE  # the memory of the CPU's table

    def show(self, pages: Pages, grown: Mapping[int, Grown]) -> dict[torch.device, torch.Tensor]:
        """Return the table of `pages` by device: [rows, most pages of a row], int32.

        Entries past a row's last page are 0, or pages of a later forward.

        The CPU's table is always there; a view makes those of other devices from it (TableView.on).

        Args:
            grown: row -> its pages before and after an append, for rows that only an append has changed.
        """
        old = self._pages
        if old is pages:
            return self._on
        appended = self._appended(old, pages, grown)
        self._pages = None  # stopped in the middle, the next table is made anew
        with persistent_tensors():
            if appended is None:
                table = _table(pages)
                self._on, self._host = {CPU: table}, table.numpy()
            elif appended:
                self._write(appended, max(map(len, pages)))
        self._pages = pages
        return self._on

    def _write(self, entries: list[tuple[int, int, int]], width: int) -> None:
        """Write (row, place, page id) into the tables, which shall have `width` columns."""
        others = {device: one for device, one in self._on.items() if device != CPU}
        if self._host.shape[1] < width:
            wide = np.zeros((self._host.shape[0], width), dtype=np.int32)
            wide[:, : self._host.shape[1]] = self._host
            self._host = wide
        rows, places, pages = zip(*entries, strict=True)
        self._host[rows, places] = pages
        # always another object: who has renumbered the pages of a table knows it by that (staging.py)
        self._on = {CPU: torch.from_numpy(self._host)}
        if not others:
            return
        columns = torch.tensor((rows, places, pages), dtype=torch.int64)
        for device, table in others.items():
            row, place, page = moved(columns, device).unbind(0)
            self._on[device] = wider = _widened(table, width)[:]
            wider.index_put_((row, place), page.to(TABLE_DTYPE))

    @staticmethod
    def _appended(
        old: Pages | None, pages: Pages, grown: Mapping[int, Grown]
    ) -> list[tuple[int, int, int]] | None:
        """Return (row, place, page id) of what was appended to the rows that were shown last; None for other changes."""
        if old is None or len(old) != len(pages):
            return None
        found = []
        for row, (before, now) in enumerate(zip(old, pages, strict=True)):
            if before is now:
                continue
            known = grown.get(row)
            follows = known is not None and known[0] is before and known[1] is now
            if not follows and now[: len(before)] != before:
                return None
            first = len(before)
            found += [(row, place, page) for place, page in enumerate(now[first:], first)]
        return found


def _widened(table: torch.Tensor, width: int) -> torch.Tensor:
    """Return `table` with at least `width` columns: itself, or a copy with zeros behind."""
    if table.shape[1] >= width:
        return table
    wide = table.new_zeros((table.shape[0], width))
    wide[:, : table.shape[1]] = table
    return wide
