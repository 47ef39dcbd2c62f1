"""The result of planning a step: changes of rows, and the places of a forward's tokens. Decides nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .moved import moved

PageIds = tuple[int, ...]
Grown = tuple[PageIds, PageIds]  # what a row held before and after pages were appended to it


@dataclass(frozen=True)
class Row:
    """One sequence of the batch.

    Attributes:
        padding: columns of left padding.
        pages: ids of the sealed pages that it holds, in order.
        exact: tokens in the exact window.
        dropped: sealed pages in front of `pages` that left the sliding window and were given back.
        ahead: columns beyond those seen up to the last token that it holds (a prefix that was shared, until the first
            forward has reached its end).
    """

    padding: int
    pages: tuple[int, ...]
    exact: int
    dropped: int = 0
    ahead: int = 0


@dataclass(frozen=True)
class RowStep:
    """The change of one row in a step.

    Attributes:
        source: index of the row that this row continues.
        exact_before: tokens in the window when the new ones arrive (without those of `sealed_first`).
        sealed_first: ids of pages sealed before the new tokens are appended (past recording only).
        skip: leading columns of the new tokens that are padding, or are held already.
        new: real tokens appended.
        sealed: ids of the pages sealed behind the step's own forward, in order.
        exact_after: tokens in the window when the step ends.
        passed: pages behind the step's forward that no later query can see: not sealed, in front of `sealed`.
        reopened: (page id, tokens) to decode back into the window (crop only), or None.
    """

    source: int
    exact_before: int
    exact_after: int
    skip: int = 0
    new: int = 0
    sealed: tuple[int, ...] = ()
    reopened: tuple[int, int] | None = None
    sealed_first: tuple[int, ...] = ()
    passed: int = 0


@dataclass(frozen=True)
class TableView:
    """The places of a forward's tokens; tensors on the CPU, moved to a device once by `on`.

    Attributes:
        block_table: [rows, max pages of a row], int32; entries past a row's last page are 0, or of a later forward.
        num_pages: [rows], int32, sealed pages that the forward reads.
        exact_lens: [rows], int32, tokens in the window, the forward's own included.
        padding: [rows], int32, columns in front of the row's first held token, counted from `offset`.
        offset: columns in front of the first one that the forward may see (sliding windows), else 0.
        starts, skips: [rows], int32, first free slot of the window, and leading new tokens that are not appended.
        tables: the block table by device, as far as it was moved.
    """

    block_table: torch.Tensor
    num_pages: torch.Tensor
    exact_lens: torch.Tensor
    padding: torch.Tensor
    offset: int = 0
    starts: torch.Tensor | None = None
    skips: torch.Tensor | None = None
    tables: dict[torch.device, torch.Tensor] = field(default_factory=dict, compare=False)
    _lengths: torch.Tensor | None = field(default=None, compare=False)
    _moved: dict[torch.device, "TableView"] = field(default_factory=dict, compare=False)

    @classmethod
    def build(
        cls,
        tables: dict[torch.device, torch.Tensor],
        columns: Sequence[npt.ArrayLike],
        rows: int,
        offset: int,
    ) -> "TableView":
        """Return the view of `tables` with its lengths side by side, so that one copy to a device moves all of them.

        Args:
            tables: the block table [rows, max pages], int32, by device; the CPU's at least.
            columns: num_pages, exact_lens, padding and, for an append, starts and skips; each [rows], integers.
        """
        aligned = -(-rows // 4) * 4  # each begins at a multiple of 16 bytes
        lengths = np.zeros((len(columns), aligned), dtype=np.int32)
        for place, column in enumerate(columns):
            lengths[place, :rows] = column
        packed = torch.from_numpy(lengths)
        return cls._unpacked(tables, torch.device("cpu"), packed, rows, offset)

    @classmethod
    def _unpacked(
        cls,
        tables: dict[torch.device, torch.Tensor],
        device: torch.device,
        packed: torch.Tensor,
        rows: int,
        offset: int,
    ) -> "TableView":
        num_pages, exact_lens, padding, *rest = packed[:, :rows].unbind(0)
        starts, skips = rest if rest else (None, None)
        table = tables[device]
        return cls(table, num_pages, exact_lens, padding, offset, starts, skips, tables, packed)

    def before(self, seen: int) -> "TableView":
        """Return where the tokens of a layer lie that has seen `seen` columns and has not appended this forward's."""
        assert self.starts is not None
        padding = self.padding.clamp(max=seen - self.offset)
        return TableView(
            self.block_table, self.num_pages, self.starts, padding, self.offset, tables=self.tables
        )

    def on(self, device: torch.device) -> "TableView":
        """Return this view with its tensors on `device` (moved once, then remembered)."""
        if device == self.block_table.device:
            return self
        if device not in self._moved:
            if device not in self.tables:
                self.tables[device] = moved(self.block_table, device)
            rows = self.num_pages.shape[0]
            packed = self._lengths
            if packed is None:
                packed = torch.stack([self.num_pages, self.exact_lens, self.padding])
            self._moved[device] = self._unpacked(
                self.tables, device, moved(packed, device), rows, self.offset
            )
        return self._moved[device]


