"""One tile of keys to scores, with scales and offsets folded into the query (docs/kernels.md has the algebra).

Knows nothing of rows, splits and softmax. Tokens lie on the rows of the products, query columns on their columns.

Keys of two widths lie in an order of their page, the wide channels first. SECTIONS are the wide channels and the others, each
(bits, bytes of a token, codes of a byte, first place, first byte, chunks of the bytes). Parts are those of the sections one
behind the other, each cut as tiles.py says. The query is gathered anew for each tile, in the order of the tile's page.
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


@triton.constexpr_function
def part_number(SECTIONS, s, c, r):
    """Return the number of the part that is chunk `c` of run `r` of section `s`."""
    before = sum(len(section[5]) * section[2] for section in SECTIONS[:s])
    return before + c * SECTIONS[s][2] + r


@triton.constexpr_function
def part_count(SECTIONS):
    """Return how many parts there are."""
    return sum(len(section[5]) * section[2] for section in SECTIONS)


@triton.constexpr_function
def bits_of(SECTIONS, s):
    """Return the bits of the codes of section `s`."""
    return SECTIONS[s][0]


@triton.constexpr_function
def width_of(SECTIONS, s):
    """Return the bytes of a token in section `s`."""
    return SECTIONS[s][1]


@triton.constexpr_function
def runs_of(SECTIONS, s):
    """Return the codes of a byte in section `s`."""
    return SECTIONS[s][2]


@triton.constexpr_function
def place_of(SECTIONS, s, r):
    """Return the first place of run `r` of section `s`."""
    return SECTIONS[s][3] + r * SECTIONS[s][1]


@triton.constexpr_function
def byte_of(SECTIONS, s):
    """Return the first byte of section `s`."""
    return SECTIONS[s][4]


@triton.constexpr_function
def chunks_of(SECTIONS, s):
    """Return how many chunks the bytes of section `s` are cut into."""
    return len(SECTIONS[s][5])


@triton.constexpr_function
def start_of(SECTIONS, s, c):
    """Return the first byte of chunk `c` in section `s`."""
    return SECTIONS[s][5][c][0]


@triton.constexpr_function
def size_of(SECTIONS, s, c):
    """Return the bytes of chunk `c` of section `s`, a power of two."""
    return SECTIONS[s][5][c][1]


@triton.constexpr_function
def is_past(SECTIONS, s, c):
    """Return whether chunk `c` reaches past section `s` and must be masked."""
    return sum(SECTIONS[s][5][c]) > SECTIONS[s][1]


@triton.jit
def _load_parts(pointers, live, SECTIONS: tl.constexpr, GUARD: tl.constexpr):
    """Load a number per channel part by part, each [size], zeros behind a part; where GUARD, zeros if `live` is 0."""
    parts = ()
    for s in tl.static_range(len(SECTIONS)):
        for c in tl.static_range(chunks_of(SECTIONS, s)):
            byte = start_of(SECTIONS, s, c) + tl.arange(0, size_of(SECTIONS, s, c))
            for r in tl.static_range(runs_of(SECTIONS, s)):
                at = pointers + place_of(SECTIONS, s, r) + byte
                if GUARD:
                    x = tl.load(at, mask=byte < width_of(SECTIONS, s) * live, other=0)
                elif is_past(SECTIONS, s, c):
                    x = tl.load(at, mask=byte < width_of(SECTIONS, s), other=0)
                else:
                    x = tl.load(at)
                parts = parts + (x,)
    return parts


@triton.jit
def load_mixed_factors(
    scale,
    offset,
    order,
    block,
    token,
    live,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    SECTIONS: tl.constexpr,
    FOLD: tl.constexpr,
    GUARD: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Load the scales, offsets and channels of a tile of keys, to be used one tile later.

    Args:
        scale, offset: DIM of each per GROUP tokens; order: DIM numbers of channels per block.
        block: page * heads + head; token: first token of the tile in its page.
        live: where GUARD, 1 if there is such a tile and 0 if nothing is to be read.
    Returns: offsets and scales of GROUPS groups of tokens (FOLD "tile", else none) and channels, each part by part.
    """
    offsets = ()
    scales = ()
    if FOLD == "tile":
        for g in tl.static_range(GROUPS):
            first = (block * (PAGE // GROUP) + token // GROUP + g) * DIM
            offsets = offsets + _load_parts(offset + first, live, SECTIONS, GUARD)
            scales = scales + _load_parts(scale + first, live, SECTIONS, GUARD)
    return offsets, scales, _load_parts(order + block * DIM, live, SECTIONS, GUARD)


@triton.jit
def gather_query(pointers, held, channels, scale, SECTIONS: tl.constexpr, DTYPE: tl.constexpr):
    """Load the query columns part by part in the order of `channels`, times `scale` [columns], as [size, columns]."""
    parts = ()
    for s in tl.static_range(len(SECTIONS)):
        for c in tl.static_range(chunks_of(SECTIONS, s)):
            byte = start_of(SECTIONS, s, c) + tl.arange(0, size_of(SECTIONS, s, c))
            inside = (byte < width_of(SECTIONS, s))[:, None] & held[None, :]
            for r in tl.static_range(runs_of(SECTIONS, s)):
                channel = channels[part_number(SECTIONS, s, c, r)].to(tl.int32)
                where = pointers[None, :] + channel[:, None]
                part = tl.load(where, mask=inside, other=0.0).to(tl.float32)
                parts = parts + ((part * scale[None, :]).to(DTYPE),)
    return parts


@triton.jit
def score_mixed(
    codes,
    offsets,
    scales,
    offset,
    scale,
    groups,
    query,
    DIM: tl.constexpr,
    SECTIONS: tl.constexpr,
    FOLD: tl.constexpr,
    ISA: tl.constexpr,
    PRECISION: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Scores of one tile of keys of two widths, or of its piece number PIECE, a token group.

    Args:
        codes: [tokens], pointers to each token's bytes.
        offsets, scales: of `load_mixed_factors`.
        offset, scale: as there, read here where FOLD is "element"; groups: [tokens], each one's row of DIM of them.
        query: of `gather_query`.
    Returns: [tokens, columns] fp32.
    """
    COLUMNS: tl.constexpr = query[0].shape[1]
    scores = tl.zeros([codes.shape[0], COLUMNS], tl.float32)
    bias = tl.zeros([COLUMNS], tl.float32)
    for s in tl.static_range(len(SECTIONS)):
        scores, bias = _add_section(
            codes, offsets, scales, offset, scale, groups, query, scores, bias, DIM, SECTIONS, s, FOLD, ISA,
            PRECISION, PIECE,
        )  # fmt: skip
    if FOLD == "tile":
        # codes of eight bits lie in the same subnormals as those of four and of two
        unit = tl.full([1, 1], 1.0 / tile_unit(4, ISA), tl.float32)
        scores = tl.fma(
            scores,
            tl.broadcast_to(unit, scores.shape),
            tl.broadcast_to(bias[None, :], scores.shape),
        )
    return scores


@triton.jit
def _add_section(
    codes, offsets, scales, offset, scale, groups, query, scores, bias, DIM: tl.constexpr, SECTIONS: tl.constexpr,
    S: tl.constexpr, FOLD: tl.constexpr, ISA: tl.constexpr, PRECISION: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Add the products with section S to scores [tokens, columns], and those of its offsets to bias [columns]."""
    BITS: tl.constexpr = bits_of(SECTIONS, S)
    DTYPE: tl.constexpr = query[0].dtype
    FIRST: tl.constexpr = PIECE * part_count(SECTIONS)
    NUMBERS: tl.constexpr = tl.float32 if FOLD == "element" else DTYPE
    for c in tl.static_range(chunks_of(SECTIONS, S)):
        byte = start_of(SECTIONS, S, c) + tl.arange(0, size_of(SECTIONS, S, c))
        where = codes[:, None] + (byte_of(SECTIONS, S) + byte)[None, :]
        inside = (byte < width_of(SECTIONS, S))[None, :]
        x = tl.load(where, mask=inside, other=0) if is_past(SECTIONS, S, c) else tl.load(where)
        runs = unpack(x, "unsigned", BITS, NUMBERS, ISA)
        for r in tl.static_range(runs_of(SECTIONS, S)):
            q = query[part_number(SECTIONS, S, c, r)]
            k = runs[r]
            if FOLD == "element":
                at = (groups * DIM)[:, None] + (place_of(SECTIONS, S, r) + byte)[None, :]
                k = k * tl.load(scale + at, mask=inside, other=0.0).to(tl.float32)
                k = k + tl.load(offset + at, mask=inside, other=0.0).to(tl.float32)
            else:
                # summed across threads: as a product of equal rows, as in keys.score_codes, gathered queries would go
                # through shared memory twice
                o = offsets[FIRST + part_number(SECTIONS, S, c, r)].to(tl.float32)
                bias += tl.sum(q.to(tl.float32) * o[:, None], 0)
                factor = scales[FIRST + part_number(SECTIONS, S, c, r)].to(DTYPE)
                q = (q * (1.0 / run_unit(r, BITS, ISA))) * factor[:, None]
            scores = tl.dot(k.to(DTYPE), q, scores, input_precision=PRECISION)
    return scores, bias
