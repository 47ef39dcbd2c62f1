"""Caches in files: one safetensors file of pages and exact tokens, with a description of the rows in its metadata.

    token_ids                           [rows, columns] int64, where they were given
    layers.<n>.<keys|values>.<field>    [pages, ..]: pages in layout "rows", in the order of rows and tokens
    layers.<n>.<keys|values>.window     [rows, num_kv_heads, longest row, head_dim]: exact tokens, zero behind a row's own
    metadata                            "cache": `Description` as JSON, with the SHA-256 of every tensor; "checksum": that of
                                        all other metadata

The safetensors library reads the file, and refuses tensors that overlap, leave holes or end behind the file. What the
description claims is checked before a tensor is made for it. Source of the format: https://huggingface.co/docs/safetensors
"""

import hashlib
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import torch
import transformers
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open

from ..backend_names import OTHER_WORDS, kernel_choices
from ..checks import check_choice
from ..config import CacheConfig, names_of
from ..errors import CacheFileError, CacheMismatchError, CacheOptionError
from ..files import replacing
from ..formats import is_shipped
from ..formats.base import FORMATS
from ..pages.moved import persistent_tensors
from ..pages.rows import RowsState
from ..pages.step import Row
from ..printable import short
from ..version import __version__
from .identity import ModelId, adapters_of
from .model_shape import decoder_config, signature
from .origin import check_token_ids
from .state import CacheState, LayerPages, LayerState, StateTensors

FORMAT, VERSION = "kv_hf.PagedCache", "4"
TOKEN_IDS = "token_ids"
MOST = (1 << 31) - 1  # tokens, rows, pages: tables are int32
MOST_PAGE_SIZE = 1 << 20
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
}
MODEL_DTYPES = {name: dtype for dtype, name in DTYPES.items() if dtype.is_floating_point}

Count = Annotated[int, Field(ge=0, le=MOST)]
Size = Annotated[int, Field(ge=1, le=1 << 16)]  # kv heads, channels of a head
DtypeName = Literal["F64", "F32", "F16", "BF16"]


