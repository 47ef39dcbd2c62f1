"""Bytes of every kind of cache, before there is a model: those that the cache then allocates.

A paged cache that grows is filled with meta tensors: `filled`. `predict` says the same by a formula for each group of layers,
which a search can ask hundreds of times. transformers' caches, preallocated pages and offloaded ones are formulas alone:
on the meta device a DynamicCache keeps no views alive, a preallocated cache writes numbers, and an offload copies out.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache

import torch

from ..cache.layer_choice import INDEXED, paged_formats
from ..cache.layer_formats import LayerFormats
from ..cache.paged_cache import PagedCache
from ..checks import check_int
from ..config import CacheConfig
from ..errors import CacheOptionError, PagePoolExhaustedError, UnsupportedModelError
from ..page_summary import part_bytes
from ..pages.device_budget import Demand, DeviceBudget, Split
from ..pages.host_pages import SMALLEST_EXTENT
from ..pages.slab import carved_bytes
from ..row_pages import RowPages, first_sealing_step, page_capacity, page_peaks, page_use
from ..spec import LANES, ROWS, TABLE_DTYPE, MemoryReport, PageSpec, pages_report, reserved_pages
from .inventory import COUNTER, SLIDING, CachedLayer, Inventory

EMPTY = MemoryReport(0, 0, 0, 0, 0, 0, 0, 0)
# classes of layers in a DynamicCache whose growth is known
KNOWN = (
    *("DynamicLayer", INDEXED, "MiniMaxM3VLSparseCacheLayer", "LinearAttentionLayer", "DummyLayer"),
    *("LinearAttentionAndFullAttentionLayer", *SLIDING),
)


def predict(
    inventory: Inventory,
    kind: str,
    options: CacheConfig | None = None,
    *,
    row_tokens: Sequence[int],
    prompt: int | None = None,
    max_length: int | None = None,
    layout: str = ROWS,
) -> MemoryReport:
    """Return the bytes that a cache takes whose rows hold `row_tokens` tokens.

    Args:
        inventory: what the model caches.
        kind: "dynamic" or "static" (transformers' DynamicCache and StaticCache: `payload` are keys and values, `other`
            states, indexer keys and counters), or "paged".
        options: of "paged"; None takes the defaults.
        row_tokens: real tokens that the cache holds of each row; shorter rows are padded on the left to the longest.
            Behind generate() that is the prompt's tokens and all new ones but the last.
        prompt: tokens of the longest row that came in the first forward, the others one by one. It decides how many
            pages a sliding window had in use at once, the room of indexer keys, and what an offload has moved. None: the
            most that any prompt leads to, which never falls as rows grow. Where none of these is there the prompt changes
            nothing (beyond 256 pages it may, by less than 1/128, with reserve_tokens). With offload None is a prompt of
            all tokens but the last. A "dynamic" cache has bytes behind a decode step, unless the prompt is all there is:
            right behind a prefill its sliding layers keep the whole prompt alive.
        max_length: columns of a "static" cache; None: as many as the longest row has tokens.
        layout: of pages: ROWS on a GPU, LANES on a CPU. The bytes are the same, but for the buffers of an offload.
    Raises: CacheOptionError, UnsupportedModelError, PagePoolExhaustedError, DeviceBudgetError: what the cache would raise,
        and for what cannot be known without the texts (prefix_store).
    """
    rows, columns = len(row_tokens), max(row_tokens, default=0)
    for index, layer in enumerate(inventory.layers):
        if layer.cache_class not in KNOWN:
            raise UnsupportedModelError(
                f"layer {index} of {inventory.name!r} is kept in a {layer.cache_class}, whose bytes are not known; known are "
                f"{', '.join(KNOWN)}"
            )
    own = inventory.torch_dtype
    if kind == "paged":
        return Pages(inventory, options or CacheConfig(), layout).report(row_tokens, prompt)
    held = {"payload": 0, "other": 0}
    if kind == "dynamic":
        for layer in inventory.layers:
            kept = stored_columns(layer, columns, prompt)
            held["payload"] += rows * kept * layer.elements * own.itemsize
            held["other"] += _beside(layer, rows, columns, own)
    else:
        room = _room(max_length, columns)
        for layer in inventory.layers:
            kept = room if layer.window is None else min(room, layer.window)
            held["payload"] += rows * kept * layer.elements * own.itemsize
            held["other"] += _beside_static(layer, rows, columns, room, own)
    return replace(EMPTY, **held, tokens=sum(row_tokens))


# -- transformers' caches -------------------------------------------------------------------------------------------


def stored_columns(layer: CachedLayer, columns: int, prompt: int | None) -> int:
    """Return the columns whose memory a layer of a DynamicCache keeps alive.

    A sliding layer keeps a view of all that its last forward saw: of the whole prompt right behind a prefill, of
    `window` columns behind a decode step. Of a window of 1 the view [-window + 1 :] is all of it.
    """
    if layer.window in (None, 1) or prompt == columns:
        return columns
    return min(columns, layer.window or 0)


def _beside(layer: CachedLayer, rows: int, columns: int, dtype: torch.dtype) -> int:
    """Return what a growing layer of transformers holds beside keys and values."""
    per_column = layer.index_bytes(dtype) + layer.position_bytes
    counter = COUNTER if layer.cache_class in SLIDING else 0  # its window, as a tensor
    return rows * (columns * per_column + layer.state_bytes(dtype)) + counter


def _beside_static(
    layer: CachedLayer, rows: int, columns: int, room: int, dtype: torch.dtype
) -> int:
    """Return the same of a layer of a StaticCache; positions of an indexer grow in this one too."""
    index = layer.index_bytes(dtype)
    counters = COUNTER * (layer.cache_class not in ("LinearAttentionLayer", "DummyLayer"))
    counters += COUNTER * bool(index or layer.cache_class == "MiniMaxM3VLSparseCacheLayer")
    held = room * index + columns * layer.position_bytes + layer.state_bytes(dtype)
    return rows * held + counters


def _room(max_length: int | None, columns: int) -> int:
    if max_length is None:
        return columns
    check_int("max_length", max_length, 1)
    if max_length < columns:
        raise CacheOptionError(
            f"max_length={max_length} has no room for a row of {columns} tokens (row_tokens)"
        )
    return max_length


# -- pages ------------------------------------------------------------------------------------------------------------


class Pages:
    """The pages of a PagedCache with these options.

    Attributes:
        formats: layer -> formats, of all layers that pages take the place of, those too that hold no keys and values.
        groups: {window: {layer: its pages}} of the layers with keys and values, full attention first. Layers that are alike
            share one object.
    Raises: CacheOptionError, UnsupportedModelError, as the cache would.
    """

    def __init__(self, inventory: Inventory, options: CacheConfig, layout: str = ROWS) -> None:
        if options.prefix_store is not None:
            raise CacheOptionError(
                "prefix_store: how many bytes rows share depends on their texts; leave it out of a plan"
            )
        if options.cross_attention != "exact":
            raise CacheOptionError(
                f"cross_attention={options.cross_attention!r} is for encoder-decoder models, which are not planned"
            )
        self.layers, self.options, self.layout = inventory.layers, options, layout
        self.dtype = inventory.torch_dtype
        self._check_max_length(inventory)
        ranks = [layer.key_dim if layer.latent else None for layer in self.layers]
        shared = next(filter(None, ranks), None)
        ranks = [  # a layer with an indexer and without latents reads another layer's
            shared if layer.cache_class == INDEXED and not layer.elements else rank
            for layer, rank in zip(self.layers, ranks, strict=True)
        ]
        windows = [layer.window for layer in self.layers]
        classes = [layer.cache_class for layer in self.layers]
        self.formats = paged_formats(classes, ranks, options, inventory.model_type, windows)
        latent = any(ranks[index] is not None for index in self.formats)
        seen = [windows[index] for index in self.formats]
        options.budget_of(inventory.model_type, seen, latent)
        spec = cache(self.spec)
        groups: dict[int | None, dict[int, PageSpec]] = {}
        for index, own in self.formats.items():
            layer = self.layers[index]
            if layer.elements:
                groups.setdefault(layer.window, {})[index] = spec(own, layer)
        self.groups = {w: groups[w] for w in sorted(groups, key=lambda w: (w is not None, w))}

    def _check_max_length(self, inventory: Inventory) -> None:
        length = self.options.max_length
        others = {layer.cache_class for layer in self.layers} - {"DynamicLayer"}
        if length is not None and (others or any(layer.latent for layer in self.layers)):
            raise UnsupportedModelError(
                f"max_length={length}: {inventory.name!r} has layers ({', '.join(sorted(others)) or 'latent attention'}) "
                "that a preallocated cache cannot hold; leave max_length out"
            )

    def spec(self, formats: LayerFormats, shape: CachedLayer) -> PageSpec:
        """Return what pages of these formats are like for keys and values as those of `shape`."""
        return formats.spec(
            num_kv_heads=shape.kv_heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            dtype=self.dtype,
            layout=self.layout,
        )

    @property
    def specs(self) -> dict[int, PageSpec]:
        """The pages of every layer with keys and values."""
        return {index: spec for specs in self.groups.values() for index, spec in specs.items()}

    def sizes(self, window: int | None) -> RowPages:
        """Return the sizes by which rows of a group become pages."""
        own = self.options
        return RowPages(own.page_size, own.sink_tokens, own.recent_tokens, window)

    def reserved(self, window: int | None, rows: int) -> int:
        """Return the pages that storage of a group has room for from the first forward on."""
        each = self.sizes(window).reserved(self.options.reserve_tokens)
        return reserved_pages(rows, each, self.options.max_pages)

    def check_pool(self, needed: int, row_tokens: Sequence[int]) -> None:
        """Raise PagePoolExhaustedError where the cache would."""
        most = self.options.max_pages
        if most is not None and needed > most:
            raise PagePoolExhaustedError(
                f"max_pages={most} is too small: {len(row_tokens)} rows of at most {max(row_tokens)} tokens take {needed}; "
                "raise max_pages, or use a smaller batch or shorter text"
            )

    def report(self, row_tokens: Sequence[int], prompt: int | None) -> MemoryReport:
        """Return the bytes of rows of these tokens, of which `prompt` came at once; see `predict`."""
        if self.options.max_length is not None:
            return self._preallocated(row_tokens, self.options.max_length)
        if self.options.offload is not None:
            return _Offload(self, row_tokens, prompt).report()
        return self._grown(row_tokens, prompt)

    def _grown(self, row_tokens: Sequence[int], prompt: int | None) -> MemoryReport:
        reports = []
        for window, specs in self.groups.items():
            sizes = self.sizes(window)
            use = page_use(sizes, row_tokens, prompt)
            self.check_pool(use.most, row_tokens)
            capacity = use.capacity(self.reserved(window, len(row_tokens)))
            reports.append(
                pages_report(list(specs.values()), sizes, row_tokens, use.held, capacity)
            )
        beside = self.beside(len(row_tokens), max(row_tokens, default=0), prompt)
        return total([*reports, replace(EMPTY, other=beside, tokens=sum(row_tokens))])

    def _preallocated(self, row_tokens: Sequence[int], length: int) -> MemoryReport:
        """Return what a cache takes that allocates everything at the first forward."""
        _room(length, max(row_tokens, default=0))
        sizes, rows = replace(self.sizes(None), recent_tokens=0), len(row_tokens)
        held = [sizes.sealed(tokens) for tokens in row_tokens]
        pages = rows * sizes.sealed(length)
        report = pages_report(list(self.specs.values()), sizes, row_tokens, held, pages)
        # pages of each row, its three lengths, and the columns seen by all
        return replace(report, tables=(pages + 3 * rows) * TABLE_DTYPE.itemsize + COUNTER)

    def beside(self, rows: int, columns: int, prompt: int | None) -> int:
        """Return the bytes in no page: indexer keys, states, and the layers that transformers keeps.

        Of these layers cache.memory() counts the tensors, not what they are views of.
        """
        size = 0
        for index, layer in enumerate(self.layers):
            if index in self.formats:
                room = index_room(columns, prompt)
                size += rows * (
                    room * layer.index_bytes(self.dtype) + layer.state_bytes(self.dtype)
                )
            else:
                kept = columns if layer.window in (None, 1) else min(columns, layer.window - 1)
                size += rows * kept * layer.elements * self.dtype.itemsize
                size += _beside(layer, rows, columns, self.dtype)
        return size


def index_room(columns: int, prompt: int | None) -> int:
    """Return the columns that indexer keys have room for (cache/latent_layer.py); without a prompt, at most."""
    room = columns - 1 if prompt is None else prompt
    while 0 < room < columns:
        room = room + 1 + (room + 1) // 8 + 64
    return max(room, columns)


def total(reports: Iterable[MemoryReport]) -> MemoryReport:
    """Return the sums; tokens are those of the cache, not of a group of layers, and stay."""
    reports = list(reports)
    sums = {one.name: sum(getattr(r, one.name) for r in reports) for one in fields(MemoryReport)}
    return MemoryReport(**{**sums, "tokens": max(report.tokens for report in reports)})


def filled(
    inventory: Inventory, options: CacheConfig, rows: int, columns: int, prompt: int | None = None
) -> MemoryReport:
    """Return the bytes of the real cache, filled with meta tensors as text would fill it.

    Args:
        rows, columns: rows, and tokens of each.
        prompt: tokens of the first forward. None: one of those prompts that lead to the most.
    Raises: what the cache raises, and what `Pages` does.
    """
    pages = Pages(inventory, options)
    sealed = pages.sizes(None).sealed(columns)
    last = options.sink_tokens + options.recent_tokens + sealed * options.page_size
    ends = [prompt or columns, columns]
    if sealed and any(pages.groups) and (prompt or 1) < last:
        # Sliding layers hold the most in a step that seals a page alone: as much in the last such step as in any before.
        ends = [last - 1, last, columns]
    # which kernel would read these pages is not asked: that of a meta tensor warns
    real = PagedCache.from_options(inventory.config, replace(options, kernel="reference"))
    seen = 0
    for end in ends:
        for index in sorted(pages.specs) if end > seen else ():
            layer = inventory.layers[index]
            keys, values = (
                torch.empty(rows, layer.kv_heads, end - seen, dim, dtype=pages.dtype, device="meta")
                for dim in (layer.key_dim, layer.value_dim)
            )
            real.update(keys, values, index)
        seen = end
    return replace(real.memory(), other=pages.beside(rows, columns, prompt))


# -- pages outside of the device --------------------------------------------------------------------------------------


class _Offload:
    """The pages of a cache with offload: the layers that have left the device, and what they are read through.

    Layers leave for good, and what lives outside grows in steps, so that both depend on the way: the forwards at which
    the cache makes room are gone through one by one (cache/offloading.py, pages/offload.py), with the cache's own budget.
    """

    def __init__(self, pages: Pages, row_tokens: Sequence[int], prompt: int | None) -> None:
        options = pages.options
        self.pages, self.row_tokens, self.rows = pages, row_tokens, len(row_tokens)
        self.device = torch.device("cpu" if pages.layout == LANES else "cuda")
        if options.offload == "cpu" and self.device.type == "cpu":
            raise CacheOptionError(
                "offload='cpu' has nothing to do on a CPU, where pages are in host memory already; use offload='disk', or "
                "leave offload out"
            )
        self.longest = max(row_tokens, default=0)
        self.new = self.longest - prompt if prompt else min(1, max(0, self.longest - 1))
        self.buffers = 1 if self.device.type == "cpu" else 2  # a copy runs beside kernels on a GPU
        self.budget = DeviceBudget(options.device_pages, options.device_bytes)
        self.reading = options.read_budget()
        self.chosen_from = {
            i for i in pages.formats if self.reading and pages.layers[i].window is None
        }
        self.split = Split()
        self.homes: dict[int, int] = {}  # layer -> pages that there is room for outside
        self.capacities: dict[int, int] = {}  # layer -> pages that room was made for

    def report(self) -> MemoryReport:
        """Go through the steps; return the bytes on the device and outside."""
        pages, new = self.pages, self.new
        self._follow()
        reports = [self._group(window, specs) for window, specs in pages.groups.items()]
        staging = 0
        if new:  # the prompt's forward reads no pages
            staging = self.buffers * sum(self.split.staging.values())
            staging += self._index_bytes(pages.sizes(None).held(self.longest - 1))
        beside = pages.beside(self.rows, self.longest, self.longest - new)
        return total(
            [*reports, replace(EMPTY, staging=staging, other=beside, tokens=sum(self.row_tokens))]
        )

    def _follow(self) -> None:
        pages, held = self.pages, self.pages.specs
        # until a layer has seen keys, it is taken to have heads like those of the first
        first = pages.layers[min(held)]
        alike = {own: pages.spec(own, first) for own in set(pages.formats.values())}
        guessed = {
            index: alike[own]
            for index, own in pages.formats.items()
            if pages.layers[index].window in pages.groups
        }
        known = {**guessed, **held}
        steps = self._steps()
        for step in sorted(steps):
            capacities = {
                layer: steps[step][pages.layers[layer].window]
                for layer in guessed
                if pages.layers[layer].window in steps[step]
            }
            if capacities:
                self._settle(known if step else guessed, capacities)
            if step == 1 and known != guessed:
                self._read(known)

    def _steps(self) -> dict[int, dict[int | None, int]]:
        """Return step -> {window: pages that its layers make room for}, where that changes or is said for the first time."""
        steps: dict[int, dict[int | None, int]] = {0: {}}
        if self.new:
            steps[1] = {}  # reads pages for the first time
        for window in self.pages.groups:
            sizes = self.pages.sizes(window)
            reserved, last = self.pages.reserved(window, self.rows), -1
            for step, needed in page_peaks(sizes, self.row_tokens, self.new):
                self.pages.check_pool(needed, self.row_tokens)
                capacity = max(page_capacity(needed), reserved)
                if capacity > last:
                    steps.setdefault(step, {})[window] = last = capacity
            again = first_sealing_step(sizes, self.row_tokens, self.new)
            if again is not None:
                steps.setdefault(again, {}).setdefault(window, steps[0][window])
        return steps

    def _settle(self, specs: Mapping[int, PageSpec], capacities: Mapping[int, int]) -> None:
        """Make room for pages of these layers, as OffloadArena.settle."""
        self.capacities.update(capacities)
        demands = {}
        for layer, spec in specs.items():
            capacity = slots = self.capacities[layer]
            if self.reading is not None and layer in self.chosen_from:
                slots = self.reading.batch_width(capacity, self.rows, spec.keys.page_size)
            demands[layer] = Demand(spec, self.device, capacity, slots, layer in self.chosen_from)
        self.split = self.budget.split(demands, self.buffers, self.split.outside)
        for layer in self.split.outside:
            first, wanted = self.homes.get(layer, 0), self.capacities[layer]
            if wanted > first:
                self.homes[layer] = first + max(wanted - first, first // 4, SMALLEST_EXTENT)

    def _read(self, specs: Mapping[int, PageSpec]) -> None:
        """Let a first decode step read: where a staging buffer is too small, room is made again."""
        before = [max(0, tokens - self.new) for tokens in self.row_tokens]
        for window, own in self.pages.groups.items():
            held = [self.pages.sizes(window).held(tokens) for tokens in before]
            for layer in self.split.outside & set(own):
                slots = sum(held)
                if self.reading is not None and layer in self.chosen_from:
                    width = self.reading.width(max(held), own[layer].keys.page_size)
                    slots = min(slots, len(held) * width)
                if carved_bytes(own[layer], slots) > self.split.staging[self.device]:
                    self._settle(specs, {})

    def _index_bytes(self, held: int) -> int:
        """Return the bytes of the indexes of layers outside, where the last step, over `held` pages of a row, chooses."""
        if self.reading is None or not self.reading.chooses(held, self.longest):
            return 0
        full = self.pages.groups.get(None, {})
        return sum(
            self.capacities[layer] * part_bytes(spec.keys)
            for layer, spec in full.items()
            if layer in self.chosen_from & self.split.outside
        )

    def _group(self, window: int | None, specs: Mapping[int, PageSpec]) -> MemoryReport:
        """Return what the pages of one window take, on the device and outside."""
        sizes = self.pages.sizes(window)
        use = page_use(sizes, self.row_tokens, self.longest - self.new)
        capacity = use.capacity(self.pages.reserved(window, self.rows))
        whole = pages_report(list(specs.values()), sizes, self.row_tokens, use.held, capacity)
        inside = [spec for layer, spec in specs.items() if layer not in self.split.outside]
        here = pages_report(inside, sizes, self.row_tokens, use.held, capacity)
        homes = {layer: count for layer, count in self.homes.items() if layer in specs}
        return replace(
            whole,
            payload=here.payload,
            scales=here.scales,
            pages_allocated=max([*homes.values(), *([capacity] if inside else [])], default=0),
            offloaded=sum(count * specs[layer].page_bytes for layer, count in homes.items()),
        )
