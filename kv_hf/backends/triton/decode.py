"""Decode attention over pages: one program walks a split of one row's pages for the queries of one kv head.

The definition of the result is backends/reference/attention.py. Tokens lie on the rows of the matrix products and query
columns (query heads of the kv head times q_len) on their columns, which costs half the products of the usual order
for 8 columns or fewer. Knows nothing of launch sizes and devices.
"""

import triton
import triton.language as tl

from .dequant import unrotate_parts
from .direct import SPECIALIZED
from .keys import (
    gather_query,
    load_key_factors,
    load_mixed_factors,
    score_codes,
    score_exact,
    score_mixed,
    stack,
)
from .softmax import (
    LOG2E,
    Visibility,
    add_sink,
    arrive_last,
    bend,
    mask_pointers,
    merge_columns,
    near_one,
    row_lengths,
    tiles_of_split,
    weigh,
    window_slots,
)
from .tiles import chunk_size, load_query, rescale, store_parts
from .values import (
    add_codes,
    add_exact,
    load_value_factors,
    no_offsets,
    offset_rows,
    settle,
)


@triton.jit
def attend_window(
    queries, real, keys, key_slot, values, value_slot, exact, page_tokens, visible, softmax_scale, best, total, acc,
    K_DIM: tl.constexpr, V_WIDTH: tl.constexpr, V_RUNS: tl.constexpr, V_CHUNKS: tl.constexpr, W_CHUNKS: tl.constexpr,
    W_TILE: tl.constexpr, W_STAGES: tl.constexpr, W_KEY_DTYPE: tl.constexpr, W_VALUE_DTYPE: tl.constexpr,
    PRECISION: tl.constexpr, HIDING: tl.constexpr,
):  # fmt: skip
    """Add the window's tokens to the running softmax (best, total, acc) and return it.

    Args:
        keys, values: pointers to slot 0 of this row and head; slots from `exact` on are not read.
        visible: a Visibility.
        acc: parts of the pages' values, settled (see `values.settle`).
    """
    COLUMNS: tl.constexpr = total.shape[0]
    BENT: tl.constexpr = HIDING.bent
    one = tl.full([COLUMNS], 1.0, tl.float32)
    query = load_query(queries, real, K_DIM, K_DIM, W_CHUNKS, one, W_KEY_DTYPE)
    factor = one * (softmax_scale * LOG2E)
    for first in tl.range(0, exact, W_TILE, num_stages=W_STAGES):
        slot, held, at = window_slots(first, exact, page_tokens, visible.sink_tokens, W_TILE)
        scores = score_exact(keys + slot * key_slot, held, query, K_DIM, W_CHUNKS, True, PRECISION)
        scores = bend(scores, factor, at, held, visible, HIDING, True)
        weights, keep, best = weigh(scores, factor, best, BENT, True)
        total = total * keep + tl.sum(weights, 0)
        acc = add_exact(
            values + slot * value_slot, held, weights, rescale(acc, keep), V_WIDTH, V_RUNS, V_CHUNKS, True,
            W_VALUE_DTYPE, PRECISION,
        )  # fmt: skip
    return best, total, acc


