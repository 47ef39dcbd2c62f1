"""The layer that answers for a layer of another process (pipeline parallelism). Knows no tensors."""

from collections.abc import Sequence
from typing import Any

from .compat import is_dummy


def answering_layer(layers: Sequence[Any], layer_idx: int, any_kind: bool = False) -> int:
    """Return `layer_idx`, or the first layer of its kind behind it that has tokens where it is not run here.

    With `any_kind` a layer of another kind answers where none of its own has tokens: all have seen as many.

    Under pipeline parallelism a process runs a run of the layers and its cache fills only those, but models ask
    the first layer of a kind for lengths. An empty layer with no filled one before it is either empty like all
    others, or not run here: layers run in order.
    """
    if layer_idx >= len(layers) or any(_filled(layer) for layer in layers[: layer_idx + 1]):
        return layer_idx
    kind = _kind(layers[layer_idx])
    filled = [i for i in range(layer_idx + 1, len(layers)) if _filled(layers[i])]
    alike = [i for i in filled if _kind(layers[i]) == kind]
    return next(iter(alike or (filled if any_kind else ())), layer_idx)


def _kind(layer: Any) -> tuple[type, int | None]:
    return type(layer), getattr(layer, "sliding_window", None)


def _filled(layer: Any) -> bool:
    return bool(getattr(layer, "is_initialized", False)) and not is_dummy(layer)
