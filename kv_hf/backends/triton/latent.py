"""Decode attention over pages of latents: one program walks a split of one row's pages for 16 query rows.

The definition of the result is backends/reference/attention.py. A tile of latents is read once, as keys and as values: products
run over chunks of the rank, one for each warp, and scores are summed over them. Query rows lie on the rows of
the products, so that weights go from one product to the next without leaving their registers.
"""

import triton
import triton.language as tl

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
from .tiles import dtype_of
from .words import (
    add_channels,
    all_unit,
    apart,
    first_factor,
    load_factors,
    load_numbers,
    load_runs,
    load_scales,
    load_tile,
    score_channels,
    score_offsets,
    score_rope,
    side_by_side,
    store_runs,
    sum_of_parts,
)


@triton.jit
def attend_latent_window(
    queries, real, latents, latent_slot, ropes, rope_slot, exact, page_tokens, visible, softmax_scale, best, total, acc,
    LATENTS: tl.constexpr, HIDING: tl.constexpr,
):  # fmt: skip
    """Add the window's tokens to the running softmax (best, total, acc) and return it; see decode.attend_window.

    latents, ropes: pointers to slot 0 of this row; acc: runs of [chunks, columns, wide].
    """
    CUT: tl.constexpr = LATENTS.cut
    ROPE: tl.constexpr = LATENTS.rope
    TILE: tl.constexpr = LATENTS.window_tile
    DTYPE: tl.constexpr = dtype_of(LATENTS.window_dtype)
    CHUNKS: tl.constexpr = acc[0].shape[0]
    COLUMNS: tl.constexpr = acc[0].shape[1]
    q = load_runs(queries, real, CUT, True)
    q_rope = q[0]
    if ROPE.dim > 0:
        q_rope = load_tile(queries + CUT.dim, real, 0, ROPE, True)
        q_rope = q_rope.to(dtype_of(LATENTS.window_rope_dtype))
    factor = tl.full([COLUMNS], 1.0, tl.float32) * (softmax_scale * LOG2E)
    for first in tl.range(0, exact, TILE, num_stages=1):
        slot, held, at = window_slots(first, exact, page_tokens, visible.sink_tokens, TILE)
        scores = tl.zeros([CHUNKS, COLUMNS, TILE], tl.float32)
        numbers = ()
        for r in tl.static_range(len(acc)):
            numbers = numbers + (
                load_tile(latents + slot * latent_slot, held, r, CUT, True).to(DTYPE),
            )
            k = tl.trans(numbers[r], (0, 2, 1))
            scores = tl.dot(q[r].to(DTYPE), k, scores, input_precision="ieee")
        if ROPE.dim > 0:
            scores = score_rope(
                scores, q_rope, ropes + slot * rope_slot, 1.0, held, ROPE, "none", True, 0
            )
        scores = tl.trans(tl.sum(scores, 0))
        scores = bend(scores, factor, at, held, visible, HIDING, True)
        weights, keep, best = weigh(scores, factor, best, HIDING.bent, True)
        total = total * keep + tl.sum(weights, 0)
        w = tl.broadcast_to(tl.trans(weights)[None, :, :], [CHUNKS, COLUMNS, TILE]).to(DTYPE)
        new = ()
        for r in tl.static_range(len(acc)):
            part = acc[r] * keep[None, :, None]
            new = new + (tl.dot(w, numbers[r], part, input_precision="ieee"),)
        acc = new
    return best, total, acc


