"""A file in place of host memory: mapped, without a name, and out of resident memory except where it is just read.

The file loses its name as soon as it exists (where the system allows that), so that nobody can remove it and
nothing is left behind by a process that is killed. Its blocks are reserved before they are written: a write into
a mapping of a full disk would end the process.

A fork shares the mapping and the file: the child would write into its parent's pages, and read what the parent writes
there later. So the file belongs to the process that made it, and any other one is refused.
"""

import errno
import mmap
import os
import shutil
import tempfile
import warnings

import torch

from ..errors import OffloadError
from .host_memory import HostMemory

CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
ZEROS = bytes(1 << 20)
AROUND = 2 << 20  # bytes, aligned: reading one memory page may map others of the same page table


class MappedFile(HostMemory):
    """Memory that lies in a temporary file.

    Args:
        folder: where the file is made; None takes the system's folder for temporary files.
    Raises: OffloadError where no file can be made there.
    """

    # bounds what is resident at once beside the copy; larger pieces were not faster
    piece_bytes = 1 << 20

    def __init__(self, folder: str | None) -> None:
        super().__init__(pinned=False)
        self.folder = tempfile.gettempdir() if folder is None else folder
        try:
            self._file = tempfile.TemporaryFile(prefix="kv_hf-", dir=self.folder)  # noqa: SIM115
        except OSError as error:
            raise OffloadError(
                f"offload_dir: no file can be made in {self.folder!r}: {error.strerror or error}"
            ) from error
        self._process = os.getpid()
        self._maps: list[tuple[int, mmap.mmap]] = []  # (address, mapping)

    def check_process(self) -> None:
        """Raise OffloadError in a process that was forked from the one that made the file."""
        if os.getpid() != self._process:
            raise OffloadError(
                f"offload='disk': these pages lie in a file of process {self._process}, and this is process "
                f"{os.getpid()}, which was forked from it: writing would change the cache of that process, and its pages "
                "may change while they are read. Nothing was touched. Call reset() and start again here, make a new cache "
                "after the fork, or take one without offload"
            )

    def check_room(self, nbytes: int) -> None:
        """Raise OffloadError where the disk has less than `nbytes` free."""
        free = shutil.disk_usage(self.folder).free if os.path.isdir(self.folder) else nbytes
        needed = nbytes - self._rest.numel()
        if needed > free:
            raise self._full(needed, f"{free:,} bytes are free")

    def forget(self, piece: torch.Tensor) -> None:
        """Unmap the memory pages of a piece [bytes] and those mapped with them; its contents stay in the file."""
        self._advise(piece, "MADV_DONTNEED", AROUND)

    def expect(self, piece: torch.Tensor) -> None:
        """Have the system read a piece [bytes] from the disk, in the background."""
        self._advise(piece, "MADV_WILLNEED", mmap.PAGESIZE)

    def _advise(self, piece: torch.Tensor, advice: str, alignment: int) -> None:
        if not hasattr(mmap, advice) or not piece.numel():  # Windows
            return
        first, last = piece.data_ptr(), piece.data_ptr() + piece.nbytes
        for address, mapped in reversed(self._maps):
            if address <= first < address + len(mapped):
                start = max(address, first - first % alignment)
                end = min(address + len(mapped), -(-last // alignment) * alignment)
                mapped.madvise(getattr(mmap, advice), start - address, end - start)
                return

    def _new_region(self, nbytes: int) -> torch.Tensor:
        size = -(-nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        start = os.fstat(self._file.fileno()).st_size
        try:
            self._reserve(start, size)
            mapped = mmap.mmap(self._file.fileno(), size, offset=start)
        except OSError as error:
            os.ftruncate(self._file.fileno(), start)
            raise self._full(size, error.strerror or str(error)) from error
        with warnings.catch_warnings():  # torch warns of buffers that could not be written to
            warnings.simplefilter("ignore")
            region = torch.frombuffer(mapped, dtype=torch.uint8)
        self._maps.append((region.data_ptr(), mapped))
        return region[:nbytes]

    def _reserve(self, start: int, size: int) -> None:
        file = self._file.fileno()
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(file, start, size)
                return
            except OSError as error:
                if error.errno not in CANNOT_RESERVE:
                    raise
        os.lseek(file, start, os.SEEK_SET)
        left = size
        while left:
            left -= os.write(file, ZEROS[:left])

    def _full(self, nbytes: int, reason: str) -> OffloadError:
        return OffloadError(
            f"offload_dir: {nbytes:,} more bytes do not fit into {self.folder!r} ({reason}); the cache is "
            "unchanged. Make room there, or name another folder"
        )
