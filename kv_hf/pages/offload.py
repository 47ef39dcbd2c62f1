"""Pages beyond a device budget are offloaded: to pinned host memory, or to mapped files.

Every step of full attention reads all pages, so what was used last says nothing about what to keep on the device. So a
layer's pages are either all there, as in an ordinary cache, or all offloaded; a layer that has left does not come back
before the cache is reset. One that stays costs no copy at all, and the layers that leave lie far apart, so that the copies of
one have the computation of several to hide behind. Pages are written to their place some at a time, and read through staging
buffers (staging.py), which all caches that share pages have in common.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import CacheOptionError, DeviceBudgetError
from ..page_summary import RANGED_PAGES, Summary, part_bytes, part_fields, spread, summary_of
from ..quant.page_parts import part_of, words_to_read
from ..spec import PageFields, PageSpec, PageWrite
from .cpu_memory import DiskMemory, HostMemory, Run, Tensors, runs_of
from .moved import persistent_tensors
from .staging import Copies, SlotPlan, Staging
from .step import TableView
from .storage import (
    PageMemory,
    PageStorage,
    ReadablePages,
    Sides,
    SideStorage,
    carve,
    carved_bytes,
    new_fields,
)

SEAL_PAGES = 8  # pages that are encoded, or moved, at a time on their way to host memory
LEAST_PAGES = 8  # that a layer has room for in host memory
PLANS = 8  # slot plans that are kept: one for each group of the caches in use


# -- who stays under a budget ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Demand:
    """The bytes of one layer's pages.

    Attributes:
        capacity: pages that storage has room for.
        slots: most pages that one batch reads.
        index: whether steps choose among the pages, by an index that stays on the device while they are offloaded.
    """

    spec: PageSpec
    device: torch.device
    capacity: int
    slots: int
    index: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self.capacity * self.spec.page_bytes

    @property
    def index_bytes(self) -> int:
        """Bytes on the device for pages that are offloaded."""
        return self.capacity * part_bytes(self.spec.keys) if self.index else 0

    def joined(self, more: "Demand") -> "Demand":
        """Return the demand of a layer that has this one and `more`, whose spec and device are the later known."""
        capacity, slots = max(self.capacity, more.capacity), max(self.slots, more.slots)
        return Demand(more.spec, more.device, capacity, slots, self.index or more.index)


def split_layers(
    demands: Mapping[int, Demand],
    device_bytes: int | None,
    buffers: int,
    already: Iterable[int] = (),
) -> frozenset[int]:
    """Return the layers that leave, the largest first and equal ones far apart; layers that are offloaded `already` stay so.

    Args:
        device_bytes: of sealed pages on the device at most; None: as few as possible.
        buffers: staging buffers of each device.
    Raises: DeviceBudgetError when not even one layer at a time fits.
    """
    layers = sorted(demands)
    if device_bytes is None:
        return frozenset(layers)
    width = max(1, (len(layers) - 1).bit_length())
    scattered = {layer: int(f"{at:0{width}b}"[::-1], 2) for at, layer in enumerate(layers)}
    waiting = sorted(layers, key=lambda layer: (-demands[layer].nbytes, scattered[layer]))
    leaving = set(already) & set(layers)
    while (needed := _on_device(demands, leaving, buffers)) > device_bytes and waiting:
        leaving.add(waiting.pop(0))
    if needed <= device_bytes:
        return frozenset(leaving)
    slots = max(demand.slots for demand in demands.values())
    indexes = sum(demand.index_bytes for demand in demands.values())
    raise DeviceBudgetError(
        f"device_bytes={device_bytes} is too small for this text: reading one layer at a time needs device_bytes={needed} "
        f"({buffers} staging buffer{'s' * (buffers > 1)} of {slots} pages, {indexes:,} bytes of the index that steps choose "
        f"pages by, and {SEAL_PAGES} pages that are being sealed); the cache is unchanged. Raise it, or use a smaller batch, a "
        "shorter text or a smaller format"
    )


def staging_sizes(leaving: Iterable[Demand]) -> dict[torch.device, int]:
    """Return the bytes of one staging buffer, by device."""
    staging: dict[torch.device, int] = {}
    for one in leaving:
        size = carved_bytes(one.spec, one.slots)
        staging[one.device] = max(staging.get(one.device, 0), size)
    return staging


def _on_device(demands: Mapping[int, Demand], offloaded: Container[int], buffers: int) -> int:
    """Return the bytes on devices at most.

    Counted are the pages that stay, the largest layer among them once more (it exists twice while it grows),
    `buffers` staging buffers for the largest layer that leaves, the indexes of the layers that leave (the largest
    once more as well), and the pages that are being sealed.
    """
    staying = [one.nbytes for layer, one in demands.items() if layer not in offloaded]
    leaving = [one for layer, one in demands.items() if layer in offloaded]
    indexes = [one.index_bytes for one in leaving]
    sides = (side for one in leaving for side in one.spec.sides)
    sealing = max((one.payload_bytes + one.scale_bytes for one in sides), default=0)
    transient = max([*staying, *indexes, SEAL_PAGES * sealing])
    return sum(staying) + sum(indexes) + transient + buffers * sum(staging_sizes(leaving).values())


# -- one layer -------------------------------------------------------------------------------------------------------


class PageIndex:
    """What a choice of pages reads of one layer's keys, on the device, while the pages themselves are offloaded.

    Of every page the words of its codes that are read, and what says the middle of the rest (page_summary.part_fields):
    about a quarter of the keys, and nothing of the values. It is filled when a step is about to choose, with those pages
    that it lacks: sealing, cropping and loading only have pages forgotten, if anything.

    Args:
        keys: the keys' storage, on whose device kernels choose.
    Attributes:
        fields: tensors of page_summary.part_fields, by page id; pages that are not held are zero or stale.
        words: [heads, words], int32: which words of a token's codes, by the first pages; None: all of them.
    """

    def __init__(self, keys: SideStorage) -> None:
        self.keys, self.spec = keys, keys.spec
        self.fields = new_fields(part_fields(self.spec), 0, keys.device)
        self.words: torch.Tensor | None = None
        self._held: set[int] = set()
        self._covered: torch.Tensor | None = None  # a table all of whose pages are held

    @property
    def nbytes(self) -> int:
        """Bytes allocated for pages."""
        return self.fields.room * part_bytes(self.spec)

    def forget(self, pages: Iterable[int]) -> None:
        """Note that other tokens lie in these pages now."""
        self._held.difference_update(pages)
        self._covered = None

    def cover(self, table: torch.Tensor, pages: Sequence[int], capacity: int) -> None:
        """Hold all pages of a table.

        Args:
            table: the block table, by which the pages are known the next time.
            pages: its pages, each once.
            capacity: pages to have room for.
        """
        if table is self._covered and capacity <= self.fields.room:
            return
        if capacity > self.fields.room:  # for a moment the index exists twice
            new = new_fields(part_fields(self.spec), capacity, self.keys.device)
            for name, tensor in self.fields.items():
                new[name][: len(tensor)] = tensor
            self.fields = new
        if pages and self.words is None and summary_of(self.spec) != Summary.ALL_CHANNELS:
            sample = self.keys.take([pages[place] for place in spread(RANGED_PAGES, len(pages))])
            self.words = words_to_read(sample, self.spec)
        missing = [page for page in pages if page not in self._held]
        for first in range(0, len(missing), SEAL_PAGES):
            some = missing[first : first + SEAL_PAGES]
            part = part_of(self.keys.take(some), self.words, self.spec)
            for name, tensor in self.fields.items():
                tensor[some] = part[name]
            self._held.update(some)
        self._covered = table


class OffloadedStorage(PageStorage):
    """Both sides of one layer's pages, on the device or in host memory.

    Args:
        memory: what the layers share; it decides which of them leave.
    Attributes:
        written: event behind the last write to host memory.
        index: what choices among offloaded pages read, from the first choice on.
    """

    resident = False
    keeps = "its pages may leave the device, whose budget was planned for it"

    def __init__(
        self, layer_idx: int, spec: PageSpec, device: torch.device, memory: "OffloadMemory"
    ) -> None:
        super().__init__(spec, device, memory)
        self.layer_idx = layer_idx
        self.written: Any = None
        self.index: PageIndex | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Everything but events; pages of host memory are written out on the CPU."""
        self._staging.copies.wait()
        return {**vars(self), "written": None, "index": None}

    @property
    def _staging(self) -> Staging:
        return self.memory.staging(self.device)

    @property
    def has_left(self) -> bool:
        """Whether the pages are not on the device; out of a pickle they are on the CPU, in no host memory."""
        return self.keys.fields["codes"].device != self.device or self.is_offloaded

    def leave(self, capacity: int) -> None:
        """Move all pages to host memory with room for `capacity`; where that fails nothing has changed."""
        host, held = self.memory.host_memory(), self.capacity
        here = self.values.host is host
        if here and capacity <= held:
            return
        room = max(capacity, held, LEAST_PAGES, held + held // 4 if here else 0)
        sides = carve(host.allocate(carved_bytes(self.spec, room)), self.spec, room)
        for side, fields in zip((self.keys, self.values), sides, strict=True):
            for first in range(0, held, SEAL_PAGES):
                some = range(first, min(first + SEAL_PAGES, held))
                host.store(side.take(some), [(0, first, len(some))], fields)
        self.written = self._staging.copies.mark()
        for side, fields in zip((self.keys, self.values), sides, strict=True):
            side.host, side.fields, side._mapped = host, fields, {}

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` pages, which may leave the device for it."""
        with self.lock, persistent_tensors():
            known = self.memory.demands.get(self.layer_idx)
            if known is None or known.capacity < capacity:
                self._demand(capacity, known.slots if known else capacity)
            if self.has_left or self.memory.leaves(self.layer_idx):
                self.leave(capacity)
            else:
                super().grow(capacity)

    def write(self, kernel: Any, call: PageWrite, jobs: torch.Tensor) -> None:
        """Have `kernel` do `call`; offloaded pages, those of `jobs` [n, 4], are sealed some at a time on their way to host memory."""
        host = self.values.host
        if host is None or call.jobs is None:
            return super().write(kernel, call, jobs)
        if call.new is not None:
            kernel.write(replace(call, jobs=None))
        pages, count = jobs[:, 2].tolist(), min(SEAL_PAGES, len(jobs))
        like = jobs[:, 3]
        here = jobs.clone()
        here[:, 2] = torch.arange(len(pages), device="cpu") % count
        before = like[like >= 0].unique().tolist()
        for place, page in enumerate(before, count):  # behind the new ones
            here[like == page, 3] = place
        here = here.to(self.device)
        room = count + len(before)
        keys, values = (new_fields(side.fields, room, self.device) for side in self.spec.sides)
        if "order" in keys:
            keys["order"][count:] = self.keys.take(before)["order"]
        for first in range(0, len(pages), count):
            some = here[first : first + count]
            kernel.write(PageWrite(call.windows, (keys, values), self.spec, call.damaged, {}, some))
            runs = runs_of(enumerate(pages[first : first + count]))
            for side, own in zip(self.sides, (keys, values), strict=True):
                host.store(own, runs, side.fields)
        self._staging.invalidate(self, pages)
        if self.index is not None:
            self.index.forget(pages)
        self.written = self._staging.copies.mark()

    def readable(self, view: TableView) -> ReadablePages:
        """Return what kernels read of the pages of `view`; offloaded ones are fetched while they are held."""
        with self.lock:
            if not self.is_offloaded:
                return super().readable(view)
            plan = self.memory.plan(view, self.device)
        return self.through(plan)._replace(offloaded=ChosenPages(self, view, plan))

    def through(self, plan: SlotPlan) -> ReadablePages:
        """Return what kernels read of the pages of `plan`: the fields are there while they are held, not before."""
        keys: dict[str, torch.Tensor] = {}
        values: dict[str, torch.Tensor] = {}

        @contextmanager
        def hold() -> Iterator[None]:
            with self.lock:
                if not self._staging.holds(self.spec, len(plan.ids)):
                    self._demand(0, len(plan.ids))
                with self._staging.reading(self, plan) as sides:
                    keys.update(sides[0])
                    values.update(sides[1])
                    yield

        return ReadablePages(self.spec, keys, values, plan.table, hold)

    def covering(self, table: torch.Tensor, pages: Sequence[int]) -> PageIndex:
        """Return the index, which then holds `pages`, those of `table` [rows, width]."""
        with persistent_tensors():
            if self.index is None:
                self.index = PageIndex(self.keys)
            # host memory has room for more
            self.index.cover(table, pages, self.memory.demands[self.layer_idx].capacity)
        return self.index

    def _demand(self, capacity: int, slots: int) -> None:
        """Have room made for `capacity` pages, of which one batch reads `slots`."""
        self.memory.make_room({self.layer_idx: Demand(self.spec, self.device, capacity, slots)})

    def fetch(self, runs: Sequence[Run], targets: Sides) -> None:
        """Copy runs of offloaded pages of both sides to `targets`."""
        for side, fields in zip((self.keys, self.values), targets, strict=True):
            assert side.host is not None
            with persistent_tensors():
                side.host.fetch(side.fields, runs, fields)


class ChosenPages:
    """The offloaded pages of one forward, of which a step may choose some; what PagedKV.offloaded offers.

    Args:
        plan: lists all pages of `view`.
    """

    def __init__(self, storage: OffloadedStorage, view: TableView, plan: SlotPlan) -> None:
        self._storage, self._view, self._plan = storage, view, plan

    def index(self) -> tuple[PageFields, torch.Tensor, torch.Tensor | None]:
        """Return what a choice reads: fields of the keys' index, their block table [rows, width], and the words that are there."""
        storage, view = self._storage, self._view
        with storage.lock:
            index = storage.covering(view.block_table, self._plan.ids)
            return index.fields, view.on(storage.device).block_table, index.words

    def read(
        self, block_table: torch.Tensor, num_pages: torch.Tensor
    ) -> tuple[Tensors, Tensors, torch.Tensor, Any]:
        """Return keys, values, block table and hold of chosen pages; the host waits for the choice, as it starts the copies.

        Args:
            block_table: [rows, width], int32, pages of the index's table.
            num_pages: [rows], int32, pages of each row.
        """
        storage, most = self._storage, min(len(self._plan.ids), block_table.numel())
        table, counts = block_table.cpu(), num_pages.cpu()
        with storage.lock:
            held = storage.memory.staging(storage.device).held(storage)
            plan = SlotPlan.of(table, counts, storage.device, most, held)
        found = storage.through(plan)
        return found.keys, found.values, found.block_table, found.hold


# -- all layers ------------------------------------------------------------------------------------------------------


class OffloadMemory(PageMemory):
    """Memory whose pages lie on the device up to a budget, and in host memory beyond it.

    Args:
        max_pages: bound of each pool, as in CacheConfig.
        place: "cpu" (host memory), "disk" (mapped files in the system's folder for temporary files), or another folder for them.
        device_bytes: of sealed pages that may lie on the device; None: as few as possible do.
    Attributes:
        demands: what room was made for, of each layer.
    """

    def __init__(self, max_pages: int | None, place: str, device_bytes: int | None) -> None:
        super().__init__(max_pages)
        self.place, self.device_bytes = place, device_bytes
        self._begin()

    def _begin(self) -> None:
        self._host: HostMemory | None = None
        self._staging: dict[torch.device, Staging] = {}
        self.demands: dict[int, Demand] = {}
        self._leaving: frozenset[int] = frozenset()
        self._plans: dict[int, SlotPlan] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Everything but memory, buffers and locks: they are made anew where the pickle is read."""
        state = super().__getstate__()
        return {n: one for n, one in state.items() if not (n.startswith("_") or n == "demands")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin()

    def check_device(self, device: torch.device) -> None:
        """Raise CacheOptionError where pages on `device` cannot be put to `place`."""
        if self.place == "cpu" and device.type == "cpu":
            raise CacheOptionError(
                "offload='cpu' has nothing to do here: the model is on the CPU, so that pages are already in host "
                "memory. Use offload='disk', or leave offload out"
            )

    def make_storage(self, layer_idx: int, spec: PageSpec, device: torch.device) -> PageStorage:
        """Make the storage of a layer."""
        self.check_device(device)
        return OffloadedStorage(layer_idx, spec, device, self)

    def host_memory(self) -> HostMemory:
        """Return the memory that pages leave to, made on first use."""
        if self._host is None:
            folder = None if self.place == "disk" else self.place
            self._host = HostMemory() if self.place == "cpu" else DiskMemory(folder)
        return self._host

    def staging(self, device: torch.device) -> Staging:
        """Return the staging buffers of a device."""
        if device not in self._staging:
            self._staging[device] = Staging(Copies(device))
        return self._staging[device]

    def plan(self, view: TableView, device: torch.device) -> SlotPlan:
        """Return the slots of the pages of `view`: made once for each table."""
        key = id(view.block_table)  # nobody else's: the plan keeps the table
        found = self._plans.get(key)
        if found is None or found.table.device != device:
            found = self._plans[key] = SlotPlan.of(view.block_table, view.num_pages, device)
            while len(self._plans) > PLANS:
                del self._plans[next(iter(self._plans))]
        return found

    def leaves(self, layer: int) -> bool:
        """Say whether the pages of a layer are, or will be, offloaded."""
        return layer in self._leaving

    def make_room(self, more: Mapping[int, Demand]) -> None:
        """Make room on the device and in host memory, before anything is written, for what is demanded besides.

        Args:
            more: by layer; of those whose storage is still to be made, as far as it is known.
        Raises: DeviceBudgetError, OffloadError; then no page has been lost or changed.
        """
        if self._host is not None:
            self._host.check_process()
        with self.lock, persistent_tensors():
            known = self.demands
            demands = known | {
                layer: known[layer].joined(one) if layer in known else one
                for layer, one in more.items()
            }
            if demands == known:
                return
            storages = self.storages
            devices = {demand.device for demand in demands.values()}
            buffers = max((self.staging(device).copies.buffers for device in devices), default=1)
            left = {layer for layer, one in storages.items() if one.has_left}
            leaving = split_layers(demands, self.device_bytes, buffers, self._leaving | left)
            needed = 0
            for layer in leaving:
                demand, one = demands[layer], storages.get(layer)
                there = one.capacity if one is not None and one.is_offloaded else 0
                needed += carved_bytes(demand.spec, max(0, demand.capacity - there))
            if needed:
                self.host_memory().check_room(needed)
            for layer in sorted(leaving & storages.keys()):
                storages[layer].leave(demands[layer].capacity)
            self.demands, self._leaving = demands, leaving
            for device, size in staging_sizes(demands[layer] for layer in leaving).items():
                self.staging(device).resize(size)

    @property
    def staging_bytes(self) -> int:
        """Bytes of the staging buffers, and of the indexes by which pages to be fetched are chosen."""
        indexes = (one.index for one in list(self.storages.values()))
        held = [one.nbytes for one in (*indexes, *self._staging.values()) if one is not None]
        return sum(held)

    def clear(self) -> None:
        """Give all memory back where nobody holds a page, the files too."""
        super().clear()
        if not self.storages:
            self._begin()
