"""Encode full pages of exact tokens in place: the bytes that quant/codec.py defines.

One program per (job, kv head): it finds the ranges of all groups, writes scales and offsets, then reads them back
and writes codes. Launched without fusion of multiplications and additions, every step rounds as the definition's.
"""

import triton
import triton.language as tl

from .float8 import MAGIC, SCALE_MAX, float_to_float8


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
    source,
    slot_stride,
    scale,
    offset,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    CODE: tl.constexpr,
    TOP: tl.constexpr,
    CUT: tl.constexpr,
):
    """Find the ranges of every channel over GROUP tokens; signed and float8 codes share one scale per page."""
    most = tl.zeros([1], tl.float32)
    for group in tl.range(PAGE // GROUP):
        token = group * GROUP + tl.arange(0, GROUP)
        for first in tl.range(0, DIM, WIDE):
            channel = first + tl.arange(0, WIDE)
            inside = channel < DIM
            where = source + token[:, None] * slot_stride + channel[None, :]
            x = _finite(tl.load(where, mask=inside[None, :], other=0.0).to(tl.float32))
            low, high = tl.min(x, 0), tl.max(x, 0)
            at = group * DIM + channel
            if CODE == "unsigned":
                s, o = _unsigned_range(low, high, TOP, CUT)
                tl.store(scale + at, s, mask=inside)
            else:
                o = (0.5 * low + 0.5 * high).to(tl.float16)
                far = tl.abs(x - o.to(tl.float32)[None, :])
                most = tl.maximum(most, tl.max(tl.max(far, 0), 0))
            tl.store(offset + at, o, mask=inside)
    if CODE != "unsigned":
        s = _signed_scale(most, TOP).to(scale.dtype.element_ty)
        tl.store(scale + tl.arange(0, 1), s)


@triton.jit
def _ranges_over_channels(
    source,
    slot_stride,
    scale,
    offset,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    CODE: tl.constexpr,
    TOP: tl.constexpr,
    CUT: tl.constexpr,
):
    """Find the ranges of every token over GROUP channels."""
    place = tl.arange(0, triton.next_power_of_2(GROUP))
    inside = (place < GROUP)[None, :]
    for first in tl.range(0, PAGE, TOKENS):
        token = first + tl.arange(0, TOKENS)
        for group in tl.range(DIM // GROUP):
            where = source + token[:, None] * slot_stride + (group * GROUP + place)[None, :]
            x = _finite(tl.load(where, mask=inside, other=0.0).to(tl.float32))
            at = token * (DIM // GROUP) + group
            if CODE == "unsigned":
                low = tl.min(tl.where(inside, x, float("inf")), 1)
                high = tl.max(tl.where(inside, x, float("-inf")), 1)
                s, o = _unsigned_range(low, high, TOP, CUT)
                tl.store(offset + at, o)
            else:
                s = _signed_scale(tl.max(tl.abs(x), 1), TOP).to(scale.dtype.element_ty)
            tl.store(scale + at, s)


@triton.jit
def seal_page(
    source,  # pointer to the page's first token of one kv head
    slot_stride,
    page,
    head,
    codes,
    scale,
    offset,
    damaged,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    CODE: tl.constexpr,
    BITS: tl.constexpr,
    TOP: tl.constexpr,
    CUT: tl.constexpr,
    S_TOKENS: tl.constexpr,
    S_CHANNELS: tl.constexpr,
    O_TOKENS: tl.constexpr,
    O_CHANNELS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    TOKEN_CONTIGUOUS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    T_TILE: tl.constexpr,
    R_TILE: tl.constexpr,
):
    """Encode one page of one kv head.

    Groups of scales and offsets are S_TOKENS x S_CHANNELS and O_TOKENS x O_CHANNELS (0 where there is no offset);
    BY_CHANNEL: whether ranges are over tokens. WIDTH: bytes (or numbers) of a token; tiles are T_TILE tokens by
    WIDE, and R_TILE what the ranges take at a time.
    """
    block = page.to(tl.int64) * HEADS + head
    codes += block * (PAGE * WIDTH)
    if CODE != "none":
        scale += block * ((PAGE // S_TOKENS) * (DIM // S_CHANNELS))
        if O_TOKENS > 0:
            offset += block * ((PAGE // O_TOKENS) * (DIM // O_CHANNELS))
        if BY_CHANNEL:
            _ranges_over_tokens(
                source, slot_stride, scale, offset, O_TOKENS, PAGE, DIM, R_TILE, CODE, TOP, CUT
            )
        else:
            _ranges_over_channels(
                source, slot_stride, scale, offset, S_CHANNELS, PAGE, DIM, R_TILE, CODE, TOP, CUT
            )
        tl.debug_barrier()  # scales and offsets are read by other threads than wrote them

    bad = tl.zeros([T_TILE, WIDE], tl.int32)
    for begin in tl.range(0, PAGE, T_TILE):
        token = begin + tl.arange(0, T_TILE)
        for start in tl.range(0, WIDTH, WIDE):
            place = start + tl.arange(0, WIDE)
            inside = (place < WIDTH)[None, :]
            if TOKEN_CONTIGUOUS:
                target = codes + token[:, None] + (place * PAGE)[None, :]
            else:
                target = codes + (token * WIDTH)[:, None] + place[None, :]
            if CODE == "none":
                x = tl.load(
                    source + token[:, None] * slot_stride + place[None, :], mask=inside, other=0
                )
                tl.store(target, x, mask=inside)
            else:
                packed = tl.zeros([T_TILE, WIDE], tl.int32)
                for run in tl.static_range(DIM // WIDTH):
                    channel = run * WIDTH + place
                    where = source + token[:, None] * slot_stride + channel[None, :]
                    given = tl.load(where, mask=inside, other=0.0).to(tl.float32)
                    x = _finite(given)
                    bad |= (x != given).to(tl.int32)
                    at = ((token // S_TOKENS) * (DIM // S_CHANNELS))[:, None]
                    at = at + (channel // S_CHANNELS)[None, :]
                    s = tl.load(scale + at, mask=inside, other=1.0).to(tl.float32)
                    s = tl.where(s == 0, 1.0, s)
                    if O_TOKENS > 0:
                        at = ((token // O_TOKENS) * (DIM // O_CHANNELS))[:, None]
                        at = at + (channel // O_CHANNELS)[None, :]
                        x = x - tl.load(offset + at, mask=inside, other=0.0).to(tl.float32)
                    steps = tl.math.div_rn(x, s)
                    if CODE == "unsigned":
                        # clamped first: rounding by MAGIC needs small numbers, and the bounds are integers
                        steps = tl.minimum(tl.maximum(steps, 0.0), TOP)
                        packed |= ((steps + MAGIC) - MAGIC).to(tl.int32) << (run * BITS)
                    else:
                        steps = tl.minimum(tl.maximum(steps, -TOP), TOP)
                        if CODE == "float8":
                            packed = float_to_float8(steps)
                        else:
                            packed = ((steps + MAGIC) - MAGIC).to(tl.int32)
                tl.store(target, packed.to(tl.uint8), mask=inside)
    if CODE != "none":
        any_bad = tl.max(tl.max(bad, 1), 0)
        tl.store(damaged, 1, mask=any_bad > 0)


@triton.jit(do_not_specialize_on_alignment=["jobs", "damaged"])
def seal_kernel(
    tokens,  # [rows, HEADS, slots, DIM]
    row_stride,
    head_stride,
    slot_stride,
    jobs,  # [n, 3]: row, first slot, page; a negative page: nothing to do
    codes,
    scale,
    offset,
    damaged,  # [] uint8, zero
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    CODE: tl.constexpr,
    BITS: tl.constexpr,
    TOP: tl.constexpr,
    CUT: tl.constexpr,
    S_TOKENS: tl.constexpr,
    S_CHANNELS: tl.constexpr,
    O_TOKENS: tl.constexpr,
    O_CHANNELS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    TOKEN_CONTIGUOUS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    T_TILE: tl.constexpr,
    R_TILE: tl.constexpr,
):
    """Encode the page of one (job, kv head) of one side. Grid: (jobs, HEADS)."""
    job = jobs + tl.program_id(0) * 3
    head = tl.program_id(1)
    row, first, page = tl.load(job).to(tl.int64), tl.load(job + 1).to(tl.int64), tl.load(job + 2)
    if page >= 0:
        source = tokens + row * row_stride + head * head_stride + first * slot_stride
        seal_page(
            source, slot_stride, page, head, codes, scale, offset, damaged, HEADS, PAGE, DIM, CODE, BITS, TOP, CUT,
            S_TOKENS, S_CHANNELS, O_TOKENS, O_CHANNELS, BY_CHANNEL, TOKEN_CONTIGUOUS, WIDTH, WIDE, T_TILE, R_TILE,
        )  # fmt: skip
