"""Caches in files: one safetensors file of pages and exact tokens, with a description of the rows in its metadata.

    token_ids                           [rows, columns] int64, where they were given
    layers.<n>.<side>.<field>           [pages, ..]: pages in layout "rows", in the order of rows and tokens
    layers.<n>.<side>.window            [rows, num_kv_heads, longest row, head_dim]: exact tokens, zero after a row's own
    layers.<n>.<name>                   what the layer holds beside pages, at the end of the text (states.py)
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any, ClassVar

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..config import CacheConfig, names_of
from ..errors import (
    CacheFileError,
    CacheMismatchError,
    CacheOptionError,
    InterruptedForwardError,
    UnsupportedModelError,
)
from ..files import replacing
from ..formats.base import FORMATS
from ..pages.moved import persistent_tensors
from ..pages.rows import RowsState, held_pages
from ..pages.storage import Pair, SideStorage, Tensors
from ..printable import short
from ..quant.codec import is_order, lay_out, pick_up
from ..row_pages import page_capacity
from ..spec import ROWS, SideSpec
from ..version import __version__
from .identity import ModelId
from .layer import PagedLayer
from .origin import check_token_ids
from .report import tensor_bytes
from .states import check_states, restore_states, state_names, states_of

FORMAT, VERSION = "kv_hf.PagedCache", "9"
TOKEN_IDS = "token_ids"
MOST = (1 << 31) - 1  # tokens, rows, pages: tables are int32
MOST_SIZE = 1 << 16  # kv heads, channels of a head


@dataclass(frozen=True)
class Description:
    """All of a saved cache but its tensors.

    Attributes:
        options: CacheConfig.to_dict(), without those that say where pages lie.
        model: that the cache belongs to.
        groups: in the order of PagedCache.groups.
        tensors: names -> SHA-256.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"strict": True, "extra": "forbid"}

    options: dict[str, Any]
    model: ModelId
    groups: tuple[RowsState, ...]
    tensors: dict[str, str]


# -- writing -------------------------------------------------------------------------------------------------


def save(cache: Any, path: str | os.PathLike[str], model: Any, token_ids: Any) -> None:
    """Write `cache`, of `model`, to `path`; see PagedCache.save. All tensors are copied to the CPU before."""
    _check_model_argument(model)
    own = ModelId.of(model)
    cache.origin.check_filled_by(own)
    _check_complete(cache)
    others = [str(one) for one in cache.origin.computed_by if one != own.adapters]
    if others:
        raise CacheMismatchError(
            f"this cache holds tokens that were computed with {' and with '.join(others)}; the model to save it for has "
            f"{own.adapters}. A file holds tokens of a single state: compute the text anew, or activate the adapters again"
        )
    tensors, seen = {}, cache._group.seen
    if token_ids is None and cache.origin.known_columns >= seen:
        token_ids = cache.token_ids
    if token_ids is not None:
        check_token_ids(token_ids, len(cache._group), seen)
        tensors[TOKEN_IDS] = token_ids.to("cpu", torch.long).contiguous()
    groups = {group: group.state() for group in cache.groups}
    with persistent_tensors():
        for layer in _storing(cache):
            tensors.update(_tensors_of(layer, groups[layer.group]))
        for index, layer in enumerate(cache.layers):
            states = states_of(layer)
            check_states(cache, index, states)
            for name, state in states.items():
                tensors[f"layers.{index}.{name}"] = state.to("cpu", copy=True).contiguous()
    description = Description(
        options=_told_options(cache),
        model=ModelId.for_file(model),
        groups=tuple(groups.values()),
        tensors={name: digest(tensor) for name, tensor in tensors.items()},
    )
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "kv_hf": __version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "cache": json.dumps(asdict(description)),
    }
    with replacing(path) as aside:
        try:
            save_file(tensors, aside, {**metadata, "checksum": _checksum(metadata)})
        except SafetensorError as error:  # the disk refuses
            raise OSError(f"{path} cannot be written: {error}") from error


def _check_model_argument(model: Any) -> None:
    """Raise CacheMismatchError unless `model` has weights and a config."""
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise CacheMismatchError(
            f"model must be the transformers model that the cache belongs to, got {type(model).__name__}"
        )


def _storing(cache: Any) -> list[Any]:
    """Return the paged layers that store tokens: others attend to the latents of one of these."""
    return [layer for layer in cache.paged_layers if getattr(layer, "has_latents", True)]


