"""Count the weights that a folder of safetensors files holds, from their headers alone."""

import json
import math
from pathlib import Path

_INDEX = "model.safetensors.index.json"
_LENGTH_BYTES = 8
_LARGEST_HEADER = 100_000_000  # what safetensors itself accepts


def count_in_files(folder: Path) -> int | None:
    """Return how many numbers the weights of a folder have, None where it has no readable safetensors files.

    Packed numbers of quantized weights count as they are stored.
    """
    names = sorted(folder.glob("*.safetensors"))
    try:
        if names:
            return sum(map(_count, names))
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        total = index["metadata"]["total_parameters"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return total if isinstance(total, int) else None


def _count(path: Path) -> int:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if length > _LARGEST_HEADER:
            raise ValueError(f"{path} is no safetensors file")
        header = json.loads(file.read(length))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name[:2] != "__")
