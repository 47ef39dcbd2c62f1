"""Bytes of a saved cache: written aside and renamed, checked against the checksum, read in pieces."""

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from ...files.writing import replacing
from ...pages.persistent import persistent_tensors
from ..state import PIECE
from .container import (
    CHECKSUM_BYTES,
    Entry,
    RefusedError,
    encode_header,
    header_length,
    ordered,
    parse_header,
)


@dataclass(frozen=True)
class Source:
    """A tensor to be written: what it is, and its bytes as tensors one behind the other."""

    entry: Entry
    pieces: Callable[[], Iterator[torch.Tensor]]


def write(path: Path, metadata: Mapping[str, str], sources: Mapping[str, Source]) -> None:
    """Write a file of these tensors, one piece in memory at a time.

    Raises: RefusedError for a header that no reader would accept; OSError, with the old file left as it was.
    """
    entries = {name: source.entry for name, source in sources.items()}
    header = encode_header(entries, metadata)
    digest = hashlib.sha256()
    with replacing(path) as file:

        def put(data: bytes | memoryview) -> int:
            digest.update(data)
            file.write(data)
            return len(data)

        put(header)
        for name in ordered(entries):
            written = sum(put(as_bytes(piece)) for piece in sources[name].pieces())
            if written != entries[name].nbytes:
                raise AssertionError(f"{name}: {written} bytes written, not {entries[name].nbytes}")
        file.write(digest.digest())


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor [any shape] in row-major order.

    They are the tensor's own memory where it is contiguous and on the CPU, else a copy.
    """
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")  # type: ignore[arg-type]


class SavedFile:
    """A file whose header is known to fit its size. Reads nothing but the header by itself.

    Attributes:
        metadata: texts of the header.
        entries: the tensors, the checksum left out.

    Raises: RefusedError for a file that is no safetensors file of our kind; OSError where it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise RefusedError("it is not a regular file")
        self._file = open(path, "rb")  # noqa: SIM115  (closed by __exit__)
        try:
            self.size = os.fstat(self._file.fileno()).st_size
            length = header_length(self._file.read(8), self.size)
            text = self._file.read(length)
            self._data = 8 + length
            self.metadata, self.entries = parse_header(text, self.size - self._data)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "SavedFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def check_sum(self) -> None:
        """Read the whole file once. Raises RefusedError unless its bytes are those that were saved."""
        digest = hashlib.sha256()
        self._file.seek(0)
        left = self.size - CHECKSUM_BYTES
        while left:
            data = self._file.read(min(left, PIECE))
            if not data:
                raise RefusedError("it became shorter while it was read")
            digest.update(data)
            left -= len(data)
        if self._file.read(CHECKSUM_BYTES) != digest.digest():
            raise RefusedError("its checksum does not fit its bytes: the file is damaged")

    def pieces(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first index, piece [n, ..]) along a tensor's first dimension, on the CPU."""
        entry = self.entries[name]
        count = entry.shape[0]
        each = entry.nbytes // count if entry.nbytes else 0
        step = max(1, PIECE // each) if each else max(1, count)
        for first in range(0, count, step):
            yield first, self._read(entry, first * each, min(step, count - first))

    def tensor(self, name: str) -> torch.Tensor:
        """Return a whole tensor of the shape in the file [any], on the CPU."""
        entry = self.entries[name]
        return self._read(entry, 0, entry.shape[0])

    def _read(self, entry: Entry, behind: int, count: int) -> torch.Tensor:
        with persistent_tensors():
            found = torch.empty((count, *entry.shape[1:]), dtype=entry.dtype, device="cpu")
        if found.numel():
            self._file.seek(self._data + entry.begin + behind)
            if self._file.readinto(as_bytes(found)) != found.nbytes:
                raise RefusedError("it became shorter while it was read")
        return found
