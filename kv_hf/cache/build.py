"""The paged layers of a model, their groups, and the storage of their pages."""

from collections.abc import Container, Iterable, Sequence
from typing import Any

from transformers.cache_utils import DynamicIndexedLayer

from ..config import CacheConfig
from ..errors import CacheOptionError
from ..pages.arena import PageArena
from ..pages.group import PageGroup
from ..pages.offload import OffloadArena
from ..read_budget import ReadBudget
from .compat import is_dummy
from .hybrid_layer import HybridLayer
from .latent_layer import IndexedLatentLayer, LatentLayer
from .layer import PagedLayer
from .layer_choice import HYBRID, paged_formats
from .layer_formats import planned_specs
from .model_shape import latent_ranks, page_sizes, signature
from .offloading import make_arena
from .prefix_store import PrefixStore


def page_layers(
    layers: Sequence[Any],
    config: Any,
    options: CacheConfig,
    kept: Container[int] = (),
    layer_class: type[PagedLayer] = PagedLayer,
) -> tuple[list[Any], tuple[PageGroup, ...], PageArena]:
    """Replace the layers that pages can hold; return all layers, the groups (full attention first) and the arena.

    Args:
        layers: those of a DynamicCache of the same model.
        config: the decoder's config.
        kept: layers that stay as they are.
        layer_class: what takes the place of the others.
    Raises: CacheOptionError for options that do not fit the layers, UnsupportedModelError where none can be paged.
    """
    ranks = latent_ranks(config, len(layers))
    formats = paged_formats(
        [type(layer).__name__ for layer in layers],
        ranks,
        options,
        getattr(config, "model_type", config),
        [getattr(layer, "sliding_window", None) for layer in layers],
        kept,
    )
    planned_specs(page_sizes(config), list(formats.values()))
    paged = list(formats)
    budget = options.budget_of(
        getattr(config, "model_type", config),
        [getattr(layers[index], "sliding_window", None) for index in paged],
        any(ranks[index] is not None for index in paged),
    )
    arena = _arena(layers, set(paged), config, options)
    groups: dict[int | None, PageGroup] = {}
    made = list(layers)
    for index in paged:
        window = getattr(layers[index], "sliding_window", None)
        # a prefix may be shared up to any of its pages: then sliding layers keep all of them
        shown = window if options.prefix_store is None else None
        if shown not in groups:
            groups[shown] = _new_group(shown, options, arena, None if shown else budget)
        rest = (groups[shown], arena, formats[index], options.kernel, window)
        if type(layers[index]).__name__ in HYBRID:
            states = layers[index].number_of_states
            made[index] = HybridLayer(index, *rest, number_of_states=states)
        elif ranks[index] is None:
            made[index] = layer_class(index, *rest)
        else:
            indexed = type(layers[index]) is DynamicIndexedLayer
            latent_class = IndexedLatentLayer if indexed else LatentLayer
            made[index] = latent_class(index, *rest, options=options, config=config)
    if isinstance(arena, OffloadArena):
        arena.choose_from(index for index in paged if made[index].group.reading.usual is not None)
    arena.grow_together(_alike(made[index] for index in paged))
    ordered = tuple(groups[w] for w in sorted(groups, key=lambda w: (w is not None, w)))
    for group in ordered:
        group.tracker.walk_with(peer.tracker for peer in ordered if peer is not group)
    return made, ordered, arena


def _alike(layers: Iterable[PagedLayer]) -> list[list[int]]:
    """Return the positions of layers that see the same tokens in pages of the same formats, in order."""
    found: dict[Any, list[int]] = {}
    for layer in layers:
        found.setdefault((id(layer.group), layer.formats), []).append(layer.layer_idx)
    return list(found.values())


def _new_group(
    window: int | None, options: CacheConfig, arena: PageArena, budget: ReadBudget | None
) -> PageGroup:
    return PageGroup(
        options.page_size,
        options.sink_tokens,
        options.recent_tokens,
        options.max_pages,
        options.reserve_tokens,
        window,
        arena.pool(window),
        budget,
    )


def _arena(layers: Sequence[Any], paged: set[int], config: Any, options: CacheConfig) -> PageArena:
    """Return an arena of the cache's own, or the one that its prefix store shares among caches."""
    store = options.prefix_store
    if store is None:
        return make_arena(options)
    if not isinstance(store, PrefixStore):
        raise CacheOptionError(
            f"prefix_store must be a kv_hf.PrefixStore, got {type(store).__name__}"
        )
    for index, layer in enumerate(layers):
        if type(layer) is DynamicIndexedLayer and index in paged:
            raise CacheOptionError(
                f"prefix_store keeps no indexer keys, which layer {index} needs (sparse attention); leave it out"
            )
        if type(layer).__name__ in HYBRID or (index not in paged and not is_dummy(layer)):
            raise CacheOptionError(
                f"prefix_store needs layers that hold nothing but pages; layer {index} is transformers' "
                f"{type(layer).__name__}, whose state belongs to the whole text"
            )
    return store.bind(options, signature(config))
