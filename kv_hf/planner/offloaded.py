"""Bytes of a PagedCache with offload: which layers' pages have left the device, and what they are read through.

Layers leave for good, and what lives outside grows in steps, so that both depend on the way: the forwards at which
the cache makes room are gone through one by one (cache/offloading.py, pages/offload.py), with the cache's own budget.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ..config import CacheConfig
from ..config_reading import read_budget
from ..errors import CacheOptionError
from ..page_summary import part_bytes
from ..pages.device_budget import Demand, DeviceBudget, Split
from ..pages.host_pages import SMALLEST_EXTENT
from ..pages.slab import carved_bytes
from ..read_budget import ReadBudget
from ..row_pages import RowPages, first_sealing_step, page_capacity, page_peaks, page_use
from ..spec import LANES, PageSpec, counted, pages_report
from .figures import EMPTY, Figures
from .growing import check_classes
from .inventory import Inventory
from .paged import (
    Groups,
    all_beside_pages,
    check_max_pages,
    check_options,
    layer_formats,
    layer_spec,
    open_slots,
    page_groups,
    reserve,
    row_sizes,
)

MOST_STEPS = 1 << 24  # that are followed; the pages that each needs are worked out at once


@dataclass
class _Room:
    """The room that the arena of an offload has made so far.

    Attributes:
        rows: of the batch.
        reading: what a step reads of the layers `chosen_from`; None: everything.
        homes: layer -> pages that there is room for outside.
        capacities: layer -> pages that room was made for.
    """

    budget: DeviceBudget
    device: torch.device
    rows: int
    reading: ReadBudget | None
    chosen_from: frozenset[int]
    split: Split = field(default_factory=Split)
    homes: dict[int, int] = field(default_factory=dict)
    capacities: dict[int, int] = field(default_factory=dict)

    @property
    def buffers(self) -> int:
        """Staging buffers: a copy runs beside kernels on a GPU only."""
        return 1 if self.device.type == "cpu" else 2

    def settle(self, specs: Mapping[int, PageSpec], capacities: Mapping[int, int]) -> None:
        """Make room for pages of these layers, as OffloadArena.settle."""
        self.capacities.update(capacities)
        demands = {
            layer: Demand(
                spec,
                self.device,
                self.capacities[layer],
                self.slots(layer, self.capacities[layer], spec),
                layer in self.chosen_from,
            )
            for layer, spec in specs.items()
        }
        self.split = self.budget.split(demands, self.buffers, self.split.outside)
        for layer in self.split.outside:
            first, wanted = self.homes.get(layer, 0), self.capacities[layer]
            if wanted > first:
                self.homes[layer] = first + max(wanted - first, first // 4, SMALLEST_EXTENT)

    def slots(self, layer: int, pages: int, spec: PageSpec) -> int:
        """Return how many of so many pages of a layer a step reads at most."""
        if self.reading is None or layer not in self.chosen_from:
            return pages
        return self.reading.batch_width(pages, self.rows, spec.keys.page_size)

    def index_bytes(self, specs: Mapping[int, PageSpec], pages: int, columns: int) -> int:
        """Return the bytes of the indexes of layers outside, where a step over rows of so many pages and columns chooses."""
        if self.reading is None or not self.reading.chooses(pages, columns):
            return 0
        return sum(
            self.capacities[layer] * part_bytes(spec.keys)
            for layer, spec in specs.items()
            if layer in self.chosen_from & self.split.outside
        )

    def read(
        self,
        groups: Groups,
        specs: Mapping[int, PageSpec],
        options: CacheConfig,
        row_tokens: Sequence[int],
    ) -> None:
        """Let a first decode step read rows of these tokens: where a staging buffer is too small, room is made again."""
        for window, own in groups.items():
            held = list(map(row_sizes(options, window).held, row_tokens))
            for layer in self.split.outside & set(own):
                slots = sum(held)
                if self.reading is not None and layer in self.chosen_from:
                    width = self.reading.width(max(held), own[layer].keys.page_size)
                    slots = min(slots, len(held) * width)
                if carved_bytes(own[layer], slots) > self.split.staging[self.device]:
                    self.settle(specs, {})


def offloaded(
    inventory: Inventory,
    options: CacheConfig,
    row_tokens: Sequence[int],
    prompt: int | None,
    dtype: torch.dtype,
    layout: str,
) -> Figures:
    """Return what a PagedCache of these options takes; without `prompt` all tokens but the last came at once."""
    check_options(options)
    check_classes(inventory)
    device = torch.device("cpu" if layout == LANES else "cuda")
    if options.offload == "cpu" and device.type == "cpu":
        raise CacheOptionError(
            "offload='cpu' has nothing to do on a CPU, where pages are in host memory already; use offload='disk', or "
            "leave offload out"
        )
    formats = layer_formats(inventory, options)
    groups = page_groups(inventory, formats, dtype, layout)
    longest = max(row_tokens, default=0)
    new = longest - prompt if prompt is not None else min(1, max(0, longest - 1))
    if new > MOST_STEPS:
        raise CacheOptionError(
            f"prompt={prompt}: behind it come {new:,} tokens one by one, and an offload is followed through {MOST_STEPS:,} "
            "steps at most; leave prompt out, or plan for a shorter context"
        )
    full = groups.get(None, {})
    reading = read_budget(options)
    room = _Room(
        DeviceBudget(options.device_pages, options.device_bytes),
        device,
        len(row_tokens),
        reading,
        frozenset(index for index in formats if reading and inventory.layers[index].window is None),
    )
    steps = _steps(groups, options, row_tokens, new)
    held = {layer: spec for specs in groups.values() for layer, spec in specs.items()}
    # until a layer has seen keys, it is taken to have heads like those of the first
    first = inventory.layers[min(held)]
    alike = {own: layer_spec(own, first, dtype, layout) for own in set(formats.values())}
    guessed = {
        index: alike[own]
        for index, own in formats.items()
        if inventory.layers[index].window in groups
    }
    known = {**guessed, **held}
    for step in sorted(steps):
        capacities = {
            layer: pages
            for window, pages in steps[step].items()
            for layer in guessed
            if inventory.layers[layer].window == window
        }
        if capacities:
            room.settle(known if step else guessed, capacities)
        if step == 1 and known != guessed:
            room.read(groups, known, options, [max(0, tokens - new) for tokens in row_tokens])
    total = Figures(replace(EMPTY, tokens=sum(row_tokens)))
    for window, specs in groups.items():
        total += _group(room, specs, row_sizes(options, window), options, row_tokens, longest - new)
    if new:  # the prompt's forward reads no pages
        size = room.buffers * sum(room.split.staging.values())
        pages = row_sizes(options, None).held(longest - 1)  # that the last step found
        size += room.index_bytes(full, pages, longest)
        total += Figures(replace(EMPTY, staging=size))
    return total + all_beside_pages(inventory, formats, row_tokens, longest - new, dtype)


def _steps(
    groups: Groups, options: CacheConfig, row_tokens: Sequence[int], new: int
) -> dict[int, dict[int | None, int]]:
    """Return step -> {window: pages that its layers make room for}, where that changes or is said for the first time."""
    steps: dict[int, dict[int | None, int]] = {0: {}}
    if new:
        steps[1] = {}  # reads pages for the first time
    for window in groups:
        sizes = row_sizes(options, window)
        reserved, last = reserve(sizes, options, len(row_tokens)), -1
        for step, pages in page_peaks(sizes, row_tokens, new):
            check_max_pages(pages, options.max_pages, row_tokens)
            capacity = max(page_capacity(pages), reserved)
            if capacity > last:
                steps.setdefault(step, {})[window] = last = capacity
        begun = steps[0][window]
        again = first_sealing_step(sizes, row_tokens, new)
        if again is not None:
            steps.setdefault(again, {}).setdefault(window, begun)
    return steps


def _group(
    room: _Room,
    specs: Mapping[int, PageSpec],
    sizes: RowPages,
    options: CacheConfig,
    row_tokens: Sequence[int],
    prompt: int,
) -> Figures:
    """Return what the pages of one window take, on the device and outside."""
    use = page_use(sizes, row_tokens, prompt)
    capacity = use.capacity(reserve(sizes, options, len(row_tokens)))
    whole = pages_report(list(specs.values()), sizes, row_tokens, use.held, capacity)
    inside = [spec for layer, spec in specs.items() if layer not in room.split.outside]
    sides = [(side, n) for spec, n in counted(inside) for side in spec.sides]
    homes = {layer: pages for layer, pages in room.homes.items() if layer in specs}
    page_bytes = {id(spec): spec.page_bytes for spec, _ in counted(list(specs.values()))}
    report = replace(
        whole,
        payload=capacity * sum(n * side.payload_bytes for side, n in sides),
        scales=capacity * sum(n * side.scale_bytes for side, n in sides),
        pages_allocated=max([*homes.values(), *([capacity] if inside else [])], default=0),
        offloaded=sum(pages * page_bytes[id(specs[layer])] for layer, pages in homes.items()),
    )
    free = (capacity - whole.pages_held) * sum(n * spec.page_bytes for spec, n in counted(inside))
    return Figures(report, free + open_slots(list(specs.values()), sizes, row_tokens))
