"""The compiled CPU kernel: C behind ctypes. The only place that knows of a C library; loads none until it is asked for."""

import sys
from dataclasses import replace

import torch

from ...formats.base import planes
from ...spec import LANES, LATENT_SIDES, PageSpec, SideSpec
from ..base import Backend, in_known_groups, unread_formats, unread_groups
from ..reference.pages import dense_side
from . import decode, library, write
from .abi import DTYPES, MOST_WIDE

MAX_ORDERED = 256  # channels of a head whose order C reads


def load() -> Backend:
    """Return the backend."""
    return Backend(
        "c",
        decode.paged_attention,
        write.write,
        dense_side,
        decode.choose_pages,
        max_queries=sys.maxsize,
    )


def why_not(device: torch.device, spec: PageSpec) -> str | None:
    """Return why the C kernel cannot read such pages on `device`, or None."""
    unread = unread_formats(spec)
    if device.type != "cpu":
        return unread or f"it runs on the CPU, the pages are on {device}"
    return unread or library.missing() or unsupported(spec)


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
    """Say whether C reads the groups of a side: those of all kernels, of any number of bits; rotated values, values around 0,
    keys of several widths; and scales of single tokens without a common offset."""
    scheme = side.scheme
    unsigned, in_planes = scheme.code == "unsigned", len(planes(scheme.bits)) > 1
    if in_planes and side.side in LATENT_SIDES:
        return False
    plain = scheme
    if side.side == "values":
        plain = replace(plain, rotated=False)
        if unsigned and scheme.offset_group is None:
            plain = replace(plain, offset_group=scheme.scale_group)
    known = len(scheme.wide) <= MOST_WIDE and None not in dict(scheme.native_wide)
    if known and side.head_dim <= MAX_ORDERED:
        plain = replace(plain, widths=(), wide=())
    if in_planes:  # which are put together
        plain = replace(plain, bits=4)
    if in_known_groups(replace(side, scheme=plain)):
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
