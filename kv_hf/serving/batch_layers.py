"""The layers of a model as continuous batching needs them: keys and values in pages, and nothing besides."""

from typing import Any

from ..cache.layer import PagedLayer
from ..cache.paged_cache import PagedCache
from ..errors import UnsupportedModelError
from ..pages.rows import RowSizes
from .batch_room import LayersOfKind


def check_layers(template: PagedCache) -> None:
    """Raise UnsupportedModelError where a layer of a paged cache holds more than keys and values in pages."""
    for index, layer in enumerate(template.layers):
        if type(layer) is not PagedLayer:
            raise UnsupportedModelError(
                f"continuous batching holds keys and values in pages, and layer {index} of this model is a "
                f"{type(layer).__name__}; use generate()"
            )


def paged_layers(template: PagedCache) -> list[PagedLayer]:
    """Return the layers of a paged cache. Raises UnsupportedModelError where some hold more than keys and values in pages."""
    check_layers(template)
    layers: list[PagedLayer] = []
    for index, layer in enumerate(template.layers):
        assert isinstance(layer, PagedLayer)
        if layer.spec is None:
            raise UnsupportedModelError(
                f"layer {index} of this model stores no keys and values of its own; use generate()"
            )
        layers.append(layer)
    return layers


def kinds_of(template: PagedCache) -> dict[int | None, LayersOfKind]:
    """Return the layers of each sliding window, full attention first, as far as their memory is concerned."""
    specs: dict[int | None, list[Any]] = {}
    for layer in paged_layers(template):
        specs.setdefault(layer.window, []).append(layer.spec)
    options = template.options
    numbers = options.page_size, options.sink_tokens, options.recent_tokens
    ordered = sorted(specs, key=lambda window: (window is not None, window or 0))
    return {window: LayersOfKind(RowSizes(*numbers, window), specs[window]) for window in ordered}
