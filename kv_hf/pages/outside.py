"""Memory outside of the device, handed out piece by piece: pinned host memory. Knows no pages.

Memory comes in regions and is given back all at once, with the object: what lives outside only grows, and regions
never move, so that nothing is copied when it does.
"""

import torch

from .slab import ALIGNMENT

SMALLEST_REGION = 1 << 20


class OutsideMemory:
    """Host memory for pages that are not on the device; pinned where a GPU shall copy from it by itself.

    Args:
        pinned: whether the memory is page-locked.
    """

    piece_bytes: int | None = None  # largest copy at a time, None for any

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self.nbytes = 0
        self._rest = torch.empty(0, dtype=torch.uint8)

    def check_process(self) -> None:
        """Raise OffloadError where this memory is another process's; memory of one's own is copied by a fork."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return memory that never moves: [nbytes], uint8, aligned to ALIGNMENT.

        Raises: OffloadError when there is no room; what was handed out before is not touched.
        """
        self.check_process()
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if size > self._rest.numel():
            region = max(size, SMALLEST_REGION, self.nbytes // 4)
            self._rest = self._new_region(region)
            self.nbytes += region
        piece, self._rest = self._rest[:nbytes], self._rest[size:]
        return piece

    def check_room(self, nbytes: int) -> None:
        """Raise OffloadError where `nbytes` more are known not to fit."""

    def forget(self, piece: torch.Tensor) -> None:
        """Take a piece [bytes] out of resident memory where that is possible; its contents stay."""

    def expect(self, piece: torch.Tensor) -> None:
        """Begin to read a piece [bytes] into resident memory where that is possible: it will be read soon."""

    def _new_region(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.pinned)
