"""The check that code of other people computes the same under the name "kv_hf".

transformers' own models are read in `hf/attention_source.py`, and were run one by one. Nothing is known of others: any
mention of the attention's name beside a few harmless forms, and any code that cannot be read, speaks against a switch.
"""

import functools
from collections.abc import Iterable
from types import FunctionType
from typing import Any

import torch

from .attention_source import facts_of, is_modeling
from .foreign_calls import why_not_called
from .names import why_not_named
from .reach import Reach, is_installed_module, is_trusted
from .replaced import in_class, in_instance, is_defined_by, is_native, layers


def why_not_foreign(
    modules: Iterable[torch.nn.Module], outer: Iterable[torch.nn.Module], current: str
) -> str | None:
    """Return why other people's code in a model speaks against "kv_hf" in place of `current`, or None.

    Args:
        modules: the modules of the part that would be switched.
        outer: the modules around it.
        current: "sdpa" or "eager", the attention that the model has.
    """
    everything = [*modules, *outer]
    kinds = {type(module) for module in everything}
    functions, reason = _replaced(everything, kinds)
    if reason is not None:
        return reason
    held = {type(value) for module in everything for value in vars(module).values()}
    foreign = frozenset(kind for kind in kinds | held if not is_trusted(kind.__module__))
    if not functions:
        return _why_not_classes(foreign, current) if foreign else None
    return _why_not(foreign, functions, current)


def _replaced(
    modules: Iterable[torch.nn.Module], kinds: Iterable[Any]
) -> tuple[list[FunctionType], str | None]:
    """Return replaced methods that are to be read, and why reading them would not do."""
    functions: list[FunctionType] = []
    for cls in sorted(kinds, key=lambda one: str(one.__qualname__)):
        for base, name, function in in_class(cls):
            readable = _readable(function)
            kept = not is_native(base) and any(is_defined_by(base, one) for one in readable)
            if not readable or (name == "forward" and not kept and _attends(base)):
                return [], f"{name} of {base.__name__} was replaced"
            functions += readable
    for module in modules:
        for name, function in in_instance(module):
            readable = _readable(function)
            kind: Any = type(module)
            if not readable or (name == "forward" and _attends(kind)):
                return [], f"{name} of a {kind.__name__} was replaced"
            functions += readable
    return functions, None


@functools.cache
def _why_not_classes(classes: frozenset[type], current: str) -> str | None:
    return _why_not(classes, [], current)


def _why_not(
    classes: Iterable[type], functions: Iterable[FunctionType], current: str
) -> str | None:
    reach = Reach()
    own = {kind: _is_of_the_model(kind) for kind in classes}
    for kind in sorted(classes, key=lambda one: (not own[one], one.__qualname__)):
        reach.follow(kind, strict=own[kind])
    for function in functions:
        reach.follow(function, strict=False)
    if reach.unread:
        return reach.unread[0]
    for piece in reach.pieces:
        reason = why_not_named(piece, current)
        if reason is not None:
            return reason
    return why_not_called(reach.pieces, current)


def why_not_as_called(classes: Iterable[type], current: str) -> str | None:
    """Return how these classes call their attention in a way that "kv_hf" would take otherwise, or None.

    Goes by what their source says outright: for models that somebody asks "kv_hf" for by name.
    """
    reach = Reach()
    for kind in classes:
        if not is_native(kind):
            reach.follow(kind, strict=True)
    return why_not_called(reach.pieces, current)


def _is_of_the_model(kind: type) -> bool:
    """Say whether a class is code of the model; a quantized linear layer that a library brought in is none."""
    bases = kind.__mro__
    if any(base.__module__.startswith("transformers.") for base in bases):
        return True
    return not is_installed_module(kind.__module__) or _attends(kind)


@functools.cache
def _attends(kind: Any) -> bool:
    """Say whether a class has to do with attention, or is not known well enough."""
    if not is_modeling(kind):
        return False
    if not issubclass(kind, torch.nn.Module):
        return False
    facts = facts_of(kind)
    return facts is None or facts.updates_cache or facts.reads_interface or facts.masks_by_itself


def _readable(function: Any) -> list[FunctionType]:
    """Return the functions behind a replaced one, none where it is not written in Python."""
    found = layers(function)
    if not all(isinstance(one, FunctionType) for one in found):
        return []
    return [one for one in found if not is_trusted(one.__globals__.get("__name__", ""))]
