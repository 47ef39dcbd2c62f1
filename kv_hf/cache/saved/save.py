"""Write the state of a cache into a file: the pages that its rows hold, in layout "rows", and the exact tokens."""

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import transformers

from ...config import CacheConfig
from ...errors import CacheFileError, CacheMismatchError
from ...pages.group_state import GroupState
from ...spec import TABLE_DTYPE
from ...version import __version__
from ..adapters import adapters_of
from ..state import CacheState, LayerState, StateTensors
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
from .files import Source, write
from .identity import identity
from .registered import registered_formats

FORMAT = "kv_hf.PagedCache"
VERSION = "2"


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
    if token_ids is not None:
        _check_token_ids(state, token_ids)
    contents = Contents(
        options=_options(state.options),
        model=identity(model),
        groups=[SavedGroup.of(group) for group in state.groups],
        layers=[SavedLayer.of(layer) for layer in state.layers],
        columns=None if token_ids is None else token_ids.shape[1],
    )
    pages = {one.layer: one.pages for one in state.layers if one.pages is not None}
    entries = tensors(contents, pages)
    sources = {}
    if token_ids is not None:
        sources[TOKEN_IDS] = _whole(entries[TOKEN_IDS], token_ids.long())
    for number, group in enumerate(state.groups):
        table = [page for row in group.rows for page in row.pages]
        name = page_ids_name(number)
        sources[name] = _whole(entries[name], torch.tensor(table, dtype=TABLE_DTYPE, device="cpu"))
    for layer in state.layers:
        sources.update(_layer_sources(layer, state, entries))
    try:
        write(
            Path(path),
            {
                "format": FORMAT,
                "version": VERSION,
                **_versions(),
                **registered_formats(one.spec for one in pages.values()),
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


def _check_adapters(state: CacheState, model: Any) -> None:
    """Raise CacheMismatchError unless the adapters are those that every generate() of this cache had."""
    own = adapters_of(model).effective()
    others = [str(one) for one in state.computed_by if one.effective() != own]
    if others:
        raise CacheMismatchError(
            f"this cache holds tokens that were computed with {' and with '.join(others)}; the model to save it for has "
            f"{own}. A file holds tokens of a single state: compute the text anew, or activate the adapters again"
        )


def _check_token_ids(state: CacheState, token_ids: torch.Tensor) -> None:
    group = next((group for group in state.groups if group.seen), state.groups[0])
    rows, seen = len(group.rows), group.seen
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


def _options(given: CacheConfig) -> dict[str, Any]:
    options = {field.name: getattr(given, field.name) for field in fields(given)}
    del options["cuda_graph"]  # how steps are launched
    if given.widen == CacheConfig.widen:
        del options["widen"]  # earlier versions do not know it
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
    layer: LayerState, state: CacheState, entries: Mapping[str, Entry]
) -> dict[str, Source]:
    assert layer.pages is not None
    found = {}
    for side in layer.pages.spec.sides:
        for field in side.fields:
            name = tensor_name(layer.layer, side.side, field)
            pieces = _page_pieces(state.tensors, layer.layer, side.side, field)
            found[name] = Source(entries[name], pieces)
        name = tensor_name(layer.layer, side.side, "window")
        group = state.groups[layer.pages.group]
        pieces = _window_pieces(state.tensors, layer.layer, side.side, group)
        found[name] = Source(entries[name], pieces)
    return found


def _page_pieces(tensors: StateTensors, layer: int, side: str, field: str) -> Any:
    """Return a function that yields one field of all pages, some at a time."""

    def pieces() -> Iterator[torch.Tensor]:
        for _, piece in tensors.pages(layer, side, field):
            yield piece

    return pieces


def _window_pieces(tensors: StateTensors, layer: int, side: str, group: GroupState) -> Any:
    """Return a function that yields each row's exact tokens, zero behind them up to the longest row."""

    def pieces() -> Iterator[torch.Tensor]:
        window = tensors.window(layer, side)
        for index, row in enumerate(group.rows):
            found = window.new_zeros((window.shape[1], group.longest, window.shape[3]))
            found[:, : row.exact] = window[index, :, : row.exact]
            yield found

    return pieces
