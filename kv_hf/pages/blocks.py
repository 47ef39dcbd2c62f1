"""Growth of pages on a GPU: several layers in one allocation, whose predecessors go back to the device.

torch's caching allocator keeps what is freed, in the segments that it asked the driver for, and a layer's old pages never
have room for its new ones. Growing layer by layer therefore keeps everything that was ever allocated (and allocations
of a few MiB waste what is left of their segment). So layers grow in blocks:

    [ layer 0 ][ layer 1 ] .. [ layer k - 1 ]      one allocation, of BLOCK_BYTES or a PARTS-th of all layers at least

k is a power of two that falls while the text grows, so that the layers of a block are those of whole former blocks: these
are then free as a whole, and `give_back` returns them to the driver. What is held beyond the pages is one block at a time.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch

from ..spec import PageFields, PageSpec
from .slab import Fields, carve, carved_bytes

BLOCK_BYTES = (
    64 << 20
)  # three segments of the allocator and more: what rounding wastes is small beside it
PARTS = 16
ALIGNMENT = 512  # bytes, of a field; as torch aligns tensors of their own


def in_blocks(device: torch.device) -> bool:
    """Say whether storage on `device` grows in blocks: on a CPU the C library gives back what was freed."""
    return device.type != "cpu"


def give_back(device: torch.device) -> None:
    """Return memory that torch keeps unused to the driver: only segments that are free as a whole go."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Part:
    """A layer's place in a block that was made before the layer came."""

    spec: PageSpec
    device: torch.device
    capacity: int
    sides: tuple[Fields, Fields]


class Growing(Protocol):
    """The pages of a layer, as far as they grow with those of others (PageStorage)."""

    spec: PageSpec
    device: torch.device

    @property
    def capacity(self) -> int:
        """Pages that there is room for."""
        ...

    @property
    def fields(self) -> tuple[PageFields, PageFields]:
        """The pages of keys and of values."""
        ...

    def take_over(self, sides: tuple[PageFields, PageFields]) -> None:
        """Hold these fields from now on, which contain the pages so far."""
        ...

    def grow_with(self, neighbours: "Neighbours", layer: int) -> None:
        """Grow as `layer` of `neighbours` from now on, under their lock."""
        ...


class Neighbours:
    """Layers whose storages grow in blocks, in order.

    Args:
        layers: positions in the model, of layers that see the same tokens and have the same formats.
    """

    lock: Any  # held while pages of any of the layers are written, or storage grows

    def __new__(cls, *args: Any) -> Self:
        """Make the lock first: storages that are read from a pickle need it before this is whole."""
        self = super().__new__(cls)
        self.lock = threading.RLock()
        return self

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self.forget()

    def __getstate__(self) -> dict[str, Any]:
        """Return the layers alone; where the pickle is read, storages join again and blocks begin anew."""
        return {"layers": self.layers, "alone": self._alone}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.layers = state["layers"]
        self.forget()
        self._alone |= state.get("alone", set())

    def forget(self) -> None:
        """Let go of all storages, and of what was made for layers that have not come."""
        self.storages: dict[int, Growing] = {}
        self._parts: dict[int, Part] = {}
        self._alone: set[int] = set()  # layers whose storage grows by itself

    def join(self, layer: int, storage: Growing) -> None:
        """Let the storage of `layer` grow with the others."""
        storage.grow_with(self, layer)
        self.storages[layer] = storage
        self._alone.discard(layer)

    def leave(self, layer: int) -> None:
        """Let the storage of `layer` go: the one that takes its place grows alone."""
        with self.lock:
            self._alone.add(layer)
            self.storages.pop(layer, None)
            self._parts.pop(layer, None)

    def block_of(self, layer: int, layer_bytes: int) -> tuple[int, ...]:
        """Return the layers of the block that `layer` lies in, where each takes `layer_bytes` bytes."""
        count = len(self.layers)
        wanted = max(BLOCK_BYTES, count * layer_bytes // PARTS)
        size = 1
        while size < count and size * layer_bytes < wanted:
            size *= 2
        first = self.layers.index(layer) // size * size
        return self.layers[first : first + size]

    def holds(self, layer: int, storage: Growing) -> bool:
        """Say whether `storage` is the one that `layer` has joined with."""
        return self.storages.get(layer) is storage

    def grow(self, layer: int, capacity: int) -> None:
        """Make room for `capacity` pages in the storage of `layer` and in those that share its block, or in none.

        Layers that have no storage yet find their place in the block when theirs grows to the same capacity.
        """
        with self.lock:
            storage = self.storages[layer]
            if storage.capacity >= capacity:
                return
            part = self._parts.pop(layer, None)
            wanted = (storage.spec, storage.device, capacity)
            if part is None or (part.spec, part.device, part.capacity) != wanted:
                self._grow_block(layer, capacity)
            else:
                storage.take_over(_filled(storage, part.sides))

    def _grow_block(self, layer: int, capacity: int) -> None:
        asking = self.storages[layer]
        spec, device = asking.spec, asking.device
        size = carved_bytes(spec, capacity, ALIGNMENT)
        chosen = [one for one in self.block_of(layer, size) if self._fits(one, asking, capacity)]
        raw = torch.empty(len(chosen) * size, dtype=torch.uint8, device=device)
        places = {
            one: carve(raw[at * size : (at + 1) * size], spec, capacity, ALIGNMENT)
            for at, one in enumerate(chosen)
        }
        # nothing of the old is given up before all of the new is there
        new = {one: _filled(self.storages.get(one), sides) for one, sides in places.items()}
        had_pages = any(one in self.storages and self.storages[one].capacity for one in chosen)
        for one, sides in new.items():
            if one in self.storages:
                self._parts.pop(one, None)
                self.storages[one].take_over(sides)
            else:
                self._parts[one] = Part(spec, device, capacity, sides)
        del raw, places, new, sides
        if had_pages:
            give_back(device)

    def _fits(self, layer: int, asking: Growing, capacity: int) -> bool:
        """Say whether a layer takes a place in the block of another one that is `asking`."""
        if layer in self._alone:
            return False
        storage = self.storages.get(layer)
        if storage is None:
            return True
        same = (storage.spec, storage.device) == (asking.spec, asking.device)
        return same and storage.capacity < capacity


def _filled(storage: Growing | None, sides: tuple[Fields, Fields]) -> tuple[PageFields, PageFields]:
    """Fill new fields with a storage's pages and, behind them, zeros, so that reading any is finite."""
    old: tuple[Mapping[str, torch.Tensor], ...] = ({}, {})
    if storage is not None:
        old = storage.fields
    for before, fields in zip(old, sides, strict=True):
        for name, tensor in fields.items():
            held = len(before[name]) if name in before else 0
            if held:
                tensor[:held] = before[name]
            tensor[held:].zero_()
    return PageFields(sides[0]), PageFields(sides[1])
