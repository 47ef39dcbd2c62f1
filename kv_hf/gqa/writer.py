"""Write a checkpoint folder: shards one tensor at a time, aside and renamed when everything is there."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ..errors import ConversionError
from ..files.folders import becoming_folder
from ..files.writing import creating
from .tensor_file import NAMES


def check_destination(destination: Path, source: Path | None = None, needed: int = 0) -> None:
    """Raise ConversionError unless a checkpoint of `needed` bytes can become `destination`.

    Args:
        source: folder that is converted; None where it is not known yet.
    """
    name = f"destination {str(destination)!r}"
    try:
        if destination.is_symlink():
            raise ConversionError(f"{name} is a link; give the folder itself")
        if destination.exists():
            if source is not None and destination.samefile(source):
                raise ConversionError(f"{name} is the source, which is never changed")
            if not destination.is_dir():
                raise ConversionError(f"{name} is a file; give a folder that does not exist")
            if source is not None and any(destination.iterdir()):
                raise ConversionError(f"{name} is not empty; give a folder that does not exist")
        parent = destination.absolute().parent
        if source is not None and source.resolve() in (parent.resolve(), *parent.resolve().parents):
            raise ConversionError(f"{name} lies within the source, which is never changed")
        while not parent.exists():
            parent = parent.parent
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise ConversionError(f"{name}: no folder can be made in {parent}")
        free = shutil.disk_usage(parent).free
    except OSError as error:
        raise ConversionError(f"{name} cannot be used: {error.strerror or error}") from error
    if free < needed:
        raise ConversionError(f"{name} needs {needed:,} bytes, and {parent} has {free:,} free")


@contextlib.contextmanager
def becoming(destination: Path) -> Iterator[Path]:
    """Make a folder that becomes `destination` when the block ends, and is deleted when it fails (files/folders.py).

    Raises: ConversionError where it cannot be written, with the parents that were made taken away again.
    """
    try:
        with becoming_folder(destination) as folder:
            yield folder
    except OSError as error:
        raise ConversionError(
            f"destination {str(destination)!r} cannot be written: {error.strerror or error}"
        ) from error


def write_shard(
    path: Path,
    entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    make: Callable[[str], torch.Tensor],
    written: Callable[[int], object] = lambda nbytes: None,
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write a safetensors file whose tensors are made one after the other.

    Args:
        entries: name -> (dtype, shape); wide dtypes go first, so that every tensor lies aligned.
        make: returns a tensor [the announced shape], of the announced dtype, by name.
        written: called with the bytes of each tensor when it is written.
        metadata: of the header, beside the format, which is always "pt".
    """
    header: dict[str, Any] = {"__metadata__": {**metadata, "format": "pt"}}
    order = sorted(entries, key=lambda name: -entries[name][0].itemsize)
    begin = 0
    for name in order:
        dtype, shape = entries[name]
        end = begin + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with creating(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            tensor = make(name)
            if (tensor.dtype, tuple(tensor.shape)) != entries[name]:
                raise AssertionError(
                    f"{name}: {tensor.dtype} {tuple(tensor.shape)}, announced {entries[name]}"
                )
            flat = tensor.contiguous().reshape(-1)
            if flat.numel():
                file.write(memoryview(flat.view(torch.uint8).numpy()))  # type: ignore[arg-type]
            written(tensor.nbytes)
            del tensor, flat  # before the next one is made
