"""Bytes of a PagedCache that grows with its text."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ..cache.layer_choice import INDEXED, paged_formats
from ..cache.layer_formats import LayerFormats
from ..config import CacheConfig
from ..config_reading import check_readable
from ..errors import CacheOptionError, PagePoolExhaustedError
from ..row_pages import RowPages, page_use, reserved_pages
from ..spec import PageSpec, counted, pages_report
from .figures import EMPTY, Figures
from .growing import check_classes, growing_layer, kept_columns, state_bytes
from .inventory import CachedLayer, Inventory

Groups = dict[int | None, dict[int, PageSpec]]


def paged(
    inventory: Inventory,
    options: CacheConfig,
    row_tokens: Sequence[int],
    prompt: int | None,
    dtype: torch.dtype,
    layout: str,
) -> Figures:
    """Return what a PagedCache of these options takes, with all its pages on the device."""
    check_options(options)
    check_classes(inventory)
    formats = layer_formats(inventory, options)
    groups = page_groups(inventory, formats, dtype, layout)
    total = Figures(replace(EMPTY, tokens=sum(row_tokens)))
    for window, specs in groups.items():
        total += _group(list(specs.values()), window, options, row_tokens, prompt)
    return total + all_beside_pages(inventory, formats, row_tokens, prompt, dtype)


def check_options(options: CacheConfig) -> None:
    """Raise CacheOptionError for options whose bytes are not a matter of one cache of a decoder."""
    if options.prefix_store is not None:
        raise CacheOptionError(
            "prefix_store: how many bytes rows share depends on their texts; leave it out of a plan"
        )
    if options.cross_attention != "exact":
        raise CacheOptionError(
            f"cross_attention={options.cross_attention!r} is for encoder-decoder models, which are not planned"
        )


def layer_formats(inventory: Inventory, options: CacheConfig) -> dict[int, LayerFormats]:
    """Return the formats of all layers that pages take the place of, those too that hold no keys and values.

    Raises: CacheOptionError, UnsupportedModelError, as the cache would.
    """
    classes = [layer.cache_class for layer in inventory.layers]
    ranks, windows = _ranks(inventory.layers), [layer.window for layer in inventory.layers]
    sizes = _recipe_sizes(inventory.layers)
    found = paged_formats(classes, ranks, options, inventory.model_type, sizes, windows)
    seen, latent = [windows[index] for index in found], any(ranks[i] is not None for i in found)
    check_readable(options, inventory.model_type, seen, latent)
    return found


def _recipe_sizes(layers: Sequence[CachedLayer]) -> dict[str, int]:
    """Return the sizes that a recipe is compared by, as far as all layers with keys and values agree in them."""
    # heads are not compared: a plan may be for another number of them, or for one device's share
    dims = {layer.key_dim for layer in layers if layer.key_dim and not layer.latent}
    return {"head_dim": dims.pop()} if len(dims) == 1 else {}


def page_groups(
    inventory: Inventory, formats: Mapping[int, LayerFormats], dtype: torch.dtype, layout: str
) -> Groups:
    """Return {window: {layer: pages}} of the layers with pages, full attention first."""
    groups: Groups = {}
    made: dict[tuple[LayerFormats, CachedLayer], PageSpec] = {}  # layers that are alike share one
    for index, own in formats.items():
        layer = inventory.layers[index]
        if layer.elements:
            if (own, layer) not in made:
                made[own, layer] = layer_spec(own, layer, dtype, layout)
            groups.setdefault(layer.window, {})[index] = made[own, layer]
    ordered = sorted(groups, key=lambda window: (window is not None, window))
    return {window: groups[window] for window in ordered}


def layer_spec(
    formats: LayerFormats, shape: CachedLayer, dtype: torch.dtype, layout: str
) -> PageSpec:
    """Return what pages of these formats are like for keys and values as those of `shape`."""
    return formats.spec(
        num_kv_heads=shape.kv_heads,
        key_dim=shape.key_dim,
        value_dim=shape.value_dim,
        dtype=dtype,
        layout=layout,
    )


def _ranks(layers: Sequence[CachedLayer]) -> list[int | None]:
    """Return kv_lora_rank of each layer; an indexed one without latents reads those of another layer."""
    found = [layer.key_dim if layer.latent else None for layer in layers]
    known = next((rank for rank in found if rank is not None), None)
    return [
        known if layer.cache_class == INDEXED and not layer.elements else rank
        for layer, rank in zip(layers, found, strict=True)
    ]


def _group(
    specs: list[PageSpec],
    window: int | None,
    options: CacheConfig,
    row_tokens: Sequence[int],
    prompt: int | None,
) -> Figures:
    sizes = row_sizes(options, window)
    use = page_use(sizes, row_tokens, prompt)
    check_max_pages(use.most, options.max_pages, row_tokens)
    capacity = use.capacity(reserve(sizes, options, len(row_tokens)))
    report = pages_report(specs, sizes, row_tokens, use.held, capacity)
    free = (capacity - report.pages_held) * sum(n * spec.page_bytes for spec, n in counted(specs))
    return Figures(report, free + open_slots(specs, sizes, row_tokens))


def check_max_pages(needed: int, most: int | None, row_tokens: Sequence[int]) -> None:
    """Raise PagePoolExhaustedError where the cache would."""
    if most is not None and needed > most:
        raise PagePoolExhaustedError(
            f"max_pages={most} is too small: {len(row_tokens)} rows of at most {max(row_tokens)} tokens take {needed}; "
            "raise max_pages, or use a smaller batch or shorter text"
        )


def reserve(sizes: RowPages, options: CacheConfig, rows: int) -> int:
    """Return the pages that storage of a group has room for from the first forward on."""
    return reserved_pages(rows, sizes.reserved(options.reserve_tokens), options.max_pages)


def row_sizes(options: CacheConfig, window: int | None) -> RowPages:
    """Return the sizes by which rows of a group become pages."""
    return RowPages(options.page_size, options.sink_tokens, options.recent_tokens, window)


def open_slots(specs: Sequence[PageSpec], sizes: RowPages, row_tokens: Sequence[int]) -> int:
    """Return the bytes of exact slots that hold no token."""
    rows = Counter(row_tokens)
    slots = sum(count * (sizes.slots - sizes.exact(tokens)) for tokens, count in rows.items())
    return sum(n * spec.window_bytes(1, slots) for spec, n in counted(specs))


def all_beside_pages(
    inventory: Inventory,
    formats: Mapping[int, LayerFormats],
    row_tokens: Sequence[int],
    prompt: int | None,
    dtype: torch.dtype,
) -> Figures:
    """Return `beside_pages` of all layers, which is worked out once for layers that are alike."""
    kinds = Counter((layer, index in formats) for index, layer in enumerate(inventory.layers))
    total = Figures()
    for (layer, pageable), count in kinds.items():
        total += beside_pages(layer, pageable, row_tokens, prompt, dtype).times(count)
    return total


def beside_pages(
    layer: CachedLayer,
    pageable: bool,
    row_tokens: Sequence[int],
    prompt: int | None,
    dtype: torch.dtype,
) -> Figures:
    """Return what a layer holds that is in no page: indexer keys and states, or all where transformers keeps it."""
    if not pageable:
        # as cache.memory() counts it: the tensors, not what they are views of
        columns = kept_columns(layer, max(row_tokens, default=0))
        kept = growing_layer(layer, row_tokens, columns, dtype)
        return Figures(replace(EMPTY, other=kept.report.total), kept.waste)
    room = index_room(max(row_tokens, default=0), prompt)
    per_token = layer.index_bytes(dtype)
    size = len(row_tokens) * room * per_token
    states = state_bytes(layer, len(row_tokens), dtype)  # of linear attention beside the pages
    return Figures(replace(EMPTY, other=size + states), size - sum(row_tokens) * per_token)


def index_room(columns: int, prompt: int | None) -> int:
    """Return the columns that indexer keys have room for (cache/latent_layer.py); without a prompt, at most."""
    room = columns - 1 if prompt is None else prompt
    while 0 < room < columns:
        room = room + 1 + (room + 1) // 8 + 64
    return max(room, columns)
