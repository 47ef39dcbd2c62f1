"""Rows of a preallocated batch: lengths that live on the device and are changed there only.

Row b owns pages b * P .. b * P + P - 1, so that there is no pool and no reference count. A step reads its lengths
from tensors and writes them back: no Python number depends on data, and torch.compile sees one graph for all steps.
Knows nothing of layers, formats or attention; a step is planned once per forward, for all layers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ..errors import CacheMismatchError, InterruptedForwardError
from ..geometry import full_pages, page_start
from ..read_budget import ReadBudget, Reading
from ..spec import TABLE_DTYPE, sealed_pages, window_slots
from .batch import Numbers
from .device_flag import DeviceFlag
from .group_state import GroupState, held_pages, renumbered
from .step import Row

OVERFULL, HIDES_MORE = 1, 2  # bits of the flag
# constants: dynamo cannot put a number into a message that differs from cache to cache
WRONG = {
    OVERFULL: "kv_hf: max_length of the cache is reached",
    HIDES_MORE: "kv_hf: the attention_mask of a compiled step that reads a part of the pages hides more than left padding: leave "
    "read_tokens, read_share and read_top_p out, or torch.compile",
}
WORKING = -1  # as `turn`: a layer or the table itself is being changed


@dataclass(frozen=True)
class StaticStep:
    """The change of every row in one forward; all tensors int32, on the device.

    Attributes:
        starts, skips: [rows], first free slot of the window, and leading new tokens that are padding.
        num_pages, exact_lens: [rows], pages sealed before this forward, and tokens in the window with its own.
        full: [rows], pages that its tokens fill.
        jobs: [n, 3], (row, first slot, page id or -1 where no page is full), see reference.seal_pages.
    """

    starts: torch.Tensor
    skips: torch.Tensor
    num_pages: torch.Tensor
    exact_lens: torch.Tensor
    full: torch.Tensor
    jobs: torch.Tensor


@dataclass(frozen=True)
class Lengths:
    """The state that a step changes: tensors on the device, and the columns as Python knows them."""

    tensors: tuple[torch.Tensor, ...]
    columns: int | None


class StaticTable:
    """Block table and lengths of a batch of at most `max_length` columns.

    Args:
        page_size, sink_tokens: as in CacheConfig.
        max_length: columns (padding included) that a row has room for.
        budget: how much of a row a step of few queries reads, None for everything.
    Attributes:
        block_table: [rows, pages_per_row], int32, never changed.
        num_pages, exact_lens, padding: [rows], int32, as in pages.group.Row.
        seen: int64 scalar, columns so far.
        started: whether any column was appended since the last reset. A prompt is; Python may know that.
        was_empty: whether the step in progress found the cache empty.
        step: the step in progress, from the first layer's begin() to the last layer's finish().
        turn: the layer that takes part next; 0 between steps, WORKING while one takes part, or after it was stopped there.
        known_columns: `seen` as a number, or None where compiled steps have moved it on.
        reading: how much of a row the next forward reads.
        flag: set on the device by compiled steps: OVERFULL, HIDES_MORE.
    """

    window = None  # all layers see all tokens
    offset = 0  # from the first column on
    block_table: torch.Tensor
    num_pages: torch.Tensor
    exact_lens: torch.Tensor
    padding: torch.Tensor
    seen: torch.Tensor
    flag: DeviceFlag

    def __init__(
        self,
        page_size: int,
        sink_tokens: int,
        max_length: int,
        budget: ReadBudget | None = None,
    ) -> None:
        self.page_size = page_size
        self.sink_tokens = sink_tokens
        self.max_length = max_length
        self.reading = Reading(budget)
        self.pages_per_row = sealed_pages(
            max_length, page_size=page_size, sink_tokens=sink_tokens, recent_tokens=0
        )
        self.rows = 0
        self.turn = 0
        self.step: StaticStep | None = None
        self.started = self.was_empty = False
        self._known_padding: torch.Tensor | None = None
        self.known_columns: int | None = 0

    @property
    def slots(self) -> int:
        """Exact tokens that a row's window has room for."""
        return window_slots(page_size=self.page_size, sink_tokens=self.sink_tokens, recent_tokens=0)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the block table [rows, pages_per_row], num_pages, exact_lens and padding [rows], all int32, and seen [], int64."""
        return self.block_table, self.num_pages, self.exact_lens, self.padding, self.seen

    def allocate(self, rows: int, device: torch.device) -> None:
        """Make the tensors of `rows` empty rows."""
        pages = torch.arange(rows * self.pages_per_row, dtype=TABLE_DTYPE, device=device)
        self.block_table = pages.reshape(rows, self.pages_per_row)
        self.num_pages, self.exact_lens, self.padding = (
            torch.zeros(rows, dtype=TABLE_DTYPE, device=device) for _ in range(3)
        )
        self.seen = torch.zeros((), dtype=torch.int64, device=device)
        self.flag = DeviceFlag(device)
        self.rows = rows

    def reset(self) -> None:
        """Forget all tokens; the tensors stay where they are."""
        self.turn = WORKING
        if self.rows:
            for tensor in (self.num_pages, self.exact_lens, self.padding, self.seen):
                tensor.zero_()
            self.flag.clear()
        self.started = self.was_empty = False
        self._known_padding, self.known_columns = None, 0
        self.step = None
        self.turn = 0

    # -- states (group_state.py) ------------------------------------------------------------------------------

    def state(self) -> GroupState:
        """Return rows and lengths between two steps, pages numbered anew; waits for the device."""
        self.check_turn(0)
        lengths = (self.padding.tolist(), self.num_pages.tolist(), self.exact_lens.tolist())
        rows = [
            Row(padding, tuple(self.block_table[index, :held].tolist()), exact)
            for index, (padding, held, exact) in enumerate(zip(*lengths, strict=True))
        ]
        held = held_pages(rows)
        return GroupState(None, len(held), renumbered(rows), self.columns(), 0, False, None)

    def check_state(self, state: GroupState) -> None:
        """Raise CacheMismatchError where a state does not fit into this table."""
        if state.seen > self.max_length:
            raise CacheMismatchError(
                f"max_length={self.max_length} is less than the {state.seen} columns of this state; make the cache with a "
                "larger max_length"
            )
        for index, row in enumerate(state.rows):
            held = len(row.pages) * self.page_size + row.exact
            if held != max(0, state.seen - row.padding) or row.dropped or row.ahead:
                raise CacheMismatchError(
                    f"row {index} of this state holds {held} tokens in pages and beside them, not all {state.seen} columns "
                    f"behind its padding of {row.padding}"
                )
            if row.exact >= self.slots:
                raise CacheMismatchError(
                    f"row {index} of this state has {row.exact} exact tokens, and a preallocated cache keeps fewer than "
                    f"{self.slots}: call end_recording() and run a forward before, or leave max_length out"
                )

    def restore(self, state: GroupState) -> None:
        """Let these rows, which are allocated and empty, stand where others stood whose `check_state` passed.

        Stopped half-way, the next step raises InterruptedForwardError.
        """
        self.turn = WORKING
        counts = ([len(row.pages) for row in state.rows], [row.exact for row in state.rows])
        numbers = (*counts, [row.padding for row in state.rows])
        lengths = (self.num_pages, self.exact_lens, self.padding)
        for tensor, given in zip(lengths, numbers, strict=True):
            tensor.copy_(torch.tensor(given, dtype=TABLE_DTYPE))
        self.seen.fill_(state.seen)
        self.known_columns, self.started = state.seen, True
        self.turn = 0

    def places(self, state: GroupState) -> list[list[int]]:
        """Return, for each page of a state, the pages of this table that hold it: one for each row."""
        found: list[list[int]] = [[] for _ in range(state.num_pages)]
        for index, row in enumerate(state.rows):
            for at, page in enumerate(row.pages):
                found[page].append(index * self.pages_per_row + at)
        return found

    # -- left padding, under the names of pages.group.PageGroup ---------------------------------------------

    def observe_padding(self, attention_mask: torch.Tensor) -> None:
        """Learn the left padding from a 2D mask [rows, columns] (0 or False = padding), without waiting for it.

        Only rows without a real token are concerned; a mask seen later cannot change stored tokens.
        """
        if attention_mask.ndim != 2:
            return
        known = (attention_mask.to(torch.bool).cumsum(-1) == 0).sum(-1)
        if not self.started:
            self._known_padding = known
        elif known.shape == self.padding.shape:
            known = known.to(self.padding)
            empty = (self.num_pages == 0) & (self.exact_lens == 0)
            self.padding.copy_(torch.where(empty, torch.maximum(known, self.padding), self.padding))

    def forget_padding(self) -> None:
        """Drop padding that was observed but not used yet (a forward without any mask follows)."""
        if not self.started:
            self._known_padding = None

    # -- steps ---------------------------------------------------------------------------------------------

    def check_append(self, rows: int, q_len: int) -> None:
        """Raise what appending `q_len` columns to `rows` rows would raise; change nothing."""
        if rows != self.rows:
            raise CacheMismatchError(
                f"this cache holds a batch of {self.rows} rows, got keys for {rows}; use a new cache, or "
                "reset() this one, for another batch size"
            )
        seen = self.columns()
        if seen + q_len > self.max_length:
            raise CacheMismatchError(
                f"max_length={self.max_length} is reached: {seen} columns are held and {q_len} more were given; the "
                "cache is unchanged. Make it with a larger max_length"
            )

    def check_flag(self) -> None:
        """Raise CacheMismatchError for what earlier steps are known to have found wrong; waits for nothing."""
        found = self.flag.look() if self.rows else 0
        if found & OVERFULL:
            raise CacheMismatchError(
                f"max_length={self.max_length} was passed by an earlier compiled step, whose tokens are of no use; call "
                "cache.reset() and start again, or make the cache with a larger max_length"
            )

        if found & HIDES_MORE:
            raise CacheMismatchError(f"{WRONG[HIDES_MORE]}; call cache.reset() and start again")

    def assert_hidden(self, mask: torch.Tensor) -> None:
        """Fail in compiled code where a step's mask [rows or 1, 1, 1, max_length] (bool) hides more than left padding."""
        columns = torch.arange(self.max_length, device=mask.device)
        held = (columns >= self.padding[:, None]) & (columns < self.seen)
        self._assert((mask[:, 0, 0] == held).all(), HIDES_MORE)

    def _assert(self, right: torch.Tensor, bit: int) -> None:
        """Fail in compiled code unless `right` ([], bool): by an assertion on a CPU, elsewhere by the flag.

        A failed assertion would make another device useless for this process.
        """
        if self.seen.device.type == "cpu":
            torch._assert_async(right, WRONG[bit])
        else:
            self.flag.tensor.bitwise_or_((~right).to(torch.int32) * bit)

    def left_padding(self) -> Numbers:
        """Return the columns of padding of each row; waits for the device."""
        return self.padding.cpu().numpy()

    def columns(self) -> int:
        """Return the columns seen as a number; waits for the device where compiled steps have moved on."""
        if self.known_columns is None:
            self.known_columns = int(self.seen)
        return self.known_columns

    def check_turn(self, layer: int) -> None:
        """Raise InterruptedForwardError unless `layer` takes part next."""
        if self.turn != layer or (layer == 0 and self.step is not None):
            due = (
                "an earlier change stopped" if self.turn == WORKING else f"layer {self.turn} is due"
            )
            raise InterruptedForwardError(
                f"layer {layer} cannot be changed here, where {due}: an earlier forward of this cache stopped "
                "half-way; call reset() and start again"
            )

    def take_turn(self, layer: int) -> None:
        """Let `layer` take part now: WORKING, until it gives the turn on. Raises as `check_turn` does."""
        self.check_turn(layer)
        self.turn = WORKING

    def give_turn(self, layer: int) -> None:
        """Let `layer` take part next."""
        self.turn = layer

    def begin(self, rows: int, q_len: int) -> None:
        """Plan the step that appends `q_len` columns, and move all lengths on; `turn` is left to the layers.

        Outside of compiled code the limits are checked first; inside, the device checks them (an assertion).
        """
        if not torch.compiler.is_compiling():
            self.check_append(rows, q_len)
        self.turn = WORKING
        if torch.compiler.is_compiling():
            self.known_columns = None
            self._assert(self.seen + q_len <= self.max_length, OVERFULL)
        else:
            self.known_columns = self.columns() + q_len
        if not self.started:
            known = self._known_padding
            if known is not None and known.shape == self.padding.shape:
                self.padding.copy_(known)
        self.was_empty, self.started = not self.started, True
        self.step = self._plan(rows, q_len)

    def _plan(self, rows: int, q_len: int) -> StaticStep:
        size, device = self.page_size, self.seen.device
        skips = (self.padding - self.seen).clamp(0, q_len).to(TABLE_DTYPE)
        starts, pages = self.exact_lens.clone(), self.num_pages.clone()
        exact = starts + (q_len - skips)
        full = full_pages(exact - self.sink_tokens, size).to(TABLE_DTYPE)
        # a tail of page_size - 1 tokens and the new ones: no row fills more pages
        place = torch.arange((size - 1 + q_len) // size, dtype=TABLE_DTYPE, device=device)
        row = torch.arange(rows, dtype=TABLE_DTYPE, device=device)[:, None]
        page = pages[:, None] + place
        there = (place < full[:, None]) & (page < self.pages_per_row)
        ids = torch.where(there, row * self.pages_per_row + page, -1)
        first = page_start(place, page_size=size, sink_tokens=self.sink_tokens).expand_as(page)
        jobs = torch.stack([row.expand_as(page), first, ids], -1).to(TABLE_DTYPE).reshape(-1, 3)
        self.exact_lens.copy_(exact - full * size)
        self.num_pages.copy_((pages + full).clamp(max=self.pages_per_row))
        self.seen.add_(q_len)
        return StaticStep(starts, skips, pages, exact, full, jobs)

    # -- steps that run without Python (CUDA graphs) -----------------------------------------------------------

    def lengths(self) -> "Lengths":
        """Return a copy of all that a step moves on, between two steps; waits for nothing."""
        self.check_turn(0)
        moving = (self.num_pages, self.exact_lens, self.seen, self.flag.tensor)
        return Lengths(tuple(tensor.clone() for tensor in moving), self.known_columns)

    def rewind(self, before: "Lengths") -> None:
        """Take the lengths back. A step of one token that runs again then writes and seals the same numbers.

        Also after a step whose Python code ran, or stopped, while its launches were only recorded.
        """
        self.turn = WORKING
        moving = (self.num_pages, self.exact_lens, self.seen, self.flag.tensor)
        for tensor, held in zip(moving, before.tensors, strict=True):
            tensor.copy_(held)
        self.known_columns = before.columns
        self.finish()

    @contextmanager
    def outside_python(self, q_len: int) -> Iterator[None]:
        """Count `q_len` columns that the device appends within this block; Python's code of the step does not run.

        Raises: what `check_append` raises, before the block.
        """
        self.check_turn(0)
        self.check_append(self.rows, q_len)
        self.turn = WORKING
        yield
        self.known_columns = self.columns() + q_len
        self.finish()

    def finish(self) -> None:
        """Drop the step: behind the last layer nothing needs it."""
        self.step = None
        self.turn = 0

    def reorder(self, sources: torch.Tensor) -> None:
        """Let row i continue the former row sources[i], in place."""
        for tensor in (self.num_pages, self.exact_lens, self.padding):
            tensor.copy_(tensor.index_select(0, sources))

    def check_integrity(self) -> None:
        """Raise ValueError unless lengths add up; InterruptedForwardError where a forward stopped half-way."""
        self.check_turn(0)
        if not self.rows:
            return
        tokens = self.num_pages.long() * self.page_size + self.exact_lens
        wrong = tokens != (self.seen - self.padding).clamp(min=0)
        if bool(wrong.any()):
            raise ValueError(
                f"rows {wrong.nonzero().flatten().tolist()} hold {tokens[wrong].tolist()} tokens of "
                f"{int(self.seen)} columns with {self.padding[wrong].tolist()} of padding"
            )
        if bool((self.exact_lens > self.slots).any()):
            raise ValueError(f"a row has more exact tokens than its {self.slots} slots")
