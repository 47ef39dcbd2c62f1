"""Encode pages of keys of two widths: the order of the channels, then both kinds of codes in that order (see seal.py).

The order is that of quant/codec.py, by comparing the ranges of every two channels.
"""

import triton
import triton.language as tl

from .seal_numbers import encode, finite, spread

OTHERS = tl.constexpr(16)  # channels that all are compared with, and tokens that are read, at once


@triton.jit
def _extent(source, slot_stride, channel, inside, SIDE: tl.constexpr):
    """Return the ranges [channels] of channels over the tokens of a page."""
    low = tl.full(channel.shape, float("inf"), tl.float32)
    high = tl.full(channel.shape, float("-inf"), tl.float32)
    for first in tl.range(0, SIDE.page, OTHERS):
        token = first + tl.arange(0, OTHERS)
        where = source + token[:, None] * slot_stride + channel[None, :]
        x = finite(tl.load(where, mask=inside[None, :], other=0.0).to(tl.float32))
        low = tl.minimum(low, tl.min(x, 0))
        high = tl.maximum(high, tl.max(x, 0))
    return high - low


@triton.jit
def _pair_extent(source, slot_stride, channel, SIDE: tl.constexpr):
    """Return the larger range of each channel's pair, which RoPE rotates into each other; -1 behind the last channel."""
    inside = channel < SIDE.dim
    own = _extent(source, slot_stride, channel, inside, SIDE)
    partner = (channel + SIDE.dim // 2) % SIDE.dim
    return tl.where(
        inside, tl.maximum(own, _extent(source, slot_stride, partner, inside, SIDE)), -1.0
    )


@triton.jit
def _write_order(source, slot_stride, order, SIDE: tl.constexpr):
    """Write which channel lies at which place: the wide ones in front, either kind in the order of the model's channels."""
    DIM: tl.constexpr = SIDE.dim
    CHANNELS: tl.constexpr = triton.next_power_of_2(DIM)
    WIDE: tl.constexpr = SIDE.sections[0][1] * SIDE.sections[0][2]
    channel = tl.arange(0, CHANNELS)
    inside = channel < DIM
    own = _pair_extent(source, slot_stride, channel, SIDE)
    rank = tl.zeros([CHANNELS], tl.int32)
    for first in tl.range(0, DIM, OTHERS):
        other = first + tl.arange(0, OTHERS)
        theirs = _pair_extent(source, slot_stride, other, SIDE)[None, :]
        wider = theirs > own[:, None]
        earlier = (theirs == own[:, None]) & (other[None, :] < channel[:, None])
        rank += tl.sum((wider | earlier).to(tl.int32), 1)
    is_wide = (inside & (rank < WIDE)).to(tl.int32)
    before = tl.cumsum(is_wide, 0) - is_wide  # wide channels in front of each
    place = tl.where(is_wide > 0, before, WIDE + channel - before)
    tl.store(order + place, channel.to(order.dtype.element_ty), mask=inside)


@triton.jit
def _write_ranges(
    source, slot_stride, scale, offset, order, SIDE: tl.constexpr, ENCODING: tl.constexpr
):  # fmt: skip
    """Write scales and offsets of every channel and group of tokens, in the order of the page."""
    GROUP: tl.constexpr = SIDE.scale_tokens
    PLACES: tl.constexpr = ENCODING.range_tile
    WIDE: tl.constexpr = SIDE.sections[0][1] * SIDE.sections[0][2]
    WIDE_TOP: tl.constexpr = (1 << SIDE.sections[0][0]) - 1
    TOP: tl.constexpr = ENCODING.top
    CUT: tl.constexpr = ENCODING.cut
    for group in tl.range(SIDE.page // GROUP):
        token = group * GROUP + tl.arange(0, GROUP)
        for first in tl.range(0, SIDE.dim, PLACES):
            place = first + tl.arange(0, PLACES)
            inside = place < SIDE.dim
            channel = tl.load(order + place, mask=inside, other=0).to(tl.int32)
            where = source + token[:, None] * slot_stride + channel[None, :]
            x = finite(tl.load(where, mask=inside[None, :], other=0.0).to(tl.float32))
            is_wide = place < WIDE
            top = tl.where(is_wide, 1.0 * WIDE_TOP, 1.0 * TOP)
            s, o = spread(tl.min(x, 0), tl.max(x, 0), top, tl.where(is_wide, 0.0, CUT))
            tl.store(scale + group * SIDE.dim + place, s, mask=inside)
            tl.store(offset + group * SIDE.dim + place, o, mask=inside)


@triton.jit
def _seal_section(
    source, slot_stride, codes, scale, offset, order, damaged, SIDE: tl.constexpr, ENCODING: tl.constexpr,
    SECTION: tl.constexpr,
):  # fmt: skip
    """Write the codes of the wide channels, or of the others."""
    BITS: tl.constexpr = SIDE.sections[SECTION][0]
    WIDTH: tl.constexpr = SIDE.sections[SECTION][1]
    RUNS: tl.constexpr = SIDE.sections[SECTION][2]
    PLACE: tl.constexpr = SIDE.sections[SECTION][3]
    BYTE: tl.constexpr = SIDE.sections[SECTION][4]
    TOP: tl.constexpr = (1 << BITS) - 1.0
    TALL: tl.constexpr = ENCODING.tall
    WIDE: tl.constexpr = ENCODING.wide
    bad = tl.zeros([TALL, WIDE], tl.int32)
    for begin in tl.range(0, SIDE.page, TALL):
        token = begin + tl.arange(0, TALL)
        for start in tl.range(0, WIDTH, WIDE):
            byte = start + tl.arange(0, WIDE)
            inside = byte < WIDTH
            packed = tl.zeros([TALL, WIDE], tl.int32)
            for run in tl.static_range(RUNS):
                place = PLACE + run * WIDTH + byte
                channel = tl.load(order + place, mask=inside, other=0).to(tl.int32)
                where = source + token[:, None] * slot_stride + channel[None, :]
                given = tl.load(where, mask=inside[None, :], other=0.0).to(tl.float32)
                code, bad = encode(
                    given, bad, token, place, inside[None, :], scale, offset, SIDE, TOP
                )
                packed = packed | (code << (run * BITS))
            target = codes + (token * SIDE.size)[:, None] + (BYTE + byte)[None, :]
            tl.store(target, packed.to(tl.uint8), mask=inside[None, :])
    any_bad = tl.max(tl.max(bad, 1), 0)
    tl.store(damaged, 1, mask=any_bad > 0)


@triton.jit
def seal_mixed(
    source, slot_stride, codes, scale, offset, order, damaged, SIDE: tl.constexpr, ENCODING: tl.constexpr
):  # fmt: skip
    """Encode one page of one kv head; the arguments are those of seal.py, and the order of the page's channels."""
    _write_order(source, slot_stride, order, SIDE)
    tl.debug_barrier()  # the order is read by other threads than wrote it
    _write_ranges(source, slot_stride, scale, offset, order, SIDE, ENCODING)
    tl.debug_barrier()
    for section in tl.static_range(len(SIDE.sections)):
        _seal_section(
            source, slot_stride, codes, scale, offset, order, damaged, SIDE, ENCODING, section
        )  # fmt: skip
