"""The argument blocks of abi.py, packed from tensors."""

import ctypes
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from typing import Any

import torch

from ...errors import CacheMismatchError
from ...quant.codec import block
from ...spec import LANES, PageFields, PageSpec, SideSpec
from ..compiled_formats import in_known_groups, unread_groups
from .abi import DTYPES, Status


class Block:
    """The memory of one argument block, kept between calls for the fields that stay.

    Copies and pickles of a block are empty: tensors lie elsewhere there.

    Attributes:
        memory, address: the block itself.
        layout: what the fields were packed from that are not packed at every call; empty before the first.
        call: the compiled function that the block is for.
    """

    __slots__ = ("address", "call", "layout", "memory")

    def __init__(self, fields: int) -> None:
        self.memory = bytearray(8 * fields)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.layout: tuple[Any, ...] = ()
        self.call: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Block, (len(self.memory) // 8,)


def take_block(launches: MutableMapping[Any, Any], name: str, fields: int) -> Block:
    """Return the block that is kept under `name`, which is put back behind a call; until then it is nobody else's."""
    found = launches.pop(name, None)
    return Block(fields) if found is None else found


def unsupported(spec: PageSpec) -> str | None:
    """Return what the C kernel does not know about these pages, or None."""
    for side in spec.sides:
        if side.layout != LANES and not side.could_fill_words:
            packed = f"of head_dim {side.head_dim}"
            if side.side == "values":
                packed = f"in pages of {side.page_size} tokens"
            return (
                f"{side.side} {packed} as {side.scheme.name!r} do not fill whole words of 32 bits; "
                "use another format, or kernel='reference'"
            )
    for side in spec.sides:
        if side.layout != LANES:
            return (
                f"{side.side} lie in the layout of another device's kernel, which wrote these pages"
            )
        if side.dtype not in DTYPES:
            return f"{side.side} of {side.dtype} are not among {', '.join(map(str, DTYPES))}"
    return unread_groups(spec, _reads, "the C kernel does")


def _reads(side: SideSpec) -> bool:
    """Say whether C reads the groups of a side: beside those of all kernels, rotated values, codes of 3 bits
    around 0, keys of two widths, and scales of single tokens without a common offset."""
    scheme = side.scheme
    if scheme.bits == 3:
        single = scheme.scale_group is not None and scheme.scale_group[0] == 1
        around_0 = scheme.offset_group is None and scheme.scale_bits == 16
        return side.side == "values" and single and around_0
    if scheme.rotated and side.side == "values":
        return in_known_groups(replace(side, scheme=replace(scheme, rotated=False)))
    if scheme.wide_channels and side.head_dim <= 256:
        plain = replace(scheme, wide_bits=0, wide_channels=0)
        return in_known_groups(replace(side, scheme=plain))
    if in_known_groups(side):
        return True
    if scheme.scale_bits != 16 or scheme.scale_group is None or scheme.scale_group[0] != 1:
        return False
    if side.side == "latent" and scheme.code == "unsigned":
        return scheme.offset_group == scheme.scale_group
    one_or_all = scheme.scale_group[1] in (1, side.head_dim)
    return (
        side.side == "keys"
        and scheme.code != "unsigned"
        and one_or_all
        and scheme.offset_group is None
    )


def side_fields(
    spec: SideSpec, fields: Mapping[str, torch.Tensor], window: torch.Tensor
) -> tuple[int, ...]:
    """Return the fields of abi.SIDE, in their order: formats, strides and pointers of one side.

    Args:
        fields: tensors of spec.fields with a leading [pages].
        window: [rows, num_kv_heads, slots, head_dim], the spec's dtype; the last dimension is contiguous.
    Returns: strides in elements; a pointer is 0 where there is no such tensor.
    """
    scheme, codes = spec.scheme, fields["codes"]
    scale, offset = fields.get("scale"), fields.get("offset")
    order = fields.get("order")
    row, head, slot, _ = window.stride()
    groups = scheme.scale_group or (0, 1)
    dtype = DTYPES[spec.dtype]
    return (
        dtype if scheme.is_exact else scheme.native_number or 0,
        spec.head_dim,
        block(spec.head_dim) if scheme.rotated else 0,
        scheme.wide_channels,
        scheme.native_wide or 0,
        groups[0],
        groups[1],
        DTYPES[spec.scale_dtype],
        codes.stride(1),
        0 if scale is None else scale.stride(1),
        0 if offset is None else offset.stride(1),
        dtype,
        row,
        head,
        slot,
        codes.data_ptr(),
        0 if scale is None else scale.data_ptr(),
        0 if offset is None else offset.data_ptr(),
        0 if order is None else order.data_ptr(),
        0 if order is None else order.stride(1),
        window.data_ptr(),
    )


def capacity_of(*sides: Mapping[str, torch.Tensor]) -> int:
    """Return the pages that every field of `sides` has room for; C reads and writes none beyond them.

    Args:
        sides: tensors of SideSpec.fields with a leading [pages], one mapping per side.
    """
    return min(
        [
            fields.room if type(fields) is PageFields else min(map(len, fields.values()))
            for fields in sides
        ]
    )


def raise_for(status: int, table: str, capacity: int, slots: int = 0) -> None:
    """Raise what a number of abi.Status means, where a call returned one; `table` names the argument of page ids."""
    if status == Status.NO_MEMORY:
        raise MemoryError("no memory for the C kernel's intermediate results")
    if status == Status.NO_SUCH_PAGE:
        raise CacheMismatchError(
            f"{table} must name pages that there is room for, 0 to {capacity - 1}, and names a page outside of them; it "
            "was made for other pages"
        )
    if status == Status.NO_SUCH_SLOT:
        raise CacheMismatchError(
            f"starts, skips and jobs must name rows and slots of the windows, 0 to {slots - 1}, and name a place outside of "
            "them; they were made for other windows"
        )
