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
from .state import CacheState, layers_of

FORMAT, VERSION = "kv_hf.PagedCache", "5"
TOKEN_IDS = "token_ids"
MOST = (1 << 31) - 1  # tokens, rows, pages: tables are int32
MOST_PAGE_SIZE = 1 << 20


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
    tensors.update(state.tensors)
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
    found = {side.scheme.format for spec in state.specs.values() for side in spec.sides}
    for one in found:
        if FORMATS.get(one.name) != one:
            raise CacheOptionError(
                f"format {one.name!r} of this cache's pages is not the one that is registered now under this name: "
                "register the cache's own again, then save"
            )
    return sorted(one.name for one in found if not is_shipped(one.name))


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
        with open(path, "rb") as held, persistent_tensors():
            # safetensors opens by name twice: a file that takes the place of this one in between has another name
            name = f"/dev/fd/{held.fileno()}" if os.path.isdir("/dev/fd") else path
            with safe_open(name, "pt") as file:
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


def _tensors(file: Any, described: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Return the tensors of a file by name, on the CPU; their memory is the file's. Raises CacheFileError for a damaged one."""
    found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    for name, tensor in found.items():
        if _digest(tensor) != described.get(name):
            raise CacheFileError(
                f"the file is damaged: tensor {short(name)} does not fit its checksum"
            )
    return found


def _check_ids(found: torch.Tensor, group: RowsState) -> None:
    """Raise CacheFileError for token ids of another number of rows, or fewer columns than were seen."""
    rows = len(group.rows)
    if found.dtype != torch.int64 or found.ndim != 2 or found.shape[0] != rows:
        raise CacheFileError(f"its token_ids are {found.dtype} {list(found.shape)} of {rows} rows")
    if found.shape[1] < group.seen:
        raise CacheFileError(f"it has {found.shape[1]} token_ids per row, but more were seen")


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
    tensors = _tensors(file, found.tensors)
    token_ids = tensors.pop(TOKEN_IDS, None)
    if token_ids is not None:
        _check_ids(token_ids, found.groups[0])
        token_ids = token_ids.clone()
    state = CacheState(
        _claimed_options(found.options, kernel),
        signature(decoder_config(model.config)),  # the same in the file
        found.groups,
        {layer: device or _device_of(model, layer) for layer in layers_of(tensors)},
        tensors,
        (adapters_of(model),),
    )
    return state, token_ids


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


def _device_of(model: Any, layer: int) -> torch.device:
    """Return the device of a layer of a model."""
    own = getattr(model.get_decoder(), "layers", None) if hasattr(model, "get_decoder") else None
    block = own[layer] if own is not None and layer < len(own) else model
    devices = [parameter.device for parameter in block.parameters() if not parameter.is_meta]
    found: torch.device = devices[0] if devices else model.device
    return found
