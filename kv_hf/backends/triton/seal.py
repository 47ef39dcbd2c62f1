"""Encode full pages of both sides in place, in one launch: the bytes that quant/codec.py defines.

One program per (job, kv head, side): it finds the ranges of all groups, writes scales and offsets, then reads them back
and writes codes. Launched without fusion of multiplications and additions, every step rounds as the definition's.
SIDE is a SideLayout everywhere, ENCODING an Encoding; their fields become constexpr where one is handed on, because
Triton 3.6 reads them as plain numbers.
"""

import triton
import triton.language as tl

from .seal_mixed import seal_mixed
from .seal_numbers import encode, finite, signed_scale, unsigned_range
from .seal_rotated import seal_rotated
from .tiles import move_to_block


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
            x = finite(tl.load(where, mask=inside[None, :], other=0.0).to(tl.float32))
            low, high = tl.min(x, 0), tl.max(x, 0)
            at = group * SIDE.dim + channel
            if SIDE.code == "unsigned":
                s, o = unsigned_range(low, high, TOP, CUT)
                tl.store(scale + at, s, mask=inside)
            else:
                o = (0.5 * low + 0.5 * high).to(tl.float16)
                far = tl.abs(x - o.to(tl.float32)[None, :])
                most = tl.maximum(most, tl.max(tl.max(far, 0), 0))
            tl.store(offset + at, o, mask=inside)
    if SIDE.code != "unsigned":
        s = signed_scale(most, TOP).to(scale.dtype.element_ty)
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
            x = finite(tl.load(where, mask=inside, other=0.0).to(tl.float32))
            at = token * GROUPS + group
            if SIDE.code == "unsigned":
                low = tl.min(tl.where(inside, x, float("inf")), 1)
                high = tl.max(tl.where(inside, x, float("-inf")), 1)
                s, o = unsigned_range(low, high, TOP, CUT)
                tl.store(offset + at, o)
            else:
                s = signed_scale(tl.max(tl.abs(x), 1), TOP).to(scale.dtype.element_ty)
            tl.store(scale + at, s)


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
    TOP: tl.constexpr = ENCODING.top
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
                    code, bad = encode(given, bad, token, channel, inside, scale, offset, SIDE, TOP)
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
    tokens, row_stride, head_stride, slot_stride, jobs, codes, scale, offset, order, damaged, SIDE: tl.constexpr,
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
        if SIDE.rotated > 0:
            seal_rotated(source, slot_stride, codes, scale, offset, damaged, SIDE, ENCODING)
        elif len(SIDE.sections) > 0:
            order += block * SIDE.dim
            seal_mixed(source, slot_stride, codes, scale, offset, order, damaged, SIDE, ENCODING)
        else:
            _seal_page(source, slot_stride, codes, scale, offset, damaged, SIDE, ENCODING)


@triton.jit(do_not_specialize_on_alignment=["jobs", "damaged", "order"])
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
    order,  # [pages, heads, dim], of keys of two widths
    KEYS: tl.constexpr,
    KEY_ENCODING: tl.constexpr,
    VALUES: tl.constexpr,
    VALUE_ENCODING: tl.constexpr,
):
    """Encode the pages of the jobs. Grid: (jobs, heads, 2), or (jobs, heads, 1) where VALUES is None."""
    if tl.program_id(2) == 0:
        _seal_side(
            tokens, row_stride, head_stride, slot_stride, jobs, codes, scale, offset, order, damaged, KEYS,
            KEY_ENCODING,
        )  # fmt: skip
    elif VALUES is not None:
        _seal_side(
            value_tokens, value_row, value_head, value_slot, jobs, value_codes, value_scale, value_offset, order, damaged,
            VALUES, VALUE_ENCODING,
        )  # fmt: skip
