"""Write a checkpoint folder: shards one tensor at a time, aside and renamed when everything is there."""

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import ConversionError

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.bool: "BOOL",
}  # fmt: skip
UNFINISHED = ".kv_hf-converting"  # what the name of a folder that is being written ends with


def check_destination(destination: Path, source: Path, needed: int) -> None:
    """Raise ConversionError unless a checkpoint of `needed` bytes can become `destination`."""
    if destination.exists():
        if destination.samefile(source):
            raise ConversionError(
                f"destination {str(destination)!r} is the source, which is never changed"
            )
        if not destination.is_dir():
            raise ConversionError(
                f"destination {str(destination)!r} is a file; give a folder that does not exist"
            )
        if any(destination.iterdir()):
            raise ConversionError(
                f"destination {str(destination)!r} is not empty; give a folder that does not exist"
            )
    parent = destination.absolute().parent
    if source.resolve() in (parent.resolve(), *parent.resolve().parents):
        raise ConversionError(
            f"destination {str(destination)!r} lies within the source, which is never changed"
        )
    while not parent.is_dir():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise ConversionError(
            f"destination {str(destination)!r} needs {needed:,} bytes, and {parent} has {free:,} free"
        )


@contextlib.contextmanager
def becoming(destination: Path) -> Iterator[Path]:
    """Make a folder beside `destination` that becomes it when the block ends, and is deleted when it fails.

    Whoever is killed in between leaves no `destination`, and beside it `<name>.<random>.kv_hf-converting`.
    """
    destination.absolute().parent.mkdir(parents=True, exist_ok=True)
    target = Path(os.path.realpath(destination))
    aside = target.with_name(f"{target.name}.{secrets.token_hex(4)}{UNFINISHED}")
    aside.mkdir()
    try:
        yield aside
        for path in aside.iterdir():
            sync(path)
        sync(aside)
        os.rename(aside, target)  # onto an empty folder, or a name that is free
        sync(target.parent)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if isinstance(error, OSError) and not isinstance(error, ConversionError):
            raise ConversionError(
                f"destination {str(destination)!r} cannot be written: {error.strerror or error}"
            ) from error
        raise


def sync(path: Path) -> None:
    """Have the system write a file or a folder out (folders where it can)."""
    if path.is_dir() and os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_shard(
    path: Path,
    entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    make: Callable[[str], torch.Tensor],
    written: Callable[[int], object] = lambda nbytes: None,
) -> None:
    """Write a safetensors file whose tensors are made one after the other.

    Args:
        entries: name -> (dtype, shape), in the order of the file.
        make: returns a tensor by name.
        written: called with the bytes of each tensor when it is written.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, (dtype, shape) in entries.items():
        end = begin + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, (dtype, shape) in entries.items():
            tensor = make(name)
            if (tensor.dtype, tuple(tensor.shape)) != (dtype, shape):
                raise AssertionError(
                    f"{name}: {tensor.dtype} {tuple(tensor.shape)}, announced {dtype} {shape}"
                )
            flat = tensor.contiguous().reshape(-1)
            if flat.numel():
                file.write(memoryview(flat.view(torch.uint8).numpy()))  # type: ignore[arg-type]
            written(tensor.nbytes)


def copy_files(source: Path, target: Path, names: Sequence[str]) -> None:
    """Copy files of these names that exist."""
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
