"""What compiled kernels read: formats with a number in the header that C and Python share, in the groups listed here.

A list of what is allowed: the kernels check nothing, so that another grouping would be read wrongly, or written past its end.
"""

from collections.abc import Callable

from ..checks import listed
from ..formats import Scheme
from ..spec import PageSpec, SideSpec


def unread_formats(spec: PageSpec) -> str | None:
    """Return which formats of the pages no compiled kernel reads, as a sentence, or None."""
    unread = [side for side in spec.sides if side.scheme.native_number is None]
    if not unread:
        return None
    formats = dict.fromkeys(side.scheme.name for side in unread)
    return (
        f"no compiled kernel reads the format {listed(repr(one) for one in formats)} of "
        f"{listed(side.side for side in unread)}"
    )


def unread_groups(spec: PageSpec, reads: Callable[[SideSpec], bool], kernel: str) -> str | None:
    """Return which side of the pages has groups that a kernel does not read, as a sentence, or None.

    Args:
        reads: says whether the kernel reads the groups of an encoded side.
        kernel: how the sentence begins: "the C kernel does".
    """
    for side in spec.sides:
        if not side.scheme.is_exact and not reads(side):
            return f"{kernel} not read {side.side} in format {side.scheme.name!r}: {_words(side.scheme)}"
    return None


def in_known_groups(side: SideSpec) -> bool:
    """Say whether an encoded side has groups that all compiled kernels read.

    | side | codes | (tokens, channels) of a scale | of an offset | bits of both |
    |---|---|---|---|---|
    | keys, latents | unsigned | (any, 1) | the same | 16 |
    | values | unsigned | (1, any) | the same | 16 |
    | keys; RoPE keys of signed codes | 8 bits | (page, head) | (page, 1) | 16 |
    | values | 8 bits | (1, any) | none | 16 |
    | latents | 8 bits | (1, at least 2) | none | 16 or 32 |
    """
    scheme = side.scheme
    scale, offset, bits = scheme.scale_group, scheme.offset_group, scheme.scale_bits
    if scale is None or transformed(scheme):
        return False
    if scheme.code == "unsigned":
        over = {"keys": scale[1], "latent": scale[1], "values": scale[0]}.get(side.side)
        return over == 1 and offset == scale and bits == 16
    if side.side in ("keys", "k_rope"):
        whole = (side.page_size, side.head_dim)
        known = side.side == "keys" or scheme.code == "signed"
        return known and scale == whole and offset == (side.page_size, 1) and bits == 16
    if scale[0] != 1 or offset is not None:
        return False
    return bits == 16 if side.side == "values" else scale[1] > 1


def transformed(scheme: Scheme) -> bool:
    """Say whether codes stand for rotated numbers, for channels of two widths, or lie in planes."""
    return scheme.rotated or scheme.wide_channels > 0 or scheme.bits == 3


def _words(scheme: Scheme) -> str:
    offset = "no offset" if scheme.offset_group is None else f"an offset {scheme.offset_group}"
    scale = "no scale" if scheme.scale_group is None else f"a scale {scheme.scale_group}"
    kind = f"{'rotated ' if scheme.rotated else ''}{scheme.code}"
    wide = (
        f" ({scheme.wide_bits} of {scheme.wide_channels} channels)" if scheme.wide_channels else ""
    )
    return (
        f"{kind} codes of {scheme.bits} bits{wide} with {scale} and {offset} for groups of (tokens, channels), in "
        f"{scheme.scale_bits} bits"
    )
