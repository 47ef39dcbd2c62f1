"""The choice of the layers whose pages stay on the device, under a budget. Moves nothing.

Every step of full attention reads all pages, so what was used last says nothing about what to keep. Whole layers
stay, and the others are read through staging buffers: a layer that stays costs no copy at all, and the layers that
leave lie far apart, so that the copies of one have the computation of several to hide behind.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from ..errors import DeviceBudgetError
from ..page_summary import part_bytes
from ..spec import PageSpec
from .slab import carved_bytes

SEAL_PAGES = 8  # pages of one side that are encoded at a time on their way outside


@dataclass(frozen=True)
class Demand:
    """The bytes of one layer's pages.

    Attributes:
        capacity: pages that storage has room for.
        slots: most pages that one batch reads.
        index: whether steps choose among the pages, by an index that stays on the device while they live outside.
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
        """Bytes on the device for pages that live outside."""
        return self.capacity * part_bytes(self.spec.keys) if self.index else 0


@dataclass(frozen=True)
class Split:
    """The layers that stay and the layers that leave.

    Attributes:
        outside: layers whose pages live outside.
        staging: bytes of one staging buffer, by device.
    """

    outside: frozenset[int] = frozenset()
    staging: Mapping[torch.device, int] = field(default_factory=dict)


class DeviceBudget:
    """Bytes of sealed pages that may lie on the device.

    Args:
        pages: so many pages of one layer, of the mean size over all layers; or None.
        nbytes: so many bytes; or None. With neither, as little as possible stays.
    """

    def __init__(self, pages: int | None, nbytes: int | None) -> None:
        self.pages = pages
        self.nbytes = nbytes

    def split(
        self, demands: Mapping[int, Demand], buffers: int, already: Iterable[int] = ()
    ) -> Split:
        """Choose who leaves; layers that are `already` outside stay there.

        Counted are the pages that stay, the largest layer among them once more (it exists twice while it grows),
        `buffers` staging buffers for the largest layer outside, the indexes of the layers outside (the largest once more
        as well), and the pages that are being sealed.

        Raises: DeviceBudgetError when not even one layer at a time fits.
        """
        limit = self._limit(demands)
        if limit is None:
            return _split(demands, set(demands))
        outside = set(already) & set(demands)
        for layer in [None, *_leaving_order(demands)]:
            if layer is not None:
                outside.add(layer)
            split = _split(demands, outside)
            if _on_device(demands, split, buffers) <= limit:
                return split
        raise self._too_small(demands, split, buffers, limit)

    def _limit(self, demands: Mapping[int, Demand]) -> int | None:
        if self.pages is None or not demands:
            return self.nbytes
        total = sum(demand.spec.page_bytes for demand in demands.values())
        return self.pages * total // len(demands)

    def _too_small(
        self, demands: Mapping[int, Demand], split: Split, buffers: int, limit: int
    ) -> DeviceBudgetError:
        needed = _on_device(demands, split, buffers)
        mean = sum(demand.spec.page_bytes for demand in demands.values()) / len(demands)
        slots = max(demand.slots for demand in demands.values())
        indexes = sum(demand.index_bytes for demand in demands.values())
        index = (
            f", the index of all pages that a step chooses from, {indexes:,} bytes"
            if indexes
            else ""
        )
        given = f"device_bytes={self.nbytes}"
        least = f"device_bytes={needed}"
        if self.pages is not None:
            given, least = f"device_pages={self.pages}", f"device_pages={int(-(-needed // mean))}"
        return DeviceBudgetError(
            f"{given} ({limit:,} bytes) is too small for this text: reading one layer at a time needs {least} "
            f"({needed:,} bytes: {buffers} staging buffer{'s' * (buffers > 1)} of {slots} pages{index}, and {SEAL_PAGES} "
            "pages that are being sealed); the cache is unchanged. Raise it, or use a smaller batch, a shorter text "
            "or a smaller format"
        )


def _leaving_order(demands: Mapping[int, Demand]) -> list[int]:
    """Return the layers in the order in which they leave: the largest first, equal ones far apart."""
    layers = sorted(demands)
    width = max(1, (len(layers) - 1).bit_length())
    scattered = {layer: int(f"{at:0{width}b}"[::-1], 2) for at, layer in enumerate(layers)}
    return sorted(layers, key=lambda layer: (-demands[layer].nbytes, scattered[layer]))


def _split(demands: Mapping[int, Demand], outside: set[int]) -> Split:
    staging: dict[torch.device, int] = {}
    for layer in outside:
        demand = demands[layer]
        size = carved_bytes(demand.spec, demand.slots)
        staging[demand.device] = max(staging.get(demand.device, 0), size)
    return Split(frozenset(outside), staging)


def _on_device(demands: Mapping[int, Demand], split: Split, buffers: int) -> int:
    """Return the bytes on devices at most, the transient ones included."""
    staying = [demand for layer, demand in demands.items() if layer not in split.outside]
    leaving = [demand for layer, demand in demands.items() if layer in split.outside]
    indexes = [one.index_bytes for one in leaving]
    growing = max([*(one.nbytes for one in staying), *indexes], default=0)
    sealing = max((SEAL_PAGES * _largest_side(one.spec) for one in leaving), default=0)
    held = sum(one.nbytes for one in staying) + sum(indexes)
    return held + max(growing, sealing) + buffers * sum(split.staging.values())


def _largest_side(spec: PageSpec) -> int:
    return max(side.payload_bytes + side.scale_bytes for side in spec.sides)
