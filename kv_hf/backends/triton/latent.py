"""Attention over pages of latents: a tile is read once, as keys and as values, for 16 query rows.

A 16-bit word holds codes of one channel and of tokens that lie a page's words apart (see spec.SideSpec), so a tile of
words unpacks into one tile of tokens per place, and may be read along channels and along tokens alike. Tiles are
[batch, rows of words, channels]: products are batches over the rank (meta_params.Part), one for each warp, and scores are
summed over them. Query rows lie on the rows of the products, so that weights go from one product to the next without
leaving their registers. LATENTS is a meta_params.Latents. Knows nothing of rows and splits.

Where scales and offsets belong to channels, the query gets the scales once per group of tokens, and sums of products get them
once per group: codes stay as they are.

    score  += (q * scale) @ codes + q . offset
    acc    += (weights @ codes) * scale + (sum of weights) * offset
"""

import triton
import triton.language as tl

from .dequant import dtype_of, run_unit, stages, tile_unit, unpack
from .heads import load_part, load_rows
from .softmax import below_one, bend, weigh


@triton.jit
def attend_latents(
    keys, values, columns, table, begin, end, visible, LATENTS: tl.constexpr, QUERIES: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """Attend query rows to tiles `begin` to `end` of a row's pages of latents.

    Arguments are those of heads.attend_heads; `keys` are latents, `values` RoPE keys.
    Returns: maxima in log2, sums of weights [columns], and parts of the weighted latents [batch, columns, size].
    """
    CUT: tl.constexpr = LATENTS.cut
    ROPE: tl.constexpr = LATENTS.rope
    RANK: tl.constexpr = LATENTS.side.dim
    ROPE_DIM: tl.constexpr = ROPE.parts[0].end
    PAGE: tl.constexpr = LATENTS.side.page
    WORDS: tl.constexpr = PAGE // LATENTS.side.places
    ROWS: tl.constexpr = LATENTS.rows
    STRIDE: tl.constexpr = LATENTS.stride
    STEP: tl.constexpr = LATENTS.step
    SHARE: tl.constexpr = LATENTS.share
    BATCH: tl.constexpr = CUT.parts[0].batch
    PARTS: tl.constexpr = len(CUT.parts)
    TILES_PER_PAGE: tl.constexpr = PAGE // LATENTS.tile
    R_CODE: tl.constexpr = LATENTS.rope_code
    DTYPE: tl.constexpr = dtype_of(LATENTS.dtype)
    COLUMNS: tl.constexpr = QUERIES.columns
    queries, real = columns.queries, columns.real
    best = tl.full([COLUMNS], float("-inf"), tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    acc = ()
    q = load_rows(queries, real, CUT, False)
    size = tl.zeros([COLUMNS], tl.float32)
    for p in tl.static_range(PARTS):
        acc = acc + (tl.zeros(q[p].shape, tl.float32),)
        size = tl.maximum(size, tl.max(tl.max(tl.abs(q[p].to(tl.float32)), 2), 0))
    q_rope = load_rows(queries + RANK, real, ROPE, False)
    size = tl.maximum(size, tl.max(tl.max(tl.abs(q_rope[0].to(tl.float32)), 2), 0))
    shrink, factor = below_one(size, visible.softmax_scale)
    q = times(q, shrink[None, :, None], DTYPE)
    q_rope = times(q_rope, shrink[None, :, None], dtype_of(LATENTS.rope_dtype))
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
        ropes = values.codes + (block * PAGE + token) * ROPE_DIM
        r_scale = 1.0
        bias = tl.zeros([BATCH, COLUMNS, ROWS], tl.float32)
        if R_CODE != "none":
            r_scale = tl.load(values.scale + block).to(tl.float32)
            offset = load_part(values.offset + block * ROPE_DIM, 0, ROPE, "")
            bias = score_offsets(bias, q_rope[0], offset)

        next_block = page.to(tl.int64)
        page = tl.load(table + tl.minimum(tile + 2, last) // TILES_PER_PAGE)
        tile_scales = scales
        next_token = ((tile + 1) % TILES_PER_PAGE) * ROWS + lane
        scales = load_scales(keys.scale, next_block, next_token, LATENTS)

        for phase in tl.static_range(PAGE // STRIDE // STEP):
            scores = ()
            for i in tl.static_range(0, STEP, SHARE):
                at = first_factor(block, start + (phase * STEP + i) * STRIDE, LATENTS)
                scores = scores + score_places(
                    numbers, q, bias, keys, at, tile_scales, row_unit, phase * STEP + i, LATENTS
                )
            turned = ()
            for i in tl.static_range(STEP):
                rope = ropes + (phase * STEP + i) * (STRIDE * ROPE_DIM)
                s = score_rope(scores[i], q_rope[0], rope, r_scale, ROPE, R_CODE, LATENTS.isa)
                turned = turned + (s,)
            # loaded apart from what scores take: their registers would be in the way there
            factors = load_factors(keys, block, start + phase * STEP * STRIDE, LATENTS)
            n = tl.arange(0, ROWS * STEP)
            at_page = tile // TILES_PER_PAGE * PAGE + start
            position = at_page + n // STEP + (phase * STEP + n % STEP) * STRIDE
            whole = tl.trans(tl.sum(side_by_side(turned), 0))
            held = tl.full(n.shape, True, tl.int1)
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
            for p in tl.static_range(PARTS):
                part = acc[p] * keep[None, :, None]
                for i in tl.static_range(0, STEP, SHARE):
                    if LATENTS.fold == "channel":
                        part = add_channels(
                            part, numbers[p], parts, sums[i // SHARE], factors[2 * (i // SHARE * PARTS + p)],
                            factors[2 * (i // SHARE * PARTS + p) + 1], row_unit, phase * STEP + i, i, LATENTS,
                        )  # fmt: skip
                    else:
                        w = tl.broadcast_to(parts[i][None, :, :], [BATCH, COLUMNS, ROWS])
                        if LATENTS.fold == "token":
                            by = tile_scales[(phase * STEP + i) * PARTS + p].to(tl.float32)
                            w = w * (by * LATENTS.boost)[:, None, :]
                        v = numbers[p][phase * STEP + i]
                        part = tl.dot(w.to(DTYPE), v, part, input_precision="ieee")
                new = new + (part,)
            acc = new
        block = next_block
    if LATENTS.side.code != "none":
        unit = LATENTS.boost * tile_unit(LATENTS.side.bits, LATENTS.isa)
        acc = times(acc, 1.0 / unit, tl.float32)
    return best, total, acc


@triton.jit
def times(parts, factor, DTYPE: tl.constexpr):
    """Return parts [batch, columns, size] times a factor that broadcasts, computed in fp32, in DTYPE."""
    new = ()
    for p in tl.static_range(len(parts)):
        new = new + ((parts[p].to(tl.float32) * factor).to(DTYPE),)
    return new


@triton.jit
def _one_below_another(tiles, COPIES: tl.constexpr):
    """Stack COPIES (1, 2, 4 or 8) tiles [batch, rows, size] at a time along their rows."""
    for _ in tl.static_range(stages(COPIES)):
        pairs = ()
        for i in tl.static_range(len(tiles) // 2):
            pair = tl.trans(tl.join(tiles[2 * i], tiles[2 * i + 1]), (0, 3, 1, 2))
            pairs = pairs + (pair.reshape(pair.shape[0], 2 * pair.shape[2], pair.shape[3]),)
        tiles = pairs
    return tiles


@triton.jit
def side_by_side(tiles):
    """Put 1, 2 or 4 tiles [batch, columns, rows] together: [batch, columns, rows * places], places fastest."""
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
    tiles = (x,)
    for _ in tl.static_range(stages(PLACES)):
        even = ()
        odd = ()
        for i in tl.static_range(len(tiles)):
            pairs = tiles[i].reshape(x.shape[0], tiles[i].shape[1] // 2, 2)
            first, second = tl.split(pairs)
            even = even + (first,)
            odd = odd + (second,)
        tiles = even + odd
    return tiles


@triton.jit
def load_numbers(rows, LATENTS: tl.constexpr):
    """Load a tile's words, `rows` points to channel 0 of each [rows], and unpack them: tiles part by part and place by place."""
    CUT: tl.constexpr = LATENTS.cut
    WHOLE: tl.constexpr = LATENTS.whole
    DTYPE: tl.constexpr = dtype_of(LATENTS.dtype)
    CODE: tl.constexpr = LATENTS.side.code
    held = tl.full(rows.shape, True, tl.int1)
    if WHOLE is not None:
        # the channels of the first and of the second part
        x = load_rows(rows, held, WHOLE, False)[0]
        x = x.reshape(x.shape[0], x.shape[1], 2, x.shape[2] // 2)
        words = tl.split(tl.trans(x, (0, 1, 3, 2)))
    else:
        words = load_rows(rows, held, CUT, False)
    numbers = ()
    for p in tl.static_range(len(words)):
        places = unpack(words[p], CODE, LATENTS.side.bits, DTYPE, LATENTS.isa)
        numbers = numbers + (_one_below_another(places, LATENTS.copies),)
    return numbers


@triton.jit
def load_scales(scale, block, token, LATENTS: tl.constexpr):
    """Load the scales of a tile by token, place by place and part by part, each [batch, rows].

    token: [rows], the tokens of place 0 in their page.
    """
    CUT: tl.constexpr = LATENTS.cut
    PAGE: tl.constexpr = LATENTS.side.page
    GROUP: tl.constexpr = LATENTS.side.scale_channels
    GROUPS: tl.constexpr = LATENTS.side.dim // GROUP
    scales = ()
    if LATENTS.fold == "token":
        for i in tl.static_range(PAGE // LATENTS.stride):
            for p in tl.static_range(len(CUT.parts)):
                number = tl.arange(0, CUT.parts[p].batch) * len(CUT.parts) + p
                group = number * CUT.parts[p].held // GROUP
                at = (block * PAGE + token + i * LATENTS.stride)[None, :] * GROUPS
                where = scale + (at + tl.minimum(group, GROUPS - 1)[:, None])
                scales = scales + (tl.load(where),)
    return scales


@triton.jit
def score_rope(
    scores, query, keys, scale, CUT: tl.constexpr, CODE: tl.constexpr, ISA: tl.constexpr
):
    """Add the products of RoPE keys to scores [batch, columns, rows]: each product of the batch takes its channels.

    Args:
        query: [batch, columns, size]; keys: [rows], pointers to channel 0 of each token.
        scale: of encoded keys, whose offsets are added elsewhere.
    """
    held = tl.full(keys.shape, True, tl.int1)
    x = load_rows(keys, held, CUT, False)[0]
    if CODE == "none":
        k = tl.trans(x.to(query.dtype), (0, 2, 1))
        return tl.dot(query, k, scores, input_precision="ieee")
    else:
        # bytes as the low half of words: RoPE keys are few, and words unpack without any exchange between threads
        k = unpack(x.to(tl.int16), CODE, 8, query.dtype, ISA)[0]
        product = tl.dot(query, tl.trans(k, (0, 2, 1)), input_precision="ieee")
        return scores + product * scale


@triton.jit
def load_factors(keys, block, token, LATENTS: tl.constexpr):
    """Load scales and offsets by channel of a tile's places, group by group and part by part, each [batch, size].

    Args:
        token: of the first place, of which there are LATENTS.step, in its page.
    """
    CUT: tl.constexpr = LATENTS.cut
    STEP: tl.constexpr = LATENTS.step
    SHARE: tl.constexpr = LATENTS.share
    factors = ()
    if LATENTS.fold == "channel":
        for i in tl.static_range(0, STEP, SHARE):
            at = first_factor(block, token + i * LATENTS.stride, LATENTS)
            for p in tl.static_range(len(CUT.parts)):
                # the hint keeps these loads apart from those of `score_places`
                by = load_part(keys.scale + at, p, CUT, ".ca")
                factors = factors + (by, load_part(keys.offset + at, p, CUT, ".ca"))
    return factors


@triton.jit
def first_factor(block, token, LATENTS: tl.constexpr):
    """Return the number of channel 0's scale by channel, of token `token` in page `block`."""
    GROUP: tl.constexpr = LATENTS.side.scale_tokens
    return (block * (LATENTS.side.page // GROUP) + token // GROUP) * LATENTS.side.dim


@triton.jit
def score_offsets(scores, query, offsets):
    """Add query . offsets [batch, size] to scores [batch, columns, rows], the same in all rows.

    As a matrix product of columns that are all equal: exact products, and no sums across threads.
    """
    shape: tl.constexpr = [query.shape[0], query.shape[2], scores.shape[2]]
    equal = tl.broadcast_to(offsets.to(query.dtype)[:, :, None], shape)
    return tl.dot(query, equal, scores, input_precision="ieee")


@triton.jit
def score_places(numbers, query, bias, keys, at, scales, row_unit, FIRST: tl.constexpr, LATENTS: tl.constexpr):  # fmt: skip
    """Score the places from FIRST on that share scales by channel, or else one: tiles [batch, columns, rows], one per place.

    Args:
        numbers: of `load_numbers`; query: part by part, [batch, columns, size].
        bias: [batch, columns, rows], what all scores begin with.
        keys: Fields; at: of `first_factor`; scales: of `load_scales`; row_unit: [rows], the units of a place's rows.
    """
    CUT: tl.constexpr = LATENTS.cut
    SHARE: tl.constexpr = LATENTS.share
    BY_CHANNEL: tl.constexpr = LATENTS.fold == "channel"
    if BY_CHANNEL:
        scale, offset = keys.scale + at, keys.offset + at
    scores = ()
    for _ in tl.static_range(SHARE):
        scores = scores + (tl.zeros(bias.shape, tl.float32) if BY_CHANNEL else bias,)
    for p in tl.static_range(len(numbers)):
        q = query[p]
        if BY_CHANNEL:
            bias = score_offsets(bias, q, load_part(offset, p, CUT, ""))
            by = load_part(scale, p, CUT, "")
            q = q * by.to(q.dtype)[:, None, :]
        products = ()
        for i in tl.static_range(SHARE):
            k = tl.trans(numbers[p][FIRST + i], (0, 2, 1))
            if LATENTS.fold == "token":
                by = scales[(FIRST + i) * len(numbers) + p].to(tl.float32)
                product = tl.dot(q, k, input_precision="ieee")
                product = tl.fma(product, by[:, None, :], scores[i])
            else:
                product = tl.dot(q, k, scores[i], input_precision="ieee")
            products = products + (product,)
        scores = products
    if BY_CHANNEL:
        products = scores
        scores = ()
        for i in tl.static_range(SHARE):
            unit = run_unit((FIRST + i) * LATENTS.copies, LATENTS.side.bits, LATENTS.isa)
            unit = row_unit * (1.0 / (tile_unit(LATENTS.side.bits, LATENTS.isa) * unit))
            scores = scores + (tl.fma(products[i], unit[None, None, :], bias),)
    return scores


@triton.jit
def add_channels(
    acc, numbers, parts, held, by, offset, row_unit, FIRST: tl.constexpr, PART: tl.constexpr, LATENTS: tl.constexpr
):  # fmt: skip
    """Add the weighted codes of one token group to a part of acc [batch, columns, size], in units of boost * tile_unit.

    Args:
        numbers: codes place by place, the group's from FIRST on; parts: weights [columns, rows], from PART on.
        held: [columns], the group's sum of weights; by, offset: [batch, size], its scales and offsets.
    """
    SHARE: tl.constexpr = LATENTS.share
    DTYPE: tl.constexpr = dtype_of(LATENTS.dtype)
    product = tl.zeros(acc.shape, tl.float32)
    for i in tl.static_range(SHARE):
        unit = run_unit((FIRST + i) * LATENTS.copies, LATENTS.side.bits, LATENTS.isa)
        unit = row_unit * (LATENTS.boost / unit)
        w = (parts[PART + i] * unit[None, :]).to(DTYPE)
        w = tl.broadcast_to(w[None, :, :], [acc.shape[0], w.shape[0], w.shape[1]])
        product = tl.dot(w, numbers[FIRST + i], product, input_precision="ieee")
    held = held * (LATENTS.boost * tile_unit(LATENTS.side.bits, LATENTS.isa))
    return (
        tl.fma(product, by.to(tl.float32)[:, None, :], acc)
        + held[None, :, None] * offset.to(tl.float32)[:, None, :]
    )
