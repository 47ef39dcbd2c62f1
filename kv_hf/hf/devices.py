"""On which devices the parts of a model compute: one, or several under accelerate's device_map."""

from collections.abc import Iterator
from typing import Any

import torch

from ..cache.model_shape import modules_of


def execution_devices(model: torch.nn.Module) -> list[torch.device]:
    """Return the devices that `model` computes on, without repetitions.

    accelerate leaves a hook on each part of a model that it splits or offloads, which names the part's device.
    `model.device` is not it: weights that are offloaded lie on "meta" between two forwards.
    """
    found = {
        torch.device(hook.execution_device): None
        for module in modules_of(model)
        for hook in _hooks(module)
        if getattr(hook, "execution_device", None) is not None
    }
    return list(found) or [next(parameter.device for parameter in model.parameters())]


def _hooks(module: torch.nn.Module) -> Iterator[Any]:
    """Yield accelerate's hooks of one module; a SequentialHook holds several."""
    hook = vars(module).get("_hf_hook")
    if hook is not None:
        yield hook
        yield from getattr(hook, "hooks", ())
