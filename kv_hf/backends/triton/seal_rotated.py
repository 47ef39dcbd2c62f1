"""Encode pages of rotated values: all channels of a token at once, transformed in registers (see seal.py)."""

import triton
import triton.language as tl

from .dequant import SCALE_MAX, unrotate_channels
from .seal_numbers import finite, nearest_code, unsigned_range


@triton.jit
def _groups(
    x, inside, token, scale, offset, SIDE: tl.constexpr, ENCODING: tl.constexpr
):  # fmt: skip
    """Write scales and offsets of all groups of x [tokens, channels]; return x in steps of its codes."""
    GROUP: tl.constexpr = SIDE.scale_channels
    GROUPS: tl.constexpr = SIDE.dim // GROUP
    TOP: tl.constexpr = ENCODING.top
    CUT: tl.constexpr = ENCODING.cut
    CLIP: tl.constexpr = ENCODING.clip
    group_of = (tl.arange(0, x.shape[1]) // GROUP)[None, :]
    divisor = tl.full(x.shape, 1.0, tl.float32)
    offsets = tl.zeros(x.shape, tl.float32)
    for group in tl.range(GROUPS):
        own = inside & (group_of == group)
        at = token * GROUPS + group
        if SIDE.centered:
            most = tl.max(tl.where(own, tl.abs(x), 0.0), 1) * CLIP
            s = tl.math.div_rn(most, tl.full(most.shape, 0.5 * TOP, tl.float32))
            s = tl.minimum(s, SCALE_MAX).to(tl.float16)
        else:
            low = tl.min(tl.where(own, x, float("inf")), 1)
            high = tl.max(tl.where(own, x, float("-inf")), 1)
            s, o = unsigned_range(low, high, TOP, CUT)
            tl.store(offset + at, o)
            offsets = tl.where(own, o.to(tl.float32)[:, None], offsets)
        tl.store(scale + at, s)
        s = s.to(tl.float32)
        divisor = tl.where(own, tl.where(s == 0, 1.0, s)[:, None], divisor)
    if SIDE.centered:
        return tl.math.div_rn(x, divisor) + 0.5 * TOP
    else:
        return tl.math.div_rn(x - offsets, divisor)


@triton.jit
def _store_plane(
    codes, code, token, WIDTH: tl.constexpr, BITS: tl.constexpr, SIDE: tl.constexpr
):  # fmt: skip
    """Pack codes [tokens, channels] of BITS bits into WIDTH bytes of a token, tokens side by side."""
    WIDE: tl.constexpr = triton.next_power_of_2(WIDTH)
    TOKENS: tl.constexpr = code.shape[0]
    place = tl.arange(0, WIDE)
    packed = tl.zeros([TOKENS, WIDE], tl.int32)
    for run in tl.static_range(8 // BITS):
        channel = tl.minimum(run * WIDTH + place, SIDE.dim - 1)
        part = tl.gather(code, tl.broadcast_to(channel[None, :], [TOKENS, WIDE]), 1)
        packed = packed | (part << (run * BITS))
    where = codes + token[:, None] + (place * SIDE.page)[None, :]
    tl.store(where, packed.to(tl.uint8), mask=(place < WIDTH)[None, :])


@triton.jit
def seal_rotated(
    source, slot_stride, codes, scale, offset, damaged, SIDE: tl.constexpr, ENCODING: tl.constexpr
):  # fmt: skip
    """Encode one page of one kv head; the arguments are those of seal.py."""
    TOKENS: tl.constexpr = ENCODING.tall
    CHANNELS: tl.constexpr = triton.next_power_of_2(SIDE.dim)
    BLOCK: tl.constexpr = SIDE.rotated
    TOP: tl.constexpr = ENCODING.top
    BITS: tl.constexpr = SIDE.bits
    LOW: tl.constexpr = SIDE.dim // 4
    WIDTH: tl.constexpr = SIDE.width
    channel = tl.arange(0, CHANNELS)
    inside = (channel < SIDE.dim)[None, :]
    bad = tl.zeros([TOKENS, CHANNELS], tl.int32)
    for first in tl.range(0, SIDE.page, TOKENS):
        token = first + tl.arange(0, TOKENS)
        where = source + token[:, None] * slot_stride + channel[None, :]
        given = tl.load(where, mask=inside, other=0.0).to(tl.float32)
        x = finite(given)
        bad |= (x != given).to(tl.int32)
        # a division by a power of two, and no -0
        x = unrotate_channels(x, BLOCK) * (1.0 / BLOCK) + 0.0
        code = nearest_code(_groups(x, inside, token, scale, offset, SIDE, ENCODING), TOP)
        if BITS == 3:
            _store_plane(codes, code & 3, token, LOW, 2, SIDE)
            _store_plane(codes + LOW * SIDE.page, code >> 2, token, WIDTH, 1, SIDE)
        else:
            _store_plane(codes, code, token, WIDTH, BITS, SIDE)
    any_bad = tl.max(tl.max(bad, 1), 0)
    tl.store(damaged, 1, mask=any_bad > 0)