@dataclass(frozen=True)
class SealJobs:
    """Pages to seal: [n, 3] int32 of (row, first slot of the row's run, page id), on the CPU."""

    jobs: torch.Tensor
    _moved: dict[torch.device, torch.Tensor] = field(default_factory=dict, compare=False)

    @classmethod
    def build(
        cls,
        pages: Sequence[Sequence[int]],
        page_size: int,
        sink_tokens: int,
        passed: Sequence[int] | npt.NDArray[np.int64] | None = None,
    ) -> "SealJobs | None":
        """Seal `pages` (for each row, in the order of its tokens) behind the sinks; None without any.

        `passed`: for each row, pages behind the sinks that are left out.
        """
        jobs = [
            (row, sink_tokens + place * page_size, page)
            for row, row_pages in enumerate(pages)
            if row_pages
            for place, page in enumerate(row_pages, 0 if passed is None else int(passed[row]))
        ]
        return cls(torch.tensor(jobs, dtype=torch.int32)) if jobs else None

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the jobs [n, 3] on `device` (moved once, then remembered)."""
        if device == self.jobs.device:
            return self.jobs
        if device not in self._moved:
            self._moved[device] = moved(self.jobs, device)
        return self._moved[device]


@dataclass(frozen=True, eq=False)
class Step:
    """One change of the group, shared by all its layers.

    Attributes:
        seen_before, seen_after: columns before and behind the step.
        num_ids: ids handed out so far: pages that storage must have room for.
        make_rows: returns what the step does to each row.
        rebuild: pages are sealed or passed behind the forward, or the window has no room for its tokens.
        moves_rest: tokens stay in the window that lie behind those that leave it.
        fits: the window has room for the new tokens.
        view: what the forward reads (append only).
        seal_first, seal: pages sealed before and behind the new tokens.
        reserved: pages that storage shall have room for beyond need.
        ahead: pages to make room for where storage grows anyway and memory allows it.
    """

    op: tuple
    seen_before: int
    seen_after: int
    num_ids: int
    make_rows: Callable[[], tuple[RowStep, ...]]
    rebuild: bool = False
    moves_rest: bool = False
    fits: bool = True
    view: TableView | None = None
    seal_first: SealJobs | None = None
    seal: SealJobs | None = None
    reserved: int = 0
    ahead: int = 0

    _moves: dict[torch.device, torch.Tensor] = field(default_factory=dict, compare=False)
    _indices: dict[Any, torch.Tensor] = field(default_factory=dict, compare=False)

    @cached_property
    def rows(self) -> tuple[RowStep, ...]:
        """Return the change of each row; made at the first call."""
        return self.make_rows()

    def moves(self, device: torch.device, rows: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return (rows that change, the former rows that they continue), [n] and int64 each, on `device` (made once).

        The first is None where the batch had another number of rows: then all rows are new.
        """
        if device not in self._moves:
            pairs = [(index, row.source) for index, row in enumerate(self.rows)]
            if len(pairs) == rows:
                pairs = [pair for pair in pairs if pair[0] != pair[1]]
            table = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T.contiguous()
            self._moves[device] = moved(table, device)
        targets, sources = self._moves[device]
        return (targets if len(self.rows) == rows else None), sources

    def index(
        self, name: Any, device: torch.device, make: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Return a tensor of this step [any shape], the same for all layers, on `device`; `make` makes it on the CPU, once."""
        key = (name, device)
        if key not in self._indices:
            self._indices[key] = moved(make(), device)
        return self._indices[key]
