"""Attention over pages of latents: a tile is read once, as keys and as values, for 16 query rows.

A 16-bit word holds codes of one channel and of tokens that lie a page's words apart (see spec.SideSpec), so a tile of
words unpacks into one tile of tokens per place, and may be read along channels and along tokens alike. Tiles are
[chunks of channels, rows of words, channels of a chunk]: products run over chunks of the rank, one for each warp, and scores are
summed over them. Query rows lie on the rows of the products, so that weights go from one product to the next without
leaving their registers. LATENTS is a meta_params.Latents. Knows nothing of rows and splits.

Where scales and offsets belong to channels, the query gets the scales once per group of tokens, and sums of products get them
once per group: codes stay as they are.

    score  += (q * scale) @ codes + q . offset
    acc    += (weights @ codes) * scale + (sum of weights) * offset
"""

import triton
import triton.language as tl

from .dequant import below, dtype_of, stages, tile_unit, unpack
from .softmax import below_one, bend, weigh


@triton.jit
def attend_latents(
    keys, values, columns, table, begin, end, visible, LATENTS: tl.constexpr, QUERIES: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """Attend query rows to tiles `begin` to `end` of a row's pages of latents.

    Arguments are those of heads.attend_heads; `keys` are latents, `values` RoPE keys.
    Returns: maxima in log2, sums of weights [columns], and runs of the weighted latents [chunks, columns, wide].
    """
    CUT: tl.constexpr = LATENTS.cut
    ROPE: tl.constexpr = LATENTS.rope
    RANK: tl.constexpr = CUT.dim
    PAGE: tl.constexpr = LATENTS.side.page
    WORDS: tl.constexpr = PAGE // LATENTS.side.places
    ROWS: tl.constexpr = LATENTS.rows
    STRIDE: tl.constexpr = LATENTS.stride
    STEP: tl.constexpr = LATENTS.step
    SHARE: tl.constexpr = LATENTS.share
    CHUNKS: tl.constexpr = CUT.chunks
    RUNS: tl.constexpr = CUT.runs
    WIDE: tl.constexpr = CUT.wide
    TILES_PER_PAGE: tl.constexpr = PAGE // LATENTS.tile
    R_CODE: tl.constexpr = LATENTS.rope_code
    DTYPE: tl.constexpr = dtype_of(LATENTS.dtype)
    COLUMNS: tl.constexpr = QUERIES.columns
    queries, real = columns.queries, columns.real
    best = tl.full([COLUMNS], float("-inf"), tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    acc = ()
    for _ in tl.static_range(RUNS):
        acc = acc + (tl.zeros([CHUNKS, COLUMNS, WIDE], tl.float32),)
    q = load_runs(queries, real, CUT)
    size = tl.zeros([COLUMNS], tl.float32)
    for r in tl.static_range(RUNS):
        size = tl.maximum(size, tl.max(tl.max(tl.abs(q[r].to(tl.float32)), 2), 0))
    q_rope = load_tile(queries + RANK, real, 0, ROPE)
    size = tl.maximum(size, tl.max(tl.max(tl.abs(q_rope.to(tl.float32)), 2), 0))
    shrink, factor = below_one(size, visible.softmax_scale)
    q = times(q, shrink[None, :, None], DTYPE)
    q_rope = (q_rope.to(tl.float32) * shrink[None, :, None]).to(dtype_of(LATENTS.rope_dtype))
    lane = tl.arange(0, ROWS)
    row_unit = tl.full([ROWS], 1.0, tl.float32)  # what undoes the units of the places of a row
    if LATENTS.copies > 1 and LATENTS.isa > 0 and LATENTS.side.bits < 8:
        shift = lane // WORDS * LATENTS.side.bits % 8
        row_unit = ((127 - shift) << 23).to(tl.float32, bitcast=True)
    # Ids of pages are fetched two tiles ahead and scales one: their loads are too narrow for the asynchronous
    # copies that hide the latency of the words' loads.
    last = end - 1
    block = tl.load(table + begin // TILES_PER_PAGE).to(tl.int64)
    page = tl.load(table + tl.minimum(begin + 1, last) // TILES_PER_PAGE)
    token = (begin % TILES_PER_PAGE) * ROWS + lane
    scales = load_scales(keys.scale, block, token, LATENTS)
    for tile in tl.range(begin, end, num_stages=STAGES):
        start = (tile % TILES_PER_PAGE) * ROWS
        token = start + lane  # of place 0
        words = keys.codes + block * (WORDS * RANK)
        words += (start + tl.arange(0, ROWS // LATENTS.copies)) * RANK
        numbers = load_numbers(words, LATENTS)
        ropes = values.codes + (block * PAGE + token) * ROPE.dim
        r_scale = 1.0
        bias = tl.zeros([CHUNKS, COLUMNS, ROWS], tl.float32)
        if R_CODE != "none":
            r_scale = tl.load(values.scale + block).to(tl.float32)
            bias = score_offsets(bias, q_rope, values.offset + block * ROPE.dim, 0, ROPE)

        next_block = page.to(tl.int64)
        page = tl.load(table + tl.minimum(tile + 2, last) // TILES_PER_PAGE)
        tile_scales = scales
        next_token = ((tile + 1) % TILES_PER_PAGE) * ROWS + lane
        scales = load_scales(keys.scale, next_block, next_token, LATENTS)

        for phase in tl.static_range(PAGE // STRIDE // STEP):
            scores = ()
            for i in tl.static_range(0, STEP, SHARE):
                if LATENTS.fold == "channel":
                    at = first_factor(block, start + (phase * STEP + i) * STRIDE, LATENTS)
                    scores = scores + score_channels(
                        numbers, q, bias, keys.scale + at, keys.offset + at, row_unit, phase * STEP + i, LATENTS
                    )  # fmt: skip
                else:
                    s = bias
                    for r in tl.static_range(RUNS):
                        k = tl.trans(numbers[r][phase * STEP + i], (0, 2, 1))
                        if LATENTS.fold == "token":
                            by = tile_scales[(phase * STEP + i) * RUNS + r].to(tl.float32)
                            product = tl.dot(q[r], k, input_precision="ieee")
                            s = tl.fma(product, tl.broadcast_to(by[:, None, :], s.shape), s)
                        else:
                            s = tl.dot(q[r], k, s, input_precision="ieee")
                    scores = scores + (s,)
            turned = ()
            for i in tl.static_range(STEP):
                rope = ropes + (phase * STEP + i) * (STRIDE * ROPE.dim)
                s = score_rope(scores[i], q_rope, rope, r_scale, ROPE, R_CODE, LATENTS.isa)
                turned = turned + (s,)
            # loaded apart from what scores take: their registers would be in the way there
            factors = load_factors(keys, block, start + phase * STEP * STRIDE, LATENTS)
            n = tl.arange(0, ROWS * STEP)
            at_page = tile // TILES_PER_PAGE * PAGE + start
            position = at_page + n // STEP + (phase * STEP + n % STEP) * STRIDE
            whole = tl.trans(tl.sum(side_by_side(turned), 0))
            held = below(n, ROWS * STEP)
            whole = bend(whole, factor, visible.sink_tokens + position, held, visible, QUERIES)
            weights, keep, best = weigh(whole, factor, best, QUERIES.bent, QUERIES.hides)
            parts = apart(tl.trans(weights), STEP)
            total = total * keep
            sums = ()  # of weights, group by group
            for i in tl.static_range(0, STEP, SHARE):
                added = parts[i]
                for other in tl.static_range(i + 1, i + SHARE):
                    added += parts[other]
                sums = sums + (tl.sum(added, 1),)
                total += sums[i // SHARE]
            new = ()
            for r in tl.static_range(RUNS):
                part = acc[r] * keep[None, :, None]
                for i in tl.static_range(0, STEP, SHARE):
                    if LATENTS.fold == "channel":
                        part = add_channels(
                            part, numbers[r], parts, sums[i // SHARE], factors[2 * (i // SHARE * RUNS + r)],
                            factors[2 * (i // SHARE * RUNS + r) + 1], row_unit, phase * STEP + i, i, LATENTS,
                        )  # fmt: skip
                    else:
                        w = tl.broadcast_to(parts[i][None, :, :], [CHUNKS, COLUMNS, ROWS])
                        if LATENTS.fold == "token":
                            by = tile_scales[(phase * STEP + i) * RUNS + r].to(tl.float32)
                            w = w * (by * LATENTS.boost)[:, None, :]
                        v = numbers[r][phase * STEP + i]
                        part = tl.dot(w.to(DTYPE), v, part, input_precision="ieee")
                new = new + (part,)
            acc = new
        block = next_block
    if LATENTS.side.code != "none":
        unit = LATENTS.boost * tile_unit(LATENTS.side.bits, LATENTS.isa)
        acc = times(acc, 1.0 / unit, tl.float32)
    return best, total, acc


@triton.jit
def times(tiles, factor, DTYPE: tl.constexpr):
    """Return tiles times a factor that broadcasts, computed in fp32, in DTYPE."""
    new = ()
    for i in tl.static_range(len(tiles)):
        new = new + ((tiles[i].to(tl.float32) * factor).to(DTYPE),)
    return new


@triton.constexpr_function
def place_unit(PLACE, BITS, ISA):
    """Return what the codes of a place of words are multiplied by besides `tile_unit`."""
    return 2.0 ** (PLACE * BITS % 8) if ISA > 0 and BITS < 8 else 1.0


@triton.jit
def _one_below_another(tiles, COPIES: tl.constexpr):
    """Stack COPIES (1, 2, 4 or 8) tiles [chunks, rows, wide] at a time along their rows."""
    for _ in tl.static_range(stages(COPIES)):
        pairs = ()
        for i in tl.static_range(len(tiles) // 2):
            pair = tl.trans(tl.join(tiles[2 * i], tiles[2 * i + 1]), (0, 3, 1, 2))
            pairs = pairs + (pair.reshape(pair.shape[0], 2 * pair.shape[2], pair.shape[3]),)
        tiles = pairs
    return tiles


@triton.jit
def side_by_side(tiles):
    """Put 1, 2 or 4 tiles [chunks, columns, rows] together: [chunks, columns, rows * places], places fastest."""
    PLACES: tl.constexpr = len(tiles)
    whole = tiles[0]
    if PLACES == 2:
        whole = tl.join(tiles[0], tiles[1])
    elif PLACES == 4:
        whole = tl.join(tl.join(tiles[0], tiles[2]), tl.join(tiles[1], tiles[3]))
    return whole.reshape(tiles[0].shape[0], tiles[0].shape[1], tiles[0].shape[2] * PLACES)


@triton.jit
def apart(x, PLACES: tl.constexpr):
    """Undo `side_by_side` for one chunk: [columns, rows * places] to tiles of [columns, rows]."""
    COLUMNS: tl.constexpr = x.shape[0]
    ROWS: tl.constexpr = x.shape[1] // PLACES
    if PLACES == 1:
        return (x,)
    elif PLACES == 2:
        first, second = tl.split(x.reshape(COLUMNS, ROWS, 2))
        return (first, second)
    else:
        even, odd = tl.split(x.reshape(COLUMNS, ROWS, 2, 2))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        return (first, second, third, fourth)


@triton.jit
def piece(RUN: tl.constexpr, CUT: tl.constexpr):
    """Return the channels of run RUN of each chunk, [chunks, wide], and which there are; CUT: meta_params.Chunks."""
    place = tl.arange(0, CUT.wide)[None, :]
    channel = (tl.arange(0, CUT.chunks)[:, None] * CUT.runs + RUN) * CUT.size + place
    if CUT.size < CUT.wide or CUT.chunks * CUT.runs * CUT.size > CUT.dim:
        inside = (place < CUT.size) & (channel < CUT.dim)
    else:
        inside = tl.full(channel.shape, True, tl.int1)
    return channel, inside


@triton.jit
def load_tile(rows, held, RUN: tl.constexpr, CUT: tl.constexpr):
    """Load run RUN of the channels of `rows` [rows], pointers to channel 0, as [chunks, rows, wide]; zeros where there are none.

    held: [rows], which exist.
    """
    channel, inside = piece(RUN, CUT)
    where = rows[None, :, None] + channel[:, None, :]
    return tl.load(where, mask=held[None, :, None] & inside[:, None, :], other=0)


@triton.jit
def load_runs(rows, held, CUT: tl.constexpr):
    """Load all runs, see `load_tile`."""
    RUNS: tl.constexpr = CUT.runs
    runs = ()
    for r in tl.static_range(RUNS):
        runs = runs + (load_tile(rows, held, r, CUT),)
    return runs


@triton.jit
def load_numbers(rows, LATENTS: tl.constexpr):
    """Load a tile's words, `rows` points to channel 0 of each [rows], and unpack them: tiles run by run and place by place."""
    CUT: tl.constexpr = LATENTS.cut
    WHOLE: tl.constexpr = LATENTS.whole
    DTYPE: tl.constexpr = dtype_of(LATENTS.dtype)
    CODE: tl.constexpr = LATENTS.side.code
    held = below(tl.arange(0, rows.shape[0]), rows.shape[0])
    if WHOLE is not None:
        # the first and the last channels of each chunk
        x = load_tile(rows, held, 0, WHOLE)
        x = x.reshape(x.shape[0], x.shape[1], 2, x.shape[2] // 2)
        runs = tl.split(tl.trans(x, (0, 1, 3, 2)))
    else:
        runs = load_runs(rows, held, CUT)
    numbers = ()
    for r in tl.static_range(len(runs)):
        places = unpack(runs[r], CODE, LATENTS.side.bits, DTYPE, LATENTS.isa)
        numbers = numbers + (_one_below_another(places, LATENTS.copies),)
    return numbers


@triton.jit
def load_scales(scale, block, token, LATENTS: tl.constexpr):
    """Load the scales of a tile by token, place by place and run by run, each [chunks, rows].

    token: [rows], the tokens of place 0 in their page.
    """
    CUT: tl.constexpr = LATENTS.cut
    RUNS: tl.constexpr = CUT.runs
    PAGE: tl.constexpr = LATENTS.side.page
    GROUP: tl.constexpr = LATENTS.side.scale_channels
    GROUPS: tl.constexpr = CUT.dim // GROUP
    scales = ()
    if LATENTS.fold == "token":
        for p in tl.static_range(PAGE // LATENTS.stride):
            for r in tl.static_range(RUNS):
                group = (tl.arange(0, CUT.chunks) * RUNS + r) * CUT.size // GROUP
                at = (block * PAGE + token + p * LATENTS.stride)[None, :] * GROUPS
                where = scale + (at + tl.minimum(group, GROUPS - 1)[:, None])
                scales = scales + (tl.load(where),)
    return scales


@triton.jit
def score_rope(
    scores, query, keys, scale, CUT: tl.constexpr, CODE: tl.constexpr, ISA: tl.constexpr
):
    """Add the products of RoPE keys to scores [chunks, columns, rows]: each chunk takes its part of the channels.

    Args:
        query: [chunks, columns, wide]; keys: [rows], pointers to channel 0 of each token.
        scale: of encoded keys, whose offsets are added elsewhere.
    """
    x = load_tile(keys, below(tl.arange(0, keys.shape[0]), keys.shape[0]), 0, CUT)
    if CODE == "none":
        k = tl.trans(x.to(query.dtype), (0, 2, 1))
        return tl.dot(query, k, scores, input_precision="ieee")
    else:
        # bytes as the low half of words: RoPE keys are few, and words unpack without any exchange between threads
        k = unpack(x.to(tl.int16), CODE, 8, query.dtype, ISA)[0]
        product = tl.dot(query, tl.trans(k, (0, 2, 1)), input_precision="ieee")
        return scores + product * scale


@triton.jit
def store_runs(pointers, acc, held, CUT: tl.constexpr):
    """Store runs of acc [chunks, columns, wide] where `held` [columns]."""
    for r in tl.static_range(len(acc)):
        channel, inside = piece(r, CUT)
        where = pointers[None, :, None] + channel[:, None, :]
        inside = held[None, :, None] & inside[:, None, :]
        tl.store(where, acc[r], mask=inside)


@triton.jit
def load_channels(factors, RUN: tl.constexpr, CUT: tl.constexpr, CACHE: tl.constexpr):
    """Load the scales or offsets of channels, `factors` points to channel 0's, as [chunks, wide]; cut as in `load_tile`."""
    channel, inside = piece(RUN, CUT)
    return tl.load(factors + channel, mask=inside, other=0, cache_modifier=CACHE)


@triton.jit
def load_factors(keys, block, token, LATENTS: tl.constexpr):
    """Load scales and offsets by channel of a tile's places, group by group and run by run, each [chunks, wide].

    Args:
        token: of the first place, of which there are LATENTS.step, in its page.
    """
    CUT: tl.constexpr = LATENTS.cut
    RUNS: tl.constexpr = CUT.runs
    STEP: tl.constexpr = LATENTS.step
    SHARE: tl.constexpr = LATENTS.share
    factors = ()
    if LATENTS.fold == "channel":
        for i in tl.static_range(0, STEP, SHARE):
            at = first_factor(block, token + i * LATENTS.stride, LATENTS)
            for r in tl.static_range(RUNS):
                # the hint keeps these loads apart from those of `score_channels`
                by = load_channels(keys.scale + at, r, CUT, ".ca")
                o = load_channels(keys.offset + at, r, CUT, ".ca")
                factors = factors + (by, o)
    return factors


@triton.jit
def first_factor(block, token, LATENTS: tl.constexpr):
    """Return the number of channel 0's scale by channel, of token `token` in page `block`."""
    GROUP: tl.constexpr = LATENTS.side.scale_tokens
    return (block * (LATENTS.side.page // GROUP) + token // GROUP) * LATENTS.cut.dim


@triton.jit
def score_offsets(scores, query, offsets, RUN: tl.constexpr, CUT: tl.constexpr):
    """Add query . offsets to scores [chunks, columns, rows], the same in all rows.

    As a matrix product of columns that are all equal: exact products, and no sums across threads.
    """
    shape: tl.constexpr = [query.shape[0], query.shape[2], scores.shape[2]]
    o = load_channels(offsets, RUN, CUT, "").to(query.dtype)
    equal = tl.broadcast_to(o[:, :, None], shape)
    return tl.dot(query, equal, scores, input_precision="ieee")


@triton.jit
def score_channels(
    numbers, query, bias, scale, offset, row_unit, FIRST: tl.constexpr, LATENTS: tl.constexpr
):
    """Score the places from FIRST on of one token group: tiles [chunks, columns, rows], one per place.

    Args:
        numbers: of `load_numbers`; query: run by run, [chunks, columns, wide].
        bias: [chunks, columns, rows], what all scores begin with.
        scale, offset: pointers to channel 0's of the group; row_unit: [rows], the units of a place's rows.
    """
    CUT: tl.constexpr = LATENTS.cut
    SHARE: tl.constexpr = LATENTS.share
    products = ()
    for _ in tl.static_range(SHARE):
        products = products + (tl.zeros(bias.shape, tl.float32),)
    for r in tl.static_range(len(numbers)):
        bias = score_offsets(bias, query[r], offset, r, CUT)
        by = load_channels(scale, r, CUT, "")
        scaled = query[r] * by.to(query[r].dtype)[:, None, :]
        more = ()
        for i in tl.static_range(SHARE):
            k = tl.trans(numbers[r][FIRST + i], (0, 2, 1))
            more = more + (tl.dot(scaled, k, products[i], input_precision="ieee"),)
        products = more
    scores = ()
    for i in tl.static_range(SHARE):
        unit = place_unit((FIRST + i) * LATENTS.copies, LATENTS.side.bits, LATENTS.isa)
        unit = row_unit * (1.0 / (tile_unit(LATENTS.side.bits, LATENTS.isa) * unit))
        unit = tl.broadcast_to(unit[None, None, :], bias.shape)
        scores = scores + (tl.fma(products[i], unit, bias),)
    return scores


@triton.jit
def add_channels(
    acc, numbers, parts, held, by, offset, row_unit, FIRST: tl.constexpr, PART: tl.constexpr, LATENTS: tl.constexpr
):  # fmt: skip
    """Add the weighted codes of one token group and run to acc [chunks, columns, wide], in units of boost * tile_unit.

    Args:
        numbers: codes place by place, the group's from FIRST on; parts: weights [columns, rows], from PART on.
        held: [columns], the group's sum of weights; by, offset: [chunks, wide], its scales and offsets.
    """
    SHARE: tl.constexpr = LATENTS.share
    DTYPE: tl.constexpr = dtype_of(LATENTS.dtype)
    product = tl.zeros(acc.shape, tl.float32)
    for i in tl.static_range(SHARE):
        unit = place_unit((FIRST + i) * LATENTS.copies, LATENTS.side.bits, LATENTS.isa)
        unit = row_unit * (LATENTS.boost / unit)
        w = (parts[PART + i] * unit[None, :]).to(DTYPE)
        w = tl.broadcast_to(w[None, :, :], [acc.shape[0], w.shape[0], w.shape[1]])
        product = tl.dot(w, numbers[FIRST + i], product, input_precision="ieee")
    by = tl.broadcast_to(by.to(tl.float32)[:, None, :], acc.shape)
    held = held * (LATENTS.boost * tile_unit(LATENTS.side.bits, LATENTS.isa))
    return tl.fma(product, by, acc) + held[None, :, None] * offset.to(tl.float32)[:, None, :]
