"""One tile of keys to scores, with scales and offsets folded into the query (docs/kernels.md has the algebra).

Knows nothing of rows, splits and softmax. Tokens lie on the rows of the products, query columns on their columns.
"""

import triton
import triton.language as tl

from .dequant import run_unit, tile_unit, unpack
from .tiles import chunk_size, chunk_start, load_parts, reaches_past


@triton.jit
def load_key_factors(
    scale,
    offset,
    block,
    token,
    live,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    D_CHUNKS: tl.constexpr,
    FOLD: tl.constexpr,
    GUARD: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Load a tile's scales and offsets of keys, to be used one tile later.

    Args:
        scale, offset: FOLD "page": one scale and DIM offsets per block; else DIM of each per GROUP tokens.
        block: page * heads + head; token: first token of the tile in its page.
        live: where GUARD, 1 if there is such a tile and 0 if nothing is to be read.
        CHUNKS, D_CHUNKS: how WIDTH and DIM are cut.
    Returns: offsets (each chunk of DIM) and scales (FOLD "page": one; "tile": each part), or two empty tuples.
    """
    offsets = ()
    scales = ()
    if FOLD == "page" or FOLD == "tile":
        for g in tl.static_range(GROUPS):
            first = (block * (PAGE // GROUP) + token // GROUP + g) * DIM
            offsets = offsets + load_parts(offset + first, live, DIM, DIM, D_CHUNKS, GUARD)
            if FOLD == "tile":
                scales = scales + load_parts(scale + first, live, DIM, WIDTH, CHUNKS, GUARD)
        if FOLD == "page":
            one = (
                tl.load(scale + block, mask=live > 0, other=0.0)
                if GUARD
                else tl.load(scale + block)
            )
            scales = (one.to(tl.float32),)
    return offsets, scales


@triton.jit
def score_exact(
    keys,
    held,
    query,
    DIM: tl.constexpr,
    CHUNKS: tl.constexpr,
    HELD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Scores of exact tokens: `keys` [tokens] points to each one's channels, read where `held`."""
    scores = tl.zeros([keys.shape[0], query[0].shape[1]], tl.float32)
    for c in tl.static_range(len(CHUNKS)):
        place = chunk_start(CHUNKS, c) + tl.arange(0, chunk_size(CHUNKS, c))
        where = keys[:, None] + place[None, :]
        if HELD:
            x = tl.load(where, mask=held[:, None] & (place < DIM)[None, :], other=0.0)
        elif reaches_past(CHUNKS, c, DIM):
            x = tl.load(where, mask=(place < DIM)[None, :], other=0.0)
        else:
            x = tl.load(where)
        scores = tl.dot(x.to(query[c].dtype), query[c], scores, input_precision=PRECISION)
    return scores


@triton.jit
def score_codes(
    codes,
    offsets,
    scales,
    offset,
    scale,
    groups,
    query,
    whole_query,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    D_CHUNKS: tl.constexpr,
    CODE: tl.constexpr,
    BITS: tl.constexpr,
    FOLD: tl.constexpr,
    ISA: tl.constexpr,
    PRECISION: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Scores of one tile of encoded keys, or of its piece number PIECE, a token group.

    Args:
        codes: [tokens], pointers to each token's bytes.
        offsets, scales: of `load_key_factors`.
        offset, scale: as there, read here where FOLD is "element"; groups: [tokens], each one's row of DIM of them.
        query: parts of [size, columns]; with FOLD "tile" they get the scales as factors here.
        whole_query: the same numbers in chunks of DIM.
    Returns: [tokens, columns] fp32.
    """
    DTYPE: tl.constexpr = query[0].dtype
    TOKENS: tl.constexpr = codes.shape[0]
    RUNS: tl.constexpr = DIM // WIDTH
    COLUMNS: tl.constexpr = query[0].shape[1]
    scores = tl.zeros([TOKENS, COLUMNS], tl.float32)
    for c in tl.static_range(len(CHUNKS)):
        place = chunk_start(CHUNKS, c) + tl.arange(0, chunk_size(CHUNKS, c))
        where = codes[:, None] + place[None, :]
        inside = (place < WIDTH)[None, :]
        x = (
            tl.load(where, mask=inside, other=0)
            if reaches_past(CHUNKS, c, WIDTH)
            else tl.load(where)
        )
        runs = unpack(x, CODE, BITS, tl.float32 if FOLD == "element" else DTYPE, ISA)
        for r in tl.static_range(RUNS):
            q = query[c * RUNS + r]
            k = runs[r]
            if FOLD == "element":
                at = (groups * DIM)[:, None] + (r * WIDTH + place)[None, :]
                k = k * tl.load(scale + at, mask=inside, other=0.0).to(tl.float32)
                k = k + tl.load(offset + at, mask=inside, other=0.0).to(tl.float32)
            elif FOLD == "tile":
                q = (q * (1.0 / run_unit(r, BITS, ISA))) * scales[
                    (PIECE * len(CHUNKS) + c) * RUNS + r
                ].to(DTYPE)[:, None]
            scores = tl.dot(k.to(DTYPE), q, scores, input_precision=PRECISION)
    if FOLD != "element":
        # offsets as a matrix product of rows that are all equal: exact products, and no sums across threads
        bias = tl.zeros([TOKENS, COLUMNS], tl.float32)
        for c in tl.static_range(len(D_CHUNKS)):
            rows = tl.broadcast_to(
                offsets[PIECE * len(D_CHUNKS) + c].to(DTYPE)[None, :],
                [TOKENS, chunk_size(D_CHUNKS, c)],
            )
            bias = tl.dot(rows, whole_query[c], bias, input_precision=PRECISION)
        unit = (
            tl.full([1, 1], 1.0 / tile_unit(BITS, ISA), tl.float32) if FOLD == "tile" else scales[0]
        )
        scores = tl.fma(scores, tl.broadcast_to(unit, scores.shape), bias)
    return scores


@triton.jit
def _stack_two(first, second):
    both = tl.permute(tl.join(first, second), (2, 0, 1))
    return tl.reshape(both, (2 * first.shape[0], first.shape[1]))


@triton.jit
def stack(parts):
    """Return one, two or four equal parts [tokens, columns], one behind the other along the tokens."""
    if len(parts) == 1:
        whole = parts[0]
    elif len(parts) == 2:
        whole = _stack_two(parts[0], parts[1])
    else:
        whole = _stack_two(_stack_two(parts[0], parts[1]), _stack_two(parts[2], parts[3]))
    return whole
