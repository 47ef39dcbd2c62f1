"""Which layers of a model are paged, in which groups, and where their pages live."""

from collections.abc import Container, Sequence
from typing import Any

from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from ..config import CacheConfig
from ..errors import CacheOptionError, UnsupportedModelError
from ..pages.arena import PageArena
from ..pages.group import PageGroup
from .compat import is_dummy
from .latent_layer import IndexedLatentLayer, LatentLayer
from .layer import PagedLayer
from .layer_formats import LayerFormats, planned_specs
from .model_shape import latent_ranks, page_sizes, signature
from .offloading import make_arena
from .prefix_store import PrefixStore

_PAGED = (DynamicLayer, DynamicSlidingWindowLayer)  # subclasses hold more than keys and values


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
    paged = [
        index
        for index, layer in enumerate(layers)
        if _can_be_paged(layer, ranks[index]) and index not in kept
    ]
    if not paged:
        kinds = sorted({type(layer).__name__ for layer in layers})
        raise UnsupportedModelError(
            f"{getattr(config, 'model_type', config)!r} has no attention layer that pages could hold "
            f"(its layers: {', '.join(kinds)}); use cache_implementation='dynamic'"
        )
    if ranks.count(None) == len(ranks):
        _check_no_latent_options(config, options)
    options.check_model(signature(config), len(layers), set(paged))
    formats = {index: LayerFormats.of(options, index, len(layers), ranks[index]) for index in paged}
    planned_specs(page_sizes(config), list(formats.values()))
    _check_overrides(layers, set(paged), options)
    arena = _arena(layers, set(paged), config, options)
    groups: dict[int | None, PageGroup] = {}
    made = list(layers)
    for index in paged:
        window = getattr(layers[index], "sliding_window", None)
        # a prefix may be shared up to any of its pages: then sliding layers keep all of them
        shown = window if options.prefix_store is None else None
        if shown not in groups:
            groups[shown] = _new_group(shown, options, arena)
        rest = (groups[shown], arena, formats[index], options.kernel, window)
        if ranks[index] is None:
            made[index] = layer_class(index, *rest)
        else:
            indexed = type(layers[index]) is DynamicIndexedLayer
            latent_class = IndexedLatentLayer if indexed else LatentLayer
            made[index] = latent_class(index, *rest, options=options, config=config)
    ordered = tuple(groups[w] for w in sorted(groups, key=lambda w: (w is not None, w)))
    for group in ordered:
        others = (peer for peer in ordered if peer is not group)
        group.lockstep.peers = tuple(peer.lockstep for peer in others)
    return made, ordered, arena


def _can_be_paged(layer: Any, rank: int | None) -> bool:
    """Say whether pages can take the place of a layer of transformers; indexer keys only beside latents."""
    return type(layer) in _PAGED or (rank is not None and type(layer) is DynamicIndexedLayer)


def _new_group(window: int | None, options: CacheConfig, arena: PageArena) -> PageGroup:
    return PageGroup(
        options.page_size,
        options.sink_tokens,
        options.recent_tokens,
        options.max_pages,
        options.reserve_tokens,
        window,
        arena.pool(window),
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
        if index not in paged and not is_dummy(layer):
            raise CacheOptionError(
                f"prefix_store needs all layers in pages; layer {index} is kept by transformers' "
                f"{type(layer).__name__}, whose state belongs to the whole text"
            )
    return store.bind(options, signature(config))


def _check_no_latent_options(config: Any, options: CacheConfig) -> None:
    """Raise CacheOptionError for options about latents, which the model of `config` does not cache."""
    for name in ("latent", "latent_group_size", "k_rope", "mla"):
        value, default = getattr(options, name), getattr(CacheConfig, name)
        if value != default:
            raise CacheOptionError(
                f"{name}={value!r} is for models with multi-head latent attention (MLA), which "
                f"{getattr(config, 'model_type', config)!r} is not; leave it out"
            )


def _check_overrides(layers: Sequence[Any], paged: set[int], options: CacheConfig) -> None:
    """Raise CacheOptionError where `layers` names only layers that transformers keeps."""
    for low, high, _ in options.layer_overrides():
        if not paged & set(range(low, high + 1)):
            raise CacheOptionError(
                f"layers: {low}-{high} holds no paged layer; transformers' {type(layers[low]).__name__} is kept there, "
                "which has no formats"
            )


def release_pages(layers: Sequence[Any]) -> None:
    """Let go of all pages of a cache that is gone: a finalizer, which may run at any moment."""
    for group in {layer.group for layer in layers if isinstance(layer, PagedLayer)}:
        rows, group.rows = group.rows, ()
        for row in rows:
            group.pool.release_later(row.pages)
