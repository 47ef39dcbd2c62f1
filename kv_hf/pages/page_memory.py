"""Memory of pages on a CPU, apart from the C library's heap, with addresses for the pages to come.

Pages outlive a prefill, its activations do not. In one heap the pages of a layer would lie between activations, and cut up
the holes that these leave: later ones would find no room there, and the heap would grow. So each field of a side lies in
a mapping of its own, which goes back to the system as a whole when its last tensor is gone:

    [ pages 0 .. n | n .. most )

Pages n .. most are addresses alone: the system gives memory, all zero, to what is written. Storage that grows up to there
copies nothing. Knows no formats and no ids.
"""

import math
import mmap
from collections.abc import Mapping
from typing import Self

import torch

from .huge_pages import advise

# Smaller sides stay in the heap: a mapping is a whole number of 4 KiB, and a call to the system. glibc begins with the same
# limit, but moves it up to the largest block that was ever freed, 32 MiB at most.
LEAST_BYTES = 128 << 10
AHEAD = 2  # a mapping has addresses for so many times the pages that are asked for


class PageMemory:
    """The fields of one side of a layer, mapped.

    Args:
        whole: by name, [most, *shape of the field in a page], all zero.
    """

    def __init__(self, whole: Mapping[str, torch.Tensor]) -> None:
        self._whole = whole
        self.most = min(len(one) for one in whole.values())

    @classmethod
    def of(cls, fields: Mapping[str, torch.Tensor], capacity: int) -> Self | None:
        """Map memory for `capacity` pages of `fields`, and addresses for more.

        Args:
            fields: [pages, *shape of the field in a page] by name: of the new ones they give shapes and dtypes.
        Returns: None for a side that stays in the heap, on other devices, and where the system has no mapping to give.
        """
        tensors = fields.values()
        plain = all(type(one) is torch.Tensor and one.device.type == "cpu" for one in tensors)
        if not plain or capacity * sum(map(page_bytes, tensors)) < LEAST_BYTES:
            return None
        for most in (AHEAD * capacity, capacity):
            whole = {name: mapped_like(one, most) for name, one in fields.items()}
            found = {name: one for name, one in whole.items() if one is not None}
            if len(found) == len(whole):
                return cls(found)
        return None

    def holds(self, fields: Mapping[str, torch.Tensor]) -> bool:
        """Say whether `fields`, [pages, ..] by name, are pages of this memory, all of them."""
        return fields.keys() == self._whole.keys() and all(
            one.data_ptr() == self._whole[name].data_ptr() for name, one in fields.items()
        )

    def pages(self, capacity: int, written: int = 0) -> dict[str, torch.Tensor]:
        """Return the fields of the pages 0 .. capacity - 1, [capacity, *shape of the field in a page] by name.

        Args:
            written: pages at the front that hold something; those behind are zero.
        """
        found = {name: whole[:capacity] for name, whole in self._whole.items()}
        for one in found.values():
            advise(one, written * page_bytes(one))
        return found


def page_bytes(field: torch.Tensor) -> int:
    """Return the bytes of one page of a field [pages, ..]."""
    return math.prod(field.shape[1:]) * field.itemsize


def mapped_like(field: torch.Tensor, pages: int) -> torch.Tensor | None:
    """Return a field of `pages` pages, all zero, in a mapping of its own; None where the system has none to give.

    Args:
        field: [any, *shape of the field in a page].
    """
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return None
    try:
        # private: after a fork each process has pages of its own
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, max(1, pages * page_bytes(field)), flags=flags)
    except OSError:  # too many mappings, or no memory: torch's allocator finds some, or raises
        return None
    storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    size = (pages, *field.shape[1:])
    strides = [math.prod(size[axis + 1 :]) for axis in range(len(size))]
    return field.new_empty((0,)).set_(storage, 0, size, strides)