@triton.jit(**SPECIALIZED)
def decode_kernel(
    query,  # [rows, heads * GROUP, q_len, K_DIM]
    query_row,
    query_head,
    query_token,
    key_codes,  # [pages, heads, PAGE, bytes]
    key_scale,
    key_offset,
    value_codes,  # [pages, heads, bytes, PAGE], or as the keys' where exact
    value_scale,  # [pages, heads, PAGE, channel groups]
    value_offset,
    block_table,  # [rows, table_row]
    table_row,
    num_pages,  # [rows]
    window_keys,  # [rows, heads, slots, K_DIM]
    wk_row,
    wk_head,
    wk_slot,
    window_values,  # [rows, heads, slots, V_DIM]
    wv_row,
    wv_head,
    wv_slot,
    exact_lens,  # [rows]
    padding,  # [rows]
    mask,  # [rows or 1, heads * GROUP or 1, q_len, columns], strides 0 where 1
    mask_row,
    mask_head,
    mask_query,
    sink_logits,  # [heads * GROUP]
    out,  # [rows, q_len, heads * GROUP, V_DIM]
    partial,  # [programs of one split, splits, M_COLUMNS, V_DIM] fp32; not read where there is one split
    bests,  # [programs of one split, splits, 2, M_COLUMNS] fp32: maxima in log2, and sums of weights
    counters,  # [programs of one split] int32, zeros before and after
    key_order,  # [pages, heads, K_DIM], of keys of two widths
    softmax_scale,
    softcap,
    sliding_window,
    sink_tokens,
    q_len,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    W_TILE: tl.constexpr,
    W_COST: tl.constexpr,
    W_STAGES: tl.constexpr,
    K_CODE: tl.constexpr,
    K_BITS: tl.constexpr,
    K_DIM: tl.constexpr,
    K_WIDTH: tl.constexpr,
    K_CHUNKS: tl.constexpr,
    K_GROUP: tl.constexpr,
    K_FOLD: tl.constexpr,
    K_SECTIONS: tl.constexpr,
    K_DTYPE: tl.constexpr,
    V_CODE: tl.constexpr,
    V_BITS: tl.constexpr,
    V_DIM: tl.constexpr,
    V_WIDTH: tl.constexpr,
    V_CHUNKS: tl.constexpr,
    V_GROUP: tl.constexpr,
    V_FOLD: tl.constexpr,
    V_OFFSET: tl.constexpr,
    V_BYTES: tl.constexpr,
    V_ROTATED: tl.constexpr,
    V_BOOST: tl.constexpr,
    V_DTYPE: tl.constexpr,
    W_CHUNKS: tl.constexpr,
    W_KEY_DTYPE: tl.constexpr,
    W_VALUE_DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    HIDING: tl.constexpr,
    SINKS: tl.constexpr,
    M_COLUMNS: tl.constexpr,
    M_SPLITS: tl.constexpr,
    M_THREADS: tl.constexpr,
    STAGES: tl.constexpr,
    ISA: tl.constexpr,
):
    """Attend the query columns of one (row, kv head, block of columns) to one split of the row's tokens.

    Grid: (rows, HEADS * blocks of columns, splits). The last split also attends to the window; the program that
    arrives last merges the splits. CHUNK: whether q_len may be more than 1. M_COLUMNS: columns of a program that hold
    query heads; M_SPLITS: splits that are merged at once; M_THREADS: see
    softmax.arrive_last.
    """
    if not CHUNK:
        q_len = 1
    used = GROUP * q_len  # columns
    blocks = (used + COLUMNS - 1) // COLUMNS
    TILES_PER_PAGE: tl.constexpr = PAGE // TILE
    PIECES: tl.constexpr = TILE // K_GROUP if K_FOLD == "tile" and K_GROUP < TILE else 1
    LIFT: tl.constexpr = (
        15 if V_FOLD == "token" and V_CODE == "unsigned" and offset_rows(V_DIM // V_GROUP) else 0
    )
    MIXED: tl.constexpr = len(K_SECTIONS) > 0
    V_RUNS: tl.constexpr = V_DIM // V_WIDTH
    V_PARTS: tl.constexpr = len(V_CHUNKS) * V_RUNS
    BENT: tl.constexpr = HIDING.bent
    HIDES: tl.constexpr = HIDING.hides

    if V_OFFSET != 1.0:
        value_offset = value_scale

    row = tl.program_id(0)
    head = tl.program_id(1) // blocks
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    first_column = (tl.program_id(1) % blocks) * COLUMNS
    column = first_column + tl.arange(0, COLUMNS)
    real = column < used
    query_head_of = head * GROUP + column % GROUP
    token_of = column // GROUP
    pages, exact, left = row_lengths(num_pages, exact_lens, padding, row)
    kv_len = pages * PAGE + exact
    masks = mask_pointers(mask, row, query_head_of, token_of, real, mask_row, mask_head, mask_query)
    visible = Visibility(
        kv_len - q_len + token_of, masks, left, sink_tokens, sliding_window, softcap
    )

    # the tiles of this split; those that no query's sliding window reaches are left out
    first = 0
    tiles = pages * TILES_PER_PAGE
    if HIDING.windowed:
        first = (kv_len - q_len + 1 - sliding_window - sink_tokens) // TILE
        first = tl.minimum(tl.maximum(first, 0), tiles)
    # the window counts as W_COST times as much work per token as a page
    begin, end = tiles_of_split(first, tiles, exact * W_COST // TILE, split, num_splits)

    queries = query + row.to(tl.int64) * query_row + query_head_of * query_head
    queries += token_of * query_token
    channel = tl.arange(0, triton.next_power_of_2(K_DIM))
    inside = (channel < K_DIM)[:, None] & real[None, :]
    x = tl.load(queries[None, :] + channel[:, None], mask=inside, other=0.0).to(tl.float32)
    shrink, factor = near_one(tl.max(tl.abs(x), 0), softmax_scale, False)
    q = ()
    if not MIXED:
        q = load_query(queries, real, K_DIM, K_WIDTH, K_CHUNKS, shrink, K_DTYPE)
    whole_q = q
    if K_FOLD == "tile" and not MIXED:
        whole_q = load_query(queries, real, K_DIM, K_DIM, W_CHUNKS, shrink, K_DTYPE)

    best = tl.full([COLUMNS], float("-inf"), tl.float32)
    totals = tl.zeros([TILE, COLUMNS], tl.float32)
    acc = ()
    for p in tl.static_range(V_PARTS):
        acc = acc + (tl.zeros([chunk_size(V_CHUNKS, p // V_RUNS), COLUMNS], tl.float32),)
    offsets = ()
    if V_CODE == "unsigned" and V_FOLD == "token":
        offsets = no_offsets(V_DIM // V_GROUP, TILE, COLUMNS)

    lane = tl.arange(0, TILE)
    table = block_table + row.to(tl.int64) * table_row
    # Ids of pages are fetched two tiles ahead and scales one: their loads are too narrow for the asynchronous
    # copies that hide the latency of the codes' loads.
    last = tl.maximum(end - 1, 0)
    live = tl.where(begin < end, 1, 0)
    page = tl.load(table + begin // TILES_PER_PAGE, mask=live > 0, other=0)
    block = page.to(tl.int64) * HEADS + head
    page = tl.load(table + tl.minimum(begin + 1, last) // TILES_PER_PAGE, mask=live > 0, other=0)
    token = (begin % TILES_PER_PAGE) * TILE
    channels = ()
    if MIXED:
        key_offsets, key_scales, channels = load_mixed_factors(
            key_scale, key_offset, key_order, block, token, live, PAGE, K_GROUP, K_DIM, K_SECTIONS, K_FOLD, True, PIECES
        )  # fmt: skip
    else:
        key_offsets, key_scales = load_key_factors(
            key_scale, key_offset, block, token, live, PAGE, K_GROUP, K_DIM, K_WIDTH, K_CHUNKS, W_CHUNKS,
            K_FOLD, True, PIECES,
        )  # fmt: skip
    value_factors = load_value_factors(
        value_scale, value_offset, block * PAGE + token + lane, live, V_DIM, V_GROUP, V_CODE, V_FOLD,
        True,
    )  # fmt: skip
    for tile in tl.range(begin, end, num_stages=STAGES):
        token = (tile % TILES_PER_PAGE) * TILE
        k_offsets = key_offsets
        k_scales = key_scales
        v_factors = value_factors
        # carried as a sum: Triton does not pipeline loops that hand a value on for two rounds
        next_block = page.to(tl.int64) * HEADS + head
        page = tl.load(table + tl.minimum(tile + 2, last) // TILES_PER_PAGE)
        next_token = (tl.minimum(tile + 1, last) % TILES_PER_PAGE) * TILE
        if MIXED:
            gathered = gather_query(queries, real, channels, shrink, K_SECTIONS, K_DTYPE)
            key_offsets, key_scales, channels = load_mixed_factors(
                key_scale, key_offset, key_order, next_block, next_token, live, PAGE, K_GROUP, K_DIM, K_SECTIONS, K_FOLD,
                False, PIECES,
            )  # fmt: skip
        else:
            key_offsets, key_scales = load_key_factors(
                key_scale, key_offset, next_block, next_token, live, PAGE, K_GROUP, K_DIM, K_WIDTH, K_CHUNKS,
                W_CHUNKS, K_FOLD, False, PIECES,
            )  # fmt: skip
        value_factors = load_value_factors(
            value_scale, value_offset, next_block * PAGE + next_token + lane, live, V_DIM, V_GROUP,
            V_CODE, V_FOLD, False,
        )  # fmt: skip

        keys = key_codes + block * (PAGE * K_WIDTH) + (token + lane) * K_WIDTH
        if K_FOLD == "none":
            scores = score_exact(keys, real, q, K_DIM, K_CHUNKS, False, PRECISION)
        else:
            groups = block * (PAGE // K_GROUP) + (token + lane) // K_GROUP
            pieces = ()
            for g in tl.static_range(PIECES):
                if PIECES > 1:
                    piece = token + g * K_GROUP + tl.arange(0, K_GROUP)
                    keys = key_codes + block * (PAGE * K_WIDTH) + piece * K_WIDTH
                if MIXED:
                    one = score_mixed(
                        keys, k_offsets, k_scales, key_offset, key_scale, groups, gathered, K_DIM, K_SECTIONS, K_FOLD,
                        0 if K_FOLD == "element" else ISA, PRECISION, g,
                    )  # fmt: skip
                else:
                    one = score_codes(
                        keys, k_offsets, k_scales, key_offset, key_scale, groups, q, whole_q, K_DIM,
                        K_WIDTH, K_CHUNKS, W_CHUNKS, K_CODE, K_BITS, K_FOLD,
                        0 if K_FOLD == "element" else ISA, PRECISION, g,
                    )  # fmt: skip
                pieces = pieces + (one,)
            scores = stack(pieces)
        scores = bend(
            scores, factor, sink_tokens + tile * TILE + lane, lane, visible, HIDING, False
        )
        weights, keep, best = weigh(scores, factor, best, BENT, HIDES, LIFT)
        totals = tl.fma(totals, tl.broadcast_to(keep[None, :], totals.shape), weights)
        if V_FOLD == "none":
            values = value_codes + block * (PAGE * V_DIM) + (token + lane) * V_DIM
            acc = add_exact(
                values, real, weights, rescale(acc, keep), V_WIDTH, V_RUNS, V_CHUNKS, False, V_DTYPE, PRECISION
            )  # fmt: skip
        else:
            values = value_codes + block * (PAGE * V_BYTES) + token + lane
            acc, offsets = add_codes(
                values, v_factors, value_scale, value_offset, block * PAGE + token + lane, weights,
                keep, acc, offsets, V_DIM, V_WIDTH, PAGE, V_CHUNKS, V_CODE, V_BITS, V_GROUP, V_FOLD,
                V_OFFSET, V_BOOST, 2.0**LIFT, V_DTYPE, 0 if V_FOLD == "element" else ISA, PRECISION,
            )  # fmt: skip

        block = next_block

    total = tl.sum(totals, 0) * (1.0 / 2.0**LIFT)
    acc = settle(
        acc,
        offsets,
        V_WIDTH,
        V_RUNS,
        V_CHUNKS,
        V_CODE,
        V_BITS,
        V_GROUP,
        V_FOLD,
        V_OFFSET,
        V_BOOST,
        2.0**LIFT,
        ISA,
    )
    if V_ROTATED > 0:  # the window's tokens, which follow, are not rotated
        acc = unrotate_parts(acc, V_WIDTH, V_RUNS, V_CHUNKS, V_ROTATED)
    if split == num_splits - 1:
        best, total, acc = attend_window(
            queries, real, window_keys + row.to(tl.int64) * wk_row + head * wk_head, wk_slot,
            window_values + row.to(tl.int64) * wv_row + head * wv_head, wv_slot, exact, pages * PAGE, visible,
            softmax_scale, best, total, acc, K_DIM, V_WIDTH, V_RUNS, V_CHUNKS, W_CHUNKS, W_TILE, W_STAGES,
            W_KEY_DTYPE, W_VALUE_DTYPE, PRECISION, HIDING,
        )  # fmt: skip

    seen = total > 0
    one = tl.full([COLUMNS], 1.0, tl.float32)
    if num_splits == 1:
        norm = add_sink(best, total, sink_logits + query_head_of, SINKS)
        at = (row.to(tl.int64) * q_len + token_of) * (HEADS * GROUP) + query_head_of
        store_parts(out + at * V_DIM, acc, norm, seen, real, V_WIDTH, V_RUNS, V_CHUNKS)
    else:
        group = row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        bests += group * num_splits * (2 * M_COLUMNS)
        partial += group * num_splits * (M_COLUMNS * V_DIM)
        place = tl.arange(0, COLUMNS)
        kept = real & (place < M_COLUMNS)
        slot = split * M_COLUMNS + place
        tl.store(bests + split * M_COLUMNS + slot, best, mask=kept)
        tl.store(bests + (split + 1) * M_COLUMNS + slot, total, mask=kept)
        store_parts(partial + slot * V_DIM, acc, one, seen, kept, V_WIDTH, V_RUNS, V_CHUNKS)
        if arrive_last(counters, group, num_splits, M_THREADS):
            merge_columns(
                partial, bests, sink_logits, out, num_splits, row.to(tl.int64) * q_len, head, first_column, used, HEADS, GROUP,
                V_DIM, M_COLUMNS, M_SPLITS, SINKS,
            )  # fmt: skip
