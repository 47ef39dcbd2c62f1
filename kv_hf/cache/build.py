"""The paged layers of a model, their formats, their groups, and the storage of their pages."""

import pickle
from collections.abc import Container, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, Self

import torch
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)

from ..backends.dispatch import MAX_DECODE_QUERIES, choose, layout_for
from ..config import SIDES_WITH_GROUPS, CacheConfig, shows_options
from ..errors import CacheOptionError, UnsupportedModelError
from ..pages.forward import Forward
from ..pages.offload import Demand, OffloadMemory
from ..pages.rows import Rows, RowSizes
from ..pages.storage import PageMemory
from ..row_pages import page_capacity
from ..spec import ROWS, PageSpec
from .layer import PagedLayer
from .layer_formats import LayerFormats, check_no_latents, planned_specs
from .layer_kinds import HybridLayer, IndexedLatentLayer, LatentLayer
from .model_shape import is_dummy, latent_ranks, page_sizes, signature
from .prefix_store import PrefixStore

HYBRID = (
    LinearAttentionAndFullAttentionLayer.__name__,
    LinearAttentionAndSlidingWindowAttentionLayer.__name__,
)
# other subclasses hold more than keys and values
_PAGED = (DynamicLayer.__name__, DynamicSlidingWindowLayer.__name__, *HYBRID)
INDEXED = DynamicIndexedLayer.__name__
_STATES = "LinearAttentionLayer"
_OF_TRANSFORMERS = (*_PAGED, INDEXED, _STATES, "DummyLayer")


class MadeOfOptions:
    """A cache that is built of a model's config and of cache options, in each of their forms."""

    def __init_subclass__(cls) -> None:
        """Let copies for other processes be bytes: torch.multiprocessing would share tensors, which steps write to."""
        ForkingPickler.register(cls, lambda cache: (pickle.loads, (pickle.dumps(cache),)))

    @shows_options
    def __init__(
        self,
        config: Any,
        cache_config: CacheConfig | Mapping[str, Any] | None = None,
        *,
        keys: str | None = None,
        values: str | None = None,
        **options: Any,
    ) -> None:
        self._build(config, CacheConfig.from_arguments(keys, values, options, cache_config))

    @classmethod
    def from_implementation(
        cls,
        config: Any,
        implementation: str,
        options: CacheConfig | Mapping[str, Any] | None = None,
    ) -> Self:
        """Build the cache of `cache_implementation=implementation, cache_config=options`."""
        return cls.from_options(config, CacheConfig.from_options(implementation, options))

    @classmethod
    def from_options(cls, config: Any, options: CacheConfig) -> Self:
        """Build the cache of validated options."""
        made = cls.__new__(cls)
        made._build(config, options)
        return made

    def _build(self, config: Any, options: CacheConfig) -> None:
        raise NotImplementedError


def _check_overrides(classes: Sequence[str], paged: set[int], options: CacheConfig) -> None:
    """Raise CacheOptionError where `layers` names only layers that transformers keeps."""
    for low, high, _ in options.layer_overrides():
        if not paged & set(range(low, high + 1)):
            raise CacheOptionError(
                f"layers: {low}-{high} holds no paged layer; transformers' {classes[low]} is kept there, "
                "which has no formats"
            )


def page_layers(
    layers: Sequence[Any],
    config: Any,
    options: CacheConfig,
    kept: Container[int] = (),
    layer_class: type[PagedLayer] = PagedLayer,
) -> tuple[list[Any], Forward, PageMemory]:
    """Replace the layers that pages can hold; return all layers, their forward (full attention first) and their memory.

    Args:
        layers: those of a DynamicCache of the same model.
        config: the decoder's config.
        kept: layers that stay as they are.
        layer_class: what takes the place of the others.
    Raises: CacheOptionError for options that do not fit the layers, UnsupportedModelError where none can be paged.
    """
    count, model_type = len(layers), getattr(config, "model_type", config)
    ranks = latent_ranks(config, count)
    classes = [type(layer).__name__ for layer in layers]
    windows = [getattr(layer, "sliding_window", None) for layer in layers]
    own = sorted(set(classes).difference(_OF_TRANSFORMERS))
    # a model makes one mask for all sliding layers: its own kind of them keeps other columns than pages do
    own_windows = any(classes[i] in own and windows[i] is not None for i in range(count))
    paged = [
        index
        for index, name in enumerate(classes)
        if index not in kept
        and (name in _PAGED or (name == INDEXED and ranks[index] is not None))
        and not (own_windows and windows[index] is not None)
    ]
    if not paged:
        raise UnsupportedModelError(
            f"{model_type!r} has no attention layer that pages could hold: they hold keys and values, or latents and an indexer's keys "
            f"(its layers: {', '.join(sorted(set(classes)))}); use cache_implementation='dynamic'"
        )
    stored = [
        side
        for side in SIDES_WITH_GROUPS
        if any((ranks[index] is not None) == (side == "latent") for index in paged)
    ]
    options.check_groups(stored)
    if all(rank is None for rank in ranks):
        check_no_latents(options, repr(model_type))
    first = {ranks[index]: index for index in reversed(paged)}  # without `layers` others are alike
    by_layer = {
        index: LayerFormats.of(options, index, count, ranks[index])
        for index in (paged if options.layers else first.values())
    }
    formats = {i: by_layer[i if options.layers else first[ranks[i]]] for i in paged}
    _check_overrides(classes, set(paged), options)
    planned_specs(page_sizes(config), list(formats.values()))
    options.check_reads(model_type, [windows[index] for index in paged], "latent" in stored)
    memory = _pages(layers, set(paged), config, options)
    # a prefix may be shared up to any of its pages: then sliding layers keep all of them
    kept_windows = {i: windows[i] if options.prefix_store is None else None for i in paged}
    groups = {
        window: Rows(
            RowSizes(options.page_size, options.sink_tokens, options.recent_tokens, window),
            memory.pool(window),
            None if window else options.budget,
            options.max_length,
        )
        for window in sorted(set(kept_windows.values()), key=lambda w: (w is not None, w))
    }
    forward = Forward(tuple(groups.values()))
    made = list(layers)
    for index, kept_window in kept_windows.items():
        group, window = groups[kept_window], windows[index]
        rest = (group, forward, memory, formats[index], window)
        if classes[index] in HYBRID:
            states = layers[index].number_of_states
            made[index] = HybridLayer(index, *rest, number_of_states=states)
        elif ranks[index] is None:
            made[index] = layer_class(index, *rest)
        else:
            indexed = type(layers[index]) is DynamicIndexedLayer
            latent_class = IndexedLatentLayer if indexed else LatentLayer
            made[index] = latent_class(index, *rest, config=config)
    return made, forward, memory


