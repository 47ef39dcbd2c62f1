"""Latents whose scales and offsets belong to channels: products of a token group's codes, and what is folded where.

    score  += (q * scale) @ codes + q . offset
    acc    += (weights @ codes) * scale + (sum of weights) * offset

The query gets the scales once per group, and sums of products get them once per group: codes stay as they are.
"""

import triton
import triton.language as tl

from .dequant import tile_unit
from .words import place_unit


@triton.jit
def load_channels(
    factors, FIRST: tl.constexpr, CHUNKS: tl.constexpr, STRIDE: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr,
    DIM: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """Load the scales or offsets of channels, `factors` points to channel 0's, as [CHUNKS, WIDE]; cut as in load_tile."""
    place = tl.arange(0, WIDE)[None, :]
    channel = tl.arange(0, CHUNKS)[:, None] * STRIDE + place + FIRST
    if SIZE < WIDE or FIRST + (CHUNKS - 1) * STRIDE + SIZE > DIM:
        return tl.load(
            factors + channel, mask=(place < SIZE) & (channel < DIM), other=0, cache_modifier=CACHE
        )
    else:
        return tl.load(factors + channel, cache_modifier=CACHE)


@triton.jit
def load_factors(
    scale, offset, first_group, token, STEP: tl.constexpr, SHARE: tl.constexpr, STRIDE: tl.constexpr,
    GROUP: tl.constexpr, CHUNKS: tl.constexpr, RUNS: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    """Load scales and offsets of a tile's STEP places, group by group and run by run, each [CHUNKS, WIDE].

    Args:
        first_group: number of the page's first group; token: of place 0 in its page.
    """
    factors = ()
    for i in tl.static_range(0, STEP, SHARE):
        at = (first_group + (token + i * STRIDE) // GROUP) * DIM
        for r in tl.static_range(RUNS):
            # the hint keeps these loads apart from those of `score_channels`
            by = load_channels(scale + at, r * SIZE, CHUNKS, RUNS * SIZE, SIZE, WIDE, DIM, ".ca")
            o = load_channels(offset + at, r * SIZE, CHUNKS, RUNS * SIZE, SIZE, WIDE, DIM, ".ca")
            factors = factors + (by, o)
    return factors


@triton.jit
def score_offsets(
    scores, query, offsets, FIRST: tl.constexpr, STRIDE: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add query . offsets to scores [CHUNKS, columns, rows], the same in all rows.

    As a matrix product of columns that are all equal: exact products, and no sums across threads.
    """
    CHUNKS: tl.constexpr = query.shape[0]
    WIDE: tl.constexpr = query.shape[2]
    o = load_channels(offsets, FIRST, CHUNKS, STRIDE, SIZE, WIDE, DIM, "").to(query.dtype)
    equal = tl.broadcast_to(o[:, :, None], [CHUNKS, WIDE, scores.shape[2]])
    return tl.dot(query, equal, scores, input_precision=PRECISION)


@triton.jit
def score_channels(
    numbers, query, bias, scale, offset, row_unit, FIRST: tl.constexpr, SHARE: tl.constexpr, COPIES: tl.constexpr,
    BITS: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr, ISA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Score the SHARE places from FIRST on, of one token group: tiles [chunks, columns, rows], one per place.

    Args:
        numbers: codes, run by run and place by place; query: run by run, [chunks, columns, wide].
        bias: [chunks, columns, rows], what all scores begin with.
        scale, offset: pointers to channel 0's of the group; row_unit: [rows], the units of a place's rows.
    """
    RUNS: tl.constexpr = len(numbers)
    CHUNKS: tl.constexpr = query[0].shape[0]
    WIDE: tl.constexpr = query[0].shape[2]
    products = ()
    for _ in tl.static_range(SHARE):
        products = products + (tl.zeros(bias.shape, tl.float32),)
    for r in tl.static_range(RUNS):
        bias = score_offsets(bias, query[r], offset, r * SIZE, RUNS * SIZE, SIZE, DIM, PRECISION)
        by = load_channels(scale, r * SIZE, CHUNKS, RUNS * SIZE, SIZE, WIDE, DIM, "")
        scaled = query[r] * by.to(query[r].dtype)[:, None, :]
        more = ()
        for i in tl.static_range(SHARE):
            k = tl.trans(numbers[r][FIRST + i], (0, 2, 1))
            more = more + (tl.dot(scaled, k, products[i], input_precision=PRECISION),)
        products = more
    scores = ()
    for i in tl.static_range(SHARE):
        unit = row_unit * (1.0 / tile_unit(BITS, ISA) / place_unit((FIRST + i) * COPIES, BITS, ISA))
        unit = tl.broadcast_to(unit[None, None, :], bias.shape)
        scores = scores + (tl.fma(products[i], unit, bias),)
    return scores


@triton.jit
def add_channels(
    acc, numbers, parts, held, by, offset, row_unit, FIRST: tl.constexpr, PART: tl.constexpr, SHARE: tl.constexpr,
    COPIES: tl.constexpr, BITS: tl.constexpr, BOOST: tl.constexpr, DTYPE: tl.constexpr, ISA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the weighted codes of one token group and run to acc [chunks, columns, wide], in units of BOOST * tile_unit.

    Args:
        numbers: codes place by place, the group's SHARE from FIRST on; parts: weights [columns, rows], from PART on.
        held: [columns], the group's sum of weights; by, offset: [chunks, wide], its scales and offsets.
    """
    product = tl.zeros(acc.shape, tl.float32)
    for i in tl.static_range(SHARE):
        unit = row_unit * (BOOST / place_unit((FIRST + i) * COPIES, BITS, ISA))
        w = (parts[PART + i] * unit[None, :]).to(DTYPE)
        w = tl.broadcast_to(w[None, :, :], [acc.shape[0], w.shape[0], w.shape[1]])
        product = tl.dot(w, numbers[FIRST + i], product, input_precision=PRECISION)
    by = tl.broadcast_to(by.to(tl.float32)[:, None, :], acc.shape)
    held = held * (BOOST * tile_unit(BITS, ISA))
    return tl.fma(product, by, acc) + held[None, :, None] * offset.to(tl.float32)[:, None, :]
