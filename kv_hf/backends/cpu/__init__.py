"""The compiled CPU kernel: C behind ctypes. The only place that knows of a C library; loads none until it is asked for."""

import sys

import torch

from ...spec import LANES, PageSpec, SideSpec
from ..base import Backend, in_known_groups, unread_formats, unread_groups
from ..reference.pages import dense_side
from . import decode, library, write
from .abi import DTYPES


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
    """Say whether C reads the groups of a side: those of all kernels, and keys of 8 bits without offsets of which a token, or a
    channel of a token, has a scale."""
    scheme = side.scheme
    plain = side.side == "keys" and scheme.code != "unsigned" and not scheme.rotated
    of_tokens = scheme.scale_group in ((1, 1), (1, side.head_dim)) and scheme.offset_group is None
    return in_known_groups(side) or (plain and of_tokens and scheme.scale_bits == 16)