def _pages(layers: Sequence[Any], paged: set[int], config: Any, options: CacheConfig) -> PageMemory:
    """Return the cache's own memory of pages, or the one that its prefix store shares among caches."""
    store = options.prefix_store
    if options.offload is not None:  # which no store goes with
        return OffloadMemory(options.max_pages, options.offload, options.device_bytes)
    if store is None:
        return PageMemory(options.max_pages)
    if not isinstance(store, PrefixStore):
        raise CacheOptionError(
            f"prefix_store must be a kv_hf.PrefixStore, got {type(store).__name__}"
        )
    for index, layer in enumerate(layers):
        name = type(layer).__name__
        known = index in paged or name == _STATES or is_dummy(layer)
        if name == INDEXED or not known:
            raise CacheOptionError(
                f"prefix_store needs layers that hold nothing but pages and states; layer {index} is transformers' {name}, which "
                "holds an indexer's keys, or tensors of its own; leave it out"
            )
    has_states = any(type(layer).__name__ in (_STATES, *HYBRID) for layer in layers)
    return store.bind(options, signature(config), has_states)


def make_room(cache: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Make room, in all layers of an offloaded cache, for the pages that an append will seal.

    Layers that have not seen keys yet are taken to have heads like those of the append.

    Args:
        keys, values: [rows, heads, q_len, head_dim], of the append.
    Raises: DeviceBudgetError, OffloadError (also in a forked process), CacheOptionError, with the cache unchanged.
    """
    cache.page_memory.check_device(keys.device)
    demands: dict[int, Demand] = {}
    batch, q_len = keys.shape[0], keys.shape[2]
    for group in cache.groups:
        count = group.plan(batch, q_len).num_pages
        capacity = group.capacity(batch, group.pool.lacking(count))
        held = len(set().union(*group.batch.pages)) + count
        most = max(page_capacity(held), batch * group.reserve)
        budget = group.reading.usual
        reads_part = q_len <= MAX_DECODE_QUERIES and group.reading.budget is not None
        # a first forward reads no pages
        if budget is not None and (reads_part or not group.lengths().any()):
            most = budget.batch_width(most, batch, group.sizes.page_size)
        for layer in cache.paged_layers:
            if layer.group is group:
                spec = layer.spec or layer.formats.spec_of(keys, values)
                device = layer.storage.device if layer.storage else keys.device
                demands[layer.layer_idx] = Demand(spec, device, capacity, most, budget is not None)
    cache.page_memory.make_room(demands)


def check_kernel(cache: Any, devices: Sequence[torch.device], dtype: torch.dtype) -> None:
    """Raise CacheOptionError when the kernel that a paged cache asks for by name cannot run for a model on these devices.

    generate() asks before its first forward; the first update() asks again, about the tensors it gets.
    """
    for device in devices if cache.options.kernel != "auto" else ():
        for spec in _planned(cache, dtype, layout_for(device)):
            choose(cache.options.kernel, device, spec)


def most_bytes(cache: Any, rows: int, dtype: torch.dtype) -> int | None:
    """Return the most bytes that pages and exact windows of a batch of `rows` take within the max_length of a paged cache.

    None where the config does not say it.
    """
    groups = [layer.group for layer in cache.paged_layers]
    found = [
        rows * group.reserve * one.page_bytes + one.window_bytes(rows, group.sizes.slots)
        for one, group in zip(_planned(cache, dtype, ROWS), groups, strict=False)
    ]
    return sum(found) if found else None


def _planned(cache: Any, dtype: torch.dtype, layout: str) -> list[PageSpec]:
    formats = [layer.formats for layer in cache.paged_layers]
    return planned_specs(page_sizes(cache._config), formats, dtype, layout)