@triton.jit
def times(tiles, factor, DTYPE: tl.constexpr):
    """Return tiles times a factor that broadcasts, computed in fp32, in DTYPE."""
    new = ()
    for i in tl.static_range(len(tiles)):
        new = new + ((tiles[i].to(tl.float32) * factor).to(DTYPE),)
    return new


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
    window,  # [rows, 1, slots, RANK]
    window_row,
    window_head,
    window_slot,
    window_rope,  # [rows, 1, slots, ROPE]
    wr_row,
    wr_head,
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
    counters,
    key_order,
    softmax_scale,
    softcap,
    sliding_window,
    sink_tokens,
    q_len,
    HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
    LATENTS: tl.constexpr,
    W_COST: tl.constexpr,
    HIDING: tl.constexpr,
    SINKS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend a block of the query rows of one row to one split of its tokens.

    Grid: (rows, blocks of query rows, splits). The last split also attends to the window; combine_kernel
    merges the splits. CHUNK: whether q_len may be more than 1. LATENTS: latent_meta_params.Latents. Arguments are those of
    decode_kernel, in the same order; those of heads, counters, orders and softcaps are not read.
    """
    if not CHUNK:
        q_len = 1
    used = HEADS * q_len  # columns
    CUT: tl.constexpr = LATENTS.cut
    ROPE: tl.constexpr = LATENTS.rope
    RANK: tl.constexpr = CUT.dim
    PAGE: tl.constexpr = LATENTS.page
    ROWS: tl.constexpr = LATENTS.rows
    PLACES: tl.constexpr = LATENTS.places
    STRIDE: tl.constexpr = LATENTS.stride
    STEP: tl.constexpr = LATENTS.step
    SHARE: tl.constexpr = LATENTS.share
    CHUNKS: tl.constexpr = CUT.chunks
    RUNS: tl.constexpr = CUT.runs
    WIDE: tl.constexpr = CUT.wide
    TILES_PER_PAGE: tl.constexpr = STRIDE // ROWS
    R_CODE: tl.constexpr = LATENTS.rope_code
    DTYPE: tl.constexpr = dtype_of(LATENTS.dtype)

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
    begin, end = tiles_of_split(first, tiles, exact * W_COST // (ROWS * PLACES), split, num_splits)

    queries = query + row.to(tl.int64) * query_row + head * query_head
    queries += token_of * query_token
    q = ()
    size = tl.zeros([COLUMNS], tl.float32)
    for r in tl.static_range(RUNS):
        q = q + (load_tile(queries, real, r, CUT, True),)
        size = tl.maximum(size, tl.max(tl.max(tl.abs(q[r].to(tl.float32)), 2), 0))
    q_rope = q[0]
    if ROPE.dim > 0:
        q_rope = load_tile(queries + RANK, real, 0, ROPE, True)
        size = tl.maximum(size, tl.max(tl.max(tl.abs(q_rope.to(tl.float32)), 2), 0))
    shrink, factor = near_one(size, softmax_scale, True)
    q = times(q, shrink[None, :, None], DTYPE)
    if ROPE.dim > 0:
        q_rope = q_rope.to(tl.float32) * shrink[None, :, None]
        q_rope = q_rope.to(dtype_of(LATENTS.rope_dtype))

    best = tl.full([COLUMNS], float("-inf"), tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    acc = ()
    for _ in tl.static_range(RUNS):
        acc = acc + (tl.zeros([CHUNKS, COLUMNS, WIDE], tl.float32),)

    lane = tl.arange(0, ROWS)
    row_unit = tl.full([ROWS], 1.0, tl.float32)  # what undoes the units of the places of a row
    if LATENTS.copies > 1 and LATENTS.isa > 0 and LATENTS.bits < 8:
        shift = lane // LATENTS.words * LATENTS.bits % 8
        row_unit = ((127 - shift) << 23).to(tl.float32, bitcast=True)
    table = block_table + row.to(tl.int64) * table_row
    # Ids of pages are fetched two tiles ahead and scales one: their loads are too narrow for the asynchronous
    # copies that hide the latency of the words' loads.
    last = tl.maximum(end - 1, 0)
    live = tl.where(begin < end, 1, 0)
    page = tl.load(table + begin // TILES_PER_PAGE, mask=live > 0, other=0)
    block = page.to(tl.int64)
    soon = tl.load(table + tl.minimum(begin + 1, last) // TILES_PER_PAGE, mask=live > 0, other=0)
    token = (begin % TILES_PER_PAGE) * ROWS + lane
    scales = load_scales(scale, block, token, live, LATENTS, True)
    for tile in tl.range(begin, end, num_stages=STAGES):
        start = (tile % TILES_PER_PAGE) * ROWS
        token = start + lane  # of place 0
        words = codes + block * (LATENTS.words * RANK)
        words += (start + tl.arange(0, ROWS // LATENTS.copies)) * RANK
        numbers = load_numbers(words, LATENTS)
        ropes = rope + (block * PAGE + token) * ROPE.dim
        r_scale = 1.0
        bias = tl.zeros([CHUNKS, COLUMNS, ROWS], tl.float32)
        if R_CODE != "none":
            r_scale = tl.load(rope_scale + block).to(tl.float32)
            bias = score_offsets(bias, q_rope, rope_offset + block * ROPE.dim, 0, ROPE)

        next_block = soon.to(tl.int64)
        soon = tl.load(table + tl.minimum(tile + 2, last) // TILES_PER_PAGE)
        tile_scales = scales
        next_token = ((tile + 1) % TILES_PER_PAGE) * ROWS + lane
        scales = load_scales(scale, next_block, next_token, live, LATENTS, False)

        for phase in tl.static_range(PLACES // STEP):
            scores = ()
            for i in tl.static_range(0, STEP, SHARE):
                if LATENTS.by_channel:
                    at = first_factor(block, start + (phase * STEP + i) * STRIDE, LATENTS)
                    scores = scores + score_channels(
                        numbers,
                        q,
                        bias,
                        scale + at,
                        offset + at,
                        row_unit,
                        phase * STEP + i,
                        LATENTS,
                    )
                else:
                    s = bias
                    for r in tl.static_range(RUNS):
                        k = tl.trans(numbers[r][phase * STEP + i], (0, 2, 1))
                        if LATENTS.by_token:
                            by = tile_scales[(phase * STEP + i) * RUNS + r].to(tl.float32)
                            product = tl.dot(q[r], k, input_precision="ieee")
                            s = tl.fma(product, tl.broadcast_to(by[:, None, :], s.shape), s)
                        else:
                            s = tl.dot(q[r], k, s, input_precision="ieee")
                    scores = scores + (s,)
            if ROPE.dim > 0:
                turned = ()
                for i in tl.static_range(STEP):
                    keys = ropes + (phase * STEP + i) * (STRIDE * ROPE.dim)
                    turned = turned + (
                        score_rope(
                            scores[i], q_rope, keys, r_scale, lane, ROPE, R_CODE, False, LATENTS.isa
                        ),
                    )
                scores = turned
            # loaded apart from what scores take: their registers would be in the way there
            factors = load_factors(scale, offset, block, start + phase * STEP * STRIDE, LATENTS)
            n = tl.arange(0, ROWS * STEP)
            at_page = tile // TILES_PER_PAGE * PAGE + start
            position = at_page + n // STEP + (phase * STEP + n % STEP) * STRIDE
            whole = tl.trans(tl.sum(side_by_side(scores), 0))
            whole = bend(whole, factor, sink_tokens + position, n, visible, HIDING, False)
            weights, keep, best = weigh(whole, factor, best, HIDING.bent, HIDING.hides)
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
                    if LATENTS.by_channel:
                        part = add_channels(
                            part, numbers[r], parts, sums[i // SHARE], factors[2 * (i // SHARE * RUNS + r)],
                            factors[2 * (i // SHARE * RUNS + r) + 1], row_unit, phase * STEP + i, i, LATENTS,
                        )  # fmt: skip
                    else:
                        w = tl.broadcast_to(parts[i][None, :, :], [CHUNKS, COLUMNS, ROWS])
                        if LATENTS.by_token:
                            by = tile_scales[(phase * STEP + i) * RUNS + r].to(tl.float32)
                            w = w * (by * LATENTS.boost)[:, None, :]
                        v = numbers[r][phase * STEP + i]
                        part = tl.dot(w.to(DTYPE), v, part, input_precision="ieee")
                new = new + (part,)
            acc = new
        block = next_block

    if LATENTS.code != "none":
        acc = times(acc, 1.0 / (LATENTS.boost * all_unit(LATENTS)), tl.float32)
    if split == num_splits - 1:
        best, total, acc = attend_latent_window(
            queries, real, window + row.to(tl.int64) * window_row, window_slot,
            window_rope + row.to(tl.int64) * wr_row, wr_slot, exact, pages * PAGE, visible, softmax_scale, best,
            total, acc, LATENTS, HIDING,
        )  # fmt: skip

    seen = total > 0
    if num_splits == 1:
        norm = add_sink(best, total, sink_logits + head, SINKS)
        at = (row.to(tl.int64) * used + column) * RANK
        store_runs(out + at, acc, norm, seen, real, CUT)
    else:
        place = tl.arange(0, COLUMNS)
        slot = (row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * num_splits + split
        bests += slot * (2 * COLUMNS)
        tl.store(bests + place, best)
        tl.store(bests + COLUMNS + place, total)
        unit = tl.full([COLUMNS], 1.0, tl.float32)
        store_runs(partial + (slot * COLUMNS + place) * RANK, acc, unit, seen, real, CUT)
