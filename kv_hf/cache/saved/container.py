"""The safetensors format: which tensors a file holds and where. Checks a header; reads no tensor.

    8 bytes     length of the header, little-endian
    header      JSON: {name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {name: text}}
    data        the tensors' bytes, row-major, little-endian, without gaps, in any order

Source: https://huggingface.co/docs/safetensors/index#format. The last tensor is ours: "checksum", the SHA-256
of every byte of the file before it.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...files.json_text import parse_json as strict_json
from ...printable import short

HEADER_LIMIT = (
    4 << 20
)  # bytes; safetensors allows 100 MB, but parsed JSON takes a multiple of its text
LARGEST = 1 << 48  # of a dimension
MOST_DIMENSIONS = 8
CHECKSUM = "checksum"
CHECKSUM_BYTES = 32

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class RefusedError(Exception):
    """The fault of a file; code that knows the path makes a CacheFileError of it."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a file.

    Attributes:
        begin: offset of its first byte, counted from the end of the header.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def describes(self, other: "Entry") -> bool:
        """Say whether dtype and shape are the same."""
        return (self.dtype, self.shape) == (other.dtype, other.shape)

    def __str__(self) -> str:
        return f"{DTYPE_NAMES[self.dtype]} {list(self.shape)}"


def ordered(entries: Mapping[str, Entry]) -> list[str]:
    """Return the names in the order of a file: large elements first, so that each tensor is aligned."""
    return sorted(entries, key=lambda name: -entries[name].dtype.itemsize)


def encode_header(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> bytes:
    """Return length and header of a file with these tensors in their `ordered` order and the checksum behind.

    Raises: RefusedError where the header would be larger than a reader accepts.
    """
    checksum = Entry(torch.uint8, (CHECKSUM_BYTES,))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    begin = 0
    listed = [(name, entries[name]) for name in ordered(entries)]
    for name, entry in [*listed, (CHECKSUM, checksum)]:
        header[name] = {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [begin, begin + entry.nbytes],
        }
        begin += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_LIMIT:
        raise RefusedError(
            f"its header would take {len(text)} bytes, at most {HEADER_LIMIT} are read"
        )
    return len(text).to_bytes(8, "little") + text


def header_length(first: bytes, file_bytes: int) -> int:
    """Return the length of the header from the first 8 bytes of a file of `file_bytes` bytes."""
    if len(first) < 8:
        raise RefusedError(
            f"a file of {file_bytes} bytes is no safetensors file: it is cut off or empty"
        )
    length = int.from_bytes(first, "little")
    if length > HEADER_LIMIT:
        raise RefusedError(
            f"its header claims {length} bytes, at most {HEADER_LIMIT} are read: not a saved cache"
        )
    if 8 + length > file_bytes:
        raise RefusedError(
            f"its header claims {length} bytes, the file has {file_bytes}: it is cut off or no saved cache"
        )
    return length


def parse_header(text: bytes, data_bytes: int) -> tuple[dict[str, str], dict[str, Entry]]:
    """Return metadata and tensors of a header that `data_bytes` bytes of data follow.

    Raises: RefusedError unless every tensor's offsets fit its shape and dtype, and all of them, side by side and
        the checksum last, fill the data exactly.
    """
    header = parse_json(text, "the header")
    if not isinstance(header, dict):
        raise RefusedError("its header is no JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise RefusedError("its metadata does not map names to texts")
    entries = {name: _parse_entry(name, value) for name, value in header.items()}
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].nbytes)):
        if entry.begin != end:
            raise RefusedError(f"tensor {short(name)} begins at {entry.begin}, expected {end}")
        end += entry.nbytes
    if end != data_bytes:
        raise RefusedError(
            f"its tensors take {end} bytes, the file holds {data_bytes}: it is cut off, or something was appended"
        )
    last = entries.pop(CHECKSUM, None)
    if last is None or not last.describes(Entry(torch.uint8, (CHECKSUM_BYTES,))):
        raise RefusedError("it has no checksum of 32 bytes: not a saved cache")
    if last.begin + last.nbytes != data_bytes:
        raise RefusedError("its checksum is not the last tensor")
    return metadata, entries


def _parse_entry(name: str, value: Any) -> Entry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise RefusedError(f"tensor {short(name)} must have dtype, shape and data_offsets")
    dtype = DTYPES.get(value["dtype"]) if isinstance(value["dtype"], str) else None
    if dtype is None:
        raise RefusedError(f"tensor {short(name)} has the unknown dtype {short(value['dtype'])}")
    shape, offsets = value["shape"], value["data_offsets"]
    if not is_counts(shape, LARGEST) or len(shape) > MOST_DIMENSIONS:
        raise RefusedError(f"tensor {short(name)} has an impossible shape: {short(shape)}")
    if not is_counts(offsets, 1 << 63) or len(offsets) != 2:
        raise RefusedError(f"tensor {short(name)} has impossible offsets: {short(offsets)}")
    entry = Entry(dtype, tuple(shape), offsets[0])
    if offsets[1] - offsets[0] != entry.nbytes:
        raise RefusedError(
            f"tensor {short(name)} is {entry}, {entry.nbytes} bytes, but its offsets are {offsets}"
        )
    return entry


def check_entries(found: Mapping[str, Entry], expected: Mapping[str, Entry]) -> None:
    """Raise RefusedError unless a file holds exactly the expected tensors."""
    check_held(found, expected)
    extra = [name for name in found if name not in expected]
    if extra:
        raise RefusedError(f"it holds a tensor that does not belong to a cache: {short(extra[0])}")


def check_held(found: Mapping[str, Entry], expected: Mapping[str, Entry]) -> None:
    """Raise RefusedError unless the expected tensors are among those of a file."""
    for name, entry in expected.items():
        if name not in found:
            raise RefusedError(f"tensor {name!r} is missing")
        if not found[name].describes(entry):
            raise RefusedError(f"tensor {name!r} is {found[name]}, expected {entry}")


def parse_json(text: bytes | str, what: str) -> Any:
    """Parse strict JSON: no name twice, no NaN, no nesting that Python cannot follow."""
    try:
        return strict_json(text, strict=True)
    except ValueError as error:
        raise RefusedError(f"{what} is no proper JSON: {short(str(error))}") from None


def is_count(value: Any, most: int) -> bool:
    """Say whether `value` is an integer from 0 to `most`."""
    return type(value) is int and 0 <= value <= most


def is_counts(values: Any, most: int) -> bool:
    """Say whether `values` is a list of integers from 0 to `most`."""
    return isinstance(values, list) and all(is_count(value, most) for value in values)
