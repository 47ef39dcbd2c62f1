"""Caches in files: one safetensors file of pages and exact tokens, with a description of the rows in its metadata.

    token_ids                           [rows, columns] int64, where they were given
    layers.<n>.<side>.<field>           [pages, ..]: pages in layout "rows", in the order of rows and tokens
    layers.<n>.<side>.window            [rows, num_kv_heads, longest row, head_dim]: exact tokens, zero after a row's own
    metadata                            "cache": `Description` as JSON, with the SHA-256 of every tensor; "checksum": that of
                                        all other metadata

Sides are "keys" and "values", or "latent" and "k_rope". The safetensors library writes and reads the file, and refuses tensors
that overlap, leave holes or end after the file. What the description claims is checked before a tensor is made for it. Source
of the format: https://huggingface.co/docs/safetensors
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple
from typing import Annotated, Any

import torch
import transformers
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..checks import check_choice
from ..config import KERNELS, OTHER_KERNEL_WORDS, CacheConfig, names_of
from ..errors import CacheFileError, CacheMismatchError, CacheOptionError
from ..files import replacing
from ..formats import is_shipped
from ..formats.base import FORMATS
from ..pages.moved import persistent_tensors
from ..pages.rows import RowsState
from ..printable import short
from ..version import __version__
from .identity import ModelId, adapters_of
from .model_shape import decoder_config, signature
from .origin import check_token_ids
from .state import CacheState, LayerPages, LayerState, StateTensors

FORMAT, VERSION = "kv_hf.PagedCache", "4"
TOKEN_IDS = "token_ids"
WINDOW = re.compile(r"layers\.(\d{1,5})\.(keys|latent)\.window")
SECOND = {"keys": "values", "latent": "k_rope"}
MOST = (1 << 31) - 1  # tokens, rows, pages: tables are int32
MOST_PAGE_SIZE = 1 << 20
MOST_SIZE = 1 << 16  # kv heads, channels of a head


class Description(BaseModel):
    """All of a saved cache but its tensors.

    Attributes:
        options: CacheConfig.to_dict(), without those that say where pages lie.
        formats: registered formats of its pages; none for shipped ones.
        model: that the cache belongs to.
        groups: in the order of PagedCache.groups.
        tensors: names -> SHA-256.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    options: dict[str, Any]
    formats: list[str]
    model: ModelId
    groups: Annotated[tuple[RowsState, ...], Field(min_length=1)]
    tensors: dict[str, str]


def tensor_name(layer: int, side: str, name: str) -> str:
    """Name the tensor `name` ("codes", "scale", "offset", "window") of a side of a layer."""
    return f"layers.{layer}.{side}.{name}"


# -- writing -------------------------------------------------------------------------------------------------


def save_state(
    state: CacheState,
    path: str | os.PathLike[str],
    model: Any,
    token_ids: torch.Tensor | None = None,
) -> None:
    """Write `state`, of a cache of `model`, to `path`; see PagedCache.save. All tensors are copied to the CPU before.

    Args:
        token_ids: [rows, columns seen or more], int64 or int32, padding included; None saves none.
    Raises: the errors of PagedCache.save.
    """
    _check_adapters(state, model)
    tensors = {}
    if token_ids is not None:
        group = next((group for group in state.groups if group.seen), state.groups[0])
        check_token_ids(token_ids, len(group.rows), group.seen)
        tensors[TOKEN_IDS] = token_ids.to("cpu", torch.long).contiguous()
    formats = _registered(state)
    for layer in state.layers:
        tensors.update(_tensors_of(layer, state))
    description = Description(
        options={
            name: value for name, value in state.options.to_dict().items() if name != "cuda_graph"
        },
        formats=formats,
        model=ModelId.for_file(model),
        groups=state.groups,
        tensors={name: _digest(tensor) for name, tensor in tensors.items()},
    )
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "kv_hf": __version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "cache": description.model_dump_json(),
    }
    with replacing(path) as aside:
        try:
            save_file(tensors, aside, {**metadata, "checksum": _checksum(metadata)})
        except SafetensorError as error:  # the disk refuses
            raise OSError(f"{path} cannot be written: {error}") from error


