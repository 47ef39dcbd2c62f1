"""A mark of a model's weights, by which a cache tells another model from its own."""

import weakref
from typing import Any

import torch

from .adapters import tuner_layers
from .weights import fingerprint, weights_of

# model -> (where its weights lay and how often they had been written to, mark)
_marks: weakref.WeakKeyDictionary[Any, tuple[int, str]] = weakref.WeakKeyDictionary()


def model_mark(model: Any) -> str | None:
    """Return the fingerprint of the numbers of a model's weights; equal for equal weights, wherever they lie.

    Weights are read when a model is first asked, and again once they were moved or written to. Otherwise this looks at
    addresses and counters: a GPU is not asked.

    Returns: hexadecimal digits; None where weights cannot be told: adapters are in the model (the cache notes them by
        themselves), processes share the weights, or some lie outside of memory.
    """
    weights = list(model.parameters())
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return None
    if any(weight.is_meta for weight in weights) or any(True for _ in tuner_layers(model)):
        return None
    written = hash(tuple(map(_written, weights)))
    found = _marks.get(model)
    if found is None or found[0] != written:
        kept = [weight for weight in weights_of(model) if weight.persistent]
        found = (written, fingerprint(kept, places=False).hex())
        _marks[model] = found
    return found[1]


def _written(weight: torch.Tensor) -> tuple[int, int]:
    """Return where a weight lies and how often it was written to."""
    try:
        return weight.data_ptr(), -1 if weight.is_inference() else weight._version
    except RuntimeError:  # a kind of tensor without an address
        return id(weight), -1
