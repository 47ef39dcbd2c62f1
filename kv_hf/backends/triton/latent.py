"""Decode attention over pages of latents: one program walks a split of one row's pages for 16 query rows.

The definition of the result is backends/reference/attention.py. A tile of latents is read once, as keys and as values: products
run over chunks of the rank, one for each warp, and scores are summed over them. Query rows lie on the rows of
the products, so that weights go from one product to the next without leaving their registers.
"""

import triton
import triton.language as tl

from .dequant import tile_unit
from .direct import SPECIALIZED
from .softmax import (
    LOG2E,
    Visibility,
    add_sink,
    bend,
    mask_pointers,
    near_one,
    row_lengths,
    tiles_of_split,
    weigh,
    window_slots,
)
from .words import (
    add_channels,
    apart,
    halves,
    load_factors,
    load_scales,
    load_tile,
    one_below_another,
    score_channels,
    score_offsets,
    score_rope,
    side_by_side,
    store_pieces,
    sum_of_parts,
    unpack_words,
)


@triton.jit
def attend_latent_window(
    queries, real, latents, latent_slot, ropes, rope_slot, exact, page_tokens, visible, softmax_scale, best, total, acc,
    RANK: tl.constexpr, SIZE: tl.constexpr, ROPE: tl.constexpr, ROPE_WIDE: tl.constexpr, W_TILE: tl.constexpr,
    DTYPE: tl.constexpr, ROPE_DTYPE: tl.constexpr, PRECISION: tl.constexpr,
    HIDING: tl.constexpr,
):  # fmt: skip
    """Add the window's tokens to the running softmax (best, total, acc) and return it; see decode.attend_window.

    latents, ropes: pointers to slot 0 of this row; acc: runs of [chunks, columns, wide].
    """
    CHUNKS: tl.constexpr = acc[0].shape[0]
    COLUMNS: tl.constexpr = acc[0].shape[1]
    WIDE: tl.constexpr = acc[0].shape[2]
    RUNS: tl.constexpr = len(acc)
    BENT: tl.constexpr = HIDING.bent
    q = ()
    for r in tl.static_range(RUNS):
        one = load_tile(queries, real, r * SIZE, CHUNKS, RUNS * SIZE, SIZE, WIDE, RANK, True)
        q = q + (one.to(DTYPE),)
    q_rope = q[0]
    if ROPE > 0:
        q_rope = load_tile(
            queries + RANK, real, 0, CHUNKS, ROPE_WIDE, ROPE_WIDE, ROPE_WIDE, ROPE, True
        ).to(ROPE_DTYPE)
    factor = tl.full([COLUMNS], 1.0, tl.float32) * (softmax_scale * LOG2E)
    for first in tl.range(0, exact, W_TILE, num_stages=1):
        slot, held, at = window_slots(first, exact, page_tokens, visible.sink_tokens, W_TILE)
        scores = tl.zeros([CHUNKS, COLUMNS, W_TILE], tl.float32)
        numbers = ()
        for r in tl.static_range(RUNS):
            rows = latents + slot * latent_slot
            x = load_tile(rows, held, r * SIZE, CHUNKS, RUNS * SIZE, SIZE, WIDE, RANK, True).to(
                DTYPE
            )
            scores = tl.dot(q[r], tl.trans(x, (0, 2, 1)), scores, input_precision=PRECISION)
            numbers = numbers + (x,)
        if ROPE > 0:
            scores = score_rope(
                scores, q_rope, ropes + slot * rope_slot, 1.0, held, CHUNKS, ROPE_WIDE, ROPE,
                "none", True, 0, PRECISION,
            )  # fmt: skip
        scores = tl.trans(tl.sum(scores, 0))
        scores = bend(scores, factor, at, held, visible, HIDING, True)
        weights, keep, best = weigh(scores, factor, best, BENT, True)
        total = total * keep + tl.sum(weights, 0)
        w = tl.broadcast_to(tl.trans(weights)[None, :, :], [CHUNKS, COLUMNS, W_TILE]).to(DTYPE)
        new = ()
        for r in tl.static_range(RUNS):
            part = acc[r] * keep[None, :, None]
            new = new + (tl.dot(w, numbers[r], part, input_precision=PRECISION),)
        acc = new
    return best, total, acc


