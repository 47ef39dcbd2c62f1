"""The contents of a cache apart from their place: one cache gives this state, another cache or a file takes it.

Knows neither files nor caches. Pages and exact tokens are tensors by the names that they have in files.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..config import CacheConfig, names_of
from ..errors import CacheMismatchError
from ..pages.rows import RowsState
from ..pages.storage import Pair
from ..printable import short
from ..quant.codec import is_order, lay_out, pick_up
from ..spec import ROWS, PageSpec, SideSpec
from .identity import Adapters

WINDOW = re.compile(r"layers\.(\d{1,5})\.(?:keys|latent)\.window")
SECOND = {"keys": "values", "latent": "k_rope"}
MOST_SIZE = 1 << 16  # kv heads, channels of a head


def tensor_name(layer: int, side: str, name: str) -> str:
    """Name the tensor `name` ("codes", "scale", "offset", "window") of a side of a layer."""
    return f"layers.{layer}.{side}.{name}"


@dataclass(frozen=True)
class CacheState:
    """All that a cache needs to go on as another one would have.

    Attributes:
        options: of the cache, without the local ones (Option.kinds).
        signature: sizes of the model that the cache was built for (model_shape.signature).
        groups: full attention first, as in PagedCache.groups.
        devices: of each layer that holds something, where it lies, or shall lie.
        tensors: by `tensor_name`: of each field all pages [pages, ..] in layout ROWS, in the order of rows and tokens, and the
            exact tokens "window" [rows, num_kv_heads, longest row, head_dim], zero after a row's own.
        computed_by: states of adapters in which the tokens were computed, as far as was noted.
        specs: of each layer's pages, in layout ROWS; empty in a file, where the options say it.
    """

    options: CacheConfig
    signature: Mapping[str, Any]
    groups: tuple[RowsState, ...]
    devices: Mapping[int, torch.device]
    tensors: Mapping[str, torch.Tensor]
    computed_by: tuple[Adapters, ...] = ()
    specs: Mapping[int, PageSpec] = field(default_factory=dict)

    def windows(self, layer: int) -> Pair:
        """Return the exact tokens of a layer, as in `tensors`. Raises CacheMismatchError for missing ones, and impossible sizes."""
        first = "latent" if tensor_name(layer, "latent", "window") in self.tensors else "keys"
        names = [tensor_name(layer, side, "window") for side in (first, SECOND[first])]
        for name in names:
            if name not in self.tensors:
                raise CacheMismatchError(f"tensor {name!r} is missing")
        keys, values = (self.tensors[name] for name in names)
        sizes = (*keys.shape[1::2], *values.shape[3:])
        if len(sizes) != 3 or min(sizes[:2]) < 1 or max(sizes) > MOST_SIZE:
            raise CacheMismatchError(
                f"layer {layer} has windows {[*keys.shape]}, {[*values.shape]}"
            )
        return keys, values

    def check(self, pages: Mapping[int, tuple[PageSpec, RowsState]]) -> None:
        """Raise CacheMismatchError unless these are the tensors of layers with such pages, and of no others.

        Args:
            pages: of each layer, what its pages are like in layout ROWS, and the rows that hold them.
        """
        differing = [i for i, spec in self.specs.items() if i in pages and pages[i][0] != spec]
        if differing:
            raise CacheMismatchError(
                f"layers {differing} of this state hold pages of other formats or sizes than its options and this model give"
            )
        expected: dict[str, tuple[torch.dtype, list[int]]] = {}
        for layer, (spec, group) in pages.items():
            for side in spec.sides:
                for part, (shape, dtype) in side.fields.items():
                    name = tensor_name(layer, side.side, part)
                    expected[name] = (dtype, [group.num_pages, *shape])
                window = [len(group.rows), side.num_kv_heads, group.longest, side.head_dim]
                expected[tensor_name(layer, side.side, "window")] = (side.dtype, window)
        for name, wanted in expected.items():
            held = self.tensors.get(name)
            if held is None:
                raise CacheMismatchError(f"tensor {name!r} is missing")
            if (held.dtype, list(held.shape)) != wanted:
                raise CacheMismatchError(
                    f"tensor {name!r} is {(held.dtype, list(held.shape))}, expected {wanted}"
                )
        extra = self.tensors.keys() - expected.keys()
        if extra:
            raise CacheMismatchError(
                f"it holds tensors that belong to no cache: {short(min(extra))}"
            )


def layers_of(tensors: Iterable[str]) -> list[int]:
    """Return the layers that have windows among tensors of these names. Raises CacheMismatchError without any."""
    found = sorted({int(match[1]) for match in map(WINDOW.fullmatch, tensors) if match})
    if not found:
        raise CacheMismatchError("it holds no layer")
    return found


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


def tensors_of(layer: Any, pages: Sequence[int], group: RowsState) -> dict[str, torch.Tensor]:
    """Return pages [pages, ..] and exact tokens [rows, num_kv_heads, slots, head_dim] of a PagedLayer, copies on the CPU.

    Args:
        pages: ids of those that the rows of the layer's group hold, in order.
    """
    found = {}
    for side, residual in zip(layer.storage.sides, layer.residuals, strict=True):
        spec = side.spec
        for part, held in side.take(pages).items():
            name = tensor_name(layer.layer_idx, spec.side, part)
            held = relaid(held, spec, ROWS) if part == "codes" else held
            found[name] = held.cpu().contiguous()
        window = residual.tokens[:, :, : group.longest].to("cpu", copy=True).contiguous()
        for row, tokens in zip(group.rows, window, strict=True):
            tokens[:, row.exact :] = 0  # what earlier tokens left there
        found[tensor_name(layer.layer_idx, spec.side, "window")] = window
    return found
