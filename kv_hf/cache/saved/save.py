"""Write a cache into a file: the pages that its rows hold, in layout "rows", and the exact tokens."""

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from ...errors import (
    CacheFileError,
    CacheMismatchError,
    InterruptedForwardError,
    UnsupportedModelError,
)
from ...kernels.inputs import PagedKV
from ...pages.group import PageGroup
from ...pages.storage import PageStorage, SideStorage
from ...quant.packing import lay_out, pick_up
from ...spec import ROWS, TABLE_DTYPE, PageSpec, SideSpec
from ...version import __version__
from ..adapters import adapters_of
from ..layer import PagedLayer
from ..report import tensor_bytes
from .container import Entry, RefusedError
from .contents import (
    TOKEN_IDS,
    Contents,
    SavedGroup,
    SavedLayer,
    page_ids_name,
    tensor_name,
    tensors,
)
from .files import PIECE, Source, write
from .identity import identity
from .registered import registered_formats

if TYPE_CHECKING:
    from ..paged_cache import PagedCache

FORMAT = "kv_hf.PagedCache"
# a file holds no recipe either: what it decides stands among the other options
PLACEMENT = ("prefix_store", "offload", "device_bytes", "device_pages", "offload_dir", "recipe")
VERSION = "2"


def save_cache(
    cache: "PagedCache",
    path: str | os.PathLike[str],
    model: Any,
    token_ids: torch.Tensor | None = None,
) -> None:
    """Write `cache` to `path`; see PagedCache.save."""
    check_model_argument(model)
    _check_savable(cache, model)
    _check_adapters(cache, model)
    if token_ids is not None:
        _check_token_ids(cache, token_ids)
    ids = [_held(group) for group in cache.groups]
    held = {layer.layer_idx: layer.current_kv() for layer in cache.paged_layers if layer.store}
    contents = Contents(
        options=_options(cache),
        model=identity(model),
        groups=[
            SavedGroup.of(group, len(pages)) for group, pages in zip(cache.groups, ids, strict=True)
        ],
        layers=[SavedLayer.of(layer, kv.spec) for layer, kv in held.items()],
        columns=None if token_ids is None else token_ids.shape[1],
    )
    members = group_numbers(cache)
    entries = tensors(contents, {i: rows_spec(kv.spec) for i, kv in held.items()}, members)
    sources = {}
    if token_ids is not None:
        sources[TOKEN_IDS] = _whole(entries[TOKEN_IDS], token_ids.long())
    for number, (group, pages) in enumerate(zip(cache.groups, ids, strict=True)):
        new = {page: place for place, page in enumerate(pages)}
        table = [new[page] for row in group.rows for page in row.pages]
        name = page_ids_name(number)
        sources[name] = _whole(entries[name], torch.tensor(table, dtype=TABLE_DTYPE, device="cpu"))
    for layer, kv in held.items():
        number = members[layer]
        storage: Any = cache.layers[layer].storage  # type: ignore[union-attr]
        sources.update(
            _layer_sources(layer, kv, storage, ids[number], contents.groups[number], entries)
        )
    try:
        write(
            Path(path),
            {
                "format": FORMAT,
                "version": VERSION,
                **_versions(),
                **registered_formats(kv.spec for kv in held.values()),
                "cache": contents.encode(),
            },
            sources,
        )
    except RefusedError as error:
        raise CacheFileError(f"{path} cannot be written: {error}") from None


def check_model_argument(model: Any) -> None:
    """Raise CacheMismatchError unless `model` has weights and a config; and on a big-endian machine."""
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise CacheMismatchError(
            f"model must be the transformers model that the cache belongs to, got {type(model).__name__}"
        )
    if sys.byteorder != "little":
        raise CacheFileError(
            "saved caches are little-endian, as safetensors files are; this machine is not"
        )


def rows_spec(spec: PageSpec) -> PageSpec:
    """Return the same pages in layout ROWS, the one of files."""
    return PageSpec(replace(spec.keys, layout=ROWS), replace(spec.values, layout=ROWS))


def group_numbers(cache: "PagedCache") -> dict[int, int]:
    """Return, for each paged layer, the number of its group."""
    numbers = {id(group): number for number, group in enumerate(cache.groups)}
    return {layer.layer_idx: numbers[id(layer.group)] for layer in cache.paged_layers}


