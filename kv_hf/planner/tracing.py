"""Attention that computes nothing, but notes which cached keys it was given: what runs in a probe."""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

# two names, as models differ in whether they can do without a mask
ATTENTION = "kv_hf_probe"
MASKED_ATTENTION = "kv_hf_probe_masked"
_SOURCES = "_kv_hf_sources"

_current = threading.local()


@dataclass
class Reads:
    """The attention modules that were seen to read each layer.

    Attributes:
        modules: layer of the cache -> id of attention module -> its query heads.
    """

    modules: dict[int, dict[int, int]] = field(default_factory=dict)

    def note(self, layers: frozenset[int], module: Any, query_heads: int) -> None:
        """Note that a module attends to the keys of a layer; keys of several layers at once are nobody's."""
        if len(layers) == 1:
            (layer,) = layers
            self.modules.setdefault(layer, {})[id(module)] = query_heads


class _Follow(TorchFunctionMode):
    """Marks what torch's functions make of marked tensors with the same layers of the cache.

    Where a model asks for numbers, which tensors of the meta device do not have, they count as 0: no expert is
    chosen, no token is special. The shapes of a cache do not depend on them.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        stand_in = _without_numbers(func, args, kwargs)
        out = func(*args, **kwargs) if stand_in is None else stand_in()
        layers = _sources((args, kwargs))
        if layers:
            _mark(out, layers)
        return out


_ZERO: dict[Any, Any] = {
    torch.Tensor.item: lambda tensor: False if tensor.dtype is torch.bool else 0,
    torch.Tensor.__contains__: lambda tensor: False,
    torch.Tensor.__bool__: lambda tensor: False,
    torch.Tensor.__int__: lambda tensor: 0,
    torch.Tensor.__index__: lambda tensor: 0,
    torch.Tensor.__float__: lambda tensor: 0.0,
    torch.Tensor.tolist: lambda tensor: torch.zeros(
        tensor.shape, dtype=tensor.dtype, device="cpu"
    ).tolist(),
}
_NONZERO = (torch.nonzero, torch.Tensor.nonzero)
_INDEX = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
_SPLIT = (torch.split, torch.Tensor.split)


def _is_mask(place: Any) -> bool:
    return isinstance(place, torch.Tensor) and place.is_meta and place.dtype is torch.bool


def _without_numbers(func: Any, args: Any, kwargs: Any) -> Callable[[], Any] | None:
    """Return what to call in place of a function that the meta device cannot run, None for all others."""
    tensor = args[0] if args else None
    if not isinstance(tensor, torch.Tensor) or not tensor.is_meta:
        return None
    if func in _ZERO:
        return lambda: _ZERO[func](tensor)
    if func in _NONZERO or (func is torch.where and len(args) == 1 and not kwargs):
        if func is torch.where or kwargs.get("as_tuple"):
            return lambda: (tensor.new_empty(0, dtype=torch.long),) * tensor.dim()
        return lambda: tensor.new_empty((0, tensor.dim()), dtype=torch.long)
    if func in _INDEX:
        places = args[1] if isinstance(args[1], tuple) else (args[1],)
        if any(_is_mask(place) for place in places):
            none = tensor.new_empty(0, dtype=torch.long)
            chosen = [(none,) * place.dim() if _is_mask(place) else (place,) for place in places]
            return lambda: func(tensor, tuple(itertools.chain(*chosen)), *args[2:], **kwargs)
    sizes = args[1] if func in _SPLIT and len(args) > 1 else None
    if isinstance(sizes, (list, tuple)) and sizes and not any(sizes):
        # sizes that were counted: all 0, so that the first part is everything
        dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
        return lambda: func(tensor, [tensor.shape[dim], *sizes[1:]], dim)
    return None


def _tensors(given: Any) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, (tuple, list)):
        for item in given:
            yield from _tensors(item)
    elif isinstance(given, dict):
        yield from _tensors(list(given.values()))


def _sources(given: Any) -> frozenset[int]:
    found: frozenset[int] = frozenset()
    for tensor in _tensors(given):
        found |= getattr(tensor, _SOURCES, frozenset())
    return found


def _mark(given: Any, layers: frozenset[int]) -> None:
    for tensor in _tensors(given):
        setattr(tensor, _SOURCES, layers)


def follow_layer(layer: Any, index: int) -> None:
    """Make `update` of one layer of a cache mark the keys and values that it returns."""
    update = layer.update

    def marking(*args: Any, **kwargs: Any) -> Any:
        out = update(*args, **kwargs)
        # views, as a model may update one layer with the tensors of another
        out = tuple(part.view_as(part) if isinstance(part, torch.Tensor) else part for part in out)
        _mark(out, frozenset((index,)))
        return out

    layer.update = marking


@contextmanager
def reading() -> Iterator[Reads]:
    """Collect what attention reads in this thread."""
    before = getattr(_current, "reads", None)
    _current.reads = Reads()
    try:
        with _Follow():
            yield _current.reads
    finally:
        _current.reads = before


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    _current.reads.note(_sources(key) or _sources(value), module, query.shape[1])
    out = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    _mark(out, frozenset())
    return out, None


def _no_mask(*_: Any, **__: Any) -> None:
    return None


@contextmanager
def registered() -> Iterator[None]:
    """Let transformers know the attention for a while. One at a time: it keeps one table for the process."""
    names = ((ATTENTION, _no_mask), (MASKED_ATTENTION, eager_mask))
    for name, mask in names:
        AttentionInterface.register(name, _attention)
        AttentionMaskInterface.register(name, mask)
    try:
        yield
    finally:
        for name, _ in names:
            for interface in (AttentionInterface, AttentionMaskInterface):
                interface._global_mapping.pop(name, None)