def _check_complete(cache: Any) -> None:
    """Raise an error unless the cache holds tokens, up to the same column in all layers, and nothing that a file does not."""
    if not len(cache._group):
        raise CacheMismatchError("this cache is empty: there is nothing to save")
    kept = [
        f"{index} ({type(layer).__name__})"
        for index, layer in enumerate(cache.layers)
        if not isinstance(layer, PagedLayer)
        and tensor_bytes(vars(layer)) > tensor_bytes(states_of(layer))
    ]
    if kept:
        raise UnsupportedModelError(
            f"layers {', '.join(kept)} are transformers' own and hold keys that are in no page; saved caches hold pages, an "
            "indexer's keys beside latents, and states of linear attention only"
        )
    for side in (side for layer in cache.paged_layers if layer.spec for side in layer.spec.sides):
        one = side.scheme.format
        if FORMATS.get(one.name) != one:
            raise CacheOptionError(
                f"format {one.name!r} of this cache's pages is not the one that is registered now under this name: "
                "register the cache's own again, then save"
            )
    without = [one.layer_idx for one in _storing(cache) if not one.store]
    if without:
        raise InterruptedForwardError(
            f"layers {without} have not taken part in the forwards of this cache: an earlier one stopped half-way; it "
            "cannot be saved"
        )
    cache.check_integrity()
    if any(layer.window != layer.group.window for layer in cache.paged_layers):
        raise UnsupportedModelError(
            "this cache keeps all pages of sliding layers for its prefix_store; save one that was made without a store"
        )


def _told_options(cache: Any) -> dict[str, Any]:
    """Return the options for a file: none of this process alone, and for widened layers the formats of their pages."""
    nothing: dict[str, Any] = dict.fromkeys(names_of("local"))
    told = replace(cache.options, **nothing, layers=stored_layers(cache))
    return {name: value for name, value in told.to_dict().items() if name != "cuda_graph"}


def stored_layers(cache: Any) -> dict[str, Any] | None:
    """Return the option `layers` of a cache, with the formats of the pages of layers that were widened."""
    overrides = dict(cache.options.layers or {})
    for layer in cache.paged_layers:
        if layer.storage is not None and layer.storage.wider is not None:
            keys, values = (side.scheme.name for side in layer.storage.spec.sides)
            overrides.pop(str(layer.layer_idx), None)  # the last override of a layer holds
            overrides[str(layer.layer_idx)] = {"keys": keys, "values": values}
    return overrides or cache.options.layers


def _named(layer: int, side: str, field: str) -> str:
    """Name a tensor of the file: a field of pages ("codes", "scale", ..), or "window"."""
    return f"layers.{layer}.{side}.{field}"


def _tensors_of(layer: Any, rows: RowsState) -> Tensors:
    """Return pages [pages, ..] and exact tokens [rows, num_kv_heads, longest, head_dim] of a layer, copies on the CPU."""
    found = {}
    for side, residual in zip(layer.storage.sides, layer.residuals, strict=True):
        spec = side.spec
        for field, held in taken(side, held_pages(layer.group.rows)).items():
            found[_named(layer.layer_idx, spec.side, field)] = held.contiguous()
        window = residual.tokens[:, :, : rows.longest].to("cpu", copy=True).contiguous()
        for row, tokens in zip(rows.rows, window, strict=True):
            tokens[:, row.exact :] = 0  # what earlier tokens left there
        found[_named(layer.layer_idx, spec.side, "window")] = window
    return found


def taken(side: SideStorage, pages: Sequence[int]) -> Tensors:
    """Return copies of these pages on the CPU, [n, ..] by field name, in the layout of files."""
    found = {name: held.cpu() for name, held in side.take(pages).items()}
    return {**found, "codes": _in_layout(found["codes"], side.spec, ROWS)}


def put(side: SideStorage, ids: Sequence[int], pages: Tensors) -> None:
    """Write pages as `taken` gave them, [n, ..] by field name, to these n ids, which must have room."""
    codes = _in_layout(pages["codes"], replace(side.spec, layout=ROWS), side.spec.layout)
    side.put(ids, {**pages, "codes": codes})


def _in_layout(codes: torch.Tensor, side: SideSpec, layout: str) -> torch.Tensor:
    """Return codes [n, ..] of pages of `side`, as its `fields["codes"]` says, in another layout."""
    other = replace(side, layout=layout)
    return codes if side.layout == layout else lay_out(pick_up(codes, side), other)


