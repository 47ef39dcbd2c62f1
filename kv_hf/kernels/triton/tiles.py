"""One tile of a page: its keys to scores, its values to weighted sums, with scales and offsets folded in.

Decides which factor goes where (docs/kernels_gpu.md has the algebra); knows nothing of rows, splits and softmax.
Tiles are cut along the bytes of a token into `CHUNKS` ((start, size), ..), sizes being powers of two; the last
may reach past WIDTH and is masked there. Part c * RUNS + r is chunk c of run r: channels r * WIDTH + start + ...
"""

import triton
import triton.language as tl

from .dequant import run_unit, tile_unit, unpack


@triton.jit
def load_query(
    pointers, held, DIM: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr, scale, DTYPE: tl.constexpr
):
    """Load the query columns part by part, times `scale` [columns], as [size, columns] in DTYPE."""
    parts = ()
    for c in tl.static_range(len(CHUNKS)):
        start: tl.constexpr = CHUNKS[c][0]
        size: tl.constexpr = CHUNKS[c][1]
        for r in tl.static_range(DIM // WIDTH):
            place = start + tl.arange(0, size)
            inside = (place < WIDTH)[:, None] & held[None, :]
            part = tl.load(pointers[None, :] + (r * WIDTH + place)[:, None], mask=inside, other=0.0)
            parts = parts + ((part.to(tl.float32) * scale[None, :]).to(DTYPE),)
    return parts


@triton.jit
def score_exact(keys, held, query, DIM: tl.constexpr, CHUNKS: tl.constexpr, HELD: tl.constexpr, PRECISION: tl.constexpr):
    """Scores of exact tokens: `keys` [tokens] points to each one's channels, read where `held`."""
    scores = tl.zeros([keys.shape[0], query[0].shape[1]], tl.float32)
    for c in tl.static_range(len(CHUNKS)):
        start: tl.constexpr = CHUNKS[c][0]
        size: tl.constexpr = CHUNKS[c][1]
        place = start + tl.arange(0, size)
        where = keys[:, None] + place[None, :]
        if HELD:
            x = tl.load(where, mask=held[:, None] & (place < DIM)[None, :], other=0.0)
        elif start + size > DIM:
            x = tl.load(where, mask=(place < DIM)[None, :], other=0.0)
        else:
            x = tl.load(where)
        scores = tl.dot(x.to(query[c].dtype), query[c], scores, input_precision=PRECISION)
    return scores


@triton.jit
def add_exact(
    values, held, weights, acc, WIDTH: tl.constexpr, RUNS: tl.constexpr, CHUNKS: tl.constexpr, HELD: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):
    """Add weights [tokens, columns] times exact values to the parts of acc; `values` [tokens] points to channels."""
    w = weights.to(DTYPE)
    new = ()
    for c in tl.static_range(len(CHUNKS)):
        start: tl.constexpr = CHUNKS[c][0]
        size: tl.constexpr = CHUNKS[c][1]
        for r in tl.static_range(RUNS):
            place = start + tl.arange(0, size)
            where = values[None, :] + (r * WIDTH + place)[:, None]
            if HELD:
                x = tl.load(where, mask=held[None, :] & (place < WIDTH)[:, None], other=0.0)
            elif start + size > WIDTH:
                x = tl.load(where, mask=(place < WIDTH)[:, None], other=0.0)
            else:
                x = tl.load(where)
            new = new + (tl.dot(x.to(DTYPE), w, acc[c * RUNS + r], input_precision=PRECISION),)
    return new


@triton.jit
def score_codes(
    codes, scale, offset, query, DIM: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr,
    CODE: tl.constexpr, BITS: tl.constexpr, FOLD: tl.constexpr, ISA: tl.constexpr, PRECISION: tl.constexpr,
):
    """Scores of one tile of encoded keys.

    Args:
        codes: [tokens], pointers to each token's bytes.
        scale, offset: pointers, to numbers of the tile: FOLD "page" to one scale and DIM offsets; "tile" to DIM
            of each; "element" [tokens] pointers to DIM of each.
        query: parts of [size, columns]; with FOLD "tile" they get the scales as factors here.
    Returns: [tokens, columns] fp32.
    """
    DTYPE: tl.constexpr = query[0].dtype
    TOKENS: tl.constexpr = codes.shape[0]
    RUNS: tl.constexpr = DIM // WIDTH
    COLUMNS: tl.constexpr = query[0].shape[1]
    scores = tl.zeros([TOKENS, COLUMNS], tl.float32)
    bias = tl.zeros([TOKENS, COLUMNS], tl.float32)
    for c in tl.static_range(len(CHUNKS)):
        start: tl.constexpr = CHUNKS[c][0]
        size: tl.constexpr = CHUNKS[c][1]
        MASKED: tl.constexpr = start + size > WIDTH
        place = start + tl.arange(0, size)
        where = codes[:, None] + place[None, :]
        x = tl.load(where, mask=(place < WIDTH)[None, :], other=0) if MASKED else tl.load(where)
        runs = unpack(x, CODE, BITS, tl.float32 if FOLD == "element" else DTYPE, ISA)
        for r in tl.static_range(RUNS):
            q = query[c * RUNS + r]
            channel = r * WIDTH + place
            if FOLD == "element":
                inside = (place < WIDTH)[None, :]
                s = tl.load(scale[:, None] + channel[None, :], mask=inside, other=0.0).to(tl.float32)
                o = tl.load(offset[:, None] + channel[None, :], mask=inside, other=0.0).to(tl.float32)
                k = (runs[r] * s + o).to(DTYPE)
                scores = tl.dot(k, q, scores, input_precision=PRECISION)
            else:
                at = offset + channel
                o = tl.load(at, mask=place < WIDTH, other=0.0) if MASKED else tl.load(at)
                # as a matrix product of rows that are all equal: exact products, and no sums across threads
                rows = tl.broadcast_to(o.to(DTYPE)[None, :], [TOKENS, size])
                bias = tl.dot(rows, q, bias, input_precision=PRECISION)
                if FOLD == "tile":
                    at = scale + channel
                    s = tl.load(at, mask=place < WIDTH, other=0.0) if MASKED else tl.load(at)
                    q = (q * (1.0 / run_unit(r, BITS, ISA))) * s.to(DTYPE)[:, None]
                scores = tl.dot(runs[r], q, scores, input_precision=PRECISION)
    if FOLD == "element":
        return scores
    elif FOLD == "tile":
        return tl.fma(scores, 1.0 / tile_unit(BITS, ISA), bias) if ISA > 0 else scores + bias
    else:
        return tl.fma(scores, tl.load(scale).to(tl.float32), bias)


@triton.jit
def add_codes(
    codes, scale, offset, weights, keep, acc, offsets, DIM: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, CHUNKS: tl.constexpr, CODE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, FOLD: tl.constexpr,
    BOOST: tl.constexpr, DTYPE: tl.constexpr, ISA: tl.constexpr, PRECISION: tl.constexpr,
):
    """Add weights [tokens, columns] times one tile of encoded values to the parts of acc.

    Args:
        codes: [tokens], pointers to each token's byte in the first row of bytes; rows lie PAGE bytes apart.
        scale, offset: [tokens], pointers to each token's DIM / GROUP scales and offsets.
        keep: [columns], what the earlier sums are multiplied by.
        acc: parts of [size, columns], in units of BOOST * tile_unit * run_unit.
        offsets: per group [tokens, columns], sums of weight * offset that are still to be added up over tokens.
    Returns: acc, offsets.
    """
    TOKENS: tl.constexpr = weights.shape[0]
    RUNS: tl.constexpr = DIM // WIDTH
    factors = ()
    sums = ()
    if FOLD == "element":
        factors = (weights.to(DTYPE),)
        sums = offsets
    else:
        for g in tl.static_range(DIM // GROUP):
            s = tl.load(scale + g).to(tl.float32) * BOOST
            factors = factors + ((weights * s[:, None]).to(DTYPE),)
            if CODE == "unsigned":
                o = tl.load(offset + g).to(tl.float32)
                sums = sums + (tl.fma(offsets[g], keep[None, :], weights * o[:, None]),)
    new = ()
    for c in tl.static_range(len(CHUNKS)):
        start: tl.constexpr = CHUNKS[c][0]
        size: tl.constexpr = CHUNKS[c][1]
        MASKED: tl.constexpr = start + size > WIDTH
        place = start + tl.arange(0, size)
        where = codes[None, :] + (place * PAGE)[:, None]
        x = tl.load(where, mask=(place < WIDTH)[:, None], other=0) if MASKED else tl.load(where)
        runs = unpack(x, CODE, BITS, tl.float32 if FOLD == "element" else DTYPE, ISA)
        for r in tl.static_range(RUNS):
            v = runs[r]
            total = acc[c * RUNS + r] * keep[None, :]
            if FOLD == "element":
                group = (r * WIDTH + place) // GROUP
                inside = (place < WIDTH)[:, None]
                s = tl.load(scale[None, :] + group[:, None], mask=inside, other=0.0).to(tl.float32)
                v = v * s
                if CODE == "unsigned":
                    o = tl.load(offset[None, :] + group[:, None], mask=inside, other=0.0)
                    v = v + o.to(tl.float32)
                w = factors[0]
            else:
                w = factors[(r * WIDTH + start) // GROUP]
            new = new + (tl.dot(v.to(DTYPE), w, total, input_precision=PRECISION),)
    return new, sums
