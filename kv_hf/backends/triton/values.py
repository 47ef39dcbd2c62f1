"""One tile of values to weighted sums, with scales folded into the weights (docs/kernels_gpu.md has the algebra).

Knows nothing of rows, splits and softmax. Channels lie on the rows of the products, query columns on their columns.
"""

import triton
import triton.language as tl

from .dequant import run_unit, tile_unit, unpack
from .tiles import chunk_size, chunk_start, group_of, reaches_past


@triton.jit
def load_value_factors(
    scale,
    offset,
    tokens,
    live,
    DIM: tl.constexpr,
    GROUP: tl.constexpr,
    CODE: tl.constexpr,
    FOLD: tl.constexpr,
    GUARD: tl.constexpr,
):
    """Load a tile's scales (and offsets) of values, to be used one tile later.

    Args:
        scale, offset: DIM / GROUP numbers per token; tokens: [tokens], block * page size + place in the page.
        live: where GUARD, 1 if there is such a tile and 0 if nothing is to be read.
    Returns: FOLD "token": (scale of each group ..) or (scale, offset of each group ..), each [tokens]; else ().
    """
    factors = ()
    if FOLD == "token":
        for g in tl.static_range(DIM // GROUP):
            at = tokens * (DIM // GROUP) + g
            if GUARD:
                held = tl.zeros(tokens.shape, tl.int32) < live
                factors = factors + (tl.load(scale + at, mask=held, other=0.0),)
                if CODE == "unsigned":
                    factors = factors + (tl.load(offset + at, mask=held, other=0.0),)
            else:
                factors = factors + (tl.load(scale + at),)
                if CODE == "unsigned":
                    factors = factors + (tl.load(offset + at),)
    return factors


@triton.jit
def add_exact(
    values,
    held,
    weights,
    acc,
    WIDTH: tl.constexpr,
    RUNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    HELD: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add weights [tokens, columns] times exact values to the parts of acc; `values` [tokens] points to channels."""
    w = weights.to(DTYPE)
    new = ()
    for c in tl.static_range(len(CHUNKS)):
        for r in tl.static_range(RUNS):
            place = chunk_start(CHUNKS, c) + tl.arange(0, chunk_size(CHUNKS, c))
            where = values[None, :] + (r * WIDTH + place)[:, None]
            if HELD:
                x = tl.load(where, mask=held[None, :] & (place < WIDTH)[:, None], other=0.0)
            elif reaches_past(CHUNKS, c, WIDTH):
                x = tl.load(where, mask=(place < WIDTH)[:, None], other=0.0)
            else:
                x = tl.load(where)
            new = new + (tl.dot(x.to(DTYPE), w, acc[c * RUNS + r], input_precision=PRECISION),)
    return new


@triton.jit
def add_codes(
    codes,
    loaded,
    scale,
    offset,
    tokens,
    weights,
    keep,
    acc,
    offsets,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    CHUNKS: tl.constexpr,
    CODE: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    FOLD: tl.constexpr,
    BOOST: tl.constexpr,
    DTYPE: tl.constexpr,
    ISA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add weights [tokens, columns] times one tile of encoded values to the parts of acc.

    Args:
        codes: [tokens], pointers to each token's byte in the first row of bytes; rows lie PAGE bytes apart.
        loaded: of `load_value_factors`; scale, offset, tokens: as there, read here where FOLD is "element".
        keep: [columns], what the earlier sums are multiplied by.
        acc: parts of [size, columns], in units of BOOST * tile_unit * run_unit.
        offsets: per group [tokens, columns], sums of weight * offset that are still to be added up over tokens.
    Returns: acc, offsets.
    """
    RUNS: tl.constexpr = DIM // WIDTH
    factors = ()
    sums = ()
    if FOLD == "element":
        factors = (weights.to(DTYPE),)
        sums = offsets
    else:
        for g in tl.static_range(DIM // GROUP):
            s = loaded[2 * g if CODE == "unsigned" else g].to(tl.float32) * BOOST
            factors = factors + ((weights * s[:, None]).to(DTYPE),)
            if CODE == "unsigned":
                o = loaded[2 * g + 1].to(tl.float32)
                sums = sums + (tl.fma(offsets[g], keep[None, :], weights * o[:, None]),)
    new = ()
    for c in tl.static_range(len(CHUNKS)):
        place = chunk_start(CHUNKS, c) + tl.arange(0, chunk_size(CHUNKS, c))
        where = codes[None, :] + (place * PAGE)[:, None]
        x = (
            tl.load(where, mask=(place < WIDTH)[:, None], other=0)
            if reaches_past(CHUNKS, c, WIDTH)
            else tl.load(where)
        )
        runs = unpack(x, CODE, BITS, tl.float32 if FOLD == "element" else DTYPE, ISA)
        for r in tl.static_range(RUNS):
            v = runs[r]
            total = acc[c * RUNS + r] * keep[None, :]
            if FOLD == "element":
                group = (r * WIDTH + place) // GROUP
                inside = (place < WIDTH)[:, None]
                at = (tokens * (DIM // GROUP))[None, :] + group[:, None]
                s = tl.load(scale + at, mask=inside, other=0.0).to(tl.float32)
                v = v * s
                if CODE == "unsigned":
                    o = tl.load(offset + at, mask=inside, other=0.0)
                    v = v + o.to(tl.float32)
                w = factors[0]
            else:
                w = factors[(r * WIDTH + chunk_start(CHUNKS, c)) // GROUP]
            new = new + (tl.dot(v.to(DTYPE), w, total, input_precision=PRECISION),)
    return new, sums


@triton.jit
def settle(
    acc, offsets, WIDTH: tl.constexpr, RUNS: tl.constexpr, CHUNKS: tl.constexpr, CODE: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, FOLD: tl.constexpr, BOOST: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Bring the parts of acc from `add_codes` to plain units and add the sums of offsets."""
    new = ()
    for p in tl.static_range(len(acc)):
        part = acc[p]
        if FOLD == "token":
            part = part * (1.0 / (BOOST * tile_unit(BITS, ISA) * run_unit(p % RUNS, BITS, ISA)))
            if CODE == "unsigned":
                part += tl.sum(offsets[group_of(p, WIDTH, RUNS, CHUNKS, GROUP)], 0)[None, :]
        new = new + (part,)
    return new
