"""What one change of the rows is: the places of a forward's tokens, and the pages that it seals. Decides nothing."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..geometry import Geometry, page_start
from ..read_budget import ReadBudget
from ..spec import TABLE_DTYPE
from .moved import moved, persistent_tensors

PageIds = tuple[int, ...]
Numbers = npt.NDArray[np.int64]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Row:
    """One sequence of the batch.

    Attributes:
        padding: columns of left padding.
        pages: ids of the sealed pages that it holds, in order.
        exact: tokens in the exact window.
        dropped: sealed pages in front of `pages` that left the sliding window and were given back.
        unseen: columns beyond those seen up to the last token that it holds (a prefix that was shared, until the first
            forward has reached its end).
    """

    padding: int
    pages: PageIds
    exact: int
    dropped: int = 0
    unseen: int = 0


def block_table(pages: Sequence[PageIds]) -> torch.Tensor:
    """Return the page ids of rows as [rows, most pages of a row], int32, filled up with 0."""
    width = max(map(len, pages), default=0)
    table = [[*row, *(0,) * (width - len(row))] for row in pages]
    return torch.tensor(table, dtype=TABLE_DTYPE, device="cpu").reshape(len(pages), width)


class Tables:
    """The block table of the last rows, on the CPU and on every device that asked for it.

    A page that is appended to a row is written into the CPU's table: kernels of earlier steps read no further than to the
    pages that the row had. A row that changed otherwise makes a new table.
    """

    def __init__(self) -> None:
        self._last: tuple[tuple[PageIds, ...], dict[torch.device, torch.Tensor]] = (), {}

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: where a pickle is read, tables are made anew."""
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Tables.__init__(self)

    def of(self, pages: tuple[PageIds, ...]) -> dict[torch.device, torch.Tensor]:
        """Return the block table of `pages` by device: [rows, most pages of a row], int32; the CPU's is always there.

        Entries past a row's last page are 0, or pages of a later forward.
        """
        old, on = self._last
        if old is not pages or not on:
            pairs = list(zip(old, pages, strict=False))
            appended = (
                on and len(old) == len(pages) and all(b is a or b[: len(a)] == a for a, b in pairs)
            )
            with persistent_tensors():
                # always another object: whoever has renumbered the pages of a table knows it by that (offload)
                table = _appended(on[CPU], pairs) if appended else block_table(pages)
            self._last = pages, {CPU: table}
        return self._last[1]


def _appended(table: torch.Tensor, pairs: Sequence[tuple[PageIds, PageIds]]) -> torch.Tensor:
    """Return `table` with what was appended to rows (pages before, and now); it gets columns where it has too few."""
    lacking = max(len(now) for _, now in pairs) - table.shape[1]
    table = torch.nn.functional.pad(table, (0, lacking)) if lacking > 0 else table[:]
    for row, (before, now) in enumerate(pairs):
        if before is not now:
            table[row, len(before) : len(now)] = torch.tensor(now[len(before) :], device="cpu")
    return table


@dataclass(frozen=True, eq=False)
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
    offset: int
    starts: torch.Tensor | None
    skips: torch.Tensor | None
    tables: dict[torch.device, torch.Tensor]
    _lengths: torch.Tensor
    _numbers: npt.NDArray[np.int32] | None  # the memory of the CPU's lengths
    _moved: dict[torch.device, "TableView"] = field(default_factory=dict)

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
        return cls._unpacked(tables, CPU, torch.from_numpy(lengths), rows, offset, lengths)

    @classmethod
    def _unpacked(
        cls,
        tables: dict[torch.device, torch.Tensor],
        device: torch.device,
        packed: torch.Tensor,
        rows: int,
        offset: int,
        numbers: npt.NDArray[np.int32] | None = None,
    ) -> "TableView":
        num_pages, exact_lens, padding, *rest = packed[:, :rows].unbind(0)
        starts, skips = rest if rest else (None, None)
        table = tables[device]
        return cls(
            table, num_pages, exact_lens, padding, offset, starts, skips, tables, packed, numbers
        )

    def advance(self, exact_lens: Numbers, starts: Numbers) -> "TableView":
        """Return this view for another append to the same pages, [rows] each; what it said before is not to be read any more."""
        assert self._numbers is not None
        rows = len(starts)
        self._numbers[1, :rows], self._numbers[3, :rows] = exact_lens, starts
        self._moved.clear()
        return self

    def on(self, device: torch.device) -> "TableView":
        """Return this view with its tensors on `device` (moved once, then remembered)."""
        if device == self.block_table.device:
            return self
        if device not in self._moved:
            if device not in self.tables:
                self.tables[device] = moved(self.block_table, device)
            packed, rows = moved(self._lengths, device), self.num_pages.shape[0]
            self._moved[device] = self._unpacked(self.tables, device, packed, rows, self.offset)
        return self._moved[device]


