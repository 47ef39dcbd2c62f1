"""The check that all code between generate()'s mask and the attention functions is transformers' own.

Under an attention other than "kv_hf" nobody sees the mask that attention gets: padding may be left out of a cache only where the
mask of generate() is known to arrive there as it is.
"""

import functools
import inspect
from typing import Any

from ..cache.adapters import without_adapters

# packages whose modules hand masks on as they are
_KNOWN = ("transformers", "torch", "peft", "accelerate")


def foreign_part(model: Any) -> str | None:
    """Return the first part of `model` whose code may change a mask and is not transformers' own, or None.

    A part is foreign where its forward takes a mask, or anything by keyword, and is defined elsewhere (a class of the user's,
    remote code, a function put in its place), or where a hook of the user's may change its keyword arguments.
    """
    for name, module in without_adapters(model).named_modules():
        kind: Any = type(module)
        forward = vars(module).get("forward")
        # accelerate puts a partial of its own function in the place of forward
        replaced = forward is not None and not hasattr(module, "_hf_hook")
        hooked = any(
            not _known(getattr(module._forward_pre_hooks.get(number), "__module__", None))
            for number in module._forward_pre_hooks_with_kwargs
        )
        if replaced or hooked or _is_foreign(kind):
            return f"{kind.__name__} ({name or 'the model itself'})"
    return None


@functools.cache
def _is_foreign(cls: Any) -> bool:
    forward = inspect.unwrap(cls.forward)
    if _known(cls.__module__) and _known(getattr(forward, "__module__", None)):
        return False
    parameters = inspect.signature(forward).parameters.values()
    return any("mask" in one.name or one.kind is one.VAR_KEYWORD for one in parameters)


def _known(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in _KNOWN
