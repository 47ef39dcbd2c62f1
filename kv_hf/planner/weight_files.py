"""Bytes and dtype of the weights in a folder of safetensors files, from the files' headers alone."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import PlanError
from ..files.json_text import parse_json
from ..files.reading import INDEX_BYTES, opened, read_json_object
from ..printable import short

_INDEX = "model.safetensors.index.json"
_ONE = "model.safetensors"
_LENGTH_BYTES = 8
_LARGEST_HEADER = 100_000_000  # what safetensors itself accepts
_LARGEST_FILE = 1 << 62
_MOST_DIMENSIONS = 16
_MOST_NUMBERS = 1 << 60  # of a checkpoint, and of its bytes; the largest known ones have 2**41
_MODEL_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class StoredWeights:
    """Weights as they are stored.

    Attributes:
        numbers: of all tensors; packed numbers of quantized weights count as they are stored. None: not known.
        nbytes: of all tensors, None where not known.
        dtype: the dtype that most parameters have, as "float32"; None: no parameter has a dtype that a model can have.
        packed: whether there are tensors of other dtypes: integers, fp8.
    """

    numbers: int | None
    nbytes: int | None
    dtype: str | None = None
    packed: bool = False


def read_weights(folder: Path) -> StoredWeights | None:
    """Return what the weights of a folder take, None where it has no readable safetensors files.

    Raises: PlanError for an index that names a file outside of the folder, or claims an impossible number.
    """
    try:
        index = _index(folder)
        names = _names(index, folder)
        if not names and (folder / _ONE).is_file():
            names = [_ONE]
        paths = [folder / name for name in names] or sorted(folder.glob("*.safetensors"))
        if paths and all(path.is_file() for path in paths):
            return _sum([entry for path in paths for entry in _entries(path)])
    except PlanError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    total = index.get("metadata")
    if not isinstance(total, Mapping):
        return None
    numbers, nbytes = (_whole(total, name, folder) for name in ("total_parameters", "total_size"))
    return None if numbers is nbytes is None else StoredWeights(numbers, nbytes)


def _whole(total: Mapping[str, Any], name: str, folder: Path) -> int | None:
    value = total.get(name)
    if value is None:
        return None
    # older versions of transformers wrote 16060522496.0
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= _MOST_NUMBERS or value != int(value):
        raise PlanError(
            f"{folder / _INDEX}: {name} must be a whole number from 0 to {_MOST_NUMBERS:,}, got {short(value)}"
        )
    return int(value) or None


def _index(folder: Path) -> dict[str, Any]:
    path = folder / _INDEX
    return read_json_object(path, INDEX_BYTES, "index") if path.is_file() else {}


def _names(index: Mapping[str, Any], folder: Path) -> list[str]:
    """Return the files that an index lists. Raises PlanError for one that is not in the index's own folder."""
    listed = index.get("weight_map")
    if listed is None:
        return []
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise PlanError(
            f"{folder / _INDEX}: weight_map must map tensors to files, got {short(listed)}"
        )
    names = sorted(set(listed.values()))
    strange = [name for name in names if name in ("", ".", "..") or Path(name).name != name]
    if strange:
        raise PlanError(
            f"{folder / _INDEX}: weight_map must name files of its own folder, got {short(strange[0])}"
        )
    return names


def _entries(path: Path) -> list[dict[str, Any]]:
    """Return what a file's header says of its tensors. Raises ValueError where that cannot be."""
    with opened(path, _LARGEST_FILE, "weights") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if length > _LARGEST_HEADER:
            raise ValueError(f"{path} is no safetensors file")
        header = parse_json(file.read(length))
        end = path.stat().st_size - _LENGTH_BYTES - length
    entries = [entry for name, entry in header.items() if name[:2] != "__"]
    for entry in entries:
        if not _is_possible(entry["shape"], entry["data_offsets"], entry["dtype"], end):
            raise ValueError(f"{path} claims a tensor that it does not hold")
    return entries


def _is_possible(shape: list[Any], offsets: list[Any], dtype: str, end: int) -> bool:
    """Say whether a tensor lies within the `end` bytes of a file, and takes the bytes that its shape says."""
    counts = [*shape, *offsets]
    if len(shape) > _MOST_DIMENSIONS or len(offsets) != 2:
        return False
    if not all(type(count) is int and 0 <= count <= _LARGEST_FILE for count in counts):
        return False
    numbers, nbytes = math.prod(shape), offsets[1] - offsets[0]
    if not 0 <= nbytes <= end - offsets[0]:
        return False
    if dtype in _MODEL_DTYPES:
        return numbers * int(getattr(torch, _MODEL_DTYPES[dtype]).itemsize) == nbytes
    return numbers <= 8 * nbytes  # no number takes less than a bit


def _sum(entries: list[dict[str, Any]]) -> StoredWeights:
    numbers: Counter[str] = Counter()
    for entry in entries:
        numbers[entry["dtype"]] += math.prod(entry["shape"])
    plain = {dtype: count for dtype, count in numbers.items() if dtype in _MODEL_DTYPES}
    most = max(plain, key=lambda dtype: plain[dtype], default=None)
    return StoredWeights(
        numbers=sum(numbers.values()),
        nbytes=sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in entries),
        dtype=None if most is None else _MODEL_DTYPES[most],
        packed=len(plain) < len(numbers),
    )
