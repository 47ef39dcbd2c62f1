"""The argument blocks of native/kv_hf.h, packed from tensors."""

import struct
from collections.abc import Mapping

import torch

from ...errors import CacheMismatchError
from ...formats import Scheme
from ...spec import LANES, PageFields, PageSpec, SideSpec

_FORMATS = {"int8": 3, "int4": 4, "int2": 5, "fp8": 6, "fp8_ds_mla": 6}
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

SIDE_FIELDS = 16
DECODE_BLOCK = struct.Struct(f"={2 * SIDE_FIELDS + 30}q2d")
SEAL_BLOCK = struct.Struct(f"={SIDE_FIELDS + 7}q1d")


def unsupported(spec: PageSpec) -> str | None:
    """Return what the C kernel does not know about these pages, or None."""
    for side in spec.sides:
        if side.layout != LANES and side.head_dim * side.code_bits % 32 == 0:
            return (
                f"{side.side} lie in the layout of another device's kernel, which wrote these pages"
            )
        if side.layout != LANES:
            return (
                f"{side.side} of head_dim {side.head_dim} as {side.scheme.name!r} do not fill whole words of 32 bits; "
                "use another format, or kernel='sdpa' or 'reference'"
            )
        if side.dtype not in DTYPES:
            return f"{side.side} of {side.dtype} are not among {', '.join(map(str, DTYPES))}"
        if side.scheme.is_exact:
            continue
        reason = _unsupported_groups(side.side, side.scheme, side)
        if reason:
            return reason
    return None


def _unsupported_groups(side: str, scheme: Scheme, spec: SideSpec) -> str | None:
    scale, offset = scheme.scale_group, scheme.offset_group
    assert scale is not None
    if side == "k_rope":
        known = scale == (spec.page_size, spec.head_dim) and offset == (spec.page_size, 1)
    elif side == "keys":
        known = scale[1] in (1, spec.head_dim) and (offset is None or offset == (scale[0], 1))
    elif side == "latent" and scale[1] == 1:
        known = offset == scale
    else:
        known = scale[0] == 1 and offset in (None, scale)
    return None if known else f"{side} with scale groups {scale} and offset groups {offset}"


def check_table(
    table: torch.Tensor, num_pages: torch.Tensor, *sides: Mapping[str, torch.Tensor]
) -> None:
    """Raise CacheMismatchError where a row's pages lie outside of the fields of `sides`, which C would read unseen.

    A table is never changed in place, so that it is looked at once; for all layers, and all steps that share it.

    Args:
        table: [rows, width], int32; entries past a row's last page may hold anything.
        num_pages: [rows], int32.
        sides: tensors of SideSpec.fields with a leading [num_pages].
    """
    bounds = table.__dict__.get("_kv_hf_bounds")
    if bounds is None:
        bounds = (int(table.min()), int(table.max())) if table.numel() else (0, -1)
        table.__dict__["_kv_hf_bounds"] = bounds
    room = _room(*sides)
    if bounds[0] >= 0 and bounds[1] < room:
        return
    held = torch.arange(table.shape[1]) < num_pages[:, None]
    wrong = table[held & ((table < 0) | (table >= room))].tolist()
    if wrong:
        raise CacheMismatchError(
            f"block_table names page {wrong[0]}, and there is room for the pages 0 to {room - 1}: the pages were not made "
            "for this table; nothing was read"
        )


def check_jobs(jobs: torch.Tensor, fields: Mapping[str, torch.Tensor]) -> None:
    """Raise CacheMismatchError where a page to be sealed lies outside of `fields`, over which C would write unseen.

    Args:
        jobs: [n, 3], int32, of (row, first slot, page id or -1).
    """
    room = _room(fields)
    pages = [page for _, _, page in jobs.tolist()] if len(jobs) <= 8 else [int(jobs[:, 2].max())]
    if pages and max(pages) >= room:
        raise CacheMismatchError(
            f"jobs seal page {max(pages)}, and there is room for the pages 0 to {room - 1}: storage was not grown for "
            "them; nothing was written"
        )


def _room(*sides: Mapping[str, torch.Tensor]) -> int:
    """Return the pages that there is room for in every field."""
    return min(
        side.room if isinstance(side, PageFields) else min(one.shape[0] for one in side.values())
        for side in sides
    )


def plain_fields(side: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a side, each asked for once: pages that lie outside of the device are fetched for it."""
    return side if isinstance(side, dict) else dict(side)


def side_fields(
    spec: SideSpec, fields: Mapping[str, torch.Tensor], window: torch.Tensor
) -> tuple[int, ...]:
    """Return the fields of struct Side: formats, pointers and strides of one side."""
    scheme, codes = spec.scheme, fields["codes"]
    scale, offset = fields.get("scale"), fields.get("offset")
    row, head, slot, _ = window.stride()
    groups = scheme.scale_group or (0, 1)
    dtype = DTYPES[spec.dtype]
    return (
        dtype if scheme.is_exact else _FORMATS[scheme.name],
        spec.head_dim,
        groups[0],
        groups[1],
        codes.data_ptr(),
        0 if scale is None else scale.data_ptr(),
        0 if offset is None else offset.data_ptr(),
        DTYPES[spec.scale_dtype],
        codes.stride(1),
        0 if scale is None else scale.stride(1),
        0 if offset is None else offset.stride(1),
        window.data_ptr(),
        dtype,
        row,
        head,
        slot,
    )
