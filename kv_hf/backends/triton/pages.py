"""Write pages and read them back, as reference/pages.py defines it: seal full pages and append to windows, in a launch each; write a side out.

Launches refuse to look into device tensors. The bytes are those of quant/codec.py, and the numbers those of
`reference.pages.dense_side`, bit for bit: launched without fusion of multiplications and additions, every step rounds as the
definition's. Knows nothing of attention.

Sealing: one program per (job, kv head, side), of both sides in one launch. Ranges over tokens (keys, most latents) are found first
and go through memory, where every number of a tile finds its own; ranges over channels are found within a tile, behind
the rotation.

SIDE is a SideLayout everywhere; fields become constexpr where one is handed on, because Triton 3.6 reads
them as plain numbers. A tile is [tokens, lanes]: a lane is a channel's place in the order of its page. Each group of
channels that is sealed has a power of two of lanes.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from ...spec import PageSpec, PageWrite, SideSpec
from ..base import PagedKV, Pair, contiguous_pair
from .dequant import (
    MAGIC,
    SCALE_MAX,
    float_to_float8,
    move_to_block,
    number,
    row_of,
    top_codes,
    unrotate,
)
from .direct import SPECIALIZED, Fields, Kernel, Strided, kept, rows_of
from .meta_params import MAX_TILE, MIN_SIZE, power_of_two, side_layout

# of one tile: more take more registers, and hardly fewer instructions
SEALED_NUMBERS = tl.constexpr(2048)
DENSE_NUMBERS = 8192  # of one tile that is written out: 64 of each thread of four warps
APPENDED = 16  # new tokens of one program, of a chunk


# -- numbers -----------------------------------------------------------------------------------------------------------


@triton.jit
def _load(source, slot_stride, token, channel, inside):
    """Return numbers [tokens, lanes], with 0 outside."""
    where = source + token[:, None] * slot_stride + channel[None, :]
    return tl.load(where, mask=inside[None, :], other=0.0)


@triton.jit
def _finite(x):
    """Replace nan by 0 and clamp to float16's range; -0 becomes 0, so that a minimum has one bit pattern."""
    return tl.where(x == x, tl.minimum(tl.maximum(x, -SCALE_MAX), SCALE_MAX), 0.0) + 0.0


@triton.jit
def _spread(low, high, top, cut, DTYPE: tl.constexpr):
    """Return scale and offset that spread codes 0 .. top over ranges less a part of `cut` at both ends."""
    less = (high - low) * cut
    low, high = low + less, high - less
    return _scale(high - low, top, DTYPE), low.to(DTYPE)


@triton.jit
def _scale(size, top, DTYPE: tl.constexpr):
    """Return the scale with which code `top` stands for `size`."""
    return tl.minimum(tl.math.div_rn(size, top), SCALE_MAX).to(DTYPE)


@triton.jit
def _steps(x, scale):
    """Return x in units of scales, which may be 0 where all numbers of a group are the same."""
    scale = scale.to(tl.float32)
    return tl.math.div_rn(x, tl.where(scale == 0, 1.0, scale))


# -- ranges ------------------------------------------------------------------------------------------------------------


@triton.jit
def _extremes(source, slot_stride, channel, inside, TOKENS: tl.constexpr, ROWS: tl.constexpr):
    """Return the least and the largest numbers [lanes] of TOKENS tokens, taken ROWS at a time."""
    low = tl.full([ROWS, channel.shape[0]], float("inf"), tl.float32)
    high = -low
    for first in tl.range(0, TOKENS, ROWS):
        token = first + tl.arange(0, ROWS)
        x = _finite(_load(source, slot_stride, token, channel, inside).to(tl.float32))
        low, high = tl.minimum(low, x), tl.maximum(high, x)
    return tl.min(low, 0), tl.max(high, 0)