def _check_savable(cache: "PagedCache", model: Any) -> None:
    cache.check_model(model.config)
    if not cache.group.rows:
        raise CacheMismatchError("this cache is empty: there is nothing to save")
    kept = [
        f"{index} ({type(layer).__name__})"
        for index, layer in enumerate(cache.layers)
        if (layer.extra_bytes if isinstance(layer, PagedLayer) else tensor_bytes(vars(layer)))
    ]
    if kept:
        raise UnsupportedModelError(
            f"layers {', '.join(kept)} hold states beside their pages (transformers' own, or indexer keys); saved caches hold pages only"
        )
    behind = [one.layer_idx for one in cache.paged_layers if not one.is_up_to_date or not one.store]
    if behind:
        raise InterruptedForwardError(
            f"layers {behind} have not taken part in all forwards of this cache: an earlier one stopped half-way; it cannot "
            "be saved"
        )
    cache.check_integrity()
    if any(layer.window != layer.group.window for layer in cache.paged_layers):
        raise UnsupportedModelError(
            "this cache keeps all pages of sliding layers for its prefix_store; save one that was made without a store"
        )


def _check_adapters(cache: "PagedCache", model: Any) -> None:
    """Raise CacheMismatchError unless the adapters are those that every generate() of this cache had."""
    own = adapters_of(model).effective()
    others = [str(one) for one in cache.computed_by if one.effective() != own]
    if others:
        raise CacheMismatchError(
            f"this cache holds tokens that were computed with {' and with '.join(others)}; the model to save it for has "
            f"{own}. A saved cache is one of a single state: compute its text anew, or activate the adapters again"
        )


def _check_token_ids(cache: "PagedCache", token_ids: torch.Tensor) -> None:
    rows, seen = len(cache.group.rows), cache.group.seen
    if (
        not isinstance(token_ids, torch.Tensor)
        or token_ids.dtype not in (torch.int64, torch.int32)
        or token_ids.ndim != 2
        or token_ids.shape[0] != rows
        or token_ids.shape[1] < seen
    ):
        got = (
            f"{token_ids.dtype} {list(token_ids.shape)}"
            if isinstance(token_ids, torch.Tensor)
            else type(token_ids).__name__
        )
        raise CacheMismatchError(
            f"token_ids must be an integer tensor [{rows}, at least {seen}], as the cache has seen {seen} columns "
            f"(padding included) of {rows} rows; got {got}"
        )


def _held(group: PageGroup) -> list[int]:
    """Return the different pages that rows hold, in the order of rows and tokens."""
    return list(dict.fromkeys(page for row in group.rows for page in row.pages))


def _options(cache: "PagedCache") -> dict[str, Any]:
    options = {field.name: getattr(cache.options, field.name) for field in fields(cache.options)}
    # where pages lie, and with whom they are shared, is a matter of this process
    options.update(dict.fromkeys(PLACEMENT))
    if options["layers"] is not None:
        options["layers"] = {
            str(span): dict(formats) if isinstance(formats, Mapping) else formats
            for span, formats in options["layers"].items()
        }
    return options


def _versions() -> dict[str, str]:
    return {
        "kv_hf": __version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }


def _whole(entry: Entry, tensor: torch.Tensor) -> Source:
    return Source(entry, lambda: iter((tensor,)))


def _layer_sources(
    layer: int,
    kv: PagedKV,
    storage: PageStorage,
    ids: list[int],
    group: SavedGroup,
    entries: Mapping[str, Entry],
) -> dict[str, Source]:
    found = {}
    for pages, window in zip(storage.sides, (kv.window_keys, kv.window_values), strict=True):
        side = pages.spec
        for field in pages.fields:
            name = tensor_name(layer, side.side, field)
            found[name] = Source(entries[name], _page_pieces(pages, ids, field, side))
        name = tensor_name(layer, side.side, "window")
        found[name] = Source(entries[name], _window_pieces(window, group))
    return found


def _page_pieces(pages: SideStorage, ids: list[int], field: str, side: SideSpec) -> Any:
    """Return a function that yields one field of the pages `ids` in layout ROWS, some at a time."""
    step = max(1, PIECE // max(1, side.payload_bytes))

    def pieces() -> Iterator[torch.Tensor]:
        for first in range(0, len(ids), step):
            found = pages.take(ids[first : first + step], [field])[field]
            if field == "codes" and side.layout != ROWS:
                found = lay_out(pick_up(found, side), replace(side, layout=ROWS))
            yield found

    return pieces


def _window_pieces(window: torch.Tensor, group: SavedGroup) -> Any:
    """Return a function that yields each row's exact tokens, zero behind them up to the longest row."""

    def pieces() -> Iterator[torch.Tensor]:
        for row, exact in enumerate(group.exact):
            found = window.new_zeros((window.shape[1], group.longest, window.shape[3]))
            found[:, :exact] = window[row, :, :exact]
            yield found

    return pieces
