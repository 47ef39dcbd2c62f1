"""Write one side of a layer out densely, in one launch: what a long chunk of queries, or code that is not ours, reads.

One program writes TILE columns of one (row, kv head). Knows nothing of attention; the bits are those of
`reference.pages.dense_side`, which is the definition.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from ...spec import SideSpec
from ..base import PagedKV
from .dequant import SCALE_MAX, Fields, move_to_block, number, unrotate_channels
from .direct import Kernel, kept
from .meta_params import MAX_TILE, MIN_SIZE, power_of_two, side_layout


@triton.constexpr_function
def within(GROUP, SIZE, WHOLE, RUN):
    """Return whether blocks of SIZE places, cut from runs of RUN, each lie inside one group of GROUP."""
    return GROUP == WHOLE or (GROUP % SIZE == 0 and RUN % SIZE == 0)


@triton.jit
def _of_groups(
    pointer, first_token, first_channel, TALL: tl.constexpr, WIDE: tl.constexpr, HELD: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Load the scales (or offsets), one per TOKENS x CHANNELS, of TALL tokens and WIDE channels, of which HELD exist.

    Returns: [TALL, WIDE], or 1 in place of a size along which all are the same.
    """
    GROUPS: tl.constexpr = SIDE.dim // CHANNELS  # of a token
    lane = tl.arange(0, 1 if within(CHANNELS, WIDE, SIDE.dim, WIDTH) else WIDE)
    column = (first_channel + lane) // CHANNELS
    if TOKENS % TALL == 0:
        at = first_token // TOKENS * GROUPS + column
        factors = tl.load(pointer + at, mask=lane < HELD, other=0.0)[None, :]
    else:
        token = first_token + tl.arange(0, TALL)
        at = (token // TOKENS * GROUPS)[:, None] + column[None, :]
        factors = tl.load(pointer + at, mask=(lane < HELD)[None, :], other=0.0)
    return factors.to(tl.float32)


@triton.jit
def _write_section(
    target,
    room,
    fields,
    begin,
    SECTION: tl.constexpr,
    SIDE: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write TILE tokens of one page to `target`, the column of the page's first token; `room` columns are left there.

    Args:
        fields: Fields of this page and head; with an order, each channel goes to its own column.
        begin: the first token; of token words, the first word.
        SECTION: number of a section of SIDE.
    """
    BITS: tl.constexpr = SIDE.sections[SECTION][0]
    WIDTH: tl.constexpr = SIDE.sections[SECTION][1]
    RUNS: tl.constexpr = SIDE.sections[SECTION][2]
    PLACE: tl.constexpr = SIDE.sections[SECTION][3]
    BYTE: tl.constexpr = SIDE.sections[SECTION][4]
    CODE: tl.constexpr = SIDE.code
    S_TOKENS: tl.constexpr = SIDE.scale_tokens
    S_CHANNELS: tl.constexpr = SIDE.scale_channels
    O_TOKENS: tl.constexpr = SIDE.offset_tokens
    O_CHANNELS: tl.constexpr = SIDE.offset_channels
    TALL: tl.constexpr = TILE // SIDE.places
    line = begin + tl.arange(0, TALL)
    lane = tl.arange(0, WIDE)
    for start in tl.static_range(0, WIDTH, WIDE):
        inside = lane < WIDTH - start
        byte = BYTE + start + lane
        if SIDE.token_contiguous:
            where = fields.codes + line[:, None] + (byte * SIDE.page)[None, :]
        else:
            where = fields.codes + (line * SIDE.size)[:, None] + byte[None, :]
        x = tl.load(where, mask=inside[None, :], other=0)
        for run in tl.static_range(RUNS):
            first = begin + (run * (SIDE.page // RUNS) if SIDE.places > 1 else 0)
            channel = PLACE + start + (0 if SIDE.places > 1 else run * WIDTH)
            if CODE == "none":
                y = x
            else:
                y = number(x, run, CODE, BITS) * _of_groups(
                    fields.scale, first, channel, TALL, WIDE, WIDTH - start, S_TOKENS, S_CHANNELS, WIDTH, SIDE
                )  # fmt: skip
                if O_TOKENS > 0:
                    y = y + _of_groups(
                        fields.offset, first, channel, TALL, WIDE, WIDTH - start, O_TOKENS, O_CHANNELS, WIDTH, SIDE
                    )  # fmt: skip
            column = channel + lane
            if SIDE.ordered:
                column = tl.load(fields.order + column, mask=inside, other=0).to(tl.int32)
            _store(target, room, first + tl.arange(0, TALL), column, inside, y, SIDE)


@triton.jit
def _store(target, room, token, channel, inside, y, SIDE: tl.constexpr):
    """Store numbers y [tokens, channels], where there is room."""
    if SIDE.code != "none" and target.dtype.element_ty == tl.float16:
        # a scale rounded up may push the largest code just past float16's range
        y = tl.minimum(tl.maximum(y, -SCALE_MAX), SCALE_MAX)
    held = (token < room)[:, None] & inside[None, :]
    at = (token * SIDE.dim)[:, None] + channel[None, :]
    tl.store(target + at, y.to(target.dtype.element_ty), mask=held)


@triton.jit
def _code_of(codes, lane, channel, inside, SIDE: tl.constexpr):
    """Load the codes [tokens, channels] of values, int32: those of tokens `lane` and of any channels."""
    WIDTH: tl.constexpr = SIDE.sections[0][1]
    BITS: tl.constexpr = SIDE.bits
    LOW: tl.constexpr = 2 * WIDTH if BITS == 3 else WIDTH  # bytes of the plane of low bits
    LOW_BITS: tl.constexpr = 2 if BITS == 3 else BITS
    where = codes + lane[:, None]
    x = tl.load(where + ((channel % LOW) * SIDE.page)[None, :], mask=inside[None, :], other=0)
    code = (x.to(tl.int32) >> ((channel // LOW) * LOW_BITS)[None, :]) & ((1 << LOW_BITS) - 1)
    if BITS == 3:
        third = where + ((LOW + channel % WIDTH) * SIDE.page)[None, :]
        x = tl.load(third, mask=inside[None, :], other=0).to(tl.int32)
        code |= ((x >> (channel // WIDTH)[None, :]) & 1) << 2
    return code


@triton.jit
def _write_rotated(target, room, fields, begin, SIDE: tl.constexpr, TILE: tl.constexpr):
    """Write TILE tokens of rotated values, as `_write_section`: all channels of a token at once."""
    DIM: tl.constexpr = SIDE.dim
    CHANNELS: tl.constexpr = triton.next_power_of_2(DIM)
    S_CHANNELS: tl.constexpr = SIDE.scale_channels
    BLOCK: tl.constexpr = SIDE.rotated
    channel = tl.arange(0, CHANNELS)
    inside = channel < DIM
    token = begin + tl.arange(0, TILE)
    y = _code_of(fields.codes, token, channel, inside, SIDE).to(tl.float32)
    if SIDE.offset_tokens == 0:  # codes lie around 0
        y = y - 0.5 * ((1 << SIDE.bits) - 1)
    y = y * _of_groups(fields.scale, begin, 0, TILE, CHANNELS, DIM, 1, S_CHANNELS, DIM, SIDE)
    if SIDE.offset_tokens > 0:
        y = y + _of_groups(fields.offset, begin, 0, TILE, CHANNELS, DIM, 1, S_CHANNELS, DIM, SIDE)
    _store(target, room, token, channel, inside, unrotate_channels(y, BLOCK), SIDE)


# tables may begin anywhere in a buffer that they share
@triton.jit(
    do_not_specialize=["seen", "table_row", "sink_tokens"],
    do_not_specialize_on_alignment=["block_table", "num_pages", "exact_lens", "padding", "order"],
)
def dense_kernel(
    out,  # [rows, HEADS, seen, DIM]
    seen,
    codes,
    scale,
    offset,
    order,  # [pages, HEADS, DIM], of keys of two widths
    block_table,
    table_row,
    num_pages,
    window,  # [rows, HEADS, slots, DIM]
    window_row,
    window_head,
    window_slot,
    exact_lens,
    padding,
    sink_tokens,
    SIDE: tl.constexpr,
    WIDE: tl.constexpr,
    W_WIDE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write TILE columns of one (row, head). Grid: (seen / TILE rounded up, HEADS, rows).

    The first programs of a row take the parts of its pages, the others its remaining columns: padding, window and what
    is free. As TILE divides a page, a row's parts and its remaining columns fill the grid whatever its number of pages, so
    that the host need not know it.

    SIDE: a SideLayout. Tiles are WIDE places wide, those of the window W_WIDE channels.
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
    out += (row.to(tl.int64) * HEADS + head) * seen * DIM
    parts = pages * (PAGE // TILE)
    if tile < parts:
        page = tl.load(block_table + row.to(tl.int64) * table_row + tile // (PAGE // TILE))
        block = page.to(tl.int64) * HEADS + head
        first = left + sinks + (tile // (PAGE // TILE)) * PAGE
        fields = move_to_block(Fields(codes, scale, offset, order), block, SIDE)
        at = out + first.to(tl.int64) * DIM
        begin = (tile % (PAGE // TILE)) * (TILE // SIDE.places)
        if SIDE.rotated > 0:
            _write_rotated(at, seen - first, fields, begin, SIDE, TILE)
        else:
            for section in tl.static_range(len(SIDE.sections)):
                _write_section(at, seen - first, fields, begin, section, SIDE, WIDE, TILE)
    else:
        column = (tile - parts) * TILE + tl.arange(0, TILE)
        behind = column >= left + sinks
        slot = column - left
        column = tl.where(behind, column + pages * PAGE, column)
        source = window + row.to(tl.int64) * window_row + head * window_head
        source += slot.to(tl.int64)[:, None] * window_slot
        held = (slot >= 0) & (slot < exact)
        target = out + column.to(tl.int64)[:, None] * DIM
        for start in tl.static_range(0, DIM, W_WIDE):
            channel = start + tl.arange(0, W_WIDE)
            inside = (channel < DIM)[None, :]
            x = tl.load(source + channel[None, :], mask=held[:, None] & inside, other=0.0)
            tl.store(target + channel[None, :], x, mask=(column < seen)[:, None] & inside)


TILE_NUMBERS = 8192  # numbers of one tile: 64 of each thread of four warps


@cache
def dense_constants(spec: SideSpec) -> dict[str, Any]:
    """Return the dense kernel's compile-time arguments."""
    side = side_layout(spec)
    scale_tokens, scale_channels = side.scale_tokens, side.scale_channels
    tile = min(side.page, MAX_TILE)
    if tile > scale_tokens >= MIN_SIZE:
        tile = scale_tokens  # one scale per channel of a tile in place of one per number
    widest = TILE_NUMBERS // tile
    if side.rotated:  # whole tokens at once
        tile = min(tile, TILE_NUMBERS // power_of_two(side.dim))
    width = max(section[1] for section in side.sections)
    runs = 1 if side.places > 1 else side.sections[-1][2]
    wide = min(power_of_two(width), widest // runs)
    groups_fit = width % scale_channels == 0 and power_of_two(scale_channels) == scale_channels
    if scale_tokens < tile and groups_fit and scale_channels >= MIN_SIZE:
        wide = min(wide, scale_channels)  # one scale per token of a tile
    return {"SIDE": side, "WIDE": wide, "W_WIDE": min(power_of_two(side.dim), widest), "TILE": tile}


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
    index = out.get_device()
    kernel = kept(
        kv.launches,
        ("dense", side, id(kv.spec), window.stride(), index),
        lambda: Kernel(
            kv.spec, dense_kernel, dense_constants(spec), num_warps=4, enable_fp_fusion=False
        ),
    )
    with kv.hold():
        kernel.launch(
            -(-kv.seen // kernel.constants["TILE"]), spec.num_kv_heads, kv.rows, index,
            lambda at: (
                at(out), kv.seen, at(pages["codes"]), at(pages.get("scale", out)), at(pages.get("offset", out)),
                at(pages.get("order", out)), at(kv.block_table), kv.block_table.stride(0), at(kv.num_pages), at(window),
                *window.stride()[:3], at(kv.exact_lens), at(kv.padding), kv.sink_tokens,
            ),
        )  # fmt: skip
    return out