def seal_jobs(
    pages: Mapping[int, PageIds],
    held: Sequence[PageIds],
    sizes: Geometry,
    passed: Numbers,
) -> torch.Tensor | None:
    """Return the pages to seal, [n, 4] int32, on the CPU, as spec.PageWrite has them; None without any.

    Args:
        pages: row -> ids, in the order of its tokens, which lie behind the sinks.
        held: pages of each row in front of them; without any a row's tokens begin with its first page's.
        passed: [rows], pages behind the sinks that are left out in front of them.
    """
    jobs = []
    for row, ids in pages.items():
        like = held[row][-1] if held[row] else -1 - sizes.sink_tokens
        for place, page in enumerate(ids, int(passed[row])):
            start = page_start(place, page_size=sizes.page_size, sink_tokens=sizes.sink_tokens)
            jobs.append((row, start, page, like))
    return torch.tensor(jobs, dtype=torch.int32, device="cpu") if jobs else None


@dataclass(eq=False)
class Step:
    """One change of the rows of a window, which all layers of that window follow with their tensors.

    Attributes:
        seen_before, seen_after: columns before and after the step.
        rows: of the batch, after the step.

    Of an append:
        columns: that the forward may see, those in front of its first page left out.
        capacity: pages that storage must have room for.
        view: what the forward reads.
        exact_before, skip, new: [rows], tokens in the window when the new ones arrive, leading columns that are not
            stored (padding, or held already), and tokens appended.
        leaving: [rows], tokens that leave the window with the step: those of sealed pages, and of pages that no later query sees.
        plain: whether it adds to the windows in place, and neither seals nor drops anything.
        budget: how much of a row the forward reads; None for everything.
        fits: whether the window has room for the new tokens.
        moves_rest: whether tokens stay in the window that lie behind those that leave it.
        first, first_leaving: pages sealed before the new tokens are appended (past recording), as of `seal_jobs`, and [rows],
            their tokens.
        seal: pages sealed after them.
        checked: the last mask that was found to hide left padding.

    Of another order of rows and of a crop:
        sources: the former row that each row continues.
        reopened: (row, page id, tokens) of the pages that a crop decodes back into the window.
        keeps_pages: whether a crop takes tokens from the windows alone, so that nothing moves.
    """

    seen_before: int
    seen_after: int
    rows: int
    columns: int = 0
    capacity: int = 0
    view: TableView | None = None
    exact_before: Any = None  # these four: [rows], int64
    skip: Any = None
    new: Any = None
    leaving: Any = None
    plain: bool = False
    budget: ReadBudget | None = None
    fits: bool = True
    moves_rest: bool = False
    first: torch.Tensor | None = None
    first_leaving: Any = None
    seal: torch.Tensor | None = None
    checked: torch.Tensor | None = None
    sources: Sequence[int] = ()
    reopened: Sequence[tuple[int, int, int]] = ()
    keeps_pages: bool = False
    _tensors: dict[Any, torch.Tensor] = field(default_factory=dict)

    def tensor(
        self, name: Any, device: torch.device, make: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Return a tensor of this step [any shape], the same for all layers, on `device`; `make` makes it on the CPU, once."""
        key = (name, device)
        if key not in self._tensors:
            self._tensors[key] = moved(make(), device)
        return self._tensors[key]


class FixedStep:
    """The tensors of a step of one token that stay where they are, so that a CUDA graph reads them at every replay.

    Args:
        rows: of the batch.
        pages: that a row holds at most.
        columns: that a mask has, whatever the length of the text.
        device: of the layers.
    Attributes:
        view: as of a Step.
        seen: columns before the step, [], int64.
    """

    def __init__(self, rows: int, pages: int, columns: int, device: torch.device) -> None:
        self.columns = columns
        with persistent_tensors():
            lengths = torch.zeros((5, -(-rows // 4) * 4), dtype=torch.int32, device=device)
            table = torch.zeros((rows, pages), dtype=TABLE_DTYPE, device=device)
            self._jobs = torch.full((rows, 4), -1, dtype=torch.int32, device=device)
            self.seen = torch.zeros((), dtype=torch.int64, device=device)
        self._lengths, self._sealed = lengths, False
        self._last_table: torch.Tensor | None = None
        self.view = TableView._unpacked({device: table}, device, lengths, rows, 0)

    @staticmethod
    def takes(step: Step) -> bool:
        """Say whether a step only appends to the windows and seals pages from them."""
        return step.fits and not step.moves_rest and step.first is None

    def standing_for(self, step: Step) -> Step:
        """Return what layers do in `step`, with these tensors."""
        return replace(
            step, columns=self.columns, view=self.view, seal=self._jobs, plain=False, _tensors={}
        )

    def write(self, step: Step) -> None:
        """Take the numbers of `step` over; kernels of earlier steps have read theirs, in the order of the stream."""
        view, device = step.view, self._lengths.device
        assert view is not None
        table = view.block_table
        self._lengths.copy_(moved(view._lengths, device))
        self.seen.fill_(step.seen_before)
        if table is not self._last_table and table.shape[1]:
            self.view.block_table[:, : table.shape[1]].copy_(moved(table, device))
            self._last_table = table
        if step.seal is not None or self._sealed:
            jobs = torch.full(self._jobs.shape, -1, dtype=torch.int32, device="cpu")
            if step.seal is not None:
                jobs[: len(step.seal)] = step.seal
            self._jobs.copy_(moved(jobs, device))
            self._sealed = step.seal is not None
