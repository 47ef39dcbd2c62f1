"""One tile of a page: its keys to scores, its values to weighted sums, with scales and offsets folded in.

Decides which factor goes where (docs/kernels_gpu.md has the algebra); knows nothing of rows, splits and softmax.
Tiles are cut along the bytes of a token into `CHUNKS` ((start, size), ..), sizes being powers of two; the last
may reach past WIDTH and is masked there. Part c * RUNS + r is chunk c of run r: channels r * WIDTH + start + ...
"""

import triton
import triton.language as tl

from .dequant import run_unit, tile_unit, unpack


@triton.constexpr_function
def chunk_start(CHUNKS, c):
    """Return the first place of chunk `c`."""
    return CHUNKS[c][0]


@triton.constexpr_function
def chunk_size(CHUNKS, c):
    """Return the places of chunk `c`, a power of two."""
    return CHUNKS[c][1]


@triton.constexpr_function
def reaches_past(CHUNKS, c, WIDTH):
    """Return whether chunk `c` reaches past `WIDTH` and must be masked."""
    return sum(CHUNKS[c]) > WIDTH


@triton.jit
def load_query(
    pointers,
    held,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    scale,
    DTYPE: tl.constexpr,
):
    """Load the query columns part by part, times `scale` [columns], as [size, columns] in DTYPE."""
    parts = ()
    for c in tl.static_range(len(CHUNKS)):
        for r in tl.static_range(DIM // WIDTH):
            place = chunk_start(CHUNKS, c) + tl.arange(0, chunk_size(CHUNKS, c))
            inside = (place < WIDTH)[:, None] & held[None, :]
            part = tl.load(pointers[None, :] + (r * WIDTH + place)[:, None], mask=inside, other=0.0)
            parts = parts + ((part.to(tl.float32) * scale[None, :]).to(DTYPE),)
    return parts


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
def _load_parts(pointers, DIM: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr):
    """Load DIM numbers part by part, each [size]."""
    parts = ()
    for c in tl.static_range(len(CHUNKS)):
        place = chunk_start(CHUNKS, c) + tl.arange(0, chunk_size(CHUNKS, c))
        for r in tl.static_range(DIM // WIDTH):
            at = pointers + r * WIDTH + place
            if reaches_past(CHUNKS, c, WIDTH):
                parts = parts + (tl.load(at, mask=place < WIDTH, other=0.0),)
            else:
                parts = parts + (tl.load(at),)
    return parts


@triton.jit
def load_key_factors(
    scale,
    offset,
    block,
    token,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    D_CHUNKS: tl.constexpr,
    FOLD: tl.constexpr,
):
    """Load a tile's scales and offsets of keys, to be used one tile later.

    Args:
        scale, offset: FOLD "page": one scale and DIM offsets per block; else DIM of each per GROUP tokens.
        block: page * heads + head; token: first token of the tile in its page.
        CHUNKS, D_CHUNKS: how WIDTH and DIM are cut.
    Returns: offsets (each chunk of DIM) and scales (FOLD "page": one; "tile": each part), or two empty tuples.
    """
    offsets = ()
    scales = ()
    if FOLD == "page" or FOLD == "tile":
        first = (block * (PAGE // GROUP) + token // GROUP) * DIM
        offsets = _load_parts(offset + first, DIM, DIM, D_CHUNKS)
        if FOLD == "page":
            scales = (tl.load(scale + block).to(tl.float32),)
        else:
            scales = _load_parts(scale + first, DIM, WIDTH, CHUNKS)
    return offsets, scales


@triton.jit
def load_value_factors(
    scale,
    offset,
    tokens,
    DIM: tl.constexpr,
    GROUP: tl.constexpr,
    CODE: tl.constexpr,
    FOLD: tl.constexpr,
):
    """Load a tile's scales (and offsets) of values, to be used one tile later.

    Args:
        scale, offset: DIM / GROUP numbers per token; tokens: [tokens], block * page size + place in the page.
    Returns: FOLD "token": (scale of each group ..) or (scale, offset of each group ..), each [tokens]; else ().
    """
    factors = ()
    if FOLD == "token":
        for g in tl.static_range(DIM // GROUP):
            factors = factors + (tl.load(scale + tokens * (DIM // GROUP) + g),)
            if CODE == "unsigned":
                factors = factors + (tl.load(offset + tokens * (DIM // GROUP) + g),)
    return factors


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
):
    """Scores of one tile of encoded keys.

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
                q = (q * (1.0 / run_unit(r, BITS, ISA))) * scales[c * RUNS + r].to(DTYPE)[:, None]
            scores = tl.dot(k.to(DTYPE), q, scores, input_precision=PRECISION)
    if FOLD != "element":
        # offsets as a matrix product of rows that are all equal: exact products, and no sums across threads
        bias = tl.zeros([TOKENS, COLUMNS], tl.float32)
        for c in tl.static_range(len(D_CHUNKS)):
            rows = tl.broadcast_to(offsets[c].to(DTYPE)[None, :], [TOKENS, chunk_size(D_CHUNKS, c)])
            bias = tl.dot(rows, whole_query[c], bias, input_precision=PRECISION)
        unit = (
            tl.full([1, 1], 1.0 / tile_unit(BITS, ISA), tl.float32) if FOLD == "tile" else scales[0]
        )
        scores = tl.fma(scores, tl.broadcast_to(unit, scores.shape), bias)
    return scores


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
    TOKENS: tl.constexpr = weights.shape[0]
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
