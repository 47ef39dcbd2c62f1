"""One tile of values to weighted sums, with scales folded into the weights (docs/kernels.md has the algebra).

Knows nothing of rows, splits and softmax. Channels lie on the rows of the products, query columns on their columns.
"""

import triton
import triton.language as tl

from .dequant import run_unit, tile_unit, unpack, unpack_planes
from .tiles import chunk_end, chunk_size, chunk_start, group_of, reaches_past

ROWS = tl.constexpr(16)  # the fewest rows of a matrix product


@triton.constexpr_function
def offset_rows(GROUPS):
    """Return whether the offsets of so many channel groups are summed by one matrix product, a group on each row.

    One group is summed with fewer instructions number by number, beside the weights.
    """
    return GROUPS in (2, 4, 8, 16)


@triton.jit
def no_offsets(GROUPS: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr):
    """Return zeros for the sums of weight * offset that `add_codes` adds to."""
    sums = ()
    if offset_rows(GROUPS):
        sums = (tl.zeros([ROWS, COLUMNS], tl.float32),)
    else:
        for _ in tl.static_range(GROUPS):
            sums = sums + (tl.zeros([TILE, COLUMNS], tl.float32),)
    return sums


@triton.jit
def _load_held(pointers, live, GUARD: tl.constexpr):
    if GUARD:
        x = tl.load(pointers, mask=tl.zeros(pointers.shape, tl.int32) < live, other=0.0)
    else:
        x = tl.load(pointers)
    return x


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
    Returns: FOLD "token": scale of each group [tokens], and behind them the offsets of unsigned codes, alike or as one
        [groups, tokens] (see offset_rows); else ().
    """
    factors = ()
    if FOLD == "token":
        GROUPS: tl.constexpr = DIM // GROUP
        for g in tl.static_range(GROUPS):
            factors = factors + (_load_held(scale + tokens * GROUPS + g, live, GUARD),)
        if CODE == "unsigned":
            if offset_rows(GROUPS):
                rows = tl.arange(0, GROUPS)[:, None]
                factors = factors + (
                    _load_held(offset + tokens[None, :] * GROUPS + rows, live, GUARD),
                )
            else:
                for g in tl.static_range(GROUPS):
                    factors = factors + (_load_held(offset + tokens * GROUPS + g, live, GUARD),)
    return factors


@triton.jit
def _load_inside(pointers, inside, PAST: tl.constexpr):
    """Load bytes, where PAST only those `inside`."""
    if PAST:
        x = tl.load(pointers, mask=inside, other=0)
    else:
        x = tl.load(pointers)
    return x


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
                inside = (place < chunk_end(CHUNKS, c, WIDTH))[:, None]
                x = tl.load(where, mask=held[None, :] & inside, other=0.0)
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
    OFFSET: tl.constexpr,
    BOOST: tl.constexpr,
    LIFT: tl.constexpr,
    DTYPE: tl.constexpr,
    ISA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add LIFT * weights [tokens, columns] times one tile of encoded values to the parts of acc.

    Args:
        codes: [tokens], pointers to each token's byte in the first row of bytes; rows lie PAGE bytes apart.
        loaded: of `load_value_factors`; scale, offset, tokens: as there, read here where FOLD is "element".
        keep: [columns], what the earlier sums are multiplied by.
        acc: parts of [size, columns], in units of BOOST * tile_unit * run_unit.
        offsets: of `no_offsets`, sums of LIFT * weight * offset: of group g on row g, or per group [tokens, columns] that are
            still to be added up over tokens.
        OFFSET: what the numbers at `offset` are multiplied by: 1, or where they are scales, the offset in units of these.
    Returns: acc, offsets.
    """
    RUNS: tl.constexpr = DIM // WIDTH
    GROUPS: tl.constexpr = DIM // GROUP
    NUMBERS: tl.constexpr = tl.float32 if FOLD == "element" else DTYPE
    factors = ()
    sums = ()
    if FOLD == "element":
        factors = (weights.to(DTYPE),)
        sums = offsets
    else:
        for g in tl.static_range(GROUPS):
            s = loaded[g].to(tl.float32) * (BOOST / LIFT)
            factors = factors + ((weights * s[:, None]).to(DTYPE),)
        if CODE == "unsigned":
            if offset_rows(GROUPS):
                TOKENS: tl.constexpr = weights.shape[0]
                rows = tl.broadcast_to(
                    loaded[GROUPS].to(DTYPE)[None], [ROWS // GROUPS, GROUPS, TOKENS]
                )
                rows = tl.reshape(rows, [ROWS, TOKENS])
                total = offsets[0] * keep[None, :]
                sums = (tl.dot(rows, weights.to(DTYPE), total, input_precision=PRECISION),)
            else:
                for g in tl.static_range(GROUPS):
                    o = loaded[GROUPS + g].to(tl.float32)
                    sums = sums + (tl.fma(offsets[g], keep[None, :], weights * o[:, None]),)
    new = ()
    for c in tl.static_range(len(CHUNKS)):
        place = chunk_start(CHUNKS, c) + tl.arange(0, chunk_size(CHUNKS, c))
        inside = (place < chunk_end(CHUNKS, c, WIDTH))[:, None]
        where = codes[None, :] + (place * PAGE)[:, None]
        x = _load_inside(where, inside, reaches_past(CHUNKS, c, WIDTH))
        if BITS == 3:
            second = _load_inside(where + WIDTH * PAGE, inside, reaches_past(CHUNKS, c, WIDTH))
            third = _load_inside(where + 2 * WIDTH * PAGE, inside, reaches_past(CHUNKS, c, WIDTH))
            runs = unpack_planes(x, second, third, NUMBERS, ISA)
        else:
            runs = unpack(x, CODE, BITS, NUMBERS, ISA)
        for r in tl.static_range(RUNS):
            v = runs[r]
            total = acc[c * RUNS + r] * keep[None, :]
            if FOLD == "element":
                group = (r * WIDTH + place) // GROUP
                at = (tokens * (DIM // GROUP))[None, :] + group[:, None]
                s = tl.load(scale + at, mask=inside, other=0.0).to(tl.float32)
                v = v * s
                if CODE == "unsigned":
                    o = tl.load(offset + at, mask=inside, other=0.0).to(tl.float32)
                    v = v + (o if OFFSET == 1.0 else o * OFFSET)
                w = factors[0]
            else:
                w = factors[(r * WIDTH + chunk_start(CHUNKS, c)) // GROUP]
            new = new + (tl.dot(v.to(DTYPE), w, total, input_precision=PRECISION),)
    return new, sums


@triton.jit
def _offset_of(sums, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Return the sum of weight * offset [columns] of channel group GROUP."""
    if offset_rows(GROUPS):
        x = tl.where((tl.arange(0, ROWS) == GROUP)[:, None], sums[0], 0.0)
    else:
        x = sums[GROUP]
    return tl.sum(x, 0)


@triton.jit
def settle(
    acc, offsets, WIDTH: tl.constexpr, RUNS: tl.constexpr, CHUNKS: tl.constexpr, CODE: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, FOLD: tl.constexpr, OFFSET: tl.constexpr, BOOST: tl.constexpr,
    LIFT: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Bring the parts of acc from `add_codes` to plain units and add the sums of offsets."""
    new = ()
    for p in tl.static_range(len(acc)):
        part = acc[p]
        if FOLD == "token":
            part = part * (1.0 / (BOOST * tile_unit(BITS, ISA) * run_unit(p % RUNS, BITS, ISA)))
            if CODE == "unsigned":
                o = _offset_of(
                    offsets, group_of(p, WIDTH, RUNS, CHUNKS, GROUP), RUNS * WIDTH // GROUP
                )
                part += (o * (OFFSET / LIFT))[None, :]
        new = new + (part,)
    return new
