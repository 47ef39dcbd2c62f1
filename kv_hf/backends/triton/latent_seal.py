"""Encode full pages of latents in place: the bytes that quant/codec.py defines, in 16-bit words of several tokens.

One program per job finds the ranges of all groups (of tokens at 4 and 2 bits, along the rank at 8), writes scales and offsets, then reads them back and
writes words. Rounds as seal.py does, whose parts it uses.
"""

import triton
import triton.language as tl

from .float8 import MAGIC, float_to_float8
from .seal import _finite, _ranges_over_channels, _ranges_over_tokens


@triton.jit
def seal_latent_page(
    source,  # pointer to the page's first token
    slot_stride,
    page,
    codes,
    scale,
    offset,
    damaged,
    PAGE: tl.constexpr,
    RANK: tl.constexpr,
    CODE: tl.constexpr,
    BITS: tl.constexpr,
    TOP: tl.constexpr,
    CUT: tl.constexpr,
    S_TOKENS: tl.constexpr,
    S_CHANNELS: tl.constexpr,
    WORDS: tl.constexpr,
    W_TILE: tl.constexpr,
    WIDE: tl.constexpr,
    R_TILE: tl.constexpr,
):
    """Encode one page. Tiles are W_TILE words by WIDE channels; R_TILE as in seal.py."""
    block = page.to(tl.int64)
    codes += block * (WORDS * RANK)
    GROUPS: tl.constexpr = RANK // S_CHANNELS  # of a token
    scale += block * (PAGE // S_TOKENS * GROUPS)
    offset += block * (PAGE // S_TOKENS * GROUPS)
    if CODE == "unsigned":
        _ranges_over_tokens(
            source, slot_stride, scale, offset, S_TOKENS, PAGE, RANK, R_TILE, CODE, TOP, CUT
        )
    else:
        _ranges_over_channels(
            source, slot_stride, scale, offset, S_CHANNELS, PAGE, RANK, R_TILE, CODE, TOP, CUT
        )
    tl.debug_barrier()  # scales and offsets are read by other threads than wrote them

    bad = tl.zeros([W_TILE, WIDE], tl.int32)
    for begin in tl.range(0, WORDS, W_TILE):
        word = begin + tl.arange(0, W_TILE)
        for start in tl.range(0, RANK, WIDE):
            channel = start + tl.arange(0, WIDE)
            inside = (channel < RANK)[None, :]
            packed = tl.zeros([W_TILE, WIDE], tl.int32)
            for place in tl.static_range(PAGE // WORDS):
                token = word + place * WORDS
                where = source + token[:, None] * slot_stride + channel[None, :]
                given = tl.load(where, mask=inside, other=0.0).to(tl.float32)
                x = _finite(given)
                bad |= (x != given).to(tl.int32)
                at = (token // S_TOKENS * GROUPS)[:, None] + (channel // S_CHANNELS)[None, :]
                s = tl.load(scale + at, mask=inside, other=1.0).to(tl.float32)
                s = tl.where(s == 0, 1.0, s)
                if CODE == "unsigned":
                    x = x - tl.load(offset + at, mask=inside, other=0.0).to(tl.float32)
                steps = tl.math.div_rn(x, s)
                if CODE == "unsigned":
                    # clamped first: rounding by MAGIC needs small numbers, and the bounds are integers
                    code = ((tl.minimum(tl.maximum(steps, 0.0), TOP) + MAGIC) - MAGIC).to(tl.int32)
                else:
                    steps = tl.minimum(tl.maximum(steps, -TOP), TOP)
                    if CODE == "float8":
                        code = float_to_float8(steps)
                    else:
                        code = ((steps + MAGIC) - MAGIC).to(tl.int32) & 0xFF
                packed |= code << (place * BITS)
            tl.store(
                codes + word[:, None] * RANK + channel[None, :], packed.to(tl.int16), mask=inside
            )
    any_bad = tl.max(tl.max(bad, 1), 0)
    tl.store(damaged, 1, mask=any_bad > 0)


@triton.jit(do_not_specialize_on_alignment=["jobs", "damaged"])
def latent_seal_kernel(
    tokens,  # [rows, 1, slots, RANK]
    row_stride,
    slot_stride,
    jobs,  # [n, 3]: row, first slot, page; a negative page: nothing to do
    codes,  # [pages, WORDS, RANK] int16
    scale,  # [pages, PAGE / S_TOKENS, RANK / S_CHANNELS]
    offset,
    damaged,  # [] uint8, zero
    PAGE: tl.constexpr,
    RANK: tl.constexpr,
    CODE: tl.constexpr,
    BITS: tl.constexpr,
    TOP: tl.constexpr,
    CUT: tl.constexpr,
    S_TOKENS: tl.constexpr,
    S_CHANNELS: tl.constexpr,
    WORDS: tl.constexpr,
    W_TILE: tl.constexpr,
    WIDE: tl.constexpr,
    R_TILE: tl.constexpr,
):
    """Encode the page of one job. Grid: (jobs,)."""
    job = jobs + tl.program_id(0) * 3
    row, first, page = tl.load(job).to(tl.int64), tl.load(job + 1).to(tl.int64), tl.load(job + 2)
    if page >= 0:
        source = tokens + row * row_stride + first * slot_stride
        seal_latent_page(
            source, slot_stride, page, codes, scale, offset, damaged, PAGE, RANK, CODE, BITS, TOP, CUT, S_TOKENS,
            S_CHANNELS, WORDS, W_TILE, WIDE, R_TILE,
        )  # fmt: skip
