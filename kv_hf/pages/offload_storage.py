"""One layer's pages, on the device or outside, behind the same methods as PageStorage."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import torch

from ..quant.codec import decode
from ..spec import PageFields, PageSpec, SideSpec
from .device_budget import SEAL_PAGES
from .host_memory import HostMemory
from .host_pages import HostPages, runs, scratch_fields
from .page_index import PageIndex
from .persistent import persistent_tensors
from .slab import Fields
from .staging import SlotPlan, Staging
from .step import SealJobs, TableView
from .storage import PageStorage, Pair, PairWriter, ReadablePages, SideStorage


class OutsidePool(Protocol):
    """Memory outside of the device and the way back to it, which the layers of an arena share (OffloadArena)."""

    lock: Any  # held while pages are written, storage grows, or staging buffers are read

    def settled(self, layer: int, capacity: int) -> bool:
        """Say whether room was made for so many pages of a layer."""
        ...

    def settle(self, capacities: Mapping[int, int], slots: Mapping[int, int] | None = None) -> None:
        """Make room for so many pages of layers, and for so many that one batch reads, before anything is written."""
        ...

    def is_outside(self, layer: int) -> bool:
        """Say whether the pages of a layer live outside."""
        ...

    def room_for(self, layer: int) -> int:
        """Return the pages of a layer that room was made for."""
        ...

    def outside(self) -> HostMemory:
        """Return the memory outside."""
        ...

    def staging(self, device: torch.device) -> Staging:
        """Return the staging buffers of a device."""
        ...

    def plan(self, view: TableView, device: torch.device) -> SlotPlan:
        """Return the slots of the pages of `view`."""
        ...


class StagedFields(Mapping[str, torch.Tensor]):
    """One side of a layer's pages in the slots of a plan: fetched when a field is asked for, not before."""

    def __init__(self, spec: SideSpec, read: Callable[[], Fields]) -> None:
        self._names = tuple(spec.fields)
        self._read = read

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class OffloadedSide(SideStorage):
    """One side of an OffloadedStorage: its own tensors are empty while the pages live outside.

    Attributes:
        page_index: what choices among the pages outside read, from the first choice on; of keys alone.
    """

    def __init__(self, spec: SideSpec, device: torch.device, index: int) -> None:
        super().__init__(spec, device)
        self.index = index
        self.home: HostPages | None = None
        self.page_index: PageIndex | None = None

    def rewritten(self, pages: Iterable[int]) -> None:
        """Note that other tokens lie in these pages outside now."""
        if self.page_index is not None:
            self.page_index.forget(pages)

    def covering(
        self, table: torch.Tensor, pages: Sequence[int], capacity: int, device: torch.device
    ) -> PageIndex:
        """Return the index of the pages of `table` [rows, width], with room for `capacity`; see PageIndex.cover."""
        if self.page_index is None:
            self.page_index = PageIndex(self.spec, device)
        self.page_index.cover(table, pages, capacity, self.take)
        return self.page_index

    @property
    def capacity(self) -> int:
        """Pages that there is room for."""
        return super().capacity if self.home is None else self.home.capacity

    def check_integrity(self) -> None:
        """Raise ValueError unless every field has room for equally many pages; those outside always have."""
        if self.home is None:
            super().check_integrity()

    def take(self, pages: Sequence[int], names: Sequence[str] | None = None) -> Fields:
        """Return copies of these pages as they are encoded, [n, ..] by field name, on the device."""
        if self.home is None:
            return super().take(pages, names)
        fields = scratch_fields(self.spec, len(pages), self.fields["codes"].device)
        for place, page, count in runs(pages):
            self.home.fetch(page, count, [fields], place, [self.index])
        return fields

    def put(self, first: int, field: str, pages: torch.Tensor) -> None:
        """Write one field of encoded pages [n, ..] to the ids first .. first + n - 1, which must have room.

        For storage that nothing was read from yet: staging buffers are not told.
        """
        if self.home is None:
            super().put(first, field, pages)
        else:
            self.home.store(self.index, first, len(pages), {field: pages}, 0)
            self.rewritten(range(first, first + len(pages)))

    def read(self, pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Decode the pages of these ids (any shape [..]) to [.., num_kv_heads, page_size, head_dim]."""
        if self.home is None:
            return super().read(pages, dtype)
        tokens = decode(self.take(pages.reshape(-1).tolist()), self.spec, dtype)
        return tokens.reshape(*pages.shape, *tokens.shape[1:])


class ChosenPages:
    """The pages of one forward outside, of which a step may choose some; what PagedKV.outside offers.

    Args:
        plan: lists all pages of `view`.
    """

    def __init__(self, storage: "OffloadedStorage", view: TableView, plan: SlotPlan) -> None:
        self._storage, self._view, self._plan = storage, view, plan

    def index(self) -> tuple[PageFields, torch.Tensor, torch.Tensor | None]:
        """Return what a choice reads: fields of the keys' index, their block table [rows, width], and the words that are there."""
        fields, words = self._storage.indexed(self._view, self._plan)
        return fields, self._view.on(self._storage.device).block_table, words

    def read(
        self, block_table: torch.Tensor, num_pages: torch.Tensor
    ) -> tuple[
        Mapping[str, torch.Tensor],
        Mapping[str, torch.Tensor],
        torch.Tensor,
        Callable[[], AbstractContextManager[Any]],
    ]:
        """Return keys, values, block table and hold of chosen pages; the host waits for the choice, as it starts the copies.

        Args:
            block_table: [rows, width], int32, pages of the index's table.
            num_pages: [rows], int32, pages of each row.
        """
        most = min(len(self._plan.ids), block_table.numel())
        some = self._storage.chosen(block_table.cpu(), num_pages.cpu(), most)
        return some.keys, some.values, some.block_table, some.hold


class OffloadedStorage(PageStorage):
    """Both sides of one layer's pages, on the device or outside.

    Args:
        arena: what the layers share; it decides which of them live outside.
    """

    def __init__(
        self, layer_idx: int, spec: PageSpec, device: torch.device, arena: OutsidePool
    ) -> None:
        super().__init__(spec, device)
        self.layer_idx = layer_idx
        self.arena = arena
        self.lock = arena.lock
        self.keys: OffloadedSide = OffloadedSide(spec.keys, device, 0)
        self.values: OffloadedSide = OffloadedSide(spec.values, device, 1)
        self.written: Any = None
        self.plan: SlotPlan | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Everything but places: pages that live outside are written out on the CPU."""
        state = super().__getstate__()
        state.update(written=None, plan=None)
        if self.home is not None:
            self.arena.staging(self.device).lane.wait()
            state["keys"], state["values"] = (
                self._dumped(side) for side in (self.keys, self.values)
            )
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.lock = self.arena.lock

    def _dumped(self, side: OffloadedSide) -> OffloadedSide:
        dumped = OffloadedSide(side.spec, torch.device("cpu"), side.index)
        dumped.fields = scratch_fields(side.spec, side.capacity, torch.device("cpu"))
        assert side.home is not None
        side.home.fetch(0, side.capacity, [dumped.fields], 0, [side.index])
        return dumped

    @property
    def home(self) -> HostPages | None:
        """Return the host pages; None while the pages are on the device."""
        return self.keys.home

    @property
    def index_bytes(self) -> int:
        """Bytes on the device of what choices among pages outside read."""
        index = self.keys.page_index
        return 0 if index is None else index.nbytes

    @property
    def why_not_wider(self) -> str | None:
        """Return why these pages cannot get a wider spec: host memory and budget were planned for the one they have."""
        return "its pages may leave the device, whose budget was planned for it"

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of pages that live outside of the device."""
        return 0 if self.home is None else self.home.nbytes

    def leave(self, outside: HostMemory, capacity: int) -> None:
        """Move all pages outside, with room for `capacity`; where that fails nothing has changed."""
        home = self.home or HostPages(self.spec, outside)
        home.grow(max(capacity, self.capacity))
        if self.home is None:
            for side in (self.keys, self.values):
                if side.capacity:
                    home.store(side.index, 0, side.capacity, side.fields, 0)
            self.written = self.arena.staging(self.device).lane.mark()
            self.keys.home = self.values.home = home
        for side in (self.keys, self.values):
            if side.fields["codes"].shape[
                0
            ]:  # an earlier call may have been stopped in front of this
                side.fields = scratch_fields(side.spec, 0, self.device)

    def grow(self, capacity: int, ahead: int = 0) -> None:
        """Make room for `capacity` pages, and for no more `ahead`; pages may leave the device for it."""
        with self.lock, persistent_tensors():
            if not self.arena.settled(self.layer_idx, capacity):
                self.arena.settle({self.layer_idx: capacity})
            if self.home is not None or self.arena.is_outside(self.layer_idx):
                self.leave(self.arena.outside(), capacity)
            else:
                super().grow(capacity)

    def grow_ahead(self, capacity: int, ahead: int = 0) -> None:
        """Nothing: the arena has made room on the device and outside before the step (OffloadArena.settle)."""

    def seal_pair(
        self, kernel: PairWriter, tokens: Pair, jobs: SealJobs, damaged: torch.Tensor, launches: dict[Any, Any]
    ) -> None:  # fmt: skip
        """Seal pages of both sides from `tokens` [rows, heads, slots, channels], on the device or, some at a time, outside."""
        home = self.home
        if home is None:
            super().seal_pair(kernel, tokens, jobs, damaged, launches)
            return
        staging = self.arena.staging(self.device)
        pages = jobs.jobs[:, 2].tolist()
        fields = tuple(
            scratch_fields(side.spec, min(SEAL_PAGES, len(pages)), self.device)
            for side in self.sides
        )
        slots = torch.arange(SEAL_PAGES, dtype=torch.int32, device=self.device)
        for first in range(0, len(pages), SEAL_PAGES):
            some = jobs.on(self.device)[first : first + SEAL_PAGES].clone()
            some[:, 2] = slots[: len(some)]
            kernel.seal_pair(tokens, some, fields, self.spec, damaged, {})
            for place, page, count in runs(pages[first : first + SEAL_PAGES]):
                for index, own in enumerate(fields):
                    home.store(index, page, count, own, place)
        staging.forget(self, pages)
        self.keys.rewritten(pages)
        self.written = staging.lane.mark()

    def read_by(self, plan: SlotPlan) -> None:
        """Note the plan by which kernels read the pages."""
        self.plan = plan

    def readable(self, view: TableView) -> ReadablePages:
        """Return what kernels read of the pages of `view`; outside of the device they are fetched when read."""
        with self.lock:
            if self.home is None:
                return super().readable(view)
            plan = self.arena.plan(view, self.device)
        return self._through(plan)._replace(outside=ChosenPages(self, view, plan))

    def _through(self, plan: SlotPlan) -> ReadablePages:
        keys, values = (
            StagedFields(side.spec, partial(self._staged, plan, index))
            for index, side in enumerate(self.sides)
        )
        return ReadablePages(keys, values, plan.table, partial(self._reading, plan))

    def indexed(self, view: TableView, plan: SlotPlan) -> tuple[PageFields, torch.Tensor | None]:
        """Return fields, and words [heads, words], of the index of the pages of `view`, which `plan` lists."""
        with self.lock:
            pages = max(self.arena.room_for(self.layer_idx), max(plan.ids, default=-1) + 1)
            index = self.keys.covering(view.block_table, plan.ids, pages, self.device)
            return index.fields, index.words

    def chosen(self, table: torch.Tensor, num_pages: torch.Tensor, most: int) -> ReadablePages:
        """Return what kernels read of the pages of `table` [rows, width], at most `most`; see `ChosenPages.read`."""
        with self.lock:
            staging = self.arena.staging(self.device)
            plan = SlotPlan.choose(table, num_pages, most, staging.held(self), self.device)
        return self._through(plan)

    def _staged(self, plan: SlotPlan, side: int) -> Fields:
        with self.lock:
            return self._room(plan).read(self, plan)[side]

    @contextmanager
    def _reading(self, plan: SlotPlan) -> Iterator[None]:
        with self.lock, self._room(plan).reading(self, plan):
            yield

    def _room(self, plan: SlotPlan) -> Staging:
        staging = self.arena.staging(self.device)
        if not staging.holds(self.spec, len(plan.ids)):
            self.arena.settle({}, {self.layer_idx: len(plan.ids)})
        return staging

    def to(self, device: torch.device) -> None:
        """Move the pages that are on the device to `device`."""
        if self.home is None:
            super().to(device)
