"""The contents of a saved cache as plain numbers: options, rows, layers, and the tensors that follow from them.

Everything read from a file passes through here before any tensor is made.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from ...config import check_option_names
from ...pages.group_state import GroupState
from ...pages.step import Row
from ...printable import short
from ...spec import ROWS, TABLE_DTYPE
from ..state import LayerPages, LayerState
from .container import (
    DTYPE_NAMES,
    DTYPES,
    Entry,
    RefusedError,
    is_count,
    is_counts,
    parse_json,
)

MOST = (1 << 31) - 1  # tokens, rows, pages: tables are int32
MOST_PAGE_SIZE = 1 << 20
MOST_SIZE = 1 << 16  # kv heads, channels of a head
MODEL_DTYPES = ("F64", "F32", "F16", "BF16")
TOKEN_IDS = "token_ids"
STATE = ("seen", "confirmed", "recording", "padding_seen")  # of a GroupState, beside its rows


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
    def of(cls, layer: LayerState) -> "SavedLayer":
        """Describe a layer."""
        dtypes = DTYPE_NAMES[layer.key_dtype], DTYPE_NAMES[layer.value_dtype]
        return cls(layer.layer, layer.num_kv_heads, layer.key_dim, layer.value_dim, *dtypes)

    def state(self, device: torch.device) -> LayerState:
        """Return what `of` described, to lie on `device`."""
        dtypes = DTYPES[self.key_dtype], DTYPES[self.value_dtype]
        sizes = self.num_kv_heads, self.key_dim, self.value_dim
        return LayerState(self.layer, *sizes, *dtypes, device)


@dataclass(frozen=True)
class SavedGroup:
    """The rows of a group of layers.

    Attributes:
        window: sliding window, None for full attention.
        num_pages: different pages that the rows hold; their ids are 0 .. num_pages - 1.
        padding, exact, dropped: those of each Row.
        pages: pages that each row holds; their ids lie in a tensor, row by row.
        state: a value for each name of STATE.
    """

    window: int | None
    num_pages: int
    padding: list[int]
    exact: list[int]
    dropped: list[int]
    pages: list[int]
    state: dict[str, Any]

    @classmethod
    def of(cls, group: GroupState) -> "SavedGroup":
        """Describe the rows of `group`."""
        rows = group.rows
        return cls(
            group.window,
            group.num_pages,
            padding=[row.padding for row in rows],
            exact=[row.exact for row in rows],
            dropped=[row.dropped for row in rows],
            pages=[len(row.pages) for row in rows],
            state={name: getattr(group, name) for name in STATE},
        )

    @property
    def longest(self) -> int:
        """Most exact tokens of a row."""
        return max(self.exact)

    def group(self, ids: Sequence[int]) -> GroupState:
        """Return the group, whose rows hold the pages `ids`. Raises RefusedError unless these are all num_pages, no other."""
        held = set(ids)  # a file may claim any number: no list of so many is made
        if (
            len(held) != self.num_pages
            or min(held, default=0)
            or max(held, default=-1) >= len(held)
        ):
            raise RefusedError(f"its rows do not hold the pages 0 .. {self.num_pages - 1}")
        found, first = [], 0
        for padding, exact, dropped, count in zip(
            self.padding, self.exact, self.dropped, self.pages, strict=True
        ):
            found.append(Row(padding, tuple(ids[first : first + count]), exact, dropped))
            first += count
        return GroupState(self.window, self.num_pages, tuple(found), **self.state)


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


def tables(contents: Contents) -> dict[str, Entry]:
    """Return the tensors of a file that belong to no layer: page ids of each group, and token ids."""
    found = {}
    if contents.columns is not None:
        found[TOKEN_IDS] = Entry(torch.int64, (contents.num_rows, contents.columns))
    for number, group in enumerate(contents.groups):
        found[page_ids_name(number)] = Entry(TABLE_DTYPE, (sum(group.pages),))
    return found


def tensors(contents: Contents, pages: Mapping[int, LayerPages]) -> dict[str, Entry]:
    """Return every tensor of a file whose layers have such pages: the one place that says which there are."""
    found = tables(contents)
    for layer, one in pages.items():
        group = contents.groups[one.group]
        for side in one.spec.sides:
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


# options that are parts of a whole; all other numbers are counts
PARTS = ("read_share", "read_top_p")


def _parse_options(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RefusedError(f"its options are {short(value)}")
    check_option_names(value)
    for name, option in value.items():
        if name in PARTS and isinstance(option, float) and 0 < option < 1:
            continue
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
