"""How full pages are encoded: tiles and bounds of codes, as the seal kernel's compile-time arguments."""

from functools import cache
from typing import Any, NamedTuple

from ...formats.linear import Float8Format, SignedFormat
from ...spec import PageSpec, SideSpec
from .meta_params import SideLayout, power_of_two, side_layout

TILE_NUMBERS = 4096  # numbers of one tile: what four warps hold without spilling
TOPS = {"none": 0.0, "float8": Float8Format.top, "signed": SignedFormat.top}


class Encoding(NamedTuple):
    """How the pages of one side are encoded.

    Attributes:
        top: the largest code; cut: part of a range that is cut off at both ends; clip: part that is left.
        by_channel: whether ranges are over tokens, not over channels.
        tall, wide: bytes or words of a tile, along the tokens and along the channels.
        range_tile: channels (where by_channel) or tokens whose ranges are found at a time.
    """

    top: float
    cut: float
    clip: float
    by_channel: bool
    tall: int
    wide: int
    range_tile: int


@cache
def encoding(spec: SideSpec) -> Encoding:
    """Choose how pages of a side are encoded."""
    scheme, side = spec.scheme, side_layout(spec)
    if side.rotated:
        return _whole_tokens(side, scheme.clip)
    if side.sections:
        return _two_widths(side, scheme.clip)
    by_channel = scheme.offset_group is not None and side.offset_channels == 1
    wide = min(power_of_two(side.width), 128 if side.token_words else 64)
    lines = side.page // side.runs if side.token_words else side.page
    numbers = TILE_NUMBERS // (2 if side.token_words else max(1, side.runs // 2))
    along = side.offset_tokens if by_channel else power_of_two(side.scale_channels)
    across = power_of_two(side.dim) if by_channel else side.page
    return Encoding(
        top=TOPS.get(side.code, float((1 << side.bits) - 1)),
        cut=0.5 * (1.0 - scheme.clip),
        clip=scheme.clip,
        by_channel=by_channel,
        tall=min(lines, numbers // wide),
        wide=wide,
        range_tile=min(across, max(1, TILE_NUMBERS // along)),
    )


def _whole_tokens(side: SideLayout, clip: float) -> Encoding:
    """Return tiles of whole tokens, for rotated values."""
    dim = power_of_two(side.dim)
    tall = min(side.page, TILE_NUMBERS // dim)
    top = float((1 << side.bits) - 1)
    return Encoding(top, 0.5 * (1.0 - clip), clip, False, tall, dim, tall)


def _two_widths(side: SideLayout, clip: float) -> Encoding:
    """Return tiles that serve both kinds of channels of keys of two widths."""
    wide = min(64, power_of_two(max(section[1] for section in side.sections)))
    tall = min(side.page, TILE_NUMBERS // 2 // wide)
    places = min(wide, TILE_NUMBERS // side.scale_tokens)
    return Encoding(float((1 << side.bits) - 1), 0.5 * (1.0 - clip), clip, True, tall, wide, places)


def pair_constants(spec: PageSpec) -> dict[str, Any]:
    """Return the compile-time arguments of the kernel that seals both sides; None for a side without numbers."""
    keys, values = spec.sides
    held = values.head_dim > 0
    return {
        "KEYS": side_layout(keys), "KEY_ENCODING": encoding(keys),
        "VALUES": side_layout(values) if held else None, "VALUE_ENCODING": encoding(values) if held else None,
    }  # fmt: skip
