"""Functions of a model that were replaced at run time: what runs then is not what the files of its classes say.

Finds them, and says whose code they are; what they do is read elsewhere. Wrappers of torch, transformers, accelerate and
peft (compiled, hooked, offloaded forwards) replace nothing.
"""

import functools
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import transformers
from transformers.integrations import sdpa_attention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .attention_source import is_modeling

_CALLED = (FunctionType, MethodType, BuiltinFunctionType, functools.partial)
_WRAPPING = ("torch", "transformers", "accelerate", "peft", "kv_hf")


def is_native(cls: type) -> bool:
    """Say whether a class is one of transformers' own models."""
    return cls.__module__.startswith("transformers.")


def why_not_registered(kinds: Iterable[type], current: str) -> str | None:
    """Return why the name `current` does not stand for transformers' attention in these classes, or None where it does."""
    if ALL_MASK_ATTENTION_FUNCTIONS.get("sdpa") is not sdpa_mask:
        return "another function than transformers' own is registered for the masks of 'sdpa'"
    modules = {base.__module__ for kind in kinds for base in kind.__mro__ if is_native(base)}
    spaces = [vars(sys.modules[name]) for name in sorted(modules) if name in sys.modules]
    for table in [ALL_ATTENTION_FUNCTIONS, *(one.get("ALL_ATTENTION_FUNCTIONS") for one in spaces)]:
        if table is not None and not _is_sdpa(table.get("sdpa")):
            return "another function than transformers' own is registered as attention 'sdpa'"
    if current == "eager":
        for space in spaces:
            eager = space.get("eager_attention_forward")
            if eager is not None and not _is_of_transformers(eager):
                return f"eager_attention_forward of {space['__name__']} was replaced"
    return None


def _is_sdpa(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    if code is None or code.co_qualname != "sdpa_attention_forward":
        return False
    return _is_file_of(code.co_filename, sdpa_attention)


def _is_of_transformers(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    root = os.path.dirname(os.path.realpath(str(transformers.__file__))) + os.sep
    return code is not None and os.path.realpath(code.co_filename).startswith(root)


def in_class(cls: type) -> Iterator[tuple[type, str, Any]]:
    """Yield (class, name, function) for the methods of `cls` and its bases that their files do not define there."""
    for base in cls.__mro__:
        if is_modeling(base):
            for name, value in list(vars(base).items()):
                function = _function(value)
                if function is not None and not _is_own(base, function):
                    yield base, name, function


def in_instance(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, function) for the methods that one module has in place of those of its class."""
    kind = type(module)
    for name, value in list(vars(module).items()):
        if isinstance(value, _CALLED) or (name == "forward" and callable(value)):
            if isinstance(value, torch.nn.Module) or not hasattr(kind, name):
                continue
            of_class = _function(inspect.getattr_static(kind, name))
            last = [one for one in layers(value) if not _wraps(one)]
            ends = layers(of_class) if of_class is not None else []
            if any(one not in ends for one in last):
                yield name, value


def layers(function: Any) -> list[Any]:
    """Return the functions that a call goes through: what wraps, and what was wrapped."""
    found: list[Any] = []
    waiting = [function]
    while waiting:
        current = waiting.pop()
        if isinstance(current, MethodType):
            waiting.append(current.__func__)
        elif isinstance(current, functools.partial):
            waiting.append(current.func)
            waiting += [one for one in current.args if isinstance(one, _CALLED)]
            waiting += [current.__wrapped__] if hasattr(current, "__wrapped__") else []
        elif current not in found:
            found.append(current)
            if hasattr(current, "__wrapped__"):
                waiting.append(current.__wrapped__)
    return found


def _function(value: Any) -> Any:
    """Return the function behind something in a class's namespace, or None where it is none."""
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    if isinstance(value, property):
        return value.fget
    if isinstance(value, functools.cached_property):
        return value.func
    return value if isinstance(value, _CALLED) else None


@functools.lru_cache(maxsize=65536)
def _is_own(base: type, function: Callable[..., Any]) -> bool:
    """Say whether a method is the one that the file of its class defines, wrappers of known packages around it or not."""
    return all(_wraps(one) or is_defined_by(base, one) for one in layers(function))


def is_defined_by(base: type, function: Any) -> bool:
    """Say whether a function is what the file of a class defines in that class."""
    module, code = sys.modules.get(base.__module__), getattr(function, "__code__", None)
    if module is None or code is None:
        return False
    inside = code.co_qualname.startswith(base.__qualname__ + ".")
    return inside and _is_file_of(code.co_filename, module)


def _is_file_of(file: str, module: ModuleType) -> bool:
    own = getattr(module, "__file__", None)
    return file == own or (own is not None and os.path.realpath(file) == os.path.realpath(own))


def _wraps(function: Any) -> bool:
    """Say whether a function is code of a package whose wrappers leave a method as it is."""
    code = getattr(function, "__code__", None)
    return code is not None and _is_wrapping_file(code.co_filename)


@functools.cache
def _is_wrapping_file(file: str) -> bool:
    real = os.path.realpath(file)
    models = os.path.join("transformers", "models") + os.sep
    return any(real.startswith(root) for root in _roots()) and models not in real


@functools.cache
def _roots() -> tuple[str, ...]:
    """Return the folders of the packages that wrap methods, as far as they are installed."""
    found = []
    for name in _WRAPPING:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            found += [os.path.realpath(one) + os.sep for one in spec.submodule_search_locations]
    return tuple(found)
