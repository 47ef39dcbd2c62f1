"""One safetensors file: its header, and single tensors read into memory of their own.

Reads with plain file reads ("pread"), never by mapping: a file that is cut off while it is read is then an error, not a
crash, and the memory in use is that of the tensor.
"""

import os
from dataclasses import dataclass, field
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
    """

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype

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
        reader: the open file; safetensors parsed its header once.
    """

    path: Path
    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]
    stamp: Stamp
    reader: Any = field(repr=False, compare=False)

    @classmethod
    def open(cls, path: Path) -> "TensorFile":
        """Read the header. Raises ConversionError for a damaged file, and for tensors of quantized weights."""
        try:
            stamp = stamp_of(path)
            reader: Any = safe_open(path, framework="pt", backend="pread")
            parts = [(name, reader.get_slice(name)) for name in reader.offset_keys()]
        except (OSError, SafetensorError, MemoryError) as error:
            raise ConversionError(f"{path} is damaged or cut off: {error}") from error
        tensors = {}
        for name, part in parts:
            kind = part.get_dtype()
            dtype = DTYPES.get(kind)
            if dtype is None and name.endswith(MASKS):
                dtype = CODES.get(kind)
            if dtype is None:
                raise ConversionError(
                    f"{path}: {name!r} is of {kind}, as quantized checkpoints are; convert the unquantized one"
                )
            tensors[name] = StoredTensor(path.name, tuple(part.get_shape()), dtype)
        return cls(path, tensors, reader.metadata() or {}, stamp, reader)

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor, [shape and dtype of the file].

        Raises: ConversionError where its file was changed or cannot be read.
        """
        self.check()
        try:
            tensor: torch.Tensor = self.reader.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ConversionError(f"{self.path}: {name!r} cannot be read: {error}") from error
        finally:
            self.check()
        return tensor

    def check(self) -> None:
        """Raise ConversionError if the file is another one than at first."""
        try:
            now = stamp_of(self.path)
        except OSError as error:
            raise ConversionError(f"{self.path} is gone: {error.strerror or error}") from error
        if now != self.stamp:
            raise ConversionError(f"{self.path} was changed while it was read")


def stamp_of(path: Path) -> Stamp:
    """Return what tells whether a file was changed. Raises OSError without one."""
    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns
