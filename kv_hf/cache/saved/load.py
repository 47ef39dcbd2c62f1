"""Read the state of a cache from a file. Every claim of the file is checked before a tensor is made for it."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ...backend_names import OTHER_WORDS, kernel_choices
from ...checks import check_choice
from ...config import CacheConfig
from ...errors import CacheFileError, CacheOptionError
from ...pages.persistent import persistent_tensors
from ...printable import short
from ..adapters import adapters_of
from ..model_shape import decoder_config, signature
from ..state import PLACEMENT, CacheState, LayerPages
from .container import RefusedError, check_entries, check_held
from .contents import TOKEN_IDS, Contents, page_ids_name, tables, tensor_name, tensors
from .files import SavedFile
from .identity import check_identity
from .registered import check_registered
from .save import FORMAT, VERSION, check_model_argument


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
        with SavedFile(Path(path)) as file, persistent_tensors():
            state, has_tokens = _read(file, model, chosen, kernel)
            yield state, file.tensor(TOKEN_IDS) if has_tokens else None
    except (RefusedError, ValueError) as error:  # ours, and those of options that a file claims
        raise CacheFileError(f"{path} cannot be loaded: {str(error)[:800]}") from error


class FileTensors:
    """Pages and exact tokens of a file (StateTensors)."""

    def __init__(self, file: SavedFile, contents: Contents) -> None:
        self._file, self._contents = file, contents

    def check(self, pages: Mapping[int, LayerPages]) -> None:
        """Raise RefusedError unless the file holds the tensors of layers with such pages, and no other."""
        check_entries(self._file.entries, tensors(self._contents, pages))

    def pages(self, layer: int, side: str, field: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first page, tensor [n, ..]) of one field, on the CPU."""
        return self._file.pieces(tensor_name(layer, side, field))

    def window(self, layer: int, side: str) -> torch.Tensor:
        """Return the exact tokens [rows, num_kv_heads, slots, head_dim], on the CPU."""
        return self._file.tensor(tensor_name(layer, side, "window"))


def _read(
    file: SavedFile, model: Any, device: torch.device | None, kernel: str | None
) -> tuple[CacheState, bool]:
    """Return the state, and whether there are token ids."""
    _check_format(file.metadata)
    file.check_sum()
    check_registered(file.metadata)
    contents = Contents.parse(file.metadata["cache"])
    check_identity(contents.model, model)
    claimed = contents.options if kernel is None else {**contents.options, "kernel": kernel}
    options = _options(claimed)
    check_held(file.entries, tables(contents))
    state = CacheState(
        options,
        signature(decoder_config(model.config)),  # the same in the file, as its identity is
        tuple(
            saved.group(file.tensor(page_ids_name(number)).tolist())
            for number, saved in enumerate(contents.groups)
        ),
        tuple(one.state(_device_of(model, one.layer, device)) for one in contents.layers),
        FileTensors(file, contents),
        (adapters_of(model),),
    )
    return state, contents.columns is not None


def _options(claimed: Mapping[str, Any]) -> CacheConfig:
    """Return the options of a file. Raises RefusedError for those of caches that are never saved."""
    if any(claimed.get(name) is not None for name in PLACEMENT):
        raise RefusedError("it claims options of caches that are never saved")
    rest = {name: value for name, value in claimed.items() if name not in ("keys", "values")}
    return CacheConfig.from_arguments(claimed.get("keys"), claimed.get("values"), rest)


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