def check_model_argument(model: Any) -> None:
    """Raise CacheMismatchError unless `model` has weights and a config."""
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise CacheMismatchError(
            f"model must be the transformers model that the cache belongs to, got {type(model).__name__}"
        )


def _checksum(metadata: Mapping[str, str]) -> str:
    """Return the SHA-256 of all metadata but the checksum."""
    rest = {name: text for name, text in metadata.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _digest(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of the numbers of a contiguous tensor [any shape] on the CPU."""
    numbers: Any = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    return hashlib.sha256(numbers).hexdigest()


def _check_adapters(state: CacheState, model: Any) -> None:
    """Raise CacheMismatchError unless the adapters are those that every generate() of this cache had."""
    own = adapters_of(model).effective()
    others = [str(one) for one in state.computed_by if one.effective() != own]
    if others:
        raise CacheMismatchError(
            f"this cache holds tokens that were computed with {' and with '.join(others)}; the model to save it for has "
            f"{own}. A file holds tokens of a single state: compute the text anew, or activate the adapters again"
        )


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


def _tensors_of(layer: LayerState, state: CacheState) -> dict[str, torch.Tensor]:
    """Return the tensors of a layer by name, as contiguous copies on the CPU."""
    assert layer.pages is not None
    number, group, found = layer.layer, state.groups[layer.pages.group], {}
    for side in layer.pages.spec.sides:
        for field, (shape, dtype) in side.fields.items():
            pieces = [torch.empty((0, *shape), dtype=dtype, device="cpu")]
            pieces += [piece.cpu() for _, piece in state.tensors.pages(number, side.side, field)]
            found[tensor_name(number, side.side, field)] = torch.cat(pieces)
        held = state.tensors.window(number, side.side)[:, :, : group.longest]
        window = held.to("cpu", copy=True).contiguous()
        for row, tokens in zip(group.rows, window, strict=True):
            tokens[:, row.exact :] = 0  # what earlier tokens left there
        found[tensor_name(number, side.side, "window")] = window
    return found


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
        check_choice("kernel", kernel, KERNELS, OTHER_KERNEL_WORDS)
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
        self.names = set(file.keys())

    def layers(self, model: Any, device: torch.device | None) -> tuple[LayerState, ...]:
        """Return the layers that have windows, by the shapes and dtypes of these. Raises CacheFileError for impossible ones."""
        found = {}
        for number, first in sorted(
            match.groups() for match in map(WINDOW.fullmatch, self.names) if match
        ):
            layer = int(number)
            keys, values = (
                self._file.get_tensor(tensor_name(layer, side, "window"))
                for side in (first, SECOND[first])
            )
            sizes = (*keys.shape[1::2], *values.shape[3:])
            if len(sizes) != 3 or min(sizes[:2]) < 1 or max(sizes) > MOST_SIZE:
                raise CacheFileError(
                    f"layer {layer} has windows {[*keys.shape]}, {[*values.shape]}"
                )
            found[layer] = LayerState(
                layer, *sizes, keys.dtype, values.dtype, _device_of(model, layer, device)
            )
        if not found:
            raise CacheFileError("it holds no layer")
        return tuple(found[layer] for layer in sorted(found))

    def check(self, pages: Mapping[int, LayerPages]) -> None:
        """Raise CacheFileError unless the file holds the tensors of layers with such pages, and no other but token ids."""
        expected: dict[str, tuple[torch.dtype, list[int]]] = {}
        for layer, one in pages.items():
            group = self._described.groups[one.group]
            for side in one.spec.sides:
                for field, (shape, dtype) in side.fields.items():
                    name = tensor_name(layer, side.side, field)
                    expected[name] = (dtype, [group.num_pages, *shape])
                window = [len(group.rows), side.num_kv_heads, group.longest, side.head_dim]
                expected[tensor_name(layer, side.side, "window")] = (side.dtype, window)
        for name, wanted in expected.items():
            if name not in self.names:
                raise CacheFileError(f"tensor {name!r} is missing")
            held = self._file.get_tensor(name)
            found = (held.dtype, list(held.shape))
            if found != wanted:
                raise CacheFileError(f"tensor {name!r} is {found}, expected {wanted}")
        extra = self.names - expected.keys() - {TOKEN_IDS}
        if extra:
            raise CacheFileError(f"it holds tensors that belong to no cache: {short(min(extra))}")

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor [any shape] of the file, on the CPU; its memory is the file's. Raises CacheFileError for a damaged one."""
        found: torch.Tensor = self._file.get_tensor(name)
        if _digest(found) != self._described.tensors.get(name):
            raise CacheFileError(f"the file is damaged: tensor {name!r} does not fit its checksum")
        return found

    def pages(self, layer: int, side: str, field: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (0, tensor [pages, ..]) of one field, on the CPU."""
        yield 0, self.tensor(tensor_name(layer, side, field))

    def window(self, layer: int, side: str) -> torch.Tensor:
        """Return a copy of the exact tokens [rows, num_kv_heads, slots, head_dim], on the CPU."""
        return self.tensor(tensor_name(layer, side, "window")).clone()

    def token_ids(self) -> torch.Tensor | None:
        """Return a copy of the token ids [rows, columns], int64, None where the file has none."""
        if TOKEN_IDS not in self.names:
            return None
        found, group = self.tensor(TOKEN_IDS).clone(), self._described.groups[0]
        rows = len(group.rows)
        if found.dtype != torch.int64 or found.ndim != 2 or found.shape[0] != rows:
            raise CacheFileError(
                f"its token_ids are {found.dtype} {list(found.shape)} of {rows} rows"
            )
        if found.shape[1] < group.seen:
            raise CacheFileError(f"it has {found.shape[1]} token_ids per row, but more were seen")
        return found


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
    _check_claims(found)
    differs = found.model.difference(ModelId.for_file(model))
    if differs is not None:
        raise CacheFileError(
            f"it was saved with {differs}; load it with the model, dtype and adapters that it was saved with"
        )
    tensors = FileTensors(file, found)
    state = CacheState(
        _claimed_options(found.options, kernel),
        signature(decoder_config(model.config)),  # the same in the file
        found.groups,
        tensors.layers(model, device),
        tensors,
        (adapters_of(model),),
    )
    return state, tensors.token_ids()


def _check_claims(claimed: Description) -> None:
    """Raise CacheFileError for formats that are not here, a model that is not told, and rows that no cache has."""
    for name in claimed.formats:
        if name not in FORMATS:
            raise CacheFileError(
                f"its pages are in the format {short(name)}, which is not registered here; import the package that has it, "
                "or call kv_hf.register_format first"
            )
    if claimed.model.adapters is None or claimed.model.weights is None:
        raise CacheFileError("it does not say by which adapters and weights it was computed")
    for group in claimed.groups:
        pages = {page for row in group.rows for page in row.pages}
        ends = len(pages), min(pages, default=0), max(pages, default=-1)
        if ends != (group.num_pages, 0, group.num_pages - 1):
            raise CacheFileError(f"its rows do not hold the pages 0 .. {group.num_pages - 1}")
        numbers = [n for row in group.rows for n in astuple(row) if not isinstance(n, tuple)]
        numbers += [group.window or 1, group.seen, group.confirmed, *(group.padding_seen or ())]
        end = max(group.confirmed, *(row.padding for row in group.rows), 0)
        if not group.rows or min(numbers) < 0 or max(numbers) > MOST or end > group.seen:
            raise CacheFileError(f"a group of rows is impossible: {short(group)}")
    if len({len(group.rows) for group in claimed.groups}) != 1:
        raise CacheFileError("it holds groups of different batches")


def _claimed_options(claimed: Mapping[str, Any], kernel: str | None) -> CacheConfig:
    """Return the options of a file. Raises CacheFileError for those of caches that are never saved, and impossible ones."""
    if any(claimed.get(name) is not None for name in names_of("local")):
        raise CacheFileError("it claims options of caches that are never saved")
    for name, value in claimed.items():
        most = MOST_PAGE_SIZE if name == "page_size" else MOST
        if isinstance(value, int | float) and value > most:
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
