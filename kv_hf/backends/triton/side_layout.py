"""How one side of a page lies in memory, as the kernels that encode and decode whole pages take it at compile time.

Importable without Triton.
"""

from functools import cache
from typing import NamedTuple

from ...quant.codec import block
from ...spec import SideSpec


class SideLayout(NamedTuple):
    """Codes, scales and offsets of one side of a page.

    Attributes:
        heads, page, dim: kv heads, tokens of a page and channels.
        code, bits: as in formats.Scheme.
        scale_tokens, scale_channels: one scale belongs to so many.
        offset_tokens, offset_channels: the same of offsets; 0 where there is none.
        token_contiguous, token_words: as in SideSpec.
        runs: codes of a byte, or of a word where token_words.
        width: bytes, words or numbers of a token; of keys of two widths, and of planes of codes, no meaning of its own.
        size: bytes, words or numbers of a token's codes.
        rotated: channels of a block of rotated numbers (quant/codec.py); 0: they are not rotated.
        centered: whether unsigned codes lie around 0 and have no offset.
        sections: of keys of two widths, (bits, bytes of a token, codes of a byte, first place, first byte) of the wide
            channels and of the others; else empty.
    """

    heads: int
    page: int
    dim: int
    code: str
    bits: int
    scale_tokens: int
    scale_channels: int
    offset_tokens: int
    offset_channels: int
    token_contiguous: bool
    token_words: bool
    runs: int
    width: int
    size: int
    rotated: int
    centered: bool
    sections: tuple[tuple[int, int, int, int, int], ...]


@cache
def side_layout(spec: SideSpec) -> SideLayout:
    """Return the layout of a side; SideSpec documents it."""
    scheme = spec.scheme
    runs = 16 // scheme.bits if spec.token_words else scheme.codes_per_byte
    return SideLayout(
        spec.num_kv_heads,
        spec.page_size,
        spec.head_dim,
        scheme.code,
        scheme.bits,
        *(scheme.scale_group or (1, 1)),
        *(scheme.offset_group or (0, 0)),
        spec.token_contiguous,
        spec.token_words,
        runs,
        spec.head_dim if spec.token_words else spec.head_dim // runs,
        spec.head_dim if spec.token_words or scheme.is_exact else spec.token_bits // 8,
        block(spec.head_dim) if scheme.rotated else 0,
        scheme.code == "unsigned" and scheme.offset_group is None,
        _sections(spec) if scheme.wide_channels else (),
    )


def _sections(spec: SideSpec) -> tuple[tuple[int, int, int, int, int], ...]:
    place = first = 0
    found = []
    for bits, channels in spec.runs:
        found.append((bits, channels * bits // 8, 8 // bits, place, first))
        place, first = place + channels, first + channels * bits // 8
    return tuple(found)
