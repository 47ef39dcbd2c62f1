"""Room on the device through which pages that live outside are read: one layer at a time, the next one ahead.

A kernel reads pages by number out of one tensor per field. So the pages that a batch holds are laid, in the order of
their ids, into the slots 0, 1, .. of a buffer, and the block table is written anew in slots: once per table, for all
layers of a group. With two buffers the layer that was read next the last time is copied while this one is used.

Where a step chooses pages, every layer has a plan of its own for them. Those that a buffer holds already stay in their
slots, so that the others alone are copied: what was copied ahead are the pages that the layer read the last time.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch

from ..spec import TABLE_DTYPE, PageSpec
from .copy_stream import CopyStream
from .host_pages import HostPages
from .moved import moved
from .persistent import persistent_tensors
from .slab import Fields, carve, carved_bytes
from .step import TableView

NO_PAGE = -1  # in a slot that nobody reads


class Outsider(Protocol):
    """A layer whose pages live outside."""

    layer_idx: int
    spec: PageSpec
    written: Any  # event behind the last write to its home
    plan: "SlotPlan | None"  # that it was last read by

    def read_by(self, plan: "SlotPlan") -> None:
        """Note the plan that it is read by."""
        ...

    @property
    def home(self) -> HostPages | None:
        """Return the host pages of the storage, None while they are on the device."""
        ...


@dataclass(frozen=True, eq=False)
class SlotPlan:
    """The slots of the pages of one block table.

    Attributes:
        source: the block table that this plan was made of.
        ids: page of each slot, ascending; of chosen pages in any order, and NO_PAGE for slots that are not read.
        table: the block table in slots, on the device; entries past a row's last page hold slot 0 or any other.
    """

    source: torch.Tensor
    ids: tuple[int, ...]
    table: torch.Tensor

    @classmethod
    def build(cls, view: TableView, device: torch.device) -> "SlotPlan":
        """Number the pages of `view` from 0 up."""
        table = view.block_table
        held = torch.arange(table.shape[1]) < view.num_pages[:, None]
        ids = torch.unique(table[held])
        slots = torch.searchsorted(ids, table).clamp(max=max(0, ids.numel() - 1))
        renumbered = slots.to(TABLE_DTYPE).to(device, non_blocking=True)
        return cls(table, tuple(ids.tolist()), renumbered)

    @classmethod
    def choose(
        cls,
        table: torch.Tensor,
        num_pages: torch.Tensor,
        slots: int,
        held: Sequence[int | None],
        device: torch.device,
    ) -> "SlotPlan":
        """Give the pages of a choice slots, those that a buffer holds the slots that they are in.

        Args:
            table: [rows, width], int32, on the CPU, with at most `slots` different pages.
            num_pages: [rows], int32, on the CPU.
            held: page in each slot of the buffer that holds pages of this layer; anything else where none does.
        """
        pages = table.numpy()
        used = np.arange(pages.shape[1]) < num_pages.numpy()[:, None]
        ids, places = np.unique(pages[used], return_inverse=True)
        wanted = {page: place for place, page in enumerate(ids.tolist())}
        slot_of = np.full(max(1, len(wanted)), -1, dtype=np.int32)
        found = [NO_PAGE] * slots
        if len(held) == slots:
            for slot, page in enumerate(held):
                if page is not None and page in wanted:
                    found[slot], slot_of[wanted[page]] = page, slot
        free = (slot for slot, page in enumerate(found) if page == NO_PAGE)
        for page, place in wanted.items():
            if slot_of[place] < 0:
                slot_of[place] = slot = next(free)
                found[slot] = page
        in_slots = np.full(pages.shape, max(0, int(slot_of[0])), dtype=np.int32)
        in_slots[used] = slot_of[places.reshape(-1)]
        return cls(table, tuple(found), moved(torch.from_numpy(in_slots), device))

    @cached_property
    def runs(self) -> list[tuple[int, int, int]]:
        """The pages as runs of consecutive ids: (slot, first id, count)."""
        return _pieces((slot, page) for slot, page in enumerate(self.ids) if page != NO_PAGE)


def _pieces(places: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return runs of (slot, page) whose slots and pages are consecutive: (first slot, first page, count)."""
    found: list[tuple[int, int, int]] = []
    for slot, page in places:
        if found:
            first, start, count = found[-1]
            if (slot, page) == (first + count, start + count):
                found[-1] = (first, start, count + 1)
                continue
        found.append((slot, page, 1))
    return found


