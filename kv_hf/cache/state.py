"""The contents of a cache apart from their place: one cache gives this state, another cache or a file takes it.

Knows neither files nor caches. Pages are handed over some at a time, in layout "rows", so that nothing is held twice.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from ..config import CacheConfig, names_of
from ..errors import CacheMismatchError, StaleHandleError
from ..pages.rows import RowsState
from ..pages.storage import PageStorage
from ..quant.codec import is_order, lay_out, pick_up
from ..spec import ROWS, PageSpec, SideSpec
from .identity import Adapters

PIECE = 4 << 20  # bytes of pages that are handed over at once


class StateTensors(Protocol):
    """Pages and exact tokens of a state, wherever they lie."""

    def check(self, pages: Mapping[int, "LayerPages"]) -> None:
        """Raise ValueError unless these are the tensors of layers with such pages, and of no others."""
        ...

    def pages(self, layer: int, side: str, field: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first page, tensor [n, ..]) of one field of all pages of a layer's side, encoded, in layout ROWS."""
        ...

    def window(self, layer: int, side: str) -> torch.Tensor:
        """Return the exact tokens [rows, num_kv_heads, longest row, head_dim]; after a row's own they hold anything."""
        ...


@dataclass(frozen=True)
class LayerPages:
    """The form of a layer's pages, in layout ROWS, and the place of its group in `CacheState.groups`."""

    spec: PageSpec
    group: int


@dataclass(frozen=True)
class LayerState:
    """The sizes of a layer's keys and values, and where they were.

    Attributes:
        layer: position in the model.
        num_kv_heads: of both sides.
        key_dim, value_dim: channels of a head.
        key_dtype, value_dtype: of the exact tokens.
        device: where the layer lies, or shall lie.
        pages: None where only `CacheState.options` say it.
    """

    layer: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    key_dtype: torch.dtype
    value_dtype: torch.dtype
    device: torch.device
    pages: LayerPages | None = None

    @classmethod
    def of(cls, layer: int, spec: PageSpec, group: int, device: torch.device) -> "LayerState":
        """Describe a layer with pages of `spec`."""
        keys, values = spec.sides
        dims = (keys.num_kv_heads, keys.head_dim, values.head_dim)
        pages = LayerPages(in_rows(spec), group)
        return cls(layer, *dims, keys.dtype, values.dtype, device, pages)

    def empty(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of no token, [1, num_kv_heads, 0, head_dim]."""
        sides = ((self.key_dim, self.key_dtype), (self.value_dim, self.value_dtype))
        keys, values = (
            torch.empty((1, self.num_kv_heads, 0, dim), dtype=dtype, device=self.device)
            for dim, dtype in sides
        )
        return keys, values


@dataclass(frozen=True)
class CacheState:
    """All that a cache needs to go on as another one would have.

    Attributes:
        options: of the cache, without the local ones (Option.kinds).
        signature: sizes of the model that the cache was built for (model_shape.signature).
        groups: full attention first, as in PagedCache.groups.
        layers: those that hold something.
        tensors: their pages and exact tokens. Those of a cache are its own, not copies: they raise StaleHandleError once
            the cache has changed.
        computed_by: states of adapters in which the tokens were computed, as far as was noted.
    """

    options: CacheConfig
    signature: Mapping[str, Any]
    groups: tuple[RowsState, ...]
    layers: tuple[LayerState, ...]
    tensors: StateTensors
    computed_by: tuple[Adapters, ...] = ()


def portable(options: CacheConfig) -> CacheConfig:
    """Return the options that mean the same in another process."""
    nothing: dict[str, Any] = dict.fromkeys(names_of("local"))
    return replace(options, **nothing)


def with_wider(options: CacheConfig, layers: Sequence[Any]) -> CacheConfig:
    """Return options by which the layers have the formats that their pages have (widening.py) without any widening."""
    overrides = dict(options.layers or {})
    for layer in layers:
        if layer.storage is not None and layer.storage.wider is not None:
            keys, values = (side.scheme.name for side in layer.spec.sides)
            overrides.pop(str(layer.layer_idx), None)  # the last override of a layer holds
            overrides[str(layer.layer_idx)] = {"keys": keys, "values": values}
    return replace(options, layers=overrides) if overrides else options


def in_rows(spec: PageSpec) -> PageSpec:
    """Return the same pages in layout ROWS."""
    return PageSpec(replace(spec.keys, layout=ROWS), replace(spec.values, layout=ROWS))


def relaid(codes: torch.Tensor, side: SideSpec, layout: str) -> torch.Tensor:
    """Return codes [n, ..] of pages of `side`, as its `fields["codes"]` says, in another layout."""
    other = replace(side, layout=layout)
    return codes if side.layout == layout else lay_out(pick_up(codes, side), other)


def field_from_rows(name: str, piece: torch.Tensor, side: SideSpec) -> torch.Tensor:
    """Return a piece [n, ..] of the field `name` of a state as pages of `side` hold it.

    Raises: CacheMismatchError where an order of channels does not name each of them once.
    """
    if name == "order" and not is_order(piece):
        raise CacheMismatchError(
            f"the order of channels in pages of {side.side} must name each channel 0 to {side.head_dim - 1} of a head once, "
            "and does not; the state or the file was damaged or forged: make it anew"
        )
    return relaid(piece, replace(side, layout=ROWS), side.layout) if name == "codes" else piece


class LiveTensors:
    """The tensors of a cache as they are now, of layers that hold something (StateTensors)."""

    def __init__(self, layers: Mapping[int, Any], pages: Mapping[int, Sequence[int]]) -> None:
        """Read from `layers` (PagedLayers), of which each holds the `pages` of its group, in order."""
        self._layers, self._pages = layers, pages
        self._revisions = {index: layer.revision for index, layer in layers.items()}

    def check(self, pages: Mapping[int, LayerPages]) -> None:
        """Raise CacheMismatchError where the layers or their pages are others."""
        own = {index: in_rows(layer.spec) for index, layer in self._layers.items()}
        theirs = {index: one.spec for index, one in pages.items()}
        differing = [i for i in own.keys() | theirs.keys() if own.get(i) != theirs.get(i)]
        if differing:
            raise CacheMismatchError(
                f"layers {sorted(differing)} of this state hold pages of other formats or sizes than its options and this model give"
            )

    def pages(self, layer: int, side: str, field: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first page, tensor [n, ..]) of one field, in layout ROWS."""
        ids = self._pages[layer]
        storage: PageStorage = self._current(layer).storage
        pages = storage.keys if side == storage.keys.spec.side else storage.values
        step = max(1, PIECE // max(1, pages.spec.payload_bytes))
        for first in range(0, len(ids), step):
            self._current(layer)
            found = pages.take(ids[first : first + step], [field])[field]
            yield first, relaid(found, pages.spec, ROWS) if field == "codes" else found

    def window(self, layer: int, side: str) -> torch.Tensor:
        """Return the exact tokens [rows, num_kv_heads, slots, head_dim], with at least as many slots as the longest row."""
        one: torch.Tensor = next(
            window.tokens for window in self._current(layer).residuals if window.spec.side == side
        )
        return one

    def _current(self, layer: int) -> Any:
        found = self._layers[layer]
        if found.revision != self._revisions[layer]:
            raise StaleHandleError(
                "this state belongs to an earlier forward: the cache has changed since. Use it, or save the cache, before that"
            )
        return found
