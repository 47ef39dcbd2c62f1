"""Both sides of a layer's pages in one piece of memory.

[ field 0 of pages 0 .. n ) [ field 1 of pages 0 .. n ) ...      keys before values, each at a multiple of ALIGNMENT
"""

import functools

import torch

from ..spec import PageSpec

ALIGNMENT = 64  # bytes, of every piece of memory and of every field in it
Fields = dict[str, torch.Tensor]


@functools.lru_cache(maxsize=256)
def fields_of(spec: PageSpec) -> tuple[tuple[int, tuple[int, ...], torch.dtype], ...]:
    """Return (bytes of one page, shape, dtype) of every field, keys before values."""
    return tuple(
        (torch.Size(shape).numel() * dtype.itemsize, shape, dtype)
        for side in spec.sides
        for shape, dtype in side.fields.values()
    )


def carved_bytes(spec: PageSpec, pages: int, alignment: int = ALIGNMENT) -> int:
    """Return the bytes that `carve` needs for `pages` pages."""
    return sum(_aligned(pages * nbytes, alignment) for nbytes, _, _ in fields_of(spec))


def carve(
    raw: torch.Tensor, spec: PageSpec, pages: int, alignment: int = ALIGNMENT
) -> tuple[Fields, Fields]:
    """Lay the fields of `pages` pages into one piece of memory.

    Args:
        raw: [bytes], uint8; at least `carved_bytes(spec, pages, alignment)`, aligned to `alignment`.
    Returns: the fields of keys and those of values by name, views of `raw`: [pages, *shape of the field in a page].
    """
    found, start = [], 0
    for nbytes, shape, dtype in fields_of(spec):
        size = pages * nbytes
        found.append(raw[start : start + size].view(dtype).view(pages, *shape))
        start += _aligned(size, alignment)
    names = [tuple(side.fields) for side in spec.sides]
    split = len(names[0])
    return (
        dict(zip(names[0], found[:split], strict=True)),
        dict(zip(names[1], found[split:], strict=True)),
    )


def _aligned(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment
