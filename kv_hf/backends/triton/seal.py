"""Encode full pages of both sides in place, in one launch: the bytes that quant/codec.py defines.

One program per (job, kv head, side): it finds the ranges of all groups, writes scales and offsets, then reads them back
and writes codes. Launched without fusion of multiplications and additions, every step rounds as the definition's.
SIDE is a SideLayout everywhere, ENCODING an Encoding; their fields become constexpr where one is handed on, because
Triton 3.6 reads them as plain numbers.
"""

import triton
import triton.language as tl

from .float8 import MAGIC, SCALE_MAX, float_to_float8
from .page_block import move_to_block


@triton.jit
def _finite(x):
    """Replace nan by 0 and clamp to float16's range; -0 becomes 0, so that a minimum has one bit pattern."""
    return tl.where(x == x, tl.minimum(tl.maximum(x, -SCALE_MAX), SCALE_MAX), 0.0) + 0.0


@triton.jit
def _unsigned_range(low, high, TOP: tl.constexpr, CUT: tl.constexpr):
    """Return scale and offset (float16) that spread codes 0 .. TOP over a range cut by CUT at both ends."""
    cut = (high - low) * CUT
    low, high = low + cut, high - cut
    scale = tl.minimum(tl.math.div_rn(high - low, tl.full(low.shape, TOP, tl.float32)), SCALE_MAX)
    return scale.to(tl.float16), low.to(tl.float16)


@triton.jit
def _signed_scale(most, TOP: tl.constexpr):
    """Return the scale that spreads codes -TOP .. TOP over -most .. most, to be rounded to the stored dtype."""
    scale = tl.math.div_rn(most, tl.full(most.shape, TOP, tl.float32))
    return tl.minimum(scale, SCALE_MAX)