class _Described(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class SavedRow(_Described):
    """A Row; its pages are numbered as they lie in the file."""

    padding: Count
    pages: tuple[Count, ...]
    exact: Count
    dropped: Count


class SavedGroup(_Described):
    """A RowsState."""

    window: Annotated[int, Field(ge=1, le=MOST)] | None
    rows: tuple[SavedRow, ...]
    seen: Count
    confirmed: Count
    recording: bool
    padding_seen: list[Count] | None

    @classmethod
    def of(cls, group: RowsState) -> "SavedGroup":
        """Describe the rows of `group`."""
        rows = tuple(
            SavedRow(padding=row.padding, pages=row.pages, exact=row.exact, dropped=row.dropped)
            for row in group.rows
        )
        rest = ("window", "seen", "confirmed", "recording", "padding_seen")
        return cls(rows=rows, **{name: getattr(group, name) for name in rest})

    def state(self) -> RowsState:
        """Return what `of` described. Raises CacheFileError for rows that no cache has."""
        held = {page for row in self.rows for page in row.pages}
        if max(held, default=-1) >= len(held):
            raise CacheFileError(f"its rows do not hold the pages 0 .. {len(held) - 1}")
        padding = max((row.padding for row in self.rows), default=MOST)
        if self.confirmed > self.seen or padding > self.seen:
            raise CacheFileError(f"a group of rows is impossible: {short(self)}")
        rows = tuple(Row(row.padding, row.pages, row.exact, row.dropped) for row in self.rows)
        rest = (self.seen, self.confirmed, self.recording, self.padding_seen)
        return RowsState(self.window, len(held), rows, *rest)


class SavedLayer(_Described):
    """The sizes of a LayerState. RoPE keys of latents may have no channels."""

    layer: Count
    num_kv_heads: Size
    key_dim: Size
    value_dim: Annotated[int, Field(ge=0, le=1 << 16)]
    key_dtype: DtypeName
    value_dtype: DtypeName

    @classmethod
    def of(cls, layer: LayerState) -> "SavedLayer":
        """Describe a layer."""
        found: dict[str, Any] = {name: getattr(layer, name) for name in cls.model_fields}
        for name in ("key_dtype", "value_dtype"):
            found[name] = DTYPES[found[name]]
        return cls(**found)

    def state(self, device: torch.device) -> LayerState:
        """Return what `of` described, to lie on `device`."""
        dtypes = MODEL_DTYPES[self.key_dtype], MODEL_DTYPES[self.value_dtype]
        sizes = self.num_kv_heads, self.key_dim, self.value_dim
        return LayerState(self.layer, *sizes, *dtypes, device)


class Description(_Described):
    """All of a saved cache but its tensors.

    Attributes:
        options: CacheConfig.to_dict(), without those that say where pages lie.
        formats: registered formats of its pages; none for shipped ones.
        model: that the cache belongs to.
        groups: in the order of PagedCache.groups.
        layers: the layers that hold something.
        tensors: names -> SHA-256.
    """

    options: dict[str, Any]
    formats: list[str]
    model: ModelId
    groups: Annotated[tuple[SavedGroup, ...], Field(min_length=1)]
    layers: Annotated[tuple[SavedLayer, ...], Field(min_length=1)]
    tensors: dict[str, str]


# -- writing -------------------------------------------------------------------------------------------------


def save_state(
    state: CacheState,
    path: str | os.PathLike[str],
    model: Any,
    token_ids: torch.Tensor | None = None,
) -> None:
    """Write `state`, of a cache of `model`, to `path`; see PagedCache.save.

    Args:
        token_ids: [rows, columns seen or more], int64 or int32, padding included; None saves none.
    Raises: the errors of PagedCache.save.
    """
    _check_adapters(state, model)
    parts: dict[str, Callable[[], torch.Tensor]] = {}
    if token_ids is not None:
        group = next((group for group in state.groups if group.seen), state.groups[0])
        check_token_ids(token_ids, len(group.rows), group.seen)
        ids = token_ids.long()
        parts[TOKEN_IDS] = lambda: ids
    for layer in state.layers:
        parts.update(_layer_parts(layer, state))
    entries, digests = {}, {}
    for name, make in parts.items():  # made twice, so that only one of them is in memory at a time
        tensor = make()
        entries[name] = (tensor.dtype, tuple(tensor.shape))
        digests[name] = hashlib.sha256(_bytes(tensor)).hexdigest()
    description = Description(
        options=_options(state.options),
        formats=_registered(state),
        model=ModelId.for_file(model),
        groups=tuple(SavedGroup.of(group) for group in state.groups),
        layers=tuple(SavedLayer.of(layer) for layer in state.layers),
        tensors=digests,
    )
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "kv_hf": __version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "cache": description.model_dump_json(),
    }
    # large elements first, so that each tensor lies where a reader that maps the file can view it
    names = sorted(entries, key=lambda name: -entries[name][0].itemsize)
    header = _header(metadata, {name: entries[name] for name in names})
    with replacing(path) as file:
        file.write(header)
        for name in names:
            file.write(_bytes(parts[name]()))


def check_model_argument(model: Any) -> None:
    """Raise CacheMismatchError unless `model` has weights and a config; CacheFileError on a big-endian machine."""
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise CacheMismatchError(
            f"model must be the transformers model that the cache belongs to, got {type(model).__name__}"
        )
    if sys.byteorder != "little":
        raise CacheFileError(
            "saved caches are little-endian, as safetensors files are; this machine is not"
        )