@triton.jit
def _find_order(source, slot_stride, lane, SIDE: tl.constexpr):
    """Return which channel lies at which place, [lanes]: the widest in front, those of a run in the order of the model's channels.

    source: pointer to the page's first token.
    """
    DIM: tl.constexpr = SIDE.dim
    PAGE: tl.constexpr = SIDE.page
    TALL: tl.constexpr = min(PAGE, max(16, SEALED_NUMBERS // lane.shape[0]))
    low, high = _extremes(source, slot_stride, lane, lane < DIM, PAGE, TALL)
    partner = (lane + DIM // 2) % DIM  # RoPE rotates both into each other
    size = tl.maximum(high - low, tl.gather(high - low, partner, 0))
    size = tl.where(lane < DIM, size, 0.0)
    # bits of numbers from 0 on are in their order; of channels with equal ranges the first ones are wide
    rank = (size.to(tl.int32, bitcast=True).to(tl.int64) << 32) - lane
    ranks = tl.sort(rank, descending=True)
    run = tl.zeros_like(lane)
    for at in tl.static_range(1, len(SIDE.runs)):
        first = tl.sum(tl.where(lane == SIDE.runs[at].place, ranks, 0), 0)
        run += (rank <= first).to(tl.int32)
    return tl.sort(run * lane.shape[0] + lane) % lane.shape[0]


@triton.jit
def _write_ranges(
    source, slot_stride, channel, place, real, top, fields, SIDE: tl.constexpr, TALL: tl.constexpr
):  # fmt: skip
    """Write the scales and offsets of groups of tokens; signed and float8 codes share one scale per page."""
    TOKENS: tl.constexpr = SIDE.offset_tokens
    ROWS: tl.constexpr = min(TALL, SIDE.offset_tokens)
    DTYPE: tl.constexpr = fields.scale.dtype.element_ty
    for group in tl.range(SIDE.page // TOKENS):
        first = source + group * TOKENS * slot_stride
        low, high = _extremes(first, slot_stride, channel, real, TOKENS, ROWS)
        at = group * SIDE.dim + place
        if SIDE.code == "unsigned":
            cut = tl.where(
                place < SIDE.runs[len(SIDE.runs) - 1].place, 0.0, 0.5 * (1.0 - SIDE.clip)
            )
            s, o = _spread(low, high, top, cut, DTYPE)
            tl.store(fields.scale + at, s, mask=real)
        else:
            o = (0.5 * low + 0.5 * high).to(DTYPE)
            # rounding keeps the order of numbers: none is further from the offset than one of these
            far = tl.maximum(high - o.to(tl.float32), o.to(tl.float32) - low)
            tl.store(fields.scale, _scale(tl.max(far, 0), SIDE.runs[0].top, DTYPE))
        tl.store(fields.offset + at, o, mask=real)


@triton.jit
def _steps_by_token(x, token, fields, SIDE: tl.constexpr):
    """Write the scales and offsets of groups of channels; return x [tokens, lanes] in steps of its codes."""
    DTYPE: tl.constexpr = fields.scale.dtype.element_ty
    GROUP: tl.constexpr = SIDE.scale_channels
    LANES: tl.constexpr = triton.next_power_of_2(GROUP)
    shape: tl.constexpr = x.shape
    x = tl.reshape(x, [shape[0], shape[1] // LANES, LANES])
    own = (tl.arange(0, LANES) < GROUP)[None, None, :]
    group = tl.arange(0, shape[1] // LANES)[None, :]
    held = group < SIDE.dim // GROUP
    at = (token * (SIDE.dim // GROUP))[:, None] + group
    if SIDE.offset_tokens > 0:
        low = tl.min(tl.where(own, x, float("inf")), 2)
        high = tl.max(tl.where(own, x, float("-inf")), 2)
        s, o = _spread(low, high, SIDE.runs[0].top, 0.5 * (1.0 - SIDE.clip), DTYPE)
        tl.store(fields.offset + at, o, mask=held)
        x = x - o.to(tl.float32)[:, :, None]
    else:
        most = tl.max(tl.where(own, tl.abs(x), 0.0), 2)
        if SIDE.code == "unsigned":  # around 0
            s = _scale(most * SIDE.clip, 0.5 * SIDE.runs[0].top, DTYPE)
        else:
            s = _scale(most, SIDE.runs[0].top, DTYPE)
    tl.store(fields.scale + at, s, mask=held)
    x = _steps(x, s[:, :, None])
    if SIDE.code == "unsigned" and SIDE.offset_tokens == 0:
        x += 0.5 * SIDE.runs[0].top
    return tl.reshape(x, shape)


# -- codes -------------------------------------------------------------------------------------------------------------


@triton.jit
def _codes(steps, top, SIDE: tl.constexpr):
    """Return the codes (int32, of which the lowest bits count) nearest to steps [tokens, lanes]; top: [lanes]."""
    # clamped first: rounding by MAGIC needs small numbers, and the bounds are integers
    if SIDE.code == "unsigned":
        steps = tl.maximum(steps, 0.0)
    else:
        steps = tl.maximum(steps, -SIDE.runs[0].top)
    steps = tl.minimum(steps, top[None, :])
    if SIDE.code == "float8":
        return float_to_float8(steps)
    else:
        return (steps + MAGIC).to(tl.int32, bitcast=True)


@triton.jit
def _at(byte, token, SIDE: tl.constexpr):
    """Return where bytes of tokens lie in a page: [tokens, bytes]."""
    if SIDE.token_contiguous:
        return (byte * SIDE.page)[None, :] + token[:, None]
    else:
        return (token * SIDE.size)[:, None] + byte[None, :]


@triton.jit
def _pack(runs, BITS: tl.constexpr):
    """Put codes [.., runs, places] into the bits of integers [.., places], those of the first run lowest."""
    shift = (tl.arange(0, runs.shape[1]) * BITS)[None, :, None]
    return tl.sum((runs & ((1 << BITS) - 1)) << shift, 1)


@triton.jit
def _store_plane(codes, code, token, NUMBER: tl.constexpr, SIDE: tl.constexpr):
    """Pack plane NUMBER of the codes [tokens, lanes] into bytes of their tokens: run r of a byte is place PLACE + r * WIDTH + byte."""
    BITS: tl.constexpr = SIDE.planes[NUMBER].bits
    PLACE: tl.constexpr = SIDE.planes[NUMBER].place
    PLACES: tl.constexpr = SIDE.planes[NUMBER].places
    RUNS: tl.constexpr = 8 // BITS
    WIDTH: tl.constexpr = PLACES // RUNS
    WIDE: tl.constexpr = triton.next_power_of_2(WIDTH)
    code = code >> SIDE.planes[NUMBER].low
    if code.shape[1] != PLACES:
        GROUP: tl.constexpr = SIDE.scale_channels
        GROUP_LANES: tl.constexpr = triton.next_power_of_2(GROUP)
        number = tl.arange(0, RUNS * WIDE)
        place = PLACE + number // WIDE * WIDTH + tl.minimum(number % WIDE, WIDTH - 1)
        lane = place // GROUP * GROUP_LANES + place % GROUP
        code = tl.gather(code, tl.broadcast_to(lane[None, :], [code.shape[0], RUNS * WIDE]), 1)
    packed = _pack(tl.reshape(code, [code.shape[0], RUNS, WIDE]), BITS)
    byte = tl.arange(0, WIDE)
    at = _at(SIDE.planes[NUMBER].byte + byte, token, SIDE)
    tl.store(codes + at, packed.to(tl.uint8), mask=(byte < WIDTH)[None, :])


@triton.jit
def _seal_page(source, slot_stride, fields, damaged, SIDE: tl.constexpr):
    """Encode one page of one kv head; `source` points to its first token."""
    GROUP: tl.constexpr = SIDE.scale_channels
    GROUP_LANES: tl.constexpr = triton.next_power_of_2(GROUP)
    # each group of channels has a power of two of lanes
    LANES: tl.constexpr = GROUP_LANES * triton.next_power_of_2(SIDE.dim // GROUP)
    # tokens at once: at least all of a word, or as many bytes side by side as a wide load takes
    FEWEST: tl.constexpr = 8 if SIDE.places > 1 else 16
    TALL: tl.constexpr = min(SIDE.page, max(FEWEST, SEALED_NUMBERS // LANES))
    BITS: tl.constexpr = SIDE.bits
    BLOCK: tl.constexpr = SIDE.rotated
    S_TOKENS: tl.constexpr = SIDE.scale_tokens
    O_TOKENS: tl.constexpr = SIDE.offset_tokens
    BY_CHANNEL: tl.constexpr = SIDE.offset_channels == 1 and BLOCK == 0
    # tokens of a word lie LINES apart
    RUNS: tl.constexpr = SIDE.places
    LINES: tl.constexpr = SIDE.page // RUNS
    lane = tl.arange(0, LANES)
    place = lane // GROUP_LANES * GROUP + lane % GROUP_LANES
    real = (lane % GROUP_LANES < GROUP) & (place < SIDE.dim)
    top = top_codes(place, SIDE)
    channel = place
    if SIDE.ordered:
        channel = tl.load(fields.order + place, mask=real, other=0).to(tl.int32)
    if BY_CHANNEL:
        _write_ranges(source, slot_stride, channel, place, real, top, fields, SIDE, TALL)
        tl.debug_barrier()
    inside = real
    if BLOCK > 0:  # rotated in the model's order, and then brought into groups
        channel, inside = lane, lane < SIDE.dim
    number = tl.arange(0, TALL)
    for begin in tl.range(0, LINES, TALL // RUNS):
        token = begin + number // (TALL // RUNS) * LINES + number % (TALL // RUNS)
        given = _load(source, slot_stride, token, channel, inside)
        if SIDE.code == "none":
            at = token[:, None] * SIDE.dim + place[None, :]
            tl.store(fields.codes + at, given, mask=real[None, :])
        else:
            given = given.to(tl.float32)
            x = _finite(given)
            if tl.max(tl.max((x != given).to(tl.int32), 1), 0) > 0:
                tl.store(damaged, 1)
            if BLOCK > 0:
                # a division by a power of two, and no -0
                x = unrotate(x, BLOCK, 1) * (1.0 / BLOCK) + 0.0
                if GROUP != GROUP_LANES:
                    x = tl.gather(x, tl.broadcast_to(place[None, :], x.shape), 1)
            if BY_CHANNEL:
                # by the ranges that `_write_ranges` has written; places are lanes here
                x -= _factors(fields.offset, token, 0, O_TOKENS, 1, SIDE, LANES, RUNS > 1)
                x = _steps(
                    x, _factors(fields.scale, token, 0, S_TOKENS, GROUP, SIDE, LANES, RUNS > 1)
                )
            else:
                x = _steps_by_token(x, token, fields, SIDE)
            code = _codes(x, top, SIDE)
            if SIDE.places > 1:
                runs = tl.reshape(code, [1, RUNS, TALL // RUNS * LANES])
                words = tl.reshape(_pack(runs, BITS), [TALL // RUNS, LANES])
                line = begin + tl.arange(0, TALL // RUNS)
                at = (line * SIDE.dim)[:, None] + place[None, :]
                tl.store(fields.codes + at, words.to(tl.int16), mask=real[None, :])
            else:
                for plane in tl.static_range(len(SIDE.planes)):
                    _store_plane(fields.codes, code, token, plane, SIDE)


@triton.jit
def _seal_side(tokens, jobs, fields, damaged, SIDE: tl.constexpr):
    """Encode the page of one (job, head) of one side."""
    job = jobs + tl.program_id(0) * 4
    head = tl.program_id(1).to(tl.int64)
    row, first, page = tl.load(job).to(tl.int64), tl.load(job + 1).to(tl.int64), tl.load(job + 2)
    if page >= 0:
        start = row_of(tokens, row, head)
        source = start + first * tokens.token
        orders = fields.order
        fields = move_to_block(fields, page.to(tl.int64) * SIDE.heads + head, SIDE)
        if SIDE.ordered:
            DIM: tl.constexpr = SIDE.dim
            lane = tl.arange(0, triton.next_power_of_2(DIM))
            like = tl.load(job + 3).to(tl.int64)
            if like >= 0:
                theirs = orders + (like * SIDE.heads + head) * DIM + lane
                channel = tl.load(theirs, mask=lane < DIM, other=0).to(tl.int32)
            else:
                channel = _find_order(start + (-1 - like) * tokens.token, tokens.token, lane, SIDE)
            order = fields.order + lane
            tl.store(order, channel.to(order.dtype.element_ty), mask=lane < DIM)
            tl.debug_barrier()  # other threads read it than wrote it
        _seal_page(source, tokens.token, fields, damaged, SIDE)


@triton.jit(**SPECIALIZED)
def seal_pair_kernel(
    keys,  # Strided: [rows, heads, slots, dim]
    key_fields,  # Fields
    values,  # Strided: [rows, heads, slots, value dim]
    value_fields,  # Fields
    jobs,  # [n, 4]: row, first slot, page, whose order of channels (PageWrite.jobs); a negative page: nothing to do
    damaged,  # [] uint8, only ever set
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Encode the pages of the jobs. Grid: (jobs, heads, 2)."""
    if tl.program_id(2) == 0:
        _seal_side(keys, jobs, key_fields, damaged, KEYS)
    elif VALUES.dim > 0:
        _seal_side(values, jobs, value_fields, damaged, VALUES)


# -- windows -----------------------------------------------------------------------------------------------------------


@triton.jit
def _copy(window, new, starts, skips, slots, q_len, DIM: tl.constexpr, TOKENS: tl.constexpr):
    """Copy one block of TOKENS tokens of one (row, head)."""
    row = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    token = (tl.program_id(2) // 2).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    skip = tl.load(skips + row)
    slot = tl.load(starts + row) + token - skip
    channel = tl.arange(0, triton.next_power_of_2(max(DIM, 1)))
    # a slot outside of the window is the caller's mistake: it must not become a write into another row
    held = (token >= skip) & (token < q_len) & (slot >= 0) & (slot < slots)
    held = held[:, None] & (channel < DIM)[None, :]
    source = row_of(new, row.to(tl.int64), head) + token[:, None] * new.token
    target = row_of(window, row.to(tl.int64), head) + slot[:, None] * window.token
    x = tl.load(source + channel[None, :], mask=held, other=0.0)
    tl.store(target + channel[None, :], x, mask=held)


@triton.jit(**SPECIALIZED)
def append_pair_kernel(
    keys,  # Strided: [rows, heads, slots, DIM]
    new_keys,  # Strided: [rows, heads, q_len, DIM]
    values,  # Strided: [rows, heads, slots, VALUE_DIM]
    new_values,  # Strided: [rows, heads, q_len, VALUE_DIM]
    starts,
    skips,
    slots,
    q_len,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Append both sides. Grid: (rows, heads, 2 * blocks of tokens)."""
    if tl.program_id(2) % 2 == 0:
        _copy(keys, new_keys, starts, skips, slots, q_len, DIM, TOKENS)
    else:
        _copy(values, new_values, starts, skips, slots, q_len, VALUE_DIM, TOKENS)


# -- dense tensors -----------------------------------------------------------------------------------------------------


@triton.jit
def _factors(
    pointer, token, start, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, SIDE: tl.constexpr, WIDE: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    """Load the scales (or offsets), one per TOKENS x CHANNELS, of tokens at WIDE places; one in place of equal ones along an axis.

    APART: whether tokens are not side by side.
    """
    if token.shape[0] <= TOKENS and not APART:
        token = tl.min(token, 0) + tl.arange(0, 1)
    place = start + tl.arange(0, 1 if SIDE.dim == CHANNELS or CHANNELS % WIDE == 0 else WIDE)
    at = (token // TOKENS * (SIDE.dim // CHANNELS))[:, None] + (place // CHANNELS)[None, :]
    return tl.load(pointer + at, mask=(place < SIDE.dim)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _load_plane(codes, token, place, NUMBER: tl.constexpr, SIDE: tl.constexpr):
    """Load the bits of codes [tokens, places], int32, that lie in plane NUMBER of SIDE; 0 of places that do not."""
    BITS: tl.constexpr = SIDE.planes[NUMBER].bits
    PLACES: tl.constexpr = SIDE.planes[NUMBER].places
    at = place - SIDE.planes[NUMBER].place
    inside = (at >= 0) & (at < PLACES)
    if SIDE.places > 1:
        LINES: tl.constexpr = SIDE.page // SIDE.places
        where = (token % LINES * SIDE.dim)[:, None] + at[None, :]
        shift = (token // LINES * BITS)[:, None]
    else:
        WIDTH: tl.constexpr = PLACES * BITS // 8
        byte = SIDE.planes[NUMBER].byte + at % WIDTH
        # outside of the plane this might be no bit of a number, and then the whole sum of planes would be undefined
        shift = tl.where(inside, at // WIDTH * BITS, 0)[None, :]
        where = _at(byte, token, SIDE)
    x = tl.load(codes + where, mask=inside[None, :], other=0).to(tl.int32) >> shift
    return (x & ((1 << BITS) - 1)) << SIDE.planes[NUMBER].low


@triton.jit
def load_numbers(fields, token, start, SIDE: tl.constexpr, WIDE: tl.constexpr):
    """Load what tokens of one page and head, `fields` of it, hold at WIDE places from `start` on: fp32 or exact, rotated where the codes are."""
    place = start + tl.arange(0, WIDE)
    CODE: tl.constexpr = SIDE.code
    S_TOKENS: tl.constexpr = SIDE.scale_tokens
    S_CHANNELS: tl.constexpr = SIDE.scale_channels
    O_TOKENS: tl.constexpr = SIDE.offset_tokens
    O_CHANNELS: tl.constexpr = SIDE.offset_channels
    if CODE == "none":
        where = fields.codes + (token * SIDE.dim)[:, None] + place[None, :]
        return tl.load(where, mask=(place < SIDE.dim)[None, :], other=0)
    else:
        code = _load_plane(fields.codes, token, place, 0, SIDE)
        for plane in tl.static_range(1, len(SIDE.planes)):
            code |= _load_plane(fields.codes, token, place, plane, SIDE)
        x = number(code, 0, CODE, 8)
        if CODE == "unsigned" and O_TOKENS == 0:  # codes lie around 0
            x = x - 0.5 * ((1 << SIDE.bits) - 1)
        x = x * _factors(fields.scale, token, start, S_TOKENS, S_CHANNELS, SIDE, WIDE, False)
        if O_TOKENS > 0:
            x = x + _factors(fields.offset, token, start, O_TOKENS, O_CHANNELS, SIDE, WIDE, False)
        return x


@triton.jit
def _write_tile(target, fields, token, held, SIDE: tl.constexpr, WIDE: tl.constexpr):
    """Write tokens of one page and head, where `held`, to `target` [tokens, 1], pointers to channel 0."""
    DIM: tl.constexpr = SIDE.dim
    for start in tl.static_range(0, DIM, WIDE):
        place = start + tl.arange(0, WIDE)
        inside = place < DIM
        x = load_numbers(fields, token, start, SIDE, WIDE)
        if SIDE.rotated > 0:
            x = unrotate(x, SIDE.rotated, 1)
        if SIDE.code != "none" and target.dtype.element_ty == tl.float16:
            # a scale rounded up may push the largest code just past float16's range
            x = tl.minimum(tl.maximum(x, -SCALE_MAX), SCALE_MAX)
        channel = place
        if SIDE.ordered:
            channel = tl.load(fields.order + place, mask=inside, other=0).to(tl.int32)
        x = x.to(target.dtype.element_ty)
        tl.store(target + channel[None, :], x, mask=held[:, None] & inside[None, :])


@triton.jit(**SPECIALIZED)
def dense_kernel(
    out,  # (pointer,): [rows, heads, seen, dim]
    fields,  # Fields
    window,  # Strided: [rows, heads, slots, dim]
    block_table,  # [rows, table_width]
    table_width,
    num_pages,  # [rows]
    exact_lens,  # [rows]
    padding,  # [rows]
    sink_tokens,
    seen,
    SIDE: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write TILE columns of one (row, head). Grid: (seen / TILE rounded up, heads, rows).

    The first programs of a row take the parts of its pages, the others its remaining columns: padding, window and what
    is free. As TILE divides a page, a row's parts and its remaining columns fill the grid whatever its number of pages, so
    that the host need not know it.

    SIDE: a SideLayout. Tiles are WIDE places wide, as those of the window.
    """
    HEADS: tl.constexpr = SIDE.heads
    PAGE: tl.constexpr = SIDE.page
    DIM: tl.constexpr = SIDE.dim
    tile = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2)
    pages = tl.load(num_pages + row)
    exact = tl.load(exact_lens + row)
    left = tl.load(padding + row)
    sinks = tl.minimum(sink_tokens, exact)
    wide_row = row.to(tl.int64)
    out_of = out[0] + (wide_row * HEADS + head) * seen * DIM
    parts = pages * (PAGE // TILE)
    if tile < parts:
        page = tl.load(block_table + wide_row * table_width + tile // (PAGE // TILE))
        block = page.to(tl.int64) * HEADS + head
        of_block = move_to_block(fields, block, SIDE)
        token = (tile % (PAGE // TILE)) * TILE + tl.arange(0, TILE)
        column = left + sinks + tile // (PAGE // TILE) * PAGE + token
        target = out_of + column.to(tl.int64)[:, None] * DIM
        _write_tile(target, of_block, token, column < seen, SIDE, WIDE)
    else:
        column = (tile - parts) * TILE + tl.arange(0, TILE)
        behind = column >= left + sinks
        slot = column - left
        column = tl.where(behind, column + pages * PAGE, column)
        source = row_of(window, wide_row, head) + slot.to(tl.int64)[:, None] * window.token
        held = (slot >= 0) & (slot < exact)
        target = out_of + column.to(tl.int64)[:, None] * DIM
        for start in tl.static_range(0, DIM, WIDE):
            channel = start + tl.arange(0, WIDE)
            inside = (channel < DIM)[None, :]
            x = tl.load(source + channel[None, :], mask=held[:, None] & inside, other=0.0)
            tl.store(target + channel[None, :], x, mask=(column < seen)[:, None] & inside)


# -- launches ----------------------------------------------------------------------------------------------------------


def write(call: PageWrite) -> None:
    """Append and seal as `reference.pages.write` does, with equal bytes, in a launch each and without waiting."""
    if call.new is not None:
        _append(call, contiguous_pair(call.new))
    if call.jobs is not None and call.jobs.shape[0]:
        _seal(call, contiguous_pair(call.windows))


def _kernel(
    launches: dict[Any, Any],
    spec: PageSpec,
    jit: Any,
    tensors: tuple[torch.Tensor, ...],
    variant: Any,
    constants: dict[str, Any],
) -> Kernel:
    """Return what a layer keeps for tensors that lie as these; its products and sums are rounded one by one."""
    key = jit, variant, id(spec), tensors[0].get_device(), *[one.stride() for one in tensors]
    return kept(launches, key, lambda: Kernel(spec, jit, constants, enable_fp_fusion=False))


def _append(call: PageWrite, new: Pair) -> None:
    windows, spec = call.windows, call.spec
    if not spec.values.head_dim:  # the strides of nothing are no reason for another variant
        windows, new = (windows[0],) * 2, (new[0],) * 2
    rows, heads, q_len, _ = new[0].shape
    slots = min(windows[0].shape[2], windows[1].shape[2])
    tokens = 1 if q_len == 1 else APPENDED
    sizes = {"DIM": spec.keys.head_dim, "VALUE_DIM": spec.values.head_dim, "TOKENS": tokens}
    kernel = _kernel(call.launches, spec, append_pair_kernel, (*windows, *new), tokens, sizes)
    kernel.launch(
        rows, heads, -(-q_len // tokens) * 2, windows[0].get_device(),
        lambda at: (
            Strided.of(at, windows[0]), Strided.of(at, new[0]), Strided.of(at, windows[1]), Strided.of(at, new[1]),
            at(call.starts), at(call.skips), slots, q_len,
        ),
    )  # fmt: skip


def _seal(call: PageWrite, tokens: Pair) -> None:
    keys, values = tokens if call.spec.values.head_dim else (tokens[0],) * 2
    sides = {"KEYS": side_layout(call.spec.keys), "VALUES": side_layout(call.spec.values)}
    kernel = _kernel(call.launches, call.spec, seal_pair_kernel, (keys, values), None, sides)
    kernel.launch(
        call.jobs.shape[0], keys.shape[1], 2, keys.get_device(),
        lambda at: (
            Strided.of(at, keys), Fields.of(at, call.fields[0]), Strided.of(at, values), Fields.of(at, call.fields[1]),
            at(call.jobs), at(call.damaged),
        ),
    )  # fmt: skip


@cache
def dense_constants(spec: SideSpec) -> dict[str, Any]:
    """Return the dense kernel's compile-time arguments."""
    side, padded = side_layout(spec), power_of_two(spec.head_dim)
    tile = min(side.page, MAX_TILE)
    if tile > side.scale_tokens >= MIN_SIZE:
        tile = side.scale_tokens  # one scale per channel of a tile in place of one per number
    if side.rotated:  # whole tokens at once
        tile = min(tile, DENSE_NUMBERS // padded)
    wide = min(padded, DENSE_NUMBERS // tile)
    if wide % side.scale_channels == 0 and side.scale_channels >= MIN_SIZE and not side.rotated:
        wide = side.scale_channels  # one scale per token of a tile
    return {"SIDE": side, "WIDE": wide, "TILE": tile}


def dense_side(kv: PagedKV, side: str) -> torch.Tensor:
    """Write a side out as `reference.pages.dense_side` does, with equal bits, in one launch and without waiting.

    Returns: [rows, num_kv_heads, seen, head_dim] in the model's dtype.
    """
    spec: SideSpec = getattr(kv.spec, side)
    pages = kv.key_pages if side == "keys" else kv.value_pages
    window = kv.residual_keys if side == "keys" else kv.residual_values
    window = window if window.stride(-1) == 1 else window.contiguous()
    out = window.new_empty((kv.rows, spec.num_kv_heads, kv.seen, spec.head_dim))
    if not out.numel():
        return out
    sizes = dense_constants(spec)
    kernel = _kernel(kv.launches, kv.spec, dense_kernel, (window,), side, sizes)
    with kv.hold():
        kernel.launch(
            -(-kv.seen // sizes["TILE"]), spec.num_kv_heads, kv.rows, out.get_device(),
            lambda at: (
                (at(out),), Fields.of(at, pages), Strided.of(at, window), *rows_of(at, kv), kv.seen
            ),
        )  # fmt: skip
    return out
