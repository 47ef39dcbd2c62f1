"""Read a cache from a file. Every claim of the file is checked before a tensor is made for it."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ...checks import check_choice
from ...config import KERNEL_CHOICES
from ...errors import CacheFileError, CacheOptionError
from ...pages.storage import SideStorage
from ...pages.storing import storing
from ...printable import short
from ...quant.packing import lay_out, pick_up
from ...spec import ROWS, PageSpec, page_capacity
from ..adapters import adapters_of
from ..layer import PagedLayer
from ..window import ExactWindow
from .container import RefusedError, check_entries
from .contents import (
    TOKEN_IDS,
    Contents,
    SavedGroup,
    page_ids_name,
    tensor_name,
    tensors,
)
from .files import SavedFile
from .group_state import restore
from .identity import check_identity
from .registered import check_registered
from .save import FORMAT, PLACEMENT, VERSION, check_model_argument, group_numbers, rows_spec

if TYPE_CHECKING:
    from ..paged_cache import PagedCache

Cache = TypeVar("Cache", bound="PagedCache")


def load_cache(
    kind: type[Cache],
    path: str | os.PathLike[str],
    model: Any,
    device: torch.device | str | None = None,
    kernel: str | None = None,
) -> Cache:
    """Read a cache of class `kind` from `path`; see PagedCache.load."""
    check_model_argument(model)
    if kernel is not None:
        check_choice("kernel", kernel, KERNEL_CHOICES)
    chosen = _device(device)
    try:
        with SavedFile(Path(path)) as file, storing():
            return _read(kind, file, model, chosen, kernel)
    except (RefusedError, ValueError) as error:  # ours, and those of options that a file claims
        raise CacheFileError(f"{path} cannot be loaded: {str(error)[:800]}") from error


def _read(
    kind: type[Cache],
    file: SavedFile,
    model: Any,
    device: torch.device | None,
    kernel: str | None,
) -> Cache:
    _check_format(file.metadata)
    file.check_sum()
    check_registered(file.metadata)
    contents = Contents.parse(file.metadata["cache"])
    check_identity(contents.model, model)
    adapters = adapters_of(model)
    options = contents.options if kernel is None else {**contents.options, "kernel": kernel}
    if any(options.get(name) is not None for name in ("max_length", *PLACEMENT)):
        raise RefusedError("it claims options of caches that are never saved")
    cache = kind(model.config, **options)
    members = group_numbers(cache)
    specs = _specs(cache, contents)
    check_entries(file.entries, tensors(contents, specs, members))
    for number, (group, saved) in enumerate(zip(cache.groups, contents.groups, strict=True)):
        rows = saved.rows(file.tensor(page_ids_name(number)).tolist())
        for index, row in enumerate(rows):
            if (row.pages or row.dropped) and row.exact < group.sink_tokens:
                raise RefusedError(f"row {index} holds pages, but not its first tokens")
        restore(group, rows, saved.num_pages, saved.state)
        group.lockstep.resume(layer for layer in specs if members[layer] == number)
    cache.check_integrity()
    devices = _devices(model, len(cache.layers), device)
    for saved_layer in contents.layers:
        index = saved_layer.layer
        layer = cache.layers[index]
        assert isinstance(layer, PagedLayer)
        layer.lazy_initialization(*saved_layer.empty(devices[index]))
        _fill(layer, file, contents.groups[members[index]])
        layer.resume()
    cache.check_integrity()
    cache.computed_by, cache.from_file = (adapters,), True
    if contents.columns is not None:
        cache.token_ids = file.tensor(TOKEN_IDS)
    return cache


def _check_format(metadata: Mapping[str, str]) -> None:
    if metadata.get("format") != FORMAT or "cache" not in metadata:
        raise RefusedError(
            f"it is a safetensors file, but not a saved cache ({short(metadata.get('format'))})"
        )
    if metadata.get("version") != VERSION:
        raise RefusedError(
            f"it is of file version {short(metadata.get('version'))}, written by kv_hf "
            f"{short(metadata.get('kv_hf'))}; this kv_hf reads version {VERSION}"
        )


def _specs(cache: "PagedCache", contents: Contents) -> dict[int, PageSpec]:
    """Return what the pages of each saved layer are like in a file."""
    windows = [group.window for group in cache.groups]
    claimed = [group.window for group in contents.groups]
    if windows != claimed:
        raise RefusedError(f"its groups have the windows {short(claimed)}, this model's {windows}")
    found = {}
    for saved in contents.layers:
        layer = cache.layers[saved.layer] if saved.layer < len(cache.layers) else None
        if not isinstance(layer, PagedLayer):
            raise RefusedError(
                f"it holds layer {saved.layer}, which is no paged layer of this model"
            )
        if not saved.value_dim and layer.formats.latent is None:
            raise RefusedError(f"it holds layer {saved.layer} with values of no channels")
        spec = layer.formats.spec(
            num_kv_heads=saved.num_kv_heads,
            key_dim=saved.key_dim,
            value_dim=saved.value_dim,
            dtype=saved.empty(torch.device("meta"))[0].dtype,
            value_dtype=saved.empty(torch.device("meta"))[1].dtype,
        )
        found[saved.layer] = rows_spec(spec)
    empty = [g.window for g in cache.groups if not any(cache.layers[i].group is g for i in found)]  # type: ignore[union-attr]
    if empty:
        raise RefusedError(f"it holds no layer of the groups with windows {empty}")
    return found


def _fill(layer: PagedLayer, file: SavedFile, saved: SavedGroup) -> None:
    """Read a layer's pages and windows, some pages at a time."""
    assert layer.store is not None
    store = layer.store
    store.pages.grow(page_capacity(saved.num_pages))
    for side, window in zip(store.pages.sides, store.windows, strict=True):
        name = side.spec.side
        for field in side.fields:
            _fill_pages(side, field, file, tensor_name(layer.layer_idx, name, field))
        _fill_window(window, file, tensor_name(layer.layer_idx, name, "window"))


def _fill_pages(side: SideStorage, field: str, file: SavedFile, name: str) -> None:
    for first, piece in file.pieces(name):
        if field == "codes" and side.spec.layout != ROWS:
            piece = lay_out(pick_up(piece, replace(side.spec, layout=ROWS)), side.spec)
        side.put(first, field, piece)


def _fill_window(window: ExactWindow, file: SavedFile, name: str) -> None:
    window.tokens = file.tensor(name).to(window.tokens.device)


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


def _devices(model: Any, layers: int, asked: torch.device | None) -> list[torch.device]:
    """Return the device of each layer's keys: `asked`, or where the model's layer is."""
    if asked is not None:
        return [asked] * layers
    own = getattr(model.get_decoder(), "layers", None) if hasattr(model, "get_decoder") else None
    found = []
    for index in range(layers):
        block = own[index] if own is not None and index < len(own) else model
        devices = [parameter.device for parameter in block.parameters() if not parameter.is_meta]
        found.append(devices[0] if devices else model.device)
    return found
