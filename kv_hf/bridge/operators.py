"""Facts from an operator's schema: the arguments that it writes to, and whether it returns views of them."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors [any shape] that the call `func(*args, **kwargs)` writes to (in place, or as `out`)."""
    for place, name in _written(func):
        value = args[place] if place < len(args) else kwargs.get(name)
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(one, torch.Tensor):
                yield one


@functools.cache
def returns_views(func: Any) -> bool:
    """Say whether `func` returns tensors that share the memory of an argument, without writing to it."""
    schema = getattr(func, "_schema", None)
    returns = () if schema is None else schema.returns
    return any(one.alias_info is not None and not one.alias_info.is_write for one in returns)


@functools.cache
def changes_shape(func: Any) -> bool:
    """Say whether `func` gives the tensor that it is called on another shape, in place."""
    return torch.Tag.inplace_view in getattr(func, "tags", ())


@functools.cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """Return place and name of each argument that is written to."""
    schema = getattr(func, "_schema", None)  # a higher-order operator has none
    arguments = () if schema is None or not schema.is_mutable else schema.arguments
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
