"""Memory of pages on a CPU, apart from the C library's heap.

Pages outlive a prefill, its activations do not. In one heap the pages of a layer lie between activations of the layers
around it: the holes that activations leave are then cut up, later ones find no room in them, and the heap grows. So
the pages of a side lie in a mapping of their own,

    [ field 0 of pages 0 .. n ) [ field 1 of pages 0 .. n ) ...      each at a multiple of ALIGNMENT

which goes back to the system as a whole when its last tensor is gone. Knows no formats and no ids.
"""

import math
import mmap
from collections.abc import Mapping

import torch

from .huge_pages import advise
from .slab import ALIGNMENT

# Smaller sides stay in the heap: a mapping is a whole number of 4 KiB, and a call to the system. glibc begins with the same
# limit, but gives it up in favour of the largest block that was ever freed, up to 32 MiB.
LEAST_BYTES = 128 << 10


def new_fields(
    old: Mapping[str, torch.Tensor], capacity: int
) -> tuple[dict[str, torch.Tensor], bool]:
    """Make room for `capacity` pages of each field of `old`, whose pages are not copied.

    Args:
        old: fields of one side, [pages, *shape of the field in a page]; of the new ones they give shape, dtype, device.
    Returns: the new fields [capacity, ..], and whether they are all zero; if not, they hold anything.
    """
    sizes = {name: capacity * math.prod(t.shape[1:]) * t.itemsize for name, t in old.items()}
    room = {name: -(-nbytes // ALIGNMENT) * ALIGNMENT for name, nbytes in sizes.items()}
    plain = all(type(t) is torch.Tensor and t.device.type == "cpu" for t in old.values())
    raw = _mapped(sum(room.values())) if plain and sum(room.values()) >= LEAST_BYTES else None
    if raw is None:
        found = {name: t.new_empty((capacity, *t.shape[1:])) for name, t in old.items()}
        for tensor in found.values():
            advise(tensor)  # before anything is written: memory gets its pages then
        return found, False
    advise(raw)
    found, start = {}, 0
    for name, one in old.items():
        piece = raw[start : start + sizes[name]]
        found[name] = piece.view(one.dtype).view(capacity, *one.shape[1:])
        start += room[name]
    return found, True


def _mapped(nbytes: int) -> torch.Tensor | None:
    """Return [nbytes], uint8, all zero, in a mapping of its own; None where the system has none to give."""
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return None
    try:
        # private: after a fork each process has pages of its own
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # too many mappings, or no memory: torch's allocator finds some, or raises
        return None
    return torch.frombuffer(memory, dtype=torch.uint8)
