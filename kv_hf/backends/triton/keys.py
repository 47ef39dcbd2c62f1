"""One tile of keys to scores, with scales and offsets folded into the query (docs/kernels.md has the algebra).

Knows nothing of rows, splits and softmax. Tokens lie on the rows of the products, query columns on their columns. KEYS is a
meta_params.Operand. Keys of two widths lie in an order of their page, the wide channels first: the query is gathered
anew for each tile, in the order of the tile's page.
"""

import triton
import triton.language as tl

from .dequant import run_unit, tile_unit, unpack
from .tiles import load_held, load_parts


@triton.jit
def load_key_factors(keys, block, token, live, KEYS: tl.constexpr, GUARD: tl.constexpr):
    """Load a tile's offsets, scales and order of keys, to be used one tile later.

    Args:
        keys: Fields; FOLD "page": one scale and DIM offsets per block; else DIM of each per token group.
        block: page * heads + head; token: first token of the tile in its page.
        live: where GUARD, 1 if there is such a tile and 0 if nothing is to be read.
    Returns: offsets (each part of KEYS.offsets), scales (fold "page": one; "tile": each part), channels (each part, of
        keys of two widths); empty tuples where there are none.
    """
    CUT: tl.constexpr = KEYS.cut
    OFFSETS: tl.constexpr = KEYS.offsets
    PIECES: tl.constexpr = KEYS.pieces
    offsets = ()
    scales = ()
    channels = ()
    if KEYS.fold == "page" or KEYS.fold == "tile":
        for piece in tl.static_range(PIECES):
            first = (block * (KEYS.page // KEYS.group) + token // KEYS.group + piece) * KEYS.dim
            offsets = offsets + load_parts(keys.offset + first, live, OFFSETS, GUARD)
            if KEYS.fold == "tile":
                scales = scales + load_parts(keys.scale + first, live, CUT, GUARD)
        if KEYS.fold == "page":
            one = (
                tl.load(keys.scale + block, mask=live > 0, other=0.0)
                if GUARD
                else tl.load(keys.scale + block)
            )
            scales = (one.to(tl.float32),)
    if KEYS.ordered:
        channels = load_parts(keys.order + block * KEYS.dim, live, CUT, GUARD)
    return offsets, scales, channels


@triton.jit
def score_keys(keys, factors, block, token, query, whole_query, KEYS: tl.constexpr):
    """Return the scores [tokens, columns] fp32 of the tile that begins with `token`; token group by token group.

    Args:
        keys, block, token: as in `load_key_factors`, which returned `factors`.
        query: parts of [size, columns]; whole_query: the same numbers as KEYS.window cuts them.
    """
    CUT: tl.constexpr = KEYS.cut
    PIECES: tl.constexpr = KEYS.pieces
    ROWS: tl.constexpr = KEYS.tile // KEYS.pieces
    scores = ()
    for piece in tl.static_range(PIECES):
        at = token + piece * ROWS + tl.arange(0, ROWS)
        rows = keys.codes + block * (KEYS.page * KEYS.row) + at * KEYS.row
        if KEYS.fold == "none":
            one = score_exact(rows, at, query, CUT, False)
        else:
            group = block * (KEYS.page // KEYS.group) + at // KEYS.group
            one = _score_codes(rows, keys, group, factors, query, whole_query, KEYS, piece)
        scores = scores + (one,)
    return _stack(scores)


@triton.jit
def score_exact(rows, held, query, CUT: tl.constexpr, HELD: tl.constexpr):
    """Scores of exact tokens: `rows` [tokens] points to each one's channels, read where `held` if HELD."""
    scores = tl.zeros([rows.shape[0], query[0].shape[1]], tl.float32)
    for p in tl.static_range(len(CUT.parts)):
        lane = tl.arange(0, CUT.parts[p].size)
        where = rows[:, None] + (CUT.parts[p].place + lane)[None, :]
        if HELD:
            inside = held[:, None] & (lane < CUT.parts[p].held)[None, :]
            x = tl.load(where, mask=inside, other=0.0)
        else:
            x = load_held(where, lane[None, :], CUT.parts[p].held)
        scores = tl.dot(x.to(query[p].dtype), query[p], scores, input_precision="ieee")
    return scores


@triton.jit
def _score_codes(
    rows, keys, group, factors, query, whole_query, KEYS: tl.constexpr, PIECE: tl.constexpr
):
    """Scores of piece number PIECE of a tile of encoded keys: [tokens, columns] fp32.

    Args:
        rows: [tokens], pointers to each token's bytes.
        group: [tokens], each one's row of DIM scales and offsets, read here where the fold is "element".
    """
    CUT: tl.constexpr = KEYS.cut
    OFFSETS: tl.constexpr = KEYS.offsets
    CODE: tl.constexpr = KEYS.code
    FIRST: tl.constexpr = PIECE * len(CUT.parts)
    DTYPE: tl.constexpr = query[0].dtype
    NUMBERS: tl.constexpr = tl.float32 if KEYS.fold == "element" else DTYPE
    offsets, scales, _ = factors
    shape: tl.constexpr = [rows.shape[0], query[0].shape[1]]
    scores = tl.zeros(shape, tl.float32)
    added = tl.zeros([query[0].shape[1]], tl.float32)
    for c in tl.static_range(len(CUT.chunks)):
        lane = tl.arange(0, CUT.chunks[c].size)
        where = rows[:, None] + (CUT.chunks[c].byte + lane)[None, :]
        inside = (lane < CUT.chunks[c].held)[None, :]
        x = load_held(where, lane[None, :], CUT.chunks[c].held)
        runs = unpack(x, CODE, CUT.chunks[c].bits, NUMBERS, KEYS.isa)
        for r in tl.static_range(len(runs)):
            q = query[CUT.chunks[c].first + r]
            k = runs[r]
            if KEYS.fold == "element":
                channel = CUT.parts[CUT.chunks[c].first + r].place + lane
                at = (group * KEYS.dim)[:, None] + channel[None, :]
                k = k * tl.load(keys.scale + at, mask=inside, other=0.0).to(tl.float32)
                k = k + tl.load(keys.offset + at, mask=inside, other=0.0).to(tl.float32)
            elif KEYS.fold == "tile":
                if KEYS.ordered:
                    # summed across threads: as a product of equal rows, gathered queries would go through shared memory
                    # twice
                    o = offsets[FIRST + CUT.chunks[c].first + r].to(tl.float32)
                    added += tl.sum(q.to(tl.float32) * o[:, None], 0)
                factor = scales[FIRST + CUT.chunks[c].first + r].to(DTYPE)
                q = (q * (1.0 / run_unit(r, CUT.chunks[c].bits, KEYS.isa))) * factor[:, None]
            scores = tl.dot(k.to(DTYPE), q, scores, input_precision="ieee")
    if KEYS.fold != "element":
        bias = tl.broadcast_to(added[None, :], shape)
        if not KEYS.ordered:
            # offsets as a matrix product of rows that are all equal: exact products, and no sums across threads
            bias = tl.zeros(shape, tl.float32)
            for p in tl.static_range(len(OFFSETS.parts)):
                o = offsets[PIECE * len(OFFSETS.parts) + p].to(DTYPE)
                equal = tl.broadcast_to(o[None, :], [rows.shape[0], OFFSETS.parts[p].size])
                bias = tl.dot(equal, whole_query[p], bias, input_precision="ieee")
        unit = scales[0]
        if (
            KEYS.fold == "tile"
        ):  # codes of eight bits lie in the same subnormals as those of four and of two
            unit = tl.full([1, 1], 1.0 / tile_unit(KEYS.bits, KEYS.isa), tl.float32)
        scores = tl.fma(scores, tl.broadcast_to(unit, scores.shape), bias)
    return scores


@triton.jit
def _stack_two(first, second):
    both = tl.permute(tl.join(first, second), (2, 0, 1))
    return tl.reshape(both, (2 * first.shape[0], first.shape[1]))


@triton.jit
def _stack(parts):
    """Return one, two or four equal parts [tokens, columns], one behind the other along the tokens."""
    if len(parts) == 1:
        whole = parts[0]
    elif len(parts) == 2:
        whole = _stack_two(parts[0], parts[1])
    else:
        whole = _stack_two(_stack_two(parts[0], parts[1]), _stack_two(parts[2], parts[3]))
    return whole
