"""Bytes of every kind of cache, before there is a model: those that the cache then allocates.

A plan's paged cache is the real one: built from the model's config, it says which layers live in pages and in which formats, and
filled with meta tensors it says its bytes (`filled`). `report` says the same by a formula for each group of layers, which a search
can ask hundreds of times. transformers' caches and offloaded pages are formulas alone: on the meta device a DynamicCache keeps
no views alive, and an offload copies out.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from ..cache.build import INDEXED
from ..cache.layer_formats import LayerFormats
from ..cache.paged_cache import PagedCache
from ..checks import check_int
from ..config import CacheConfig
from ..errors import CacheOptionError, PagePoolExhaustedError, PlanError, UnsupportedModelError
from ..pages.offload import LEAST_PAGES, Demand, split_layers, staging_sizes
from ..row_pages import PageUse, RowPages, page_use
from ..spec import LANES, ROWS, MemoryReport, PageSpec, pages_report
from .inventory import COUNTER, SLIDING, CachedLayer, Inventory

EMPTY = MemoryReport(0, 0, 0, 0, 0, 0, 0, 0)
MOST_FILLED = 256  # rows of a real cache that is filled
_WITHOUT_COUNTER = ("LinearAttentionLayer", "DummyLayer")  # in a StaticCache
_SPARSE = "MiniMaxM3VLSparseCacheLayer"
# classes of layers in a DynamicCache whose growth is known
KNOWN = (
    *("DynamicLayer", INDEXED, _SPARSE, *_WITHOUT_COUNTER),
    *("LinearAttentionAndFullAttentionLayer", *SLIDING),
)


def widest_window(inventory: Inventory) -> int:
    """Return the tokens of the widest sliding window, 0 where there is none."""
    return max((layer.window or 0 for layer in inventory.layers), default=0)


def _check_known(inventory: Inventory) -> None:
    for index, layer in enumerate(inventory.layers):
        if layer.cache_class not in KNOWN:
            raise UnsupportedModelError(
                f"layer {index} of {inventory.name!r} is kept in a {layer.cache_class}, whose bytes are not known; known are "
                f"{', '.join(KNOWN)}"
            )


def _check_room(max_length: int, columns: int) -> None:
    check_int("max_length", max_length, 1)
    if max_length < columns:
        raise CacheOptionError(
            f"max_length={max_length} has no room for a row of {columns} tokens (row_tokens)"
        )


# -- transformers' caches -------------------------------------------------------------------------------------------


class Stock:
    """transformers' DynamicCache or StaticCache of a model: `payload` is keys and values, `other` all else that it holds.

    Args:
        kind: "dynamic" or "static".
        bound: columns of a static cache; None: as many as the longest row has tokens.
    Raises: UnsupportedModelError for layers whose bytes are not known.
    """

    page_size, exact = 1, 0  # tokens by which a row grows, and those that lie in no page
    options, specs = None, dict[int, PageSpec]()

    def __init__(self, inventory: Inventory, kind: str, bound: int | None = None) -> None:
        _check_known(inventory)
        self.inventory, self.kind, self.bound = inventory, kind, bound

    def report(self, row_tokens: Sequence[int], prompt: int | None = None) -> MemoryReport:
        """Return the bytes of rows that hold `row_tokens` tokens, padded to the longest; see `Pages.report`.

        A dynamic cache has bytes behind a decode step, unless the prompt is all there is: right behind a prefill its sliding
        layers keep the whole prompt alive.
        """
        rows, columns = len(row_tokens), max(row_tokens, default=0)
        dtype, payload, other = self.inventory.torch_dtype, 0, 0
        room = None
        if self.kind == "static":
            room = columns if self.bound is None else self.bound
            _check_room(max(room, 1), columns)
        for layer in self.inventory.layers:
            kept = stored_columns(layer, columns, prompt)
            if room is not None:
                kept = room if layer.window is None else min(room, layer.window)
            payload += rows * kept * layer.elements * dtype.itemsize
            other += _other_bytes(layer, rows, columns, dtype, room)
        return replace(EMPTY, payload=payload, other=other, tokens=sum(row_tokens))

    def filled(self, rows: int, columns: int, prompt: int | None = None) -> MemoryReport:
        """Return the bytes of `rows` rows of `columns` tokens."""
        return self.report([columns] * rows, prompt)

    def unbounded(self) -> "Stock":
        """Return the same cache without a bound."""
        return Stock(self.inventory, self.kind)

    @property
    def widest(self) -> int:
        """Tokens from which on all windows are full."""
        return widest_window(self.inventory)


def stored_columns(layer: CachedLayer, columns: int, prompt: int | None) -> int:
    """Return the columns whose memory a layer of a DynamicCache keeps alive.

    A sliding layer keeps a view of all that its last forward saw: of the whole prompt right behind a prefill, of
    `window` columns behind a decode step. Of a window of 1 the view [-window + 1 :] is all of it.
    """
    if layer.window in (None, 1) or prompt == columns:
        return columns
    return min(columns, layer.window or 0)


def _other_bytes(
    layer: CachedLayer, rows: int, columns: int, dtype: torch.dtype, room: int | None = None
) -> int:
    """Return what a layer of transformers holds beside keys and values.

    Args:
        room: columns of a layer that does not grow, but for the positions of an indexer; None: it grows.
    """
    index, kind = layer.index_bytes(dtype), layer.cache_class
    counters = int(kind in SLIDING)  # its window, as a tensor
    if room is not None:
        counters = (kind not in _WITHOUT_COUNTER) + bool(index or kind == _SPARSE)
    held = (columns if room is None else room) * index + columns * layer.position_bytes
    return rows * (held + layer.state_bytes(dtype)) + COUNTER * counters


# -- pages ------------------------------------------------------------------------------------------------------------


class Pages:
    """The PagedCache of a model: which layers live in pages, and how, is what the real cache says, built without tensors.

    Args:
        on_cpu: whether the model runs on a CPU, not on a GPU. The bytes are the same, but for the buffers of an offload.
    Attributes:
        cache: the real one, empty.
        formats: layer -> formats, of all layers that pages take the place of, those too that hold no keys and values.
        groups: {window: {layer: its pages}} of the layers with keys and values, full attention first. Layers that are alike
            share one object.
        specs: layer -> its pages, of all groups.
    Raises: CacheOptionError, UnsupportedModelError: what the cache would raise, and for what cannot be known without the
        texts (prefix_store). PlanError for an inventory without a config.
    """

    def __init__(self, inventory: Inventory, options: CacheConfig, on_cpu: bool = False) -> None:
        _check_known(inventory)
        if options.prefix_store is not None:
            raise CacheOptionError(
                "prefix_store: how many bytes rows share depends on their texts; leave it out of a plan"
            )
        if inventory.config is None:
            raise PlanError(
                f"the inventory of {inventory.name!r} has no config, of which a paged cache is built; take load_inventory's"
            )
        self.inventory, self.options, self.on_cpu = inventory, options, on_cpu
        self.layers, self.dtype = inventory.layers, inventory.torch_dtype
        self.page_size, self.exact = options.page_size, options.sink_tokens + options.recent_tokens
        self.bound = options.max_length
        # which kernel would read these pages is not asked: that of a meta tensor warns
        plain = replace(options, kernel="reference")
        self.cache: Any = PagedCache.from_options(inventory.config, plain)
        self.formats: dict[int, LayerFormats] = {
            layer.layer_idx: layer.formats for layer in self.cache.paged_layers
        }
        self.spec = functools.cache(self._spec)
        groups: dict[int | None, dict[int, PageSpec]] = {}
        for index, own in self.formats.items():
            shape = self.layers[index]
            if shape.elements:
                groups.setdefault(shape.window, {})[index] = self.spec(own, shape)
        self.groups = {w: groups[w] for w in sorted(groups, key=lambda w: (w is not None, w))}
        self.specs = {index: one for specs in self.groups.values() for index, one in specs.items()}

    def _spec(self, formats: LayerFormats, shape: CachedLayer) -> PageSpec:
        return formats.spec(
            num_kv_heads=shape.kv_heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            dtype=self.dtype,
            layout=LANES if self.on_cpu else ROWS,
        )

    def unbounded(self) -> "Pages":
        """Return the same pages without bounds, and without room made in advance."""
        free: dict[str, Any] = dict.fromkeys(("max_length", "max_pages", "device_bytes"))
        return Pages(self.inventory, replace(self.options, **free), self.on_cpu)

    @property
    def widest(self) -> int:
        """Tokens from which on all windows are full, and staging buffers stop to grow."""
        part = self.options.budget
        return max(widest_window(self.inventory), part.from_tokens if part is not None else 0)

    def sizes(self, window: int | None) -> RowPages:
        """Return the sizes by which rows of a group become pages."""
        own = self.options
        return RowPages(own.page_size, own.sink_tokens, own.recent_tokens, window)

    def reserved(self, window: int | None, rows: int) -> int:
        """Return the pages that storage of a group has room for from the first forward on."""
        return rows * self.sizes(window).reserved(self.bound)

    def report(self, row_tokens: Sequence[int], prompt: int | None = None) -> MemoryReport:
        """Return the bytes of rows that hold `row_tokens` tokens, by formulas.

        Args:
            row_tokens: real tokens that the cache holds of each row; shorter rows are padded on the left to the longest.
                Behind generate() that is the prompt's tokens and all new ones but the last.
            prompt: tokens of the longest row that came in the first forward, the others one by one. It decides how many
                pages a sliding window had in use at once, and the room of indexer keys. None: the most that any prompt
                leads to, which never falls as rows grow. Where none of these is there the prompt changes nothing.
        Raises: PagePoolExhaustedError, DeviceBudgetError, as the cache would.
        """
        rows, longest = len(row_tokens), max(row_tokens, default=0)
        if self.bound is not None:
            _check_room(self.bound, longest)
        uses = {window: self._use(window, row_tokens, prompt) for window in self.groups}
        offloaded, staging = self._offloaded(uses, row_tokens)
        reports = [self._group(window, row_tokens, use, offloaded) for window, use in uses.items()]
        other = self.other_bytes(rows, longest, prompt)
        return total(
            [*reports, replace(EMPTY, other=other, staging=staging, tokens=sum(row_tokens))]
        )

    def _use(self, window: int | None, row_tokens: Sequence[int], prompt: int | None) -> PageUse:
        use, most = page_use(self.sizes(window), row_tokens, prompt), self.options.max_pages
        if most is not None and use.most > most:
            raise PagePoolExhaustedError(
                f"max_pages={most} is too small: {len(row_tokens)} rows of at most {max(row_tokens)} tokens take {use.most}; "
                "raise max_pages, or use a smaller batch or shorter text"
            )
        return use

    def _group(
        self,
        window: int | None,
        row_tokens: Sequence[int],
        use: PageUse,
        offloaded: Mapping[int, int],
    ) -> MemoryReport:
        """Return what the pages of one window take; `offloaded` is layer -> room for its offloaded pages."""
        specs, sizes = self.groups[window], self.sizes(window)
        capacity = use.capacity(self.reserved(window, len(row_tokens)))
        off_device = {layer: count for layer, count in offloaded.items() if layer in specs}
        on_device = [spec for layer, spec in specs.items() if layer not in off_device]
        here, whole = (
            pages_report(some, sizes, row_tokens, use.held, capacity)
            for some in (on_device, list(specs.values()))
        )
        return replace(
            here,
            tail=whole.tail,
            pages_allocated=max(capacity if on_device else 0, *off_device.values(), 0),
            offloaded=sum(count * specs[layer].page_bytes for layer, count in off_device.items()),
        )

    def _offloaded(
        self, uses: Mapping[int | None, PageUse], row_tokens: Sequence[int]
    ) -> tuple[dict[int, int], int]:
        """Return layer -> room for offloaded pages, and the bytes of buffers and indexes on the device.

        Those of a text of one prefill, from which a step reads. Token by token more layers may leave, as they leave for good, and
        their room grows by a quarter, or 8 pages. Where layers differ in their heads, a first forward takes all for ones like
        the first: the buffers and the choice of layers may be others until pages are sealed in a later step.
        """
        if self.options.offload is None:
            return {}, 0
        memory, reading = self.cache.page_memory, self.options.budget
        device = torch.device("cpu" if self.on_cpu else "cuda")
        memory.check_device(device)
        buffers = 1 if self.on_cpu else 2  # a copy runs beside kernels on a GPU
        rows, longest = len(row_tokens), max(row_tokens, default=0)
        demands = {}
        for window, specs in self.groups.items():
            capacity = uses[window].capacity(self.reserved(window, rows))
            for layer, spec in specs.items():
                chosen, slots = self.cache.layers[layer].group.reading.usual is not None, capacity
                if reading is not None and chosen:
                    slots = reading.batch_width(capacity, rows, self.page_size)
                demands[layer] = Demand(spec, device, capacity, slots, chosen)
        leaving = split_layers(demands, memory.device_bytes, buffers)
        away = {layer: demands[layer] for layer in leaving}
        held = self.sizes(None).held(max(0, longest - 1))
        chooses = reading is not None and reading.chooses(held, longest)
        indexes = sum(one.index_bytes for one in away.values()) * chooses
        room = {n: max(one.capacity, LEAST_PAGES) for n, one in away.items() if one.capacity}
        return room, buffers * sum(staging_sizes(away.values()).values()) + indexes

    def other_bytes(self, rows: int, columns: int, prompt: int | None) -> int:
        """Return the bytes in no page: indexer keys, states, and the layers that transformers keeps.

        Of these layers cache.memory() counts the tensors, not what they are views of.
        """
        size, room = 0, index_room(columns, prompt)
        for index, layer in enumerate(self.layers):
            if index in self.formats:
                index_keys = room * layer.index_bytes(self.dtype)
                size += rows * (index_keys + layer.state_bytes(self.dtype))
            else:
                kept = columns if layer.window in (None, 1) else min(columns, layer.window - 1)
                size += rows * kept * layer.elements * self.dtype.itemsize
                size += _other_bytes(layer, rows, columns, self.dtype)
        return size

    def filled(self, rows: int, columns: int, prompt: int | None = None) -> MemoryReport:
        """Return the bytes of `rows` rows of `columns` tokens: of the real cache where that can be filled without a device.

        Args:
            prompt: tokens of the first forward. None: one of those prompts that lead to the most.
        Raises: what the cache raises.
        """
        if self.options.offload is not None or rows > MOST_FILLED:
            return self.report([columns] * rows, prompt)
        sealed = self.sizes(None).sealed(columns)
        last = self.exact + sealed * self.page_size
        ends = [prompt or columns, columns]
        if sealed and any(self.groups) and (prompt or 1) < last:
            # Sliding layers hold the most in a step that seals a page alone: as much in the last such step as in any before.
            ends = [last - 1, last, columns]
        real, seen = self.cache.fresh(), 0
        for end in ends:
            for index in sorted(self.specs) if end > seen else ():
                layer = self.layers[index]
                sides = (
                    torch.empty(
                        rows, layer.kv_heads, end - seen, dim, dtype=self.dtype, device="meta"
                    )
                    for dim in (layer.key_dim, layer.value_dim)
                )
                real.update(*sides, index)
            seen = end
        return replace(real.memory(), other=self.other_bytes(rows, columns, prompt))


def index_room(columns: int, prompt: int | None) -> int:
    """Return the columns that indexer keys have room for (cache/layer_kinds.py); without a prompt, at most."""
    room = columns - 1 if prompt is None else prompt
    while 0 < room < columns:
        room = room + 1 + (room + 1) // 8 + 64
    return max(room, columns)


def total(reports: Iterable[MemoryReport]) -> MemoryReport:
    """Return the sums; tokens are those of the cache, not of a group of layers, and stay."""
    reports = list(reports)
    sums = {one.name: sum(getattr(r, one.name) for r in reports) for one in fields(MemoryReport)}
    return MemoryReport(**{**sums, "tokens": max(report.tokens for report in reports)})
