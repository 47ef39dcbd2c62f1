"""What a step does to the rows of a batch, and where a forward then finds its tokens. Decides nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch


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
    """What a step does to one row.

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
    """Where a forward finds its tokens; tensors on the CPU, moved to a device once by `on`.

    Attributes:
        block_table: [rows, max pages of a row], int32; entries past a row's last page are 0.
        num_pages: [rows], int32, sealed pages that the forward reads.
        exact_lens: [rows], int32, tokens in the window, the forward's own included.
        padding: [rows], int32, columns in front of the row's first held token, counted from `offset`.
        offset: columns in front of the first one that the forward may see (sliding windows), else 0.
    """

    block_table: torch.Tensor
    num_pages: torch.Tensor
    exact_lens: torch.Tensor
    padding: torch.Tensor
    offset: int = 0
    _moved: dict[torch.device, "TableView"] = field(default_factory=dict, compare=False)

    def on(self, device: torch.device) -> "TableView":
        """Return this view with its tensors on `device` (moved once, then remembered)."""
        if device == self.block_table.device:
            return self
        if device not in self._moved:
            names = ("block_table", "num_pages", "exact_lens", "padding")
            moved = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
            self._moved[device] = TableView(**moved, offset=self.offset)
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
        passed: Sequence[int] | None = None,
    ) -> "SealJobs | None":
        """Seal `pages` (for each row, in the order of its tokens) behind the sinks; None without any.

        `passed`: for each row, pages behind the sinks that are left out.
        """
        starts = passed or [0] * len(pages)
        jobs = [
            (row, sink_tokens + place * page_size, page)
            for row, (row_pages, start) in enumerate(zip(pages, starts, strict=True))
            for place, page in enumerate(row_pages, start)
        ]
        return cls(torch.tensor(jobs, dtype=torch.int32)) if jobs else None

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the jobs on `device` (moved once, then remembered)."""
        if device == self.jobs.device:
            return self.jobs
        if device not in self._moved:
            self._moved[device] = self.jobs.to(device, non_blocking=True)
        return self._moved[device]


@dataclass(frozen=True)
class Step:
    """One change of the group, shared by all its layers."""

    op: tuple
    rows: tuple[RowStep, ...]
    seen_before: int
    seen_after: int
    rebuild: bool  # the window cannot be appended to in place: the forward's own tokens are sealed
    num_ids: int  # ids handed out so far: pages that storage must have room for
    view: TableView | None = None  # append only
    seal_first: SealJobs | None = None  # pages sealed before the new tokens arrive
    seal: SealJobs | None = None  # pages sealed behind them
    reserved: int = 0  # pages that storage shall have room for beyond need
    ahead: int = 0  # pages to make room for where storage grows anyway and memory allows it

    _offsets: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict, compare=False
    )
    _moves: dict[torch.device, torch.Tensor] = field(default_factory=dict, compare=False)

    def offsets(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return exact_before and skip of all rows, two int32 tensors on `device` (made once)."""
        if device not in self._offsets:
            both = torch.tensor([[row.exact_before, row.skip] for row in self.rows]).int()
            both = both.to(device, non_blocking=True)
            self._offsets[device] = (both[:, 0].contiguous(), both[:, 1].contiguous())
        return self._offsets[device]

    def moves(self, device: torch.device, rows: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return (rows that change, the former rows that they continue), int64 tensors on `device` (made once).

        The first is None where the batch had another number of rows: then all rows are new.
        """
        if device not in self._moves:
            pairs = [(index, row.source) for index, row in enumerate(self.rows)]
            if len(pairs) == rows:
                pairs = [pair for pair in pairs if pair[0] != pair[1]]
            moved = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T.contiguous()
            self._moves[device] = moved.to(device, non_blocking=True)
        targets, sources = self._moves[device]
        return (targets if len(self.rows) == rows else None), sources

    @cached_property
    def uniform(self) -> tuple[int, int, int] | None:
        """(exact_before, skip, new) where they are the same for all rows, else None."""
        first = self.rows[0]
        same = (first.exact_before, first.skip, first.new)
        alike = all((row.exact_before, row.skip, row.new) == same for row in self.rows)
        return same if alike else None