def _header(
    metadata: Mapping[str, str], entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
) -> bytes:
    """Return length and JSON header of a safetensors file with these tensors, in this order."""
    header: dict[str, Any] = {"__metadata__": {**metadata, "checksum": _checksum(metadata)}}
    begin = 0
    for name, (dtype, shape) in entries.items():
        end = begin + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {
            "dtype": DTYPES[dtype],
            "shape": shape,
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _checksum(metadata: Mapping[str, str]) -> str:
    """Return the SHA-256 of all metadata but the checksum."""
    rest = {name: text for name, text in metadata.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor [any shape] in row-major order: its own memory where it is contiguous on the CPU."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")  # type: ignore[arg-type]


def _check_adapters(state: CacheState, model: Any) -> None:
    """Raise CacheMismatchError unless the adapters are those that every generate() of this cache had."""
    own = adapters_of(model).effective()
    others = [str(one) for one in state.computed_by if one.effective() != own]
    if others:
        raise CacheMismatchError(
            f"this cache holds tokens that were computed with {' and with '.join(others)}; the model to save it for has "
            f"{own}. A file holds tokens of a single state: compute the text anew, or activate the adapters again"
        )


def _options(given: CacheConfig) -> dict[str, Any]:
    return {name: value for name, value in given.to_dict().items() if name != "cuda_graph"}


def _registered(state: CacheState) -> list[str]:
    """Return the names of the formats of other packages that pages are in.

    Raises: CacheOptionError where another format is registered under the name of one of them.
    """
    specs = [layer.pages.spec for layer in state.layers if layer.pages is not None]
    found = {side.scheme.format for spec in specs for side in spec.sides}
    for one in found:
        if FORMATS.get(one.name) != one:
            raise CacheOptionError(
                f"format {one.name!r} of this cache's pages is not the one that is registered now under this name: "
                "register the cache's own again, then save"
            )
    return sorted(one.name for one in found if not is_shipped(one.name))


def _layer_parts(layer: LayerState, state: CacheState) -> dict[str, Callable[[], torch.Tensor]]:
    """Return the tensors of a layer by name, each as a function that makes it."""
    assert layer.pages is not None
    number, tensors = layer.layer, state.tensors
    group = state.groups[layer.pages.group]
    found: dict[str, Callable[[], torch.Tensor]] = {}
    for side in layer.pages.spec.sides:
        for field, (shape, dtype) in side.fields.items():

            def pages(
                of: str = side.side,
                field: str = field,
                none: torch.Tensor = torch.empty((0, *shape), dtype=dtype, device="cpu"),  # noqa: B008
            ) -> torch.Tensor:
                pieces = [piece.cpu() for _, piece in tensors.pages(number, of, field)]
                return torch.cat([none, *pieces])

            found[tensor_name(number, side.side, field)] = pages

        def window(of: str = side.side) -> torch.Tensor:
            held = tensors.window(number, of)[:, :, : group.longest].cpu().clone()
            for row, tokens in zip(group.rows, held, strict=True):
                tokens[:, row.exact :] = 0  # what earlier tokens left there
            return held

        found[tensor_name(number, side.side, "window")] = window
    return found


def tensor_name(layer: int, side: str, name: str) -> str:
    """Name the tensor `name` ("codes", "scale", "offset", "window") of a side ("keys", "values") of a layer."""
    return f"layers.{layer}.{side}.{name}"


# -- reading -------------------------------------------------------------------------------------------------


@contextmanager
def opened_state(
    path: str | os.PathLike[str],
    model: Any,
    device: torch.device | str | None = None,
    kernel: str | None = None,
) -> Iterator[tuple[CacheState, torch.Tensor | None]]:
    """Yield the state that a file holds, and its token ids; the file is read while the state is taken over.

    Takes the arguments of PagedCache.load.

    Yields: the state, and token ids [rows, columns], int64 on the CPU, or None where the file has none.
    Raises: the errors of PagedCache.load. A ValueError from the block is a fault of the file, and becomes a
        CacheFileError.
    """
    check_model_argument(model)
    if kernel is not None:
        check_choice("kernel", kernel, kernel_choices(), OTHER_WORDS)
    chosen = _device(device)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise CacheFileError("it is not a regular file")
        with safe_open(path, "pt") as file, persistent_tensors():
            yield _read(file, model, chosen, kernel)
    except SafetensorError as error:
        raise CacheFileError(
            f"{path} cannot be loaded: it is cut off or no saved cache ({error})"
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise CacheFileError(f"{path} cannot be loaded: its {place[:80]}: {first['msg']}") from None
    except ValueError as error:  # ours, and those of options that a file claims
        raise CacheFileError(f"{path} cannot be loaded: {str(error)[:800]}") from error


class FileTensors(StateTensors):
    """Pages and exact tokens of a file. Each tensor is compared with its SHA-256 when it is read."""

    def __init__(self, file: Any, description: Description) -> None:
        self._file, self._described = file, description

    def check(self, pages: Mapping[int, LayerPages]) -> None:
        """Raise CacheFileError unless the file holds the tensors of layers with such pages, and no other but token ids."""
        groups = [group.state() for group in self._described.groups]
        expected: dict[str, tuple[torch.dtype, list[int]]] = {}
        for layer, one in pages.items():
            group = groups[one.group]
            for side in one.spec.sides:
                for field, (shape, dtype) in side.fields.items():
                    name = tensor_name(layer, side.side, field)
                    expected[name] = (dtype, [group.num_pages, *shape])
                window = [len(group.rows), side.num_kv_heads, group.longest, side.head_dim]
                expected[tensor_name(layer, side.side, "window")] = (side.dtype, window)
        for name, wanted in expected.items():
            self.check_tensor(name, *wanted)
        extra = self.names - expected.keys() - {TOKEN_IDS}
        if extra:
            raise CacheFileError(f"it holds tensors that belong to no cache: {short(min(extra))}")

    @property
    def names(self) -> set[str]:
        """The tensors that the file holds."""
        return set(self._file.keys())

    def check_tensor(self, name: str, dtype: torch.dtype, shape: list[int]) -> None:
        """Raise CacheFileError unless the file holds such a tensor."""
        if name not in self.names:
            raise CacheFileError(f"tensor {name!r} is missing")
        held = self._file.get_slice(name)
        found = (held.get_dtype(), held.get_shape())
        if found != (DTYPES[dtype], shape):
            raise CacheFileError(
                f"tensor {name!r} is {found[0]} {found[1]}, expected {DTYPES[dtype]} {shape}"
            )

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor [any shape] of the file, on the CPU; its memory is the file's. Raises CacheFileError for a damaged one."""
        found: torch.Tensor = self._file.get_tensor(name)
        if hashlib.sha256(_bytes(found)).hexdigest() != self._described.tensors.get(name):
            raise CacheFileError(f"the file is damaged: tensor {name!r} does not fit its checksum")
        return found

    def pages(self, layer: int, side: str, field: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (0, tensor [pages, ..]) of one field, on the CPU."""
        yield 0, self.tensor(tensor_name(layer, side, field))

    def window(self, layer: int, side: str) -> torch.Tensor:
        """Return a copy of the exact tokens [rows, num_kv_heads, slots, head_dim], on the CPU."""
        return self.tensor(tensor_name(layer, side, "window")).clone()


def _read(
    file: Any, model: Any, device: torch.device | None, kernel: str | None
) -> tuple[CacheState, torch.Tensor | None]:
    """Return the state, and the token ids."""
    metadata = file.metadata() or {}
    if metadata.get("format") != FORMAT or "cache" not in metadata:
        raise CacheFileError(
            f"it is a safetensors file, but not a saved cache ({short(metadata.get('format'))})"
        )
    if metadata.get("version") != VERSION:
        raise CacheFileError(
            f"it is of file version {short(metadata.get('version'))}, written by kv_hf "
            f"{short(metadata.get('kv_hf'))}; this kv_hf reads version {VERSION}"
        )
    if metadata.get("checksum") != _checksum(metadata):
        raise CacheFileError("the file is damaged: its description does not fit its checksum")
    found = Description.model_validate_json(metadata["cache"])
    _check_formats(found.formats)
    _check_model(found.model, model)
    options = _claimed_options(found.options, kernel)
    groups = tuple(group.state() for group in found.groups)
    if len({len(group.rows) for group in groups}) != 1:
        raise CacheFileError("it holds groups of different batches")
    if len({one.layer for one in found.layers}) != len(found.layers):
        raise CacheFileError("it names a layer twice")
    tensors = FileTensors(file, found)
    state = CacheState(
        options,
        signature(decoder_config(model.config)),  # the same in the file, as its identity is
        groups,
        tuple(one.state(_device_of(model, one.layer, device)) for one in found.layers),
        tensors,
        (adapters_of(model),),
    )
    return state, _token_ids(tensors, groups[0])


def _check_model(saved: ModelId, model: Any) -> None:
    """Raise CacheFileError unless `model` computes the keys and values that the model of a file does."""
    if saved.adapters is None or saved.weights is None:
        raise CacheFileError("it does not say by which adapters and weights it was computed")
    found = saved.difference(ModelId.for_file(model))
    if found is not None:
        raise CacheFileError(
            f"it was saved with {found}; load it with the model, dtype and adapters that it was saved with"
        )


def _token_ids(tensors: FileTensors, group: RowsState) -> torch.Tensor | None:
    if TOKEN_IDS not in tensors.names:
        return None
    found = tensors.tensor(TOKEN_IDS).clone()
    rows = len(group.rows)
    if found.dtype != torch.int64 or found.ndim != 2 or found.shape[0] != rows:
        raise CacheFileError(f"its token_ids are {found.dtype} {list(found.shape)} of {rows} rows")
    if found.shape[1] < group.seen:
        raise CacheFileError(f"it has {found.shape[1]} token_ids per row, but more were seen")
    return found


def _check_formats(claimed: Sequence[str]) -> None:
    """Raise CacheFileError unless the registered formats that a file claims are here."""
    for name in claimed:
        if name not in FORMATS:
            raise CacheFileError(
                f"its pages are in the format {short(name)}, which is not registered here; import the package that has it, "
                "or call kv_hf.register_format first"
            )


def _claimed_options(claimed: Mapping[str, Any], kernel: str | None) -> CacheConfig:
    """Return the options of a file. Raises CacheFileError for those of caches that are never saved, and impossible ones."""
    if any(claimed.get(name) is not None for name in names_of("local")):
        raise CacheFileError("it claims options of caches that are never saved")
    for name, value in claimed.items():
        if isinstance(value, int | float) and value > (
            MOST_PAGE_SIZE if name == "page_size" else MOST
        ):
            raise CacheFileError(f"its option {name} is {short(value)}")
    rest = {name: value for name, value in claimed.items() if name not in ("keys", "values")}
    if kernel is not None:
        rest["kernel"] = kernel
    return CacheConfig.from_arguments(claimed.get("keys"), claimed.get("values"), rest)


def _device(asked: torch.device | str | None) -> torch.device | None:
    """Return the device as the keys on it will name it ("cuda" is "cuda:0" there)."""
    if asked is None:
        return None
    try:
        device = torch.empty(0, device=asked).device
    except (RuntimeError, AssertionError, TypeError) as error:  # torch without CUDA asserts
        raise CacheOptionError(
            f"device must be a device of torch that is there, got {asked!r}: {short(str(error))}"
        ) from None
    if device.type == "meta":
        raise CacheOptionError("device must be one that holds numbers, got 'meta'")
    return torch.device("cpu") if device.type == "cpu" else device


def _device_of(model: Any, layer: int, asked: torch.device | None) -> torch.device:
    """Return the device of a layer's keys: `asked`, or where the model's layer is."""
    if asked is not None:
        return asked
    own = getattr(model.get_decoder(), "layers", None) if hasattr(model, "get_decoder") else None
    block = own[layer] if own is not None and layer < len(own) else model
    devices = [parameter.device for parameter in block.parameters() if not parameter.is_meta]
    found: torch.device = devices[0] if devices else model.device
    return found
