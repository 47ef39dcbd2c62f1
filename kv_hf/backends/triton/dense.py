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
from .dequant import SCALE_MAX, move_to_block, number, row_of, unrotate
from .direct import SPECIALIZED, Fields, Kernel, Strided, kept, rows_of
from .meta_params import MAX_TILE, MIN_SIZE, power_of_two, side_layout


@triton.jit
def _factors(
    pointer, token, start, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, SIDE: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Load the scales (or offsets), one per TOKENS x CHANNELS, of tokens at WIDE places; one in place of equal ones along an axis."""
    if token.shape[0] <= TOKENS:
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
        if SIDE.token_contiguous:
            where = (byte * SIDE.page)[None, :] + token[:, None]
        else:
            where = (token * SIDE.size)[:, None] + byte[None, :]
    x = tl.load(codes + where, mask=inside[None, :], other=0).to(tl.int32) >> shift
    return (x & ((1 << BITS) - 1)) << SIDE.planes[NUMBER].low


@triton.jit
def _load_numbers(fields, token, start, SIDE: tl.constexpr, WIDE: tl.constexpr):
    """Load what tokens of one page and head, `fields` of it, hold at WIDE places from `start` on: fp32 or exact."""
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
        x = x * _factors(fields.scale, token, start, S_TOKENS, S_CHANNELS, SIDE, WIDE)
        if O_TOKENS > 0:
            x = x + _factors(fields.offset, token, start, O_TOKENS, O_CHANNELS, SIDE, WIDE)
        if SIDE.rotated > 0:
            x = unrotate(x, SIDE.rotated, 1)
        return x


@triton.jit
def _write_tile(target, fields, token, held, SIDE: tl.constexpr, WIDE: tl.constexpr):
    """Write tokens of one page and head, where `held`, to `target` [tokens, 1], pointers to channel 0."""
    DIM: tl.constexpr = SIDE.dim
    for start in tl.static_range(0, DIM, WIDE):
        place = start + tl.arange(0, WIDE)
        inside = place < DIM
        x = _load_numbers(fields, token, start, SIDE, WIDE)
        if SIDE.code != "none" and target.dtype.element_ty == tl.float16:
            # a scale rounded up may push the largest code just past float16's range
            x = tl.minimum(tl.maximum(x, -SCALE_MAX), SCALE_MAX)
        channel = place
        if SIDE.wide > 0:
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


TILE_NUMBERS = 8192  # numbers of one tile: 64 of each thread of four warps


@cache
def dense_constants(spec: SideSpec) -> dict[str, Any]:
    """Return the dense kernel's compile-time arguments."""
    side, padded = side_layout(spec), power_of_two(spec.head_dim)
    tile = min(side.page, MAX_TILE)
    if tile > side.scale_tokens >= MIN_SIZE:
        tile = side.scale_tokens  # one scale per channel of a tile in place of one per number
    if side.rotated:  # whole tokens at once
        tile = min(tile, TILE_NUMBERS // padded)
    wide = min(padded, TILE_NUMBERS // tile)
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
    index = out.get_device()
    kernel = kept(
        kv.launches,
        ("dense", side, id(kv.spec), window.stride(), index),
        lambda: Kernel(kv.spec, dense_kernel, dense_constants(spec), enable_fp_fusion=False),
    )
    with kv.hold():
        kernel.launch(
            -(-kv.seen // kernel.constants["TILE"]), spec.num_kv_heads, kv.rows, index,
            lambda at: (
                (at(out),), Fields.of(at, pages), Strided.of(at, window), *rows_of(at, kv), kv.seen
            ),
        )  # fmt: skip
    return out
