"""Pages beyond a device budget live outside: in pinned host memory, or in a mapped file.

A layer's pages are either all on the device, as in an ordinary cache, or all outside; device_budget.py decides, and
a layer that has left does not come back before the cache is reset. Sealed pages are written outside piece by piece
and read through staging buffers (staging.py), which all caches of an arena share.
"""

import threading
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..errors import CacheOptionError
from ..spec import PageSpec
from .arena import PageArena
from .copy_stream import CopyStream, lane_for
from .device_budget import Demand, DeviceBudget, Split
from .host_memory import HostMemory
from .mapped_file import MappedFile
from .offload_storage import OffloadedStorage
from .persistent import persistent_tensors
from .slab import carved_bytes
from .staging import SlotPlan, Staging
from .step import TableView
from .storage import PageStorage

PLANS = 8  # slot plans that are kept: one for each group of the caches in use


class OffloadArena(PageArena):
    """An arena whose pages lie on the device up to a budget, and outside beyond it.

    Args:
        max_pages: bound of each pool, as in CacheConfig.
        place: "cpu" (host memory) or "disk" (a mapped file).
        budget: what may lie on the device.
        folder: where the file is made; None takes the system's folder for temporary files.
    Attributes:
        chosen_from: layers of whose pages a step may choose some: their index counts as memory of the device.
    """

    chosen_from: frozenset[int] = frozenset()

    def __new__(cls, *args: Any, **options: Any) -> "OffloadArena":
        """Make the lock first: storages that are read from a pickle need it before the arena is whole."""
        self = super().__new__(cls)
        self.lock = threading.RLock()
        return self

    lock: Any  # held while pages are written, storage grows, or staging buffers are read

    def __init__(
        self, max_pages: int | None, place: str, budget: DeviceBudget, folder: str | None = None
    ) -> None:
        super().__init__(max_pages)
        self.place, self.budget, self.folder = place, budget, folder
        self._prepare()

    def _prepare(self) -> None:
        self._outside: HostMemory | None = None
        self._staging: dict[torch.device, Staging] = {}
        self._specs: dict[int, tuple[PageSpec, torch.device]] = {}  # as far as is known
        self._capacities: dict[int, int] = {}  # pages that room was made for
        self._slots: dict[int, int] = {}
        self._split = Split()
        self._plans: dict[int, SlotPlan] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Everything but memory, buffers and the lock: they are made anew where the pickle is read."""
        names = (
            "max_pages",
            "place",
            "budget",
            "folder",
            "pools",
            "storages",
            "neighbours",
            "chosen_from",
        )
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._prepare()

    def choose_from(self, layers: Iterable[int]) -> None:
        """Note that steps may read a part of the pages of these layers."""
        self.chosen_from = frozenset(layers)

    def check_process(self) -> None:
        """Raise OffloadError in a process that was forked from the one whose file the pages lie in."""
        if self._outside is not None:
            self._outside.check_process()

    def check_device(self, device: torch.device) -> None:
        """Raise CacheOptionError where pages on `device` cannot be put to this arena's place."""
        if self.place == "cpu" and device.type == "cpu":
            raise CacheOptionError(
                "offload='cpu' has nothing to do here: the model is on the CPU, so that pages are already in host "
                "memory. Use offload='disk', or leave offload out"
            )

    def make_storage(self, layer_idx: int, spec: PageSpec, device: torch.device) -> PageStorage:
        """Make the storage of a layer."""
        self.check_device(device)
        return OffloadedStorage(layer_idx, spec, device, self)

    def outside(self) -> HostMemory:
        """Return the memory outside, made on first use."""
        if self._outside is None:
            cuda = torch.cuda.is_available()
            disk = self.place == "disk"
            self._outside = MappedFile(self.folder) if disk else HostMemory(pinned=cuda)
        return self._outside

    def make_lane(self, device: torch.device) -> CopyStream:
        """Return how copies to `device` run."""
        return lane_for(device)

    def staging(self, device: torch.device) -> Staging:
        """Return the staging buffers of a device."""
        if device not in self._staging:
            self._staging[device] = Staging(device, self.make_lane(device))
        return self._staging[device]

    def plan(self, view: TableView, device: torch.device) -> SlotPlan:
        """Return the slots of the pages of `view`: made once for each table."""
        key = id(view.block_table)  # nobody else's: the plan keeps the table
        found = self._plans.get(key)
        if found is None or found.table.device != device:
            found = SlotPlan.build(view, device)
            self._plans[key] = found
            while len(self._plans) > PLANS:
                del self._plans[next(iter(self._plans))]
        return found

    def settled(self, layer: int, capacity: int) -> bool:
        """Say whether room was made for so many pages of a layer."""
        return self._capacities.get(layer, 0) >= capacity

    def room_for(self, layer: int) -> int:
        """Return the pages of a layer that room was made for."""
        return self._capacities.get(layer, 0)

    def is_outside(self, layer: int) -> bool:
        """Say whether the pages of a layer live outside."""
        return layer in self._split.outside

    def settle(
        self,
        capacities: Mapping[int, int],
        slots: Mapping[int, int] | None = None,
        expected: Mapping[int, tuple[PageSpec, torch.device]] | None = None,
    ) -> None:
        """Make room on the device and outside, before anything is written.

        Args:
            capacities: layer -> pages that its storage shall have room for, where that grows.
            slots: layer -> most pages that one batch reads; where it was never said, as many as there is room for.
            expected: spec and device of layers whose storage is still to be made, as far as is known.
        Raises: DeviceBudgetError, OffloadError; then no page has been lost or changed.
        """
        with self.lock, persistent_tensors():
            held = {layer: (one.spec, one.device) for layer, one in self.storages.items()}
            specs = {**self._specs, **(expected or {}), **held}
            room, most = dict(self._capacities), dict(self._slots)
            for known, more in ((room, capacities), (most, slots or {})):
                known.update({layer: max(n, known.get(layer, 0)) for layer, n in more.items()})
            demands = {
                layer: Demand(
                    *found,
                    room.get(layer, 0),
                    most.get(layer, room.get(layer, 0)),
                    layer in self.chosen_from,
                )
                for layer, found in specs.items()
            }
            lanes = [self.staging(device).lane for device in {found[1] for found in specs.values()}]
            buffers = max((lane.buffers for lane in lanes), default=1)
            left = {layer for layer, one in self.storages.items() if one.offloaded_bytes}
            split = self.budget.split(demands, buffers, self._split.outside | left)
            self._check_outside(split, demands)
            for layer in sorted(split.outside & set(self.storages)):
                storage = self.storages[layer]
                assert isinstance(storage, OffloadedStorage)
                storage.leave(self.outside(), demands[layer].capacity)
            self._specs, self._capacities, self._slots, self._split = specs, room, most, split
            for device, size in split.staging.items():
                self.staging(device).resize(size)

    def _check_outside(self, split: Split, demands: Mapping[int, Demand]) -> None:
        needed = 0
        for layer in split.outside:
            demand, storage = demands[layer], self.storages.get(layer)
            outside = storage is not None and bool(storage.offloaded_bytes)
            held = storage.capacity if storage is not None and outside else 0
            if demand.capacity > held:
                needed += carved_bytes(demand.spec, demand.capacity - held)
        if needed:
            self.outside().check_room(needed)

    @property
    def staging_bytes(self) -> int:
        """Bytes of the staging buffers, and of the indexes by which pages to be fetched are chosen."""
        indexes = sum(
            one.index_bytes for one in self.storages.values() if isinstance(one, OffloadedStorage)
        )
        return indexes + sum(staging.nbytes for staging in self._staging.values())

    def clear(self) -> None:
        """Give all memory back where nobody holds a page, the file too."""
        with self.lock:
            super().clear()
            if not self.storages:
                self._prepare()