def _checksum(metadata: Mapping[str, str]) -> str:
    """Return the SHA-256 of all metadata but the checksum."""
    rest = {name: text for name, text in metadata.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def digest(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of the numbers of a contiguous tensor [any shape] on the CPU."""
    numbers: Any = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    return hashlib.sha256(numbers).hexdigest()


# -- reading -------------------------------------------------------------------------------------------------


def load(kind: Any, path: str | os.PathLike[str], model: Any, device: Any, **options: Any) -> Any:
    """Return the cache that a file holds, as one of class `kind`, with `options` that are not None; see PagedCache.load."""
    _check_model_argument(model)
    own = {name: value for name, value in options.items() if value is not None}
    CacheConfig(**own)  # what it refuses is no fault of the file
    chosen = _device(device)
    with _opened(path) as file, persistent_tensors():
        found = _described(file)
        differs = found.model.difference(ModelId.for_file(model))
        if differs is not None:
            raise CacheFileError(
                f"it was saved with {differs}; load it with the model, dtype and adapters that it was saved with"
            )
        tensors = _tensors(file, found.tensors)
        token_ids = tensors.pop(TOKEN_IDS, None)
        if token_ids is not None:
            check_token_ids(token_ids, len(found.groups[0].rows), found.groups[0].seen)
        cache = kind.from_options(model.config, replace(_claimed_options(found.options), **own))
        _check_fits(cache, found.groups)
        groups = dict(zip(cache.groups, found.groups, strict=True))
        for group, rows in groups.items():
            group.restore(rows)
        for layer in _storing(cache):
            device = chosen or device_of(model, layer.layer_idx)
            _fill(layer, tensors, groups[layer.group], device)
        for index, layer in enumerate(cache.layers):
            names = [name for name in state_names(layer) if f"layers.{index}.{name}" in tensors]
            states = {name: tensors.pop(f"layers.{index}.{name}") for name in names}
            check_states(cache, index, states)
            restore_states(layer, states, chosen or device_of(model, index))
        if tensors:
            raise CacheFileError(f"it holds tensors that belong to no cache: {short(min(tensors))}")
        _resume(cache)
        if token_ids is not None:
            cache.origin.note_text(token_ids, 0, cache._group.seen)
    cache.origin.note_model(ModelId.of(model))
    cache.origin.from_file = True
    return cache


def _resume(cache: Any) -> None:
    """Let a cache go on from rows and layers that were filled from a file."""
    storing = _storing(cache)
    for layer in storing:
        layer.seen = layer.group.seen
        layer.revision += 1
    cache.forward.resume(len(storing))
    cache._tokens_on = storing[0].device if cache._group.seen else None
    cache.check_integrity()


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[Any]:
    """Yield a file, opened by safetensors. A ValueError from the block is a fault of the file, and becomes a CacheFileError."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise CacheFileError("it is not a regular file")
        with open(path, "rb") as held:
            # safetensors opens by name twice: a file that takes the place of this one in between has another name
            name = f"/dev/fd/{held.fileno()}" if os.path.isdir("/dev/fd") else path
            with safe_open(name, "pt") as file:
                yield file
    except SafetensorError as error:
        raise CacheFileError(
            f"{path} cannot be loaded: it is cut off or no saved cache ({error})"
        ) from error
    except ValueError as error:  # ours, and those of options that a file claims
        raise CacheFileError(f"{path} cannot be loaded: {str(error)[:800]}") from error


def _described(file: Any) -> Description:
    """Return what a file says of itself. Raises CacheFileError for another file, a damaged one, and claims that no cache makes."""
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
    from pydantic import TypeAdapter, ValidationError  # only where a file is read

    try:
        found = TypeAdapter(Description).validate_json(metadata["cache"])
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise CacheFileError(f"its {place[:80]}: {first['msg']}") from None
    if not found.groups:
        raise CacheFileError("it has no rows")
    _check_claims(found)
    return found


def _tensors(file: Any, described: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Return the tensors of a file by name, on the CPU; their memory is the file's. Raises CacheFileError for a damaged one."""
    found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    for name, tensor in found.items():
        if digest(tensor) != described.get(name):
            raise CacheFileError(
                f"the file is damaged: tensor {short(name)} does not fit its checksum"
            )
    return found


def _check_fits(cache: Any, groups: Sequence[RowsState]) -> None:
    """Raise CacheMismatchError unless rows are those of such a cache."""
    windows, claimed = [group.window for group in cache.groups], [one.window for one in groups]
    if windows != claimed:
        raise CacheMismatchError(
            f"its groups have the windows {short(claimed)}, this model's {windows}"
        )
    most = cache.options.max_length
    for group, theirs in zip(cache.groups, groups, strict=True):
        if most is not None and theirs.seen > most:
            raise CacheMismatchError(
                f"max_length={most} is less than the {theirs.seen} columns of this cache; load it with a larger max_length"
            )
        for index, row in enumerate(theirs.rows):
            if (row.pages or row.dropped) and row.exact < group.sizes.sink_tokens:
                raise CacheMismatchError(f"row {index} holds pages, but not its first tokens")


def _held(tensors: Tensors, name: str) -> torch.Tensor:
    if name not in tensors:
        raise CacheMismatchError(f"tensor {name!r} is missing")
    return tensors[name]


def _windows(layer: Any, tensors: Tensors) -> Pair:
    """Return the exact tokens of a layer, as in the file. Raises CacheMismatchError for missing ones, and impossible sizes."""
    latents = _named(layer.layer_idx, "latent", "window") in tensors
    sides = ("latent", "k_rope") if latents else ("keys", "values")
    keys, values = (_held(tensors, _named(layer.layer_idx, side, "window")) for side in sides)
    sizes = (*keys.shape[1::2], *values.shape[3:])
    if len(sizes) != 3 or min(sizes[: 2 if latents else 3]) < 1 or max(sizes) > MOST_SIZE:
        raise CacheMismatchError(
            f"layer {layer.layer_idx} has windows {[*keys.shape]}, {[*values.shape]}"
        )
    return keys, values


def _fill(
    layer: Any, tensors: dict[str, torch.Tensor], rows: RowsState, device: torch.device
) -> None:
    """Give an empty layer its pages and exact tokens, on `device`; they are taken out of `tensors`.

    Raises: CacheMismatchError where they are not of such a layer; no memory was asked for that the file does not have itself.
    """
    keys, values = (window[:1, :, :0].to(device) for window in _windows(layer, tensors))
    layer.lazy_initialization(keys, values)

    def claimed(side: SideSpec, field: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        name = _named(layer.layer_idx, side.side, field)
        held, wanted = _held(tensors, name), (dtype, [*shape])
        if (held.dtype, [*held.shape]) != wanted:
            raise CacheMismatchError(
                f"tensor {name!r} is {(held.dtype, [*held.shape])}, expected {wanted}"
            )
        return tensors.pop(name)

    count, pages = rows.num_pages, []
    for side in layer.spec.sides:
        fields = replace(side, layout=ROWS).fields.items()
        pages.append({name: claimed(side, name, of, count, *shape) for name, (shape, of) in fields})
    layer.storage.grow(page_capacity(count))
    layer.storage.judged = count > 0  # as in the cache that was saved
    for held, storage, residual in zip(pages, layer.storage.sides, layer.residuals, strict=True):
        side = storage.spec
        if "order" in held and not is_order(held["order"]):
            raise CacheMismatchError(
                f"the order of channels in pages of {side.side} must name each channel 0 to {side.head_dim - 1} "
                "of a head once, and does not; the file was damaged or forged: make it anew"
            )
        put(storage, range(count), held)
        sizes = len(rows.rows), side.num_kv_heads, rows.longest, side.head_dim
        residual.tokens = claimed(side, "window", side.dtype, *sizes).to(device, copy=True)


def _check_claims(claimed: Description) -> None:
    """Raise CacheFileError for a model that is not told, and rows that no cache has."""
    if claimed.model.adapters is None or claimed.model.weights is None:
        raise CacheFileError("it does not say by which adapters and weights it was computed")
    for group in claimed.groups:
        pages = {page for row in group.rows for page in row.pages}
        if len(pages) != group.num_pages or pages != {*range(len(pages))}:
            raise CacheFileError(f"its rows do not hold the pages 0 .. {group.num_pages - 1}")
        numbers = [n for row in group.rows for n in astuple(row) if not isinstance(n, tuple)]
        numbers += [group.window or 1, group.seen, group.confirmed, *(group.padding_seen or ())]
        end = max(group.confirmed, *(row.padding for row in group.rows), 0)
        if not group.rows or min(numbers) < 0 or max(numbers) > MOST or end > group.seen:
            raise CacheFileError(f"a group of rows is impossible: {short(group)}")
    if len({len(group.rows) for group in claimed.groups}) != 1:
        raise CacheFileError("it holds groups of different batches")


def _claimed_options(claimed: Mapping[str, Any]) -> CacheConfig:
    """Return the options of a file. Raises CacheFileError for those of caches that are never saved, and impossible ones."""
    if any(claimed.get(name) is not None for name in names_of("local")):
        raise CacheFileError("it claims options of caches that are never saved")
    rest = {name: value for name, value in claimed.items() if name not in ("keys", "values")}
    return CacheConfig.from_arguments(claimed.get("keys"), claimed.get("values"), rest)


def _device(asked: torch.device | str | None) -> torch.device | None:
    """Return the device as the keys on it will name it ("cuda" is "cuda:0" there)."""
    if asked is None:
        return None
    try:
        device = torch.empty(0, device=asked).device
        if device.type == "meta":
            raise TypeError("tensors on meta hold no numbers")
    except (RuntimeError, AssertionError, TypeError) as error:  # torch without CUDA asserts
        raise CacheOptionError(
            f"device must be a device of torch that is there, got {asked!r}: {short(str(error))}"
        ) from None
    return torch.device("cpu") if device.type == "cpu" else device


def device_of(model: Any, layer: int) -> torch.device:
    """Return the device of a layer of a model."""
    own = getattr(model.get_decoder(), "layers", None) if hasattr(model, "get_decoder") else None
    block = own[layer] if own is not None and layer < len(own) else model
    devices = [parameter.device for parameter in block.parameters() if not parameter.is_meta]
    return devices[0] if devices else model.device