@triton.jit
def _ranges_over_tokens(
    source, slot_stride, scale, offset, SIDE: tl.constexpr, ENCODING: tl.constexpr
):
    """Find the ranges of every channel over a group's tokens; signed and float8 codes share one scale per page."""
    GROUP: tl.constexpr = SIDE.offset_tokens
    WIDE: tl.constexpr = ENCODING.range_tile
    TOP: tl.constexpr = ENCODING.top
    CUT: tl.constexpr = ENCODING.cut
    most = tl.zeros([1], tl.float32)
    for group in tl.range(SIDE.page // GROUP):
        token = group * GROUP + tl.arange(0, GROUP)
        for first in tl.range(0, SIDE.dim, WIDE):
            channel = first + tl.arange(0, WIDE)
            inside = channel < SIDE.dim
            where = source + token[:, None] * slot_stride + channel[None, :]
            x = _finite(tl.load(where, mask=inside[None, :], other=0.0).to(tl.float32))
            low, high = tl.min(x, 0), tl.max(x, 0)
            at = group * SIDE.dim + channel
            if SIDE.code == "unsigned":
                s, o = _unsigned_range(low, high, TOP, CUT)
                tl.store(scale + at, s, mask=inside)
            else:
                o = (0.5 * low + 0.5 * high).to(tl.float16)
                far = tl.abs(x - o.to(tl.float32)[None, :])
                most = tl.maximum(most, tl.max(tl.max(far, 0), 0))
            tl.store(offset + at, o, mask=inside)
    if SIDE.code != "unsigned":
        s = _signed_scale(most, TOP).to(scale.dtype.element_ty)
        tl.store(scale + tl.arange(0, 1), s)


@triton.jit
def _ranges_over_channels(
    source, slot_stride, scale, offset, SIDE: tl.constexpr, ENCODING: tl.constexpr
):
    """Find the ranges of every token over a group's channels."""
    GROUP: tl.constexpr = SIDE.scale_channels
    GROUPS: tl.constexpr = SIDE.dim // GROUP
    TOKENS: tl.constexpr = ENCODING.range_tile
    TOP: tl.constexpr = ENCODING.top
    CUT: tl.constexpr = ENCODING.cut
    place = tl.arange(0, triton.next_power_of_2(GROUP))
    inside = (place < GROUP)[None, :]
    for first in tl.range(0, SIDE.page, TOKENS):
        token = first + tl.arange(0, TOKENS)
        for group in tl.range(GROUPS):
            where = source + token[:, None] * slot_stride + (group * GROUP + place)[None, :]
            x = _finite(tl.load(where, mask=inside, other=0.0).to(tl.float32))
            at = token * GROUPS + group
            if SIDE.code == "unsigned":
                low = tl.min(tl.where(inside, x, float("inf")), 1)
                high = tl.max(tl.where(inside, x, float("-inf")), 1)
                s, o = _unsigned_range(low, high, TOP, CUT)
                tl.store(offset + at, o)
            else:
                s = _signed_scale(tl.max(tl.abs(x), 1), TOP).to(scale.dtype.element_ty)
            tl.store(scale + at, s)


@triton.jit
def _group_of(token, channel, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, SIDE: tl.constexpr):
    """Return the numbers [tokens, channels] of the groups of TOKENS x CHANNELS in a page."""
    return ((token // TOKENS) * (SIDE.dim // CHANNELS))[:, None] + (channel // CHANNELS)[None, :]


@triton.jit
def _encode(
    given, bad, token, channel, inside, scale, offset, SIDE: tl.constexpr, ENCODING: tl.constexpr
):  # fmt: skip
    """Return the codes (int32) of numbers [tokens, channels] fp32, and `bad` (int32) with those that had to be made finite."""
    S_TOKENS: tl.constexpr = SIDE.scale_tokens
    S_CHANNELS: tl.constexpr = SIDE.scale_channels
    O_TOKENS: tl.constexpr = SIDE.offset_tokens
    O_CHANNELS: tl.constexpr = SIDE.offset_channels
    TOP: tl.constexpr = ENCODING.top
    x = _finite(given)
    bad |= (x != given).to(tl.int32)
    at = _group_of(token, channel, S_TOKENS, S_CHANNELS, SIDE)
    s = tl.load(scale + at, mask=inside, other=1.0).to(tl.float32)
    s = tl.where(s == 0, 1.0, s)
    if O_TOKENS > 0:
        at = _group_of(token, channel, O_TOKENS, O_CHANNELS, SIDE)
        x = x - tl.load(offset + at, mask=inside, other=0.0).to(tl.float32)
    steps = tl.math.div_rn(x, s)
    if SIDE.code == "unsigned":
        # clamped first: rounding by MAGIC needs small numbers, and the bounds are integers
        steps = tl.minimum(tl.maximum(steps, 0.0), TOP)
    else:
        steps = tl.minimum(tl.maximum(steps, -TOP), TOP)
    if SIDE.code == "float8":
        return float_to_float8(steps), bad
    else:
        return ((steps + MAGIC) - MAGIC).to(tl.int32), bad


@triton.jit
def _seal_page(
    source,  # pointer to the page's first token of one kv head
    slot_stride,
    codes,  # pointers to the page's block
    scale,
    offset,
    damaged,
    SIDE: tl.constexpr,
    ENCODING: tl.constexpr,
):
    """Encode one page of one kv head.

    A line of codes is a token, or several where words hold codes of several tokens. Run r of a byte is channel
    place + r * width, run r of a word is token line + r * lines.
    """
    if SIDE.code != "none":
        if ENCODING.by_channel:
            _ranges_over_tokens(source, slot_stride, scale, offset, SIDE, ENCODING)
        else:
            _ranges_over_channels(source, slot_stride, scale, offset, SIDE, ENCODING)
        tl.debug_barrier()  # scales and offsets are read by other threads than wrote them

    RUNS: tl.constexpr = SIDE.runs
    LINES: tl.constexpr = SIDE.page // RUNS if SIDE.token_words else SIDE.page
    TALL: tl.constexpr = ENCODING.tall
    WIDE: tl.constexpr = ENCODING.wide
    bad = tl.zeros([TALL, WIDE], tl.int32)
    for begin in tl.range(0, LINES, TALL):
        line = begin + tl.arange(0, TALL)
        for start in tl.range(0, SIDE.width, WIDE):
            place = start + tl.arange(0, WIDE)
            inside = (place < SIDE.width)[None, :]
            if SIDE.token_contiguous:
                target = codes + line[:, None] + (place * SIDE.page)[None, :]
            else:
                target = codes + (line * SIDE.width)[:, None] + place[None, :]
            if SIDE.code == "none":
                x = tl.load(
                    source + line[:, None] * slot_stride + place[None, :], mask=inside, other=0
                )
                tl.store(target, x, mask=inside)
            else:
                packed = tl.zeros([TALL, WIDE], tl.int32)
                for run in tl.static_range(RUNS):
                    token = line + (run * LINES if SIDE.token_words else 0)
                    channel = place + (0 if SIDE.token_words else run * SIDE.width)
                    where = source + token[:, None] * slot_stride + channel[None, :]
                    given = tl.load(where, mask=inside, other=0.0).to(tl.float32)
                    code, bad = _encode(
                        given, bad, token, channel, inside, scale, offset, SIDE, ENCODING
                    )
                    if SIDE.token_words and SIDE.code == "signed":
                        code &= 0xFF
                    packed = code if RUNS == 1 else packed | (code << (run * SIDE.bits))
                if SIDE.token_words:
                    tl.store(target, packed.to(tl.int16), mask=inside)
                else:
                    tl.store(target, packed.to(tl.uint8), mask=inside)
    if SIDE.code != "none":
        any_bad = tl.max(tl.max(bad, 1), 0)
        tl.store(damaged, 1, mask=any_bad > 0)


@triton.jit
def _seal_side(
    tokens, row_stride, head_stride, slot_stride, jobs, codes, scale, offset, damaged, SIDE: tl.constexpr,
    ENCODING: tl.constexpr,
):  # fmt: skip
    """Encode the page of one (job, head) of one side."""
    job = jobs + tl.program_id(0) * 3
    head = tl.program_id(1)
    row, first, page = tl.load(job).to(tl.int64), tl.load(job + 1).to(tl.int64), tl.load(job + 2)
    if page >= 0:
        source = tokens + row * row_stride + head * head_stride + first * slot_stride
        block = page.to(tl.int64) * SIDE.heads + head
        codes, scale, offset = move_to_block(codes, scale, offset, block, SIDE)
        _seal_page(source, slot_stride, codes, scale, offset, damaged, SIDE, ENCODING)


@triton.jit(do_not_specialize_on_alignment=["jobs", "damaged"])
def seal_pair_kernel(
    tokens,  # [rows, heads, slots, dim]
    row_stride,
    head_stride,
    slot_stride,
    codes,
    scale,
    offset,
    value_tokens,  # [rows, heads, slots, value dim]
    value_row,
    value_head,
    value_slot,
    value_codes,
    value_scale,
    value_offset,
    jobs,  # [n, 3]: row, first slot, page; a negative page: nothing to do
    damaged,  # [] uint8, only ever set
    KEYS: tl.constexpr,
    KEY_ENCODING: tl.constexpr,
    VALUES: tl.constexpr,
    VALUE_ENCODING: tl.constexpr,
):
    """Encode the pages of the jobs. Grid: (jobs, heads, 2), or (jobs, heads, 1) where VALUES is None."""
    if tl.program_id(2) == 0:
        _seal_side(
            tokens, row_stride, head_stride, slot_stride, jobs, codes, scale, offset, damaged, KEYS,
            KEY_ENCODING,
        )  # fmt: skip
    elif VALUES is not None:
        _seal_side(
            value_tokens, value_row, value_head, value_slot, jobs, value_codes, value_scale, value_offset, damaged,
            VALUES, VALUE_ENCODING,
        )  # fmt: skip