class StagingBuffer:
    """Bytes on the device that hold pages of one layer at a time.

    Attributes:
        owner: the layer whose pages it holds.
        ids: page in each slot, None where a newer one was written outside since.
        plan: whose pages it holds, every one; None where that is to be looked at.
        ready, used: events behind the last copy into it, and behind the last kernel that read it.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        with persistent_tensors():
            self.raw = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.owner: Outsider | None = None
        self.ids: list[int | None] = []
        self.plan: SlotPlan | None = None
        self.ready: Any = None
        self.used: Any = None
        self._fields: tuple[Fields, Fields] = ({}, {})

    def give(self, owner: Outsider, slots: int) -> None:
        """Let the buffer be `owner`'s, with so many slots; what it held is forgotten where that is new."""
        if self.owner is not owner or len(self.ids) != slots:
            self.owner = self.plan = None  # of nobody, should this be stopped half-way
            self.ids = [None] * slots
            with persistent_tensors():
                used = self.raw[: carved_bytes(owner.spec, slots)]
                self._fields = carve(used, owner.spec, slots)
            self.owner = owner

    def fill(self, plan: SlotPlan, copy: Callable[[], Any] | None) -> None:
        """Have `copy` fill the slots with the pages of `plan`; where it fails, they hold nothing. None: they are there.

        Slots of NO_PAGE keep what they hold.
        """
        ids = plan.ids
        before, self.ids, self.plan = self.ids, [None] * len(ids), None
        if copy is not None:
            self.ready = copy()
        self.ids = [old if page == NO_PAGE else page for old, page in zip(before, ids, strict=True)]
        self.plan = plan

    def outdate(self, pages: Iterable[int]) -> None:
        """Note that newer ones of these pages were written outside."""
        stale = set(pages)
        self.plan = None
        self.ids = [None if page in stale else page for page in self.ids]

    def note_use(self, event: Any) -> None:
        """Note the event behind the last kernel that reads it."""
        self.used = event

    @property
    def fields(self) -> tuple[Fields, Fields]:
        """The slots as fields of keys and of values."""
        return self._fields


class Staging:
    """The staging buffers of one device.

    Args:
        lane: how copies run beside kernels; says how many buffers there are.
    """

    def __init__(self, device: torch.device, lane: CopyStream) -> None:
        self.device = device
        self.lane = lane
        self.size = 0  # bytes of a buffer
        self._buffers: list[StagingBuffer] = []
        self._last: StagingBuffer | None = None
        self._before: Outsider | None = None
        self._next: dict[int, Outsider] = {}  # layer -> the one that was read behind it

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(buffer.raw.nbytes for buffer in self._buffers)

    def resize(self, nbytes: int) -> None:
        """Let buffers have `nbytes` bytes from their next use on; the old ones go first."""
        if nbytes != self.size:
            self._buffers, self._last = [], None
            self.size = nbytes

    def holds(self, spec: PageSpec, slots: int) -> bool:
        """Say whether so many pages fit into a buffer."""
        return carved_bytes(spec, slots) <= self.size

    def forget(self, layer: Outsider, pages: list[int]) -> None:
        """Note that `pages` of a layer were written outside: what lies here is stale."""
        for buffer in self._buffers:
            if buffer.owner is layer:
                buffer.outdate(pages)

    def held(self, layer: Outsider) -> Sequence[int | None]:
        """Return the page in each slot of the buffer that holds pages of a layer; nothing where none does."""
        return next((one.ids for one in self._buffers if one.owner is layer), ())

    def read(self, layer: Outsider, plan: SlotPlan) -> tuple[Fields, Fields]:
        """Return the pages of `plan` in their slots, for kernels that are launched now."""
        buffer = self._filled(layer, plan)
        self.lane.join(buffer.ready)
        self._last = buffer
        return buffer.fields

    @contextmanager
    def reading(self, layer: Outsider, plan: SlotPlan) -> Iterator[None]:
        """Keep the pages of `plan` in their slots for the kernels launched inside, then fetch what comes next."""
        self.read(layer, plan)
        buffer = self._last
        assert buffer is not None
        try:
            yield
        finally:
            buffer.note_use(self.lane.mark())
        before = layer.plan
        layer.read_by(plan)
        if self._before is not None and self._before is not layer:
            self._next[self._before.layer_idx] = layer
        self._before = layer
        following = self._next.get(layer.layer_idx)
        if following is not None and following is not layer and following.plan is not None:
            # layers of one group share their table: what this one has just got, the next one will
            ahead = plan if following.plan is before else following.plan
            self._fetch_ahead(following, ahead)

    def _fetch_ahead(self, layer: Outsider, plan: SlotPlan) -> None:
        if layer.home is None or not self.holds(layer.spec, len(plan.ids)):
            return
        if self.lane.buffers > 1:
            self._filled(layer, plan)
            return
        layer.home.expect_runs(plan.runs)

    def _filled(self, layer: Outsider, plan: SlotPlan) -> StagingBuffer:
        """Return a buffer into which the pages of `plan` have been, or are being, copied."""
        buffer = self._buffer(layer)
        buffer.give(layer, len(plan.ids))
        if buffer.plan is plan:
            return buffer
        if any(page is not None for page in buffer.ids):
            slots = enumerate(zip(buffer.ids, plan.ids, strict=True))
            todo = _pieces((slot, new) for slot, (old, new) in slots if new not in (old, NO_PAGE))
        else:
            todo = plan.runs
        if not todo:
            buffer.fill(plan, None)
            return buffer
        home, fields = layer.home, buffer.fields
        assert home is not None

        def copy() -> None:
            with persistent_tensors():
                home.fetch_runs(todo, fields, (0, 1))

        buffer.fill(plan, lambda: self.lane.run(copy, (buffer.used, layer.written)))
        return buffer

    def _buffer(self, layer: Outsider) -> StagingBuffer:
        """Return the buffer that holds pages of `layer`, or else the one that was not read last."""
        while len(self._buffers) < self.lane.buffers:
            buffer = StagingBuffer(self.size, self.device)
            buffer.note_use(self.lane.mark())  # kernels given before may still read that memory
            self.lane.keep(buffer.raw)
            self._buffers.append(buffer)
        own = [buffer for buffer in self._buffers if buffer.owner is layer]
        others = [buffer for buffer in self._buffers if buffer is not self._last]
        return (own or others or self._buffers)[0]
