"""What the weights of a folder of safetensors files take, and their dtype, from the files' headers alone."""

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_INDEX = "model.safetensors.index.json"
_ONE = "model.safetensors"
_LENGTH_BYTES = 8
_LARGEST_HEADER = 100_000_000  # what safetensors itself accepts
_MODEL_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class StoredWeights:
    """Weights as they are stored.

    Attributes:
        numbers: of all tensors; packed numbers of quantized weights count as they are stored. None: not known.
        nbytes: of all tensors, None where not known.
        dtype: that most numbers have of those that a model can have, as "float32"; None: no number has one.
        packed: whether there are tensors of other dtypes: integers, fp8.
    """

    numbers: int | None
    nbytes: int | None
    dtype: str | None = None
    packed: bool = False


def read_weights(folder: Path) -> StoredWeights | None:
    """Return what the weights of a folder take, None where it has no readable safetensors files."""
    try:
        index = _index(folder)
        names = sorted(set(index["weight_map"].values())) if "weight_map" in index else []
        if not names and (folder / _ONE).is_file():
            names = [_ONE]
        paths = [folder / name for name in names] or sorted(folder.glob("*.safetensors"))
        if paths and all(path.is_file() for path in paths):
            return _sum([entry for path in paths for entry in _entries(path)])
        total = index["metadata"]
        numbers, nbytes = (_whole(total.get(name)) for name in ("total_parameters", "total_size"))
        found = StoredWeights(numbers, nbytes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return None if found.numbers is found.nbytes is None else found


def _whole(value: Any) -> int | None:
    return int(value) if isinstance(value, (int, float)) and value > 0 else None


def _index(folder: Path) -> dict[str, Any]:
    path = folder / _INDEX
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _entries(path: Path) -> list[dict[str, Any]]:
    """Return what a file's header says of its tensors."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if length > _LARGEST_HEADER:
            raise ValueError(f"{path} is no safetensors file")
        header = json.loads(file.read(length))
    return [entry for name, entry in header.items() if name[:2] != "__"]


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