@triton.jit(**SPECIALIZED)
def latent_kernel(
    query,  # [rows, HEADS, q_len, RANK + ROPE]
    query_row,
    query_head,
    query_token,
    codes,  # [pages, WORDS, RANK]: int16 words of codes, or exact numbers of PAGE tokens
    scale,  # [pages, PAGE, RANK / GROUP] at 8 bits, else [pages, PAGE / GROUP, RANK]
    offset,
    rope,  # [pages, PAGE, ROPE]
    rope_scale,  # [pages]
    rope_offset,  # [pages, ROPE]
    block_table,  # [rows, table_row]
    table_row,
    num_pages,  # [rows]
    window,  # [rows, slots, RANK]
    window_row,
    window_slot,
    window_rope,  # [rows, slots, ROPE]
    wr_row,
    wr_slot,
    exact_lens,  # [rows]
    padding,  # [rows]
    mask,  # [rows or 1, HEADS or 1, q_len, columns], strides 0 where 1
    mask_row,
    mask_head,
    mask_query,
    sink_logits,  # [HEADS]
    out,  # [rows, q_len, HEADS, RANK]; written where there is one split
    partial,  # [programs of one split, splits, COLUMNS, RANK] fp32; where there are more
    bests,  # [programs of one split, splits, 2, COLUMNS] fp32: maxima in log2, and sums of weights
    softmax_scale,
    sliding_window,
    sink_tokens,
    q_len,
    HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAGE: tl.constexpr,
    RANK: tl.constexpr,
    CODE: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,  # channels that share a scale at 8 bits, else tokens
    WORDS: tl.constexpr,
    STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    SHARE: tl.constexpr,
    CHUNKS: tl.constexpr,
    RUNS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    BOOST: tl.constexpr,
    L_DTYPE: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_CODE: tl.constexpr,
    ROPE_WIDE: tl.constexpr,
    ROPE_DTYPE: tl.constexpr,
    W_TILE: tl.constexpr,
    W_COST: tl.constexpr,
    W_DTYPE: tl.constexpr,
    W_ROPE_DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    HIDING: tl.constexpr,
    SINKS: tl.constexpr,
    STAGES: tl.constexpr,
    ISA: tl.constexpr,
):
    """Attend a block of the query rows of one row to one split of its tokens.

    Grid: (rows, blocks of query rows, splits). The last split also attends to the window; combine_kernel
    merges the splits. CHUNK: whether q_len may be more than 1. STRIDE: tokens between
    the places of a row of a tile; where a page has fewer words than a product needs rows, the rows of several places
    lie one below another.
    """
    if not CHUNK:
        q_len = 1
    used = HEADS * q_len  # columns
    COPIES: tl.constexpr = STRIDE // WORDS  # places of a word that are rows of a tile
    PLACES: tl.constexpr = PAGE // STRIDE
    TOKENS: tl.constexpr = ROWS * PLACES
    TILES_PER_PAGE: tl.constexpr = STRIDE // ROWS
    BY_CHANNEL: tl.constexpr = CODE == "unsigned"
    BY_TOKEN: tl.constexpr = CODE == "signed" or CODE == "float8"
    BENT: tl.constexpr = HIDING.bent
    HIDES: tl.constexpr = HIDING.hides

    row = tl.program_id(0)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = column < used
    head = column % HEADS
    token_of = column // HEADS
    pages, exact, left = row_lengths(num_pages, exact_lens, padding, row)
    kv_len = pages * PAGE + exact
    masks = mask_pointers(mask, row, head, token_of, real, mask_row, mask_head, mask_query)
    visible = Visibility(kv_len - q_len + token_of, masks, left, sink_tokens, sliding_window, 1.0)

    # the tiles of this split; those of pages that no query's sliding window reaches are left out
    first = 0
    tiles = pages * TILES_PER_PAGE
    if HIDING.windowed:
        first = tl.maximum(kv_len - q_len + 1 - sliding_window - sink_tokens, 0) // PAGE
        first = tl.minimum(first * TILES_PER_PAGE, tiles)
    # the window counts as W_COST times as much work per token as a page
    begin, end = tiles_of_split(first, tiles, exact * W_COST // TOKENS, split, num_splits)

    queries = query + row.to(tl.int64) * query_row + head * query_head
    queries += token_of * query_token
    size = tl.zeros([COLUMNS], tl.float32)
    for r in tl.static_range(RUNS):
        one = load_tile(queries, real, r * SIZE, CHUNKS, RUNS * SIZE, SIZE, WIDE, RANK, True)
        size = tl.maximum(size, tl.max(tl.max(tl.abs(one.to(tl.float32)), 2), 0))
    if ROPE > 0:
        turned = load_tile(
            queries + RANK, real, 0, CHUNKS, ROPE_WIDE, ROPE_WIDE, ROPE_WIDE, ROPE, True
        )
        turned = turned.to(tl.float32)
        size = tl.maximum(size, tl.max(tl.max(tl.abs(turned), 2), 0))
    shrink, factor = near_one(size, softmax_scale, True)
    q = ()
    for r in tl.static_range(RUNS):
        one = load_tile(queries, real, r * SIZE, CHUNKS, RUNS * SIZE, SIZE, WIDE, RANK, True)
        q = q + ((one.to(tl.float32) * shrink[None, :, None]).to(L_DTYPE),)
    q_rope = q[0]
    if ROPE > 0:
        q_rope = (turned * shrink[None, :, None]).to(ROPE_DTYPE)

    best = tl.full([COLUMNS], float("-inf"), tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    acc = ()
    for _ in tl.static_range(RUNS):
        acc = acc + (tl.zeros([CHUNKS, COLUMNS, WIDE], tl.float32),)

    lane = tl.arange(0, ROWS)
    row_unit = tl.full([ROWS], 1.0, tl.float32)  # what undoes the units of the places of a row
    if COPIES > 1 and ISA > 0 and BITS < 8:
        row_unit = ((127 - lane // WORDS * BITS % 8) << 23).to(tl.float32, bitcast=True)
    table = block_table + row.to(tl.int64) * table_row
    # Ids of pages are fetched two tiles ahead and scales one: their loads are too narrow for the asynchronous
    # copies that hide the latency of the words' loads.
    last = tl.maximum(end - 1, 0)
    live = tl.where(begin < end, 1, 0)
    page = tl.load(table + begin // TILES_PER_PAGE, mask=live > 0, other=0)
    block = page.to(tl.int64)
    soon = tl.load(table + tl.minimum(begin + 1, last) // TILES_PER_PAGE, mask=live > 0, other=0)
    scales = ()
    if BY_TOKEN:
        token = (begin % TILES_PER_PAGE) * ROWS + lane
        scales = load_scales(
            scale, block * PAGE + token, live, CHUNKS, RUNS, SIZE, GROUP, RANK // GROUP, STRIDE, PLACES, True
        )  # fmt: skip
    for tile in tl.range(begin, end, num_stages=STAGES):
        start = (tile % TILES_PER_PAGE) * ROWS
        token = start + lane  # of place 0
        words = codes + block * (WORDS * RANK) + (start + tl.arange(0, ROWS // COPIES)) * RANK
        numbers = ()
        if RUNS == 2 and SIZE == WIDE and BY_CHANNEL:
            x = load_tile(words, lane, 0, CHUNKS, 2 * SIZE, 2 * SIZE, 2 * WIDE, RANK, False)
            runs = halves(x)
        else:
            runs = ()
            for r in tl.static_range(RUNS):
                x = load_tile(words, lane, r * SIZE, CHUNKS, RUNS * SIZE, SIZE, WIDE, RANK, False)
                runs = runs + (x,)
        for r in tl.static_range(RUNS):
            places = unpack_words(runs[r], CODE, BITS, L_DTYPE, ISA)
            numbers = numbers + (one_below_another(places, COPIES),)
        ropes = rope + (block * PAGE + token) * ROPE
        r_scale = 1.0
        bias = tl.zeros([CHUNKS, COLUMNS, ROWS], tl.float32)
        if ROPE_CODE != "none":
            r_scale = tl.load(rope_scale + block).to(tl.float32)
            bias = score_offsets(
                bias, q_rope, rope_offset + block * ROPE, 0, ROPE_WIDE, ROPE_WIDE, ROPE, PRECISION
            )

        next_block = soon.to(tl.int64)
        soon = tl.load(table + tl.minimum(tile + 2, last) // TILES_PER_PAGE)
        tile_scales = scales
        if BY_TOKEN:
            next_token = ((tile + 1) % TILES_PER_PAGE) * ROWS + lane
            scales = load_scales(
                scale, next_block * PAGE + next_token, live, CHUNKS, RUNS, SIZE, GROUP, RANK // GROUP, STRIDE,
                PLACES, False,
            )  # fmt: skip

        for phase in tl.static_range(PLACES // STEP):
            scores = ()
            for i in tl.static_range(0, STEP, SHARE):
                if BY_CHANNEL:
                    at = block * (PAGE // GROUP) + (start + (phase * STEP + i) * STRIDE) // GROUP
                    scores = scores + score_channels(
                        numbers, q, bias, scale + at * RANK, offset + at * RANK, row_unit, phase * STEP + i, SHARE,
                        COPIES, BITS, SIZE, RANK, ISA, PRECISION,
                    )  # fmt: skip
                else:
                    s = bias
                    for r in tl.static_range(RUNS):
                        k = tl.trans(numbers[r][phase * STEP + i], (0, 2, 1))
                        if BY_TOKEN:
                            by = tile_scales[(phase * STEP + i) * RUNS + r].to(tl.float32)
                            product = tl.dot(q[r], k, input_precision=PRECISION)
                            s = tl.fma(product, tl.broadcast_to(by[:, None, :], s.shape), s)
                        else:
                            s = tl.dot(q[r], k, s, input_precision=PRECISION)
                    scores = scores + (s,)
            if ROPE > 0:
                turned_scores = ()
                for i in tl.static_range(STEP):
                    turned_scores = turned_scores + (score_rope(
                        scores[i], q_rope, ropes + (phase * STEP + i) * (STRIDE * ROPE), r_scale, lane, CHUNKS, ROPE_WIDE,
                        ROPE, ROPE_CODE, False, ISA, PRECISION,
                    ),)  # fmt: skip
                scores = turned_scores
            factors = ()
            if BY_CHANNEL:
                # loaded apart from what scores take: their registers would be in the way there
                factors = load_factors(
                    scale, offset, block * (PAGE // GROUP), start + phase * STEP * STRIDE, STEP, SHARE, STRIDE, GROUP,
                    CHUNKS, RUNS, SIZE, WIDE, RANK,
                )  # fmt: skip
            n = tl.arange(0, ROWS * STEP)
            at_page = tile // TILES_PER_PAGE * PAGE + start
            position = at_page + n // STEP + (phase * STEP + n % STEP) * STRIDE
            whole = tl.trans(tl.sum(side_by_side(scores), 0))
            whole = bend(whole, factor, sink_tokens + position, n, visible, HIDING, False)
            weights, keep, best = weigh(whole, factor, best, BENT, HIDES)
            parts = apart(tl.trans(weights), STEP)
            total = total * keep
            sums = ()  # of weights, group by group
            for i in tl.static_range(0, STEP, SHARE):
                sums = sums + (sum_of_parts(parts, i, SHARE),)
                total += sums[i // SHARE]
            new = ()
            for r in tl.static_range(RUNS):
                part = acc[r] * keep[None, :, None]
                for i in tl.static_range(0, STEP, SHARE):
                    if BY_CHANNEL:
                        part = add_channels(
                            part, numbers[r], parts, sums[i // SHARE], factors[2 * (i // SHARE * RUNS + r)],
                            factors[2 * (i // SHARE * RUNS + r) + 1], row_unit, phase * STEP + i, i, SHARE, COPIES, BITS,
                            BOOST, L_DTYPE, ISA, PRECISION,
                        )  # fmt: skip
                    else:
                        w = tl.broadcast_to(parts[i][None, :, :], [CHUNKS, COLUMNS, ROWS])
                        if BY_TOKEN:
                            by = tile_scales[(phase * STEP + i) * RUNS + r].to(tl.float32)
                            w = w * (by * BOOST)[:, None, :]
                        v = numbers[r][phase * STEP + i]
                        part = tl.dot(w.to(L_DTYPE), v, part, input_precision=PRECISION)
                new = new + (part,)
            acc = new
        block = next_block

    if CODE != "none":
        new = ()
        for r in tl.static_range(RUNS):
            new = new + (acc[r] * (1.0 / (BOOST * tile_unit(BITS, ISA))),)
        acc = new
    if split == num_splits - 1:
        best, total, acc = attend_latent_window(
            queries, real, window + row.to(tl.int64) * window_row, window_slot,
            window_rope + row.to(tl.int64) * wr_row, wr_slot, exact, pages * PAGE, visible, softmax_scale, best,
            total, acc, RANK, SIZE, ROPE, ROPE_WIDE, W_TILE, W_DTYPE, W_ROPE_DTYPE, PRECISION, HIDING,
        )  # fmt: skip

    seen = total > 0
    if num_splits == 1:
        norm = add_sink(best, total, sink_logits + head, SINKS)
        at = (row.to(tl.int64) * used + column) * RANK
        store_pieces(out + at, acc, norm, seen, real, SIZE, RANK)
    else:
        place = tl.arange(0, COLUMNS)
        slot = (row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * num_splits + split
        bests += slot * (2 * COLUMNS)
        tl.store(bests + place, best)
        tl.store(bests + COLUMNS + place, total)
        unit = tl.full([COLUMNS], 1.0, tl.float32)
        target = (slot * COLUMNS + place) * RANK
        store_pieces(partial + target, acc, unit, seen, real, SIZE, RANK)
