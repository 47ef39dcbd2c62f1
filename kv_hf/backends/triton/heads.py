"""Attention over pages of keys and values: one tile of tokens at a time, with scales and offsets folded into the query and the weights.

docs/kernels.md has the algebra. Tokens (of keys) or channels (of values) lie on the rows of the matrix products, query columns on
their columns, which costs half the products of the usual order for 8 columns or fewer. A meta_params.Cut says what is loaded
and multiplied at once: chunks of a token's bytes, and parts of its channels. Sizes are powers of two; what does not
exist is masked. KEYS and VALUES are a meta_params.Operand each. Keys of several widths lie in an order of their row, the
widest first, into which the query is brought once. Knows nothing of rows and splits.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .dequant import (
    below,
    dtype_of,
    low_plane,
    move_to_block,
    row_of,
    run_unit,
    tile_unit,
    unpack,
    unpack_planes,
)
from .direct import Fields
from .pages import load_numbers
from .softmax import LOG2E, below_one, bend, weigh


class Columns(NamedTuple):
    """Query columns of a program: query heads of a kv head times queries.

    Attributes:
        row, head: of the batch (int64) and of the keys.
        number: [columns], among those of the head, of which there are `used`; real: [columns], which exist.
        heads, tokens: [columns], their query heads and queries.
        queries: [columns], pointers to channel 0.
        q_len: queries of the row.
    """

    row: Any
    head: Any
    number: Any
    used: Any
    real: Any
    heads: Any
    tokens: Any
    queries: Any
    q_len: Any


@triton.jit
def columns_of(query, q_len, QUERIES: tl.constexpr):
    """Return the Columns of this program; query: Strided. Grid: (rows, heads * blocks of columns, ..)."""
    if not QUERIES.chunk:
        q_len = 1
    COLUMNS: tl.constexpr = QUERIES.columns
    used = QUERIES.group * q_len
    blocks = (used + COLUMNS - 1) // COLUMNS
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) // blocks
    number = (tl.program_id(1) % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    heads, tokens = head * QUERIES.group + number % QUERIES.group, number // QUERIES.group
    queries = query.pointer + row * query.row + heads * query.head + tokens * query.token
    return Columns(row, head, number, used, number < used, heads, tokens, queries, q_len)


@triton.jit
def attend_heads(
    keys, values, columns, table, begin, end, visible, KEYS: tl.constexpr, VALUES: tl.constexpr, QUERIES: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Attend the query columns of one head to tiles `begin` to `end` of a row's pages.

    Args:
        keys, values: Fields; columns: Columns.
        table: pointer to the row's page ids; visible: a Visibility.
    Returns: maxima in log2, sums of weights [columns], and parts of the weighted values [size, columns], rotated where the
        pages' are.
    """
    COLUMNS: tl.constexpr = QUERIES.columns
    PAGE: tl.constexpr = KEYS.side.page
    TILE: tl.constexpr = KEYS.tile
    TILES_PER_PAGE: tl.constexpr = PAGE // TILE
    K_CUT: tl.constexpr = KEYS.cut
    O_CUT: tl.constexpr = KEYS.offsets
    V_CUT: tl.constexpr = VALUES.cut
    K_DTYPE: tl.constexpr = dtype_of(KEYS.dtype)
    if VALUES.side.offset_tokens == 0:  # codes around 0: their offset is in units of their scale
        values = Fields(values.codes, values.scale, values.scale, values.order)
    best = tl.full([COLUMNS], float("-inf"), tl.float32)
    totals = tl.zeros([TILE, COLUMNS], tl.float32)
    acc = zeros(V_CUT, COLUMNS)
    # of weights times offsets, channel group by channel group: of one, still to be added up over tokens
    GROUPS: tl.constexpr = VALUES.groups
    SUMS: tl.constexpr = TILE if GROUPS == 1 else 1
    offsets = ()
    for _ in tl.static_range(GROUPS):
        offsets = offsets + (tl.zeros([SUMS, COLUMNS], tl.float32),)
    queries, real, head = columns.queries, columns.real, columns.head
    shrink, factor = query_units(queries, real, visible.softmax_scale, KEYS.side.dim)
    lane = tl.arange(0, TILE)
    # Ids of pages are fetched two tiles ahead and scales one: their loads are too narrow for the asynchronous
    # copies that hide the latency of the codes' loads.
    last = end - 1
    block = tl.load(table + begin // TILES_PER_PAGE).to(tl.int64) * QUERIES.heads + head
    channels = ()
    whole_channels = ()
    if KEYS.side.ordered:  # that of all pages of the row
        order = keys.order + block * KEYS.side.dim
        channels = load_parts(order, K_CUT)
        whole_channels = load_parts(order, O_CUT)
    q = load_query(queries, real, shrink, channels, K_CUT, K_DTYPE)
    whole_q = load_query(queries, real, shrink, whole_channels, O_CUT, K_DTYPE)
    page = tl.load(table + tl.minimum(begin + 1, last) // TILES_PER_PAGE)
    token = (begin % TILES_PER_PAGE) * TILE
    key_factors = load_key_factors(keys, block, token, KEYS)
    value_factors = load_value_factors(values, block * PAGE + token + lane, VALUES)
    for tile in tl.range(begin, end, num_stages=STAGES):
        token = (tile % TILES_PER_PAGE) * TILE
        k_factors = key_factors
        v_factors = value_factors
        # carried as a sum: Triton does not pipeline loops that hand a value on for two rounds
        next_block = page.to(tl.int64) * QUERIES.heads + head
        page = tl.load(table + tl.minimum(tile + 2, last) // TILES_PER_PAGE)
        next_token = (tl.minimum(tile + 1, last) % TILES_PER_PAGE) * TILE
        key_factors = load_key_factors(keys, next_block, next_token, KEYS)
        value_factors = load_value_factors(values, next_block * PAGE + next_token + lane, VALUES)
        scores = score_keys(keys, k_factors, block, token, q, whole_q, KEYS)
        at = visible.sink_tokens + tile * TILE + lane
        scores = bend(scores, factor, at, tl.full(lane.shape, True, tl.int1), visible, QUERIES)
        weights, keep, best = weigh(scores, factor, best, QUERIES.bent, QUERIES.hides)
        totals = tl.fma(totals, keep[None, :], weights)
        acc, offsets = add_values(
            values, v_factors, block, token, weights, keep, acc, offsets, VALUES
        )
        block = next_block
    return best, tl.sum(totals, 0), settle(acc, offsets, VALUES)


# -- the exact window --------------------------------------------------------------------------------------------------


@triton.jit
def attend_window(
    keys, values, columns, exact, page_tokens, visible, WINDOW: tl.constexpr, QUERIES: tl.constexpr
):  # fmt: skip
    """Attend query columns to the exact tokens of a row, of one head or of latents.

    Args:
        keys, values: Strided windows of all rows and heads, of which `exact` slots hold tokens. Slots below
            `sink_tokens` lie in front of the `page_tokens` tokens in pages, the others behind them.
        WINDOW: a meta_params.ExactWindow.
    Returns: as `attend_heads`, in parts of values or latents; without values ().
    """
    IS_LATENT: tl.constexpr = WINDOW.rank > 0
    K_CUT: tl.constexpr = WINDOW.key_cut
    R_CUT: tl.constexpr = WINDOW.value_cut
    V_CUT: tl.constexpr = WINDOW.key_cut if IS_LATENT else WINDOW.value_cut
    TILE: tl.constexpr = WINDOW.tile
    K_DTYPE: tl.constexpr = dtype_of(WINDOW.key_dtype)
    V_DTYPE: tl.constexpr = dtype_of(WINDOW.value_dtype)
    COLUMNS: tl.constexpr = QUERIES.columns
    queries, real = columns.queries, columns.real
    best = tl.full([COLUMNS], float("-inf"), tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    acc = ()
    if V_CUT is not None:
        acc = zeros(V_CUT, COLUMNS)
    one = tl.full([COLUMNS], 1.0, tl.float32)
    factor = one * (visible.softmax_scale * LOG2E)
    query = load_query(queries, real, one, (), K_CUT, K_DTYPE)
    if IS_LATENT:
        rope = load_query(queries + WINDOW.rank, real, one, (), R_CUT, V_DTYPE)
    for first in tl.range(0, exact, TILE, num_stages=1 if IS_LATENT else 2):
        slot = first + tl.arange(0, TILE)
        held = slot < exact
        at = slot + tl.where(slot < visible.sink_tokens, 0, page_tokens)
        key_rows = row_of(keys, columns.row, columns.head) + slot * keys.token
        value_rows = row_of(values, columns.row, columns.head) + slot * values.token
        scores = score_parts(load_rows(key_rows, held, K_CUT, False), query)
        if IS_LATENT:
            scores += score_parts(load_rows(value_rows, held, R_CUT, False), rope)
            value_rows = key_rows
        scores = bend(scores, factor, at, held, visible, QUERIES)
        weights, keep, best = weigh(scores, factor, best, QUERIES.bent, True)
        total = total * keep + tl.sum(weights, 0)
        if V_CUT is not None:
            v = load_rows(value_rows, held, V_CUT, True)
            acc = add_parts(v, weights, keep, acc, V_DTYPE, IS_LATENT)
    return best, total, acc


# -- parts -------------------------------------------------------------------------------------------------------------


@triton.jit
def channels_of(PART: tl.constexpr, CUT: tl.constexpr):
    """Return the channels of a part, [size] or [batch, size], and which there are."""
    BATCH: tl.constexpr = CUT.parts[PART].batch
    HELD: tl.constexpr = CUT.parts[PART].held
    lane = tl.arange(0, CUT.parts[PART].size)
    channel = CUT.parts[PART].place + lane
    inside = below(lane, HELD)
    if BATCH > 0:
        END: tl.constexpr = CUT.parts[PART].end
        first = (tl.arange(0, BATCH)[:, None] * len(CUT.parts) + PART) * HELD
        channel = first + lane[None, :]
        inside = tl.broadcast_to(inside[None, :], channel.shape)
        if BATCH * len(CUT.parts) * HELD > END:
            inside = inside & (channel < END)
    return channel, inside


@triton.jit
def places(rows, held, channel, inside, ACROSS: tl.constexpr):
    """Return pointers to channels of `rows` [tokens], and which are `held` and `inside`: [.., tokens, size], [.., size, tokens] where ACROSS."""
    inside = tl.expand_dims(inside, ACROSS - 2) & tl.expand_dims(held, -1 - ACROSS)
    return tl.expand_dims(rows, -1 - ACROSS) + tl.expand_dims(channel, ACROSS - 2), inside


@triton.jit
def zeros(CUT: tl.constexpr, COLUMNS: tl.constexpr):
    """Return zeros for every part, [size, columns] fp32."""
    parts = ()
    for p in tl.static_range(len(CUT.parts)):
        parts = parts + (_zeros(CUT.parts[p].size, COLUMNS),)
    return parts


@triton.jit
def _zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.zeros([ROWS, COLUMNS], tl.float32)  # whose shape takes no field in Triton 3.6 and 3.7


@triton.jit
def query_units(queries, real, softmax_scale, DIM: tl.constexpr):
    """Return what brings query columns below 1, and their scores to log2, see `below_one`; `queries` are read where `real`."""
    channel = tl.arange(0, triton.next_power_of_2(DIM))
    inside = (channel < DIM)[:, None] & real[None, :]
    x = tl.load(queries[None, :] + channel[:, None], mask=inside, other=0.0).to(tl.float32)
    return below_one(tl.max(tl.abs(x), 0), softmax_scale)


@triton.jit
def load_query(pointers, held, scale, channels, CUT: tl.constexpr, DTYPE: tl.constexpr):
    """Load the query columns part by part, times `scale` [columns], as [size, columns] in DTYPE.

    channels: part by part, in the order of a row, or () for the model's.
    """
    parts = ()
    for p in tl.static_range(len(CUT.parts)):
        channel, inside = channels_of(p, CUT)
        if len(channels) > 0:
            channel = channels[p].to(tl.int32)
        where, inside = places(pointers, held, channel, inside, True)
        part = tl.load(where, mask=inside, other=0).to(tl.float32)
        parts = parts + ((part * scale[None, :]).to(DTYPE),)
    return parts


@triton.jit
def load_part(pointers, PART: tl.constexpr, CUT: tl.constexpr, CACHE: tl.constexpr):
    """Load a number for each channel of a part, as `channels_of` has them, zeros behind them."""
    channel, inside = channels_of(PART, CUT)
    return tl.load(pointers + channel, mask=inside, other=0, cache_modifier=CACHE)


@triton.jit
def load_parts(pointers, CUT: tl.constexpr):
    """Load a number for each channel part by part."""
    parts = ()
    for p in tl.static_range(len(CUT.parts)):
        parts = parts + (load_part(pointers, p, CUT, ""),)
    return parts


@triton.jit
def load_rows(rows, held, CUT: tl.constexpr, ACROSS: tl.constexpr):
    """Load numbers or words of `rows` [tokens], pointers to channel 0 of those that are `held`, part by part, as `places` has them."""
    parts = ()
    for p in tl.static_range(len(CUT.parts)):
        channel, inside = channels_of(p, CUT)
        where, inside = places(rows, held, channel, inside, ACROSS)
        parts = parts + (tl.load(where, mask=inside, other=0),)
    return parts


@triton.jit
def load_plain(fields, block, token, OPERAND: tl.constexpr, ACROSS: tl.constexpr):
    """Load the numbers of tokens of one page and head of which no scale is folded into anything, as `load_rows` does.

    Args:
        fields: Fields; block: page * heads + head; token: [tokens], in the page.
    """
    SIDE: tl.constexpr = OPERAND.side
    CUT: tl.constexpr = OPERAND.cut
    parts = ()
    if OPERAND.fold == "none":
        rows = fields.codes + block * (SIDE.page * SIDE.dim) + token * SIDE.dim
        held = tl.full(token.shape, True, tl.int1)
        parts = load_rows(rows, held, CUT, ACROSS)
    else:
        of_block = move_to_block(fields, block, SIDE)
        for p in tl.static_range(len(CUT.parts)):
            x = load_numbers(of_block, token, CUT.parts[p].place, SIDE, CUT.parts[p].size)
            parts = parts + (tl.trans(x) if ACROSS else x,)
    return parts


@triton.jit
def load_runs(
    pointers, lane, CUT: tl.constexpr, NUMBER: tl.constexpr, STEP: tl.constexpr, OPERAND: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """Load a chunk's bytes, of both planes where its codes lie in two, and unpack them to runs of numbers.

    Args:
        pointers: to the first byte of tokens, whose bytes lie STEP apart; lane: numbers of bytes of chunk NUMBER of CUT. Both
            are broadcast.
    """
    CHUNK: tl.constexpr = CUT.chunks[NUMBER]
    CODE: tl.constexpr = OPERAND.side.code
    BITS: tl.constexpr = CHUNK.bits
    LOW: tl.constexpr = low_plane(BITS)
    inside = below(lane, CHUNK.held)
    x = tl.load(pointers + (CHUNK.byte + lane) * STEP, mask=inside, other=0)
    if LOW > 0:
        even = tl.zeros(x.shape, tl.uint8)
        odd = even
        # equal for both halves, so that one load serves the chunks of both
        second = pointers + (CHUNK.second + CHUNK.start % CHUNK.half + lane) * STEP
        if CHUNK.start + CHUNK.held <= CHUNK.half:
            even = tl.load(second, mask=inside, other=0)
        elif CHUNK.start >= CHUNK.half:
            odd = tl.load(second, mask=inside, other=0)
        else:
            byte = CHUNK.start + lane
            even = tl.load(second, mask=inside & (byte < CHUNK.half), other=0)
            odd = tl.load(second - CHUNK.half * STEP, mask=inside & (byte >= CHUNK.half), other=0)
        return unpack_planes(x, even, odd, LOW, DTYPE, OPERAND.isa)
    else:
        return unpack(x, CODE, BITS, DTYPE, OPERAND.isa)


@triton.jit
def store_parts(pointers, acc, held, CUT: tl.constexpr, ACROSS: tl.constexpr):
    """Store the parts of acc, as `places` has them, where `held` [columns]."""
    for p in tl.static_range(len(acc)):
        channel, inside = channels_of(p, CUT)
        where, inside = places(pointers, held, channel, inside, ACROSS)
        tl.store(where, acc[p], mask=inside)


# -- keys --------------------------------------------------------------------------------------------------------------


@triton.jit
def load_key_factors(keys, block, token, KEYS: tl.constexpr):
    """Load a tile's offsets and scales of keys, to be used one tile later.

    Args:
        keys: Fields; FOLD "page": one scale and DIM offsets per block; else DIM of each per token group.
        block: page * heads + head; token: first token of the tile in its page.
    Returns: group by group offsets (each part of KEYS.offsets) and scales (fold "page": one; "tile": each part); empty tuples where
        there are none.
    """
    CUT: tl.constexpr = KEYS.cut
    OFFSETS: tl.constexpr = KEYS.offsets
    offsets = ()
    scales = ()
    if KEYS.fold == "page" or KEYS.fold == "tile":
        GROUP: tl.constexpr = KEYS.side.scale_tokens
        GROUPS: tl.constexpr = KEYS.groups
        group = block * (KEYS.side.page // GROUP) + token // GROUP
        for g in tl.static_range(GROUPS):
            offsets = offsets + load_parts(keys.offset + (group + g) * KEYS.side.dim, OFFSETS)
            if KEYS.fold == "tile":
                scales = scales + load_parts(keys.scale + (group + g) * KEYS.side.dim, CUT)
        if KEYS.fold == "page":
            scales = (tl.load(keys.scale + block).to(tl.float32),)
    return offsets, scales


@triton.jit
def score_keys(keys, factors, block, token, query, whole_query, KEYS: tl.constexpr):
    """Return the scores [tokens, columns] fp32 of the tile that begins with `token`.

    Args:
        keys, block, token: as in `load_key_factors`, which returned `factors`.
        query: parts of [size, columns]; whole_query: the same numbers as KEYS.offsets cuts them.
    """
    if KEYS.fold == "none" or KEYS.fold == "element":
        at = token + tl.arange(0, KEYS.tile)
        return score_parts(load_plain(keys, block, at, KEYS, False), query)
    else:
        GROUPS: tl.constexpr = KEYS.groups
        TOKENS: tl.constexpr = KEYS.tile // GROUPS
        codes = keys.codes + block * (KEYS.side.page * KEYS.side.size)
        scores = ()
        for g in tl.static_range(GROUPS):
            rows = codes + (token + g * TOKENS + tl.arange(0, TOKENS)) * KEYS.side.size
            scores = scores + (_score_codes(rows, factors, query, whole_query, KEYS, g),)
        return _stack(scores)


@triton.jit
def _stack(parts):
    """Return one or two equal parts [tokens, columns] (see meta_params.TOKEN_GROUPS), one behind the other along the tokens."""
    whole = parts[0]
    if len(parts) == 2:
        both = tl.permute(tl.join(parts[0], parts[1]), (2, 0, 1))
        whole = tl.reshape(both, (2 * whole.shape[0], whole.shape[1]))
    return whole


@triton.jit
def score_parts(keys, query):
    """Return the scores [tokens, columns] fp32 of keys, parts of [tokens, size], whose numbers are those of the model."""
    scores = tl.zeros([keys[0].shape[0], query[0].shape[1]], tl.float32)
    for p in tl.static_range(len(keys)):
        scores = tl.dot(keys[p].to(query[p].dtype), query[p], scores, input_precision="ieee")
    return scores


@triton.jit
def _score_codes(rows, factors, query, whole_query, KEYS: tl.constexpr, GROUP: tl.constexpr):
    """Scores of token group GROUP of a tile of encoded keys: [tokens, columns] fp32; rows: [tokens], pointers to its bytes."""
    CUT: tl.constexpr = KEYS.cut
    FIRST: tl.constexpr = GROUP * len(CUT.parts)
    DTYPE: tl.constexpr = query[0].dtype
    offsets, scales = factors
    scores = tl.zeros([rows.shape[0], query[0].shape[1]], tl.float32)
    for c in tl.static_range(len(CUT.chunks)):
        lane = tl.arange(0, CUT.chunks[c].size)
        runs = load_runs(rows[:, None], lane[None, :], CUT, c, 1, KEYS, DTYPE)
        for r in tl.static_range(len(runs)):
            q = query[CUT.chunks[c].first + r]
            if KEYS.fold == "tile":
                factor = scales[FIRST + CUT.chunks[c].first + r].to(DTYPE)
                q = (q * (1.0 / run_unit(r, CUT.chunks[c].bits, KEYS.isa))) * factor[:, None]
            scores = tl.dot(runs[r], q, scores, input_precision="ieee")
    bias = tl.zeros(scores.shape, tl.float32)
    for p in tl.static_range(len(whole_query)):
        # offsets as a matrix product of rows that are all equal: exact products, and no sums across threads
        o = offsets[GROUP * len(whole_query) + p].to(DTYPE)
        equal = tl.broadcast_to(o[None, :], [rows.shape[0], o.shape[0]])
        bias = tl.dot(equal, whole_query[p], bias, input_precision="ieee")
    unit = scales[0]
    if KEYS.fold == "tile":
        unit = tl.full([1, 1], 1.0 / tile_unit(KEYS.side.bits, KEYS.isa), tl.float32)
    return tl.fma(scores, unit, bias)


# -- values ------------------------------------------------------------------------------------------------------------


@triton.jit
def load_value_factors(values, tokens, VALUES: tl.constexpr):
    """Load a tile's scales (and offsets) of values, to be used one tile later.

    Args:
        values: Fields; tokens: [tokens], block * page size + place in the page.
    Returns: the scale of each of VALUES.groups [tokens], and behind them the offsets of unsigned codes.
    """
    GROUPS: tl.constexpr = VALUES.groups
    factors = ()
    for g in tl.static_range(GROUPS):
        factors = factors + (tl.load(values.scale + tokens * GROUPS + g),)
    if VALUES.side.code == "unsigned":
        for g in tl.static_range(GROUPS):
            factors = factors + (tl.load(values.offset + tokens * GROUPS + g),)
    return factors


@triton.jit
def add_parts(values, weights, keep, acc, DTYPE: tl.constexpr, TURNED: tl.constexpr = False):
    """Add weights [tokens, columns] times values, parts of [size, tokens] whose numbers are those of the model, to acc's parts times keep.

    TURNED: whether columns lie on the rows of products, too few for those of a group of four warps, which would take as much
    shared memory again.
    """
    w = weights.to(DTYPE)
    new = ()
    for p in tl.static_range(len(values)):
        x = values[p].to(DTYPE)
        part = acc[p] * keep[None, :]
        if TURNED:
            part = tl.dot(tl.trans(w), tl.trans(x), tl.trans(part), input_precision="ieee")
            part = tl.trans(part)
        else:
            part = tl.dot(x, w, part, input_precision="ieee")
        new = new + (part,)
    return new


@triton.jit
def add_values(values, loaded, block, token, weights, keep, acc, offsets, VALUES: tl.constexpr):
    """Add weights [tokens, columns] times the tile of values that begins with `token` to the parts of acc.

    Args:
        values, block, token: as for keys; loaded: of `load_value_factors`.
        keep: [columns], what the earlier sums are multiplied by.
        acc: parts of [size, columns], in units of boost * tile_unit * run_unit.
        offsets: sums of weight * offset of each group, [1, columns], or of the one group [tokens, columns], still to be
            added up over tokens.
    Returns: acc, offsets.
    """
    DTYPE: tl.constexpr = dtype_of(VALUES.dtype)
    lane = token + tl.arange(0, VALUES.tile)
    if VALUES.groups == 0:
        parts = load_plain(values, block, lane, VALUES, True)
        return add_parts(parts, weights, keep, acc, DTYPE), offsets
    else:
        factors, sums = _fold(loaded, weights, keep, offsets, VALUES, DTYPE)
        codes = values.codes + block * (VALUES.side.page * VALUES.side.size) + lane
        return _add_codes(codes, factors, keep, acc, VALUES, DTYPE), sums


@triton.jit
def _fold(loaded, weights, keep, offsets, VALUES: tl.constexpr, DTYPE: tl.constexpr):
    """Return the weights of each channel group [tokens, columns], with its scales, and the new sums of offsets."""
    GROUPS: tl.constexpr = VALUES.groups
    factors = ()
    sums = ()
    for g in tl.static_range(GROUPS):
        s = loaded[g].to(tl.float32) * VALUES.boost
        factors = factors + ((weights * s[:, None]).to(DTYPE),)
        total = offsets[g]
        if VALUES.side.code == "unsigned":
            added = weights * loaded[GROUPS + g].to(tl.float32)[:, None]
            if GROUPS > 1:  # the sums of several would not fit into registers
                added = tl.sum(added, 0)[None, :]
            total = tl.fma(total, keep[None, :], added)
        sums = sums + (total,)
    return factors, sums


@triton.jit
def _add_codes(codes, factors, keep, acc, VALUES: tl.constexpr, DTYPE: tl.constexpr):
    """Add one tile of codes, see `add_values`.

    Args:
        codes: [tokens], pointers to each token's byte in the first row of bytes; rows lie a page's tokens apart.
        factors: of `_fold`.
    """
    CUT: tl.constexpr = VALUES.cut
    new = ()
    for c in tl.static_range(len(CUT.chunks)):
        lane = tl.arange(0, CUT.chunks[c].size)
        runs = load_runs(codes[None, :], lane[:, None], CUT, c, VALUES.side.page, VALUES, DTYPE)
        for r in tl.static_range(len(runs)):
            total = acc[CUT.chunks[c].first + r] * keep[None, :]
            w = factors[CUT.parts[CUT.chunks[c].first + r].place // VALUES.side.scale_channels]
            new = new + (tl.dot(runs[r], w, total, input_precision="ieee"),)
    return new


@triton.jit
def settle(acc, offsets, VALUES: tl.constexpr):
    """Bring the parts of acc from `add_values` to plain units and add the sums of offsets."""
    CUT: tl.constexpr = VALUES.cut
    RUNS: tl.constexpr = len(CUT.parts) // len(CUT.chunks)
    new = ()
    for p in tl.static_range(len(acc)):
        part = acc[p]
        if VALUES.groups > 0:
            unit = run_unit(p % RUNS, VALUES.side.bits, VALUES.isa) * tile_unit(
                VALUES.side.bits, VALUES.isa
            )
            part = part * (1.0 / (VALUES.boost * unit))
            if VALUES.side.code == "unsigned":
                o = tl.sum(offsets[CUT.parts[p].place // VALUES.side.scale_channels], 0)
                if VALUES.side.offset_tokens == 0:
                    o = o * (-0.5 * VALUES.side.runs[0].top)
                part += o[None, :]
        new = new + (part,)
    return new
