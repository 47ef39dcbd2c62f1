"""Which function of the tokens a model's keys and values are right now: adapters, hooks, autocast and weights."""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch

from .adapters import adapters_of, without_adapters
from .weights import fingerprint, weights_of


@dataclass(frozen=True)
class ModelState:
    """What besides tokens decides a model's keys and values, within this process.

    Attributes:
        space: hexadecimal digest of adapters, hooks and autocast: what is switched to and fro.
        weights: fingerprint of the weights, see weights.fingerprint: what changes for good.
    """

    space: str
    weights: bytes


def model_state(model: Any) -> ModelState:
    """Return the state of `model` at this moment. Takes some milliseconds: once per generate(), not per step."""
    adapters = adapters_of(model)
    parts = (adapters, _hooks(model), _autocast(model))
    space = hashlib.sha256(repr(parts).encode()).hexdigest()
    return ModelState(space, fingerprint(weights_of(model)))


def _hooks(model: Any) -> list[tuple[str, int]]:
    """Return where hooks are registered, and their numbers, which no other hook of this process ever has."""
    return [
        (name, number)
        for name, module in without_adapters(model).named_modules()
        if module._forward_hooks or module._forward_pre_hooks
        for hooks in (module._forward_pre_hooks, module._forward_hooks)
        for number, hook in hooks.items()
        if not str(getattr(hook, "__module__", "")).startswith("transformers.")
    ]


def _autocast(model: Any) -> str:
    """Return the dtype that operations of the model are cast to, "" without autocast."""
    kind = next((parameter.device.type for parameter in model.parameters()), "cpu")
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return ""
    return str(torch.get_autocast_dtype(kind))
