"""The choice of the layers that live in pages, and of their formats: decided by names, before any tensor."""

from collections.abc import Container, Sequence

from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)

from ..config import CacheConfig
from ..errors import CacheOptionError, UnsupportedModelError
from ..formats import format_names
from .layer_formats import LayerFormats

HYBRID = (
    LinearAttentionAndFullAttentionLayer.__name__,
    LinearAttentionAndSlidingWindowAttentionLayer.__name__,
)
# other subclasses hold more than keys and values
_PAGED = (DynamicLayer.__name__, DynamicSlidingWindowLayer.__name__, *HYBRID)
INDEXED = DynamicIndexedLayer.__name__
_STATES = "LinearAttentionLayer"
_OF_TRANSFORMERS = (*_PAGED, INDEXED, _STATES, "DummyLayer")


def paged_formats(
    classes: Sequence[str],
    ranks: Sequence[int | None],
    options: CacheConfig,
    model_type: str,
    windows: Sequence[int | None],
    kept: Container[int] = (),
) -> dict[int, LayerFormats]:
    """Return the formats of each layer that lives in pages.

    Args:
        classes: names of the classes of the layers in a DynamicCache.
        ranks: kv_lora_rank of each layer, None of those without latent attention.
        model_type: of the model, for messages.
        windows: of each layer, None of those that see everything.
        kept: layers that stay as they are.
    Raises: CacheOptionError for options that do not fit the layers, UnsupportedModelError where none can be paged.
    """
    count = len(classes)
    own = sorted(set(classes).difference(_OF_TRANSFORMERS))
    own_windows = any(
        name in own and window is not None for name, window in zip(classes, windows, strict=True)
    )
    paged = [
        index
        for index, name in enumerate(classes)
        if index not in kept
        and _can_be_paged(name, ranks[index])
        # a model makes one mask for all sliding layers: its own kind of them keeps other columns than pages do
        and not (own_windows and windows[index] is not None)
    ]
    if not paged:
        raise UnsupportedModelError(
            f"{model_type!r} {_why_no_pages(classes, own)}; use cache_implementation='dynamic'"
        )
    if all(rank is None for rank in ranks):
        _check_no_latent_options(model_type, options)
    formats = _formats(options, paged, count, ranks)
    _check_overrides(classes, set(paged), options)
    return formats


def _why_no_pages(classes: Sequence[str], own: Sequence[str]) -> str:
    """Return why none of the layers of these classes can live in pages."""
    if own:
        return f"keeps more than keys and values in cache layers of its own ({', '.join(own)}), which pages do not hold"
    if INDEXED in classes:
        return (
            f"keeps an indexer's keys beside full keys and values ({INDEXED}); pages hold an indexer's keys beside latents "
            "only"
        )
    return f"has no attention layer that pages could hold (its layers: {', '.join(sorted(set(classes)))})"


def _formats(
    options: CacheConfig, paged: Sequence[int], count: int, ranks: Sequence[int | None]
) -> dict[int, LayerFormats]:
    if options.layers:
        return {index: LayerFormats.of(options, index, count, ranks[index]) for index in paged}
    alike = {ranks[index]: index for index in reversed(paged)}
    made = {rank: LayerFormats.of(options, index, count, rank) for rank, index in alike.items()}
    return {index: made[ranks[index]] for index in paged}


def _can_be_paged(name: str, rank: int | None) -> bool:
    """Say whether pages can take the place of a layer of transformers; indexer keys only beside latents."""
    return name in _PAGED or (rank is not None and name == INDEXED)


def _check_no_latent_options(model_type: str, options: CacheConfig) -> None:
    """Raise CacheOptionError for options about latents, which the model does not cache.

    Beside a format that latents cannot have, `latent` is what a cache name says for other models.
    """
    one_sided = {options.keys, options.values} - {*format_names("latent")}
    for name in ("latent", "latent_group_size", "k_rope", "mla"):
        if name == "latent" and one_sided:
            continue
        value, default = getattr(options, name), getattr(CacheConfig, name)
        if value != default:
            raise CacheOptionError(
                f"{name}={value!r} is for models with multi-head latent attention (MLA), which "
                f"{model_type!r} is not; leave it out"
            )


def _check_overrides(classes: Sequence[str], paged: set[int], options: CacheConfig) -> None:
    """Raise CacheOptionError where `layers` names only layers that transformers keeps."""
    for low, high, _ in options.layer_overrides():
        if not paged & set(range(low, high + 1)):
            raise CacheOptionError(
                f"layers: {low}-{high} holds no paged layer; transformers' {classes[low]} is kept there, "
                "which has no formats"
            )
