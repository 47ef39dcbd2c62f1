"""What a saved cache consists of, as plain numbers: options, rows, layers, and the tensors that follow from them.

Everything read from a file passes through here before any tensor is made.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from ...config import check_option_names
from ...pages.group import PageGroup
from ...pages.step import Row
from ...printable import short
from ...spec import ROWS, TABLE_DTYPE, PageSpec
from .container import (
    DTYPE_NAMES,
    DTYPES,
    Entry,
    RefusedError,
    is_count,
    is_counts,
    parse_json,
)
from .group_state import STATE, state_of

MOST = (1 << 31) - 1  # tokens, rows, pages: tables are int32
MOST_PAGE_SIZE = 1 << 20
MOST_SIZE = 1 << 16  # kv heads, channels of a head
MODEL_DTYPES = ("F64", "F32", "F16", "BF16")
TOKEN_IDS = "token_ids"


@dataclass(frozen=True)
class SavedLayer:
    """The sizes of a layer's keys and values."""

    layer: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    key_dtype: str
    value_dtype: str

    @classmethod
    def of(cls, layer: int, spec: PageSpec) -> "SavedLayer":
        """Describe a layer with pages of `spec`."""
        keys, values = spec.sides
        return cls(
            layer,
            keys.num_kv_heads,
            keys.head_dim,
            values.head_dim,
            DTYPE_NAMES[keys.dtype],
            DTYPE_NAMES[values.dtype],
        )

    def empty(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of no token, [1, num_kv_heads, 0, head_dim]."""
        sides = ((self.key_dim, self.key_dtype), (self.value_dim, self.value_dtype))
        keys, values = (
            torch.empty((1, self.num_kv_heads, 0, dim), dtype=DTYPES[dtype], device=device)
            for dim, dtype in sides
        )
        return keys, values


@dataclass(frozen=True)
class SavedGroup:
    """The rows of a group of layers.

    Attributes:
        window: sliding window, None for full attention.
        num_pages: different pages that the rows hold; their ids are 0 .. num_pages - 1.
        padding, exact, dropped: those of each Row.
        pages: pages that each row holds; their ids lie in a tensor, row by row.
        state: state_of(group).
    """

    window: int | None
    num_pages: int
    padding: list[int]
    exact: list[int]
    dropped: list[int]
    pages: list[int]
    state: dict[str, Any]

    @classmethod
    def of(cls, group: PageGroup, num_pages: int) -> "SavedGroup":
        """Describe the rows of `group`, which hold `num_pages` different pages."""
        rows = group.rows
        return cls(
            group.window,
            num_pages,
            padding=[row.padding for row in rows],
            exact=[row.exact for row in rows],
            dropped=[row.dropped for row in rows],
            pages=[len(row.pages) for row in rows],
            state=state_of(group),
        )

    @property
    def longest(self) -> int:
        """Most exact tokens of a row."""
        return max(self.exact)

    def rows(self, ids: Sequence[int]) -> tuple[Row, ...]:
        """Return the rows with their page ids. Raises RefusedError unless all num_pages ids are held, no other."""
        if sorted(set(ids)) != list(range(self.num_pages)):
            raise RefusedError(f"its rows do not hold the pages 0 .. {self.num_pages - 1}")
        found, first = [], 0
        for padding, exact, dropped, count in zip(
            self.padding, self.exact, self.dropped, self.pages, strict=True
        ):
            found.append(Row(padding, tuple(ids[first : first + count]), exact, dropped))
            first += count
        return tuple(found)


@dataclass(frozen=True)
class Contents:
    """All of a saved cache but its tensors.

    Attributes:
        options: fields of CacheConfig.
        model: identity of the model (identity.py).
        groups: in the order of PagedCache.groups.
        layers: the layers that hold something.
        columns: token ids per row that were saved, None without.
    """

    options: dict[str, Any]
    model: dict[str, Any]
    groups: list[SavedGroup]
    layers: list[SavedLayer]
    columns: int | None

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return len(self.groups[0].padding)

    def encode(self) -> str:
        """Return the text that `parse` reads."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> "Contents":
        """Read what `encode` wrote. Raises RefusedError for anything that no cache could have written."""
        found = _object(parse_json(text, "its description"), cls, "description")
        groups = [_parse_group(value) for value in _list(found["groups"], "groups")]
        layers = [_parse_layer(value) for value in _list(found["layers"], "layers")]
        rows = {len(group.padding) for group in groups}
        if not layers or len(rows) != 1 or 0 in rows:
            raise RefusedError("it holds no layers or no rows, or groups of different batches")
        if len({layer.layer for layer in layers}) != len(layers):
            raise RefusedError("it names a layer twice")
        columns = found["columns"]
        if columns is not None and not is_count(columns, MOST):
            raise RefusedError(f"it claims {short(columns)} columns of token ids")
        if columns is not None and columns < groups[0].state["seen"]:
            raise RefusedError(f"it has {columns} token ids per row, but more were seen")
        return cls(_parse_options(found["options"]), found["model"], groups, layers, columns)


def tensors(
    contents: Contents, specs: Mapping[int, PageSpec], groups: Mapping[int, int]
) -> dict[str, Entry]:
    """Return every tensor of a file: the one place that says which there are.

    Args:
        specs: pages of each layer, in layout ROWS.
        groups: layer -> number of its group.
    """
    found = {}
    if contents.columns is not None:
        found[TOKEN_IDS] = Entry(torch.int64, (contents.num_rows, contents.columns))
    for number, group in enumerate(contents.groups):
        found[page_ids_name(number)] = Entry(TABLE_DTYPE, (sum(group.pages),))
    for layer, spec in specs.items():
        group = contents.groups[groups[layer]]
        for side in spec.sides:
            if side.layout != ROWS:
                raise AssertionError("files hold pages in rows")
            for name, (shape, dtype) in side.fields.items():
                field = Entry(dtype, (group.num_pages, *shape))
                found[tensor_name(layer, side.side, name)] = field
            window = (contents.num_rows, side.num_kv_heads, group.longest, side.head_dim)
            found[tensor_name(layer, side.side, "window")] = Entry(side.dtype, window)
    return found


def tensor_name(layer: int, side: str, name: str) -> str:
    """Name the tensor `name` ("codes", "scale", "offset", "window") of a side ("keys", "values") of a layer."""
    return f"layers.{layer}.{side}.{name}"


def page_ids_name(group: int) -> str:
    """Name the tensor of the page ids that the rows of a group hold."""
    return f"groups.{group}.pages"


def _object(value: Any, of: type, what: str) -> dict[str, Any]:
    names = {field.name for field in fields(of)}
    if not isinstance(value, dict) or set(value) != names:
        raise RefusedError(f"a {what} must have {', '.join(sorted(names))}, got {short(value)}")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise RefusedError(f"its {what} are no list: {short(value)}")
    return value


def _parse_options(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RefusedError(f"its options are {short(value)}")
    check_option_names(value)
    for name, option in value.items():
        most = MOST_PAGE_SIZE if name == "page_size" else MOST
        if isinstance(option, (int, float)) and not is_count(option, most):
            raise RefusedError(f"its option {name} is {short(option)}")
    return value


def _parse_layer(value: Any) -> SavedLayer:
    layer = SavedLayer(**_object(value, SavedLayer, "layer"))
    sizes = (layer.num_kv_heads, layer.key_dim, layer.value_dim)
    dtypes = (layer.key_dtype, layer.value_dtype)
    if not is_count(layer.layer, MOST) or not all(
        is_count(size, MOST_SIZE) and (size or place == 2)  # RoPE keys may have no channels
        for place, size in enumerate(sizes)
    ):
        raise RefusedError(f"it describes an impossible layer: {short(value)}")
    if not all(isinstance(dtype, str) and dtype in MODEL_DTYPES for dtype in dtypes):
        raise RefusedError(f"layer {layer.layer} has the impossible dtypes {short(dtypes)}")
    return layer


def _parse_group(value: Any) -> SavedGroup:
    group = SavedGroup(**_object(value, SavedGroup, "group"))
    lists = (group.padding, group.exact, group.dropped, group.pages)
    if not all(is_counts(numbers, MOST) for numbers in lists) or not group.padding:
        raise RefusedError(f"the rows of a group are {short(value)}")
    if len({len(numbers) for numbers in lists}) != 1:
        raise RefusedError(f"the lists of a group are of different lengths: {short(value)}")
    if group.window is not None and not (is_count(group.window, MOST) and group.window):
        raise RefusedError(f"a group has the impossible window {short(group.window)}")
    if not is_count(group.num_pages, MOST):
        raise RefusedError(f"a group claims {short(group.num_pages)} pages")
    _check_state(group)
    return group


def _check_state(group: SavedGroup) -> None:
    state = group.state
    if not isinstance(state, dict) or set(state) != set(STATE):
        raise RefusedError(f"a group's state is {short(state)}")
    seen, padding_seen = state["seen"], state["padding_seen"]
    if not is_count(seen, MOST) or not is_count(state["confirmed"], seen):
        raise RefusedError(f"a group's state is {short(state)}")
    if type(state["recording"]) is not bool or max(group.padding) > seen:
        raise RefusedError(f"a group's state is {short(state)}")
    if padding_seen is not None and not is_counts(padding_seen, MOST):
        raise RefusedError(f"a group's state is {short(state)}")
