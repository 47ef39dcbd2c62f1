"""Which layer answers for one that this process does not run. Knows no tensors."""

from collections.abc import Sequence
from typing import Any


def answering_layer(layers: Sequence[Any], layer_idx: int) -> int:
    """Return `layer_idx`, or the first layer of its kind behind it that has tokens where it is not run here.

    Under pipeline parallelism a process runs a run of the layers and its cache fills only those, but models ask
    the first layer of a kind for lengths. An empty layer with no filled one before it is either empty like all
    others, or not run here: layers run in order.
    """
    if layer_idx >= len(layers) or any(_filled(layer) for layer in layers[: layer_idx + 1]):
        return layer_idx
    kind = _kind(layers[layer_idx])
    later = range(layer_idx + 1, len(layers))
    return next((i for i in later if _kind(layers[i]) == kind and _filled(layers[i])), layer_idx)


def _kind(layer: Any) -> tuple[type, int | None]:
    return type(layer), getattr(layer, "sliding_window", None)


def _filled(layer: Any) -> bool:
    return bool(getattr(layer, "is_initialized", False))
