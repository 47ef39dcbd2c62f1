"""Everything besides tokens that decides a model's keys and values now: adapters, hooks, autocast and weights."""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch

from .adapters import adapters_of, without_adapters
from .weights import fingerprint, weights_of


@dataclass(frozen=True)
class ModelState:
    """Everything besides tokens that decides a model's keys and values, within this process.

    Attributes:
        space: hexadecimal digest of adapters, hooks, autocast and dropout: what is switched to and fro.
        weights: fingerprint of the weights, see weights.fingerprint: what changes for good.
    """

    space: str
    weights: bytes


def model_state(model: Any) -> ModelState:
    """Return the state of `model` at this moment. Takes some milliseconds: once per generate(), not per step."""
    adapters = adapters_of(model)
    parts = (adapters, _hooks(model), _autocast(model), drops_numbers(model))
    space = hashlib.sha256(repr(parts).encode()).hexdigest()
    return ModelState(space, fingerprint(weights_of(model)))


def _hooks(model: Any) -> list[tuple[str, int]]:
    """Return where hooks are registered, and their numbers, which no other hook of this process ever has.

    Those of all modules ("register_module_forward_hook") come first.
    """
    every = torch.nn.modules.module
    found = [
        ("all modules", every._global_forward_pre_hooks),
        ("all modules", every._global_forward_hooks),
    ]
    for name, module in without_adapters(model).named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            found += [(name, module._forward_pre_hooks), (name, module._forward_hooks)]
    return [
        (name, number)
        for name, hooks in found
        for number, hook in hooks.items()
        if not str(getattr(hook, "__module__", "")).startswith("transformers.")
    ]


def drops_numbers(model: Any) -> bool:
    """Say whether forwards of `model` drop numbers at random, so that equal tokens get other keys and values each time.

    In training mode it does where a dropout layer, or a number of a module or of the config that is named after dropout
    (Llama's `attention_dropout`), is more than zero.
    """
    parts = [part for part in model.modules() if part.training]
    if not parts:
        return False
    if any(isinstance(part, torch.nn.modules.dropout._DropoutNd) and part.p for part in parts):
        return True
    configs = [
        vars(part.config) for part in parts if hasattr(getattr(part, "config", None), "to_dict")
    ]
    return any(
        "drop" in name and isinstance(value, int | float) and value > 0
        for values in (*map(vars, parts), *configs)
        for name, value in values.items()
    )


def _autocast(model: Any) -> str:
    """Return the dtype that operations of the model are cast to, "" without autocast."""
    kind = next((parameter.device.type for parameter in model.parameters()), "cpu")
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return ""
    return str(torch.get_autocast_dtype(kind))
