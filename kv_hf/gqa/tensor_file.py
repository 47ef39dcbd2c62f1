"""One safetensors file: its header, and single tensors read into memory of their own.

Reads with plain file reads, never by mapping: a file that is cut off while it is read is then an error, not a crash, and
the memory in use is that of the tensor.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..errors import ConversionError

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "BOOL": torch.bool,
}  # fmt: skip
# of quantized weights, and of the causal masks that old checkpoints keep
CODES = {"U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32}
MASKS = ("attn.bias", "attention.bias", "masked_bias")
NAMES = {dtype: name for name, dtype in {**DTYPES, **CODES}.items()}
Stamp = tuple[int, int, int]


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint.

    Attributes:
        file: name of the file that holds it.
        shape, dtype: of the tensor.
        begin: where it begins in the file, in bytes.
    """

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int

    @property
    def numel(self) -> int:
        """Numbers in the tensor."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file as it was when it was opened.

    Attributes:
        path: of the file.
        tensors: by name, in the order of their bytes.
        metadata: of the header.
        stamp: what tells whether the file was changed since.
    """

    path: Path
    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]
    stamp: Stamp

    @classmethod
    def open(cls, path: Path) -> "TensorFile":
        """Read the header. Raises ConversionError for a damaged file, and for tensors of quantized weights."""
        try:
            stamp = stamp_of(path)
            # the checks of safetensors: header, offsets, length ("pt" would map the file as private memory)
            with safe_open(path, framework="np") as checked:
                checked.keys()
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header: dict[str, Any] = json.loads(file.read(size))
        except (OSError, SafetensorError, ValueError, RecursionError, MemoryError) as error:
            raise ConversionError(f"{path} is damaged or cut off: {error}") from error
        metadata = header.pop("__metadata__", None) or {}
        tensors = {}
        for name in sorted(header, key=lambda name: (header[name]["data_offsets"], name)):
            entry = header[name]
            dtype = DTYPES.get(entry["dtype"])
            if dtype is None and name.endswith(MASKS):
                dtype = CODES.get(entry["dtype"])
            if dtype is None:
                raise ConversionError(
                    f"{path}: {name!r} is of {entry['dtype']}, as quantized checkpoints are; convert the unquantized one"
                )
            begin = 8 + size + entry["data_offsets"][0]
            tensors[name] = StoredTensor(path.name, tuple(entry["shape"]), dtype, begin)
        return cls(path, tensors, metadata, stamp)

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor. Raises ConversionError where its file was changed or cannot be read."""
        stored = self.tensors[name]
        flat = torch.empty(stored.nbytes, dtype=torch.uint8)
        view: Any = memoryview(flat.numpy().data)
        done = 0
        try:
            with self.path.open("rb", buffering=0) as file:
                self.check(os.fstat(file.fileno()))
                file.seek(stored.begin)
                while done < stored.nbytes:
                    got = file.readinto(view[done:])
                    if not got:
                        raise ConversionError(f"{self.path} was cut off while it was read")
                    done += got
                self.check(os.fstat(file.fileno()))
        except OSError as error:
            raise ConversionError(
                f"{self.path}: {name!r} cannot be read: {error.strerror or error}"
            ) from error
        return flat.view(stored.dtype).reshape(stored.shape)

    def check(self, found: os.stat_result | None = None) -> None:
        """Raise ConversionError if the file is another one than at first."""
        try:
            now = stamp_of(self.path) if found is None else _stamp(found)
        except OSError as error:
            raise ConversionError(f"{self.path} is gone: {error.strerror or error}") from error
        if now != self.stamp:
            raise ConversionError(f"{self.path} was changed while it was read")


def stamp_of(path: Path) -> Stamp:
    """Return what tells whether a file was changed. Raises OSError without one."""
    return _stamp(path.stat())


def _stamp(found: os.stat_result) -> Stamp:
    return found.st_ino, found.st_size, found.st_mtime_ns
