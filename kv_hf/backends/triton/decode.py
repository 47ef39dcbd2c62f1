"""Decode attention over pages: one program walks a split of one row's pages for the queries of one kv head.

The definition of the result is backends/reference/attention.py. Tokens lie on the rows of the matrix products and query
columns (query heads of the kv head times q_len) on their columns, which costs half the products of the usual order
for 8 columns or fewer. Knows nothing of launch sizes and devices.
"""

import triton
import triton.language as tl

from .dequant import unrotate_parts
from .direct import SPECIALIZED
from .keys import load_key_factors, score_exact, score_keys
from .softmax import (
    LOG2E,
    Visibility,
    add_sink,
    arrive_last,
    bend,
    mask_pointers,
    merge_splits,
    near_one,
    row_lengths,
    tiles_of_split,
    weigh,
    window_slots,
)
from .tiles import Fields, dtype_of, load_query, rescale, store_parts, zeros
from .values import add_exact, add_values, load_value_factors, no_offsets, settle


@triton.jit
def attend_window(
    queries, real, keys, key_slot, values, value_slot, exact, page_tokens, visible, softmax_scale, best, total, acc,
    KEYS: tl.constexpr, VALUES: tl.constexpr, HIDING: tl.constexpr, W_TILE: tl.constexpr,
):  # fmt: skip
    """Add the window's tokens to the running softmax (best, total, acc) and return it.

    Args:
        keys, values: pointers to slot 0 of this row and head; slots from `exact` on are not read.
        visible: a Visibility.
        acc: parts of the pages' values, settled (see `values.settle`).
    """
    CUT: tl.constexpr = KEYS.window
    V_CUT: tl.constexpr = VALUES.cut
    DTYPE: tl.constexpr = dtype_of(VALUES.window_dtype)
    K_DTYPE: tl.constexpr = dtype_of(KEYS.window_dtype)
    one = tl.full([total.shape[0]], 1.0, tl.float32)
    query = load_query(queries, real, one, (), CUT, K_DTYPE)
    factor = one * (softmax_scale * LOG2E)
    for first in tl.range(0, exact, W_TILE, num_stages=2):
        slot, held, at = window_slots(first, exact, page_tokens, visible.sink_tokens, W_TILE)
        scores = score_exact(keys + slot * key_slot, held, query, CUT, True)
        scores = bend(scores, factor, at, held, visible, HIDING, True)
        weights, keep, best = weigh(scores, factor, best, HIDING.bent, True)
        total = total * keep + tl.sum(weights, 0)
        rows = values + slot * value_slot
        acc = add_exact(rows, held, weights, rescale(acc, keep), V_CUT, True, DTYPE)
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
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    W_TILE: tl.constexpr,
    W_COST: tl.constexpr,
    HIDING: tl.constexpr,
    SINKS: tl.constexpr,
    M_COLUMNS: tl.constexpr,
    M_SPLITS: tl.constexpr,
    M_THREADS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend the query columns of one (row, kv head, block of columns) to one split of the row's tokens.

    Grid: (rows, HEADS * blocks of columns, splits). The last split also attends to the window; the program that
    arrives last merges the splits. KEYS, VALUES: meta_params.Operand. CHUNK: whether q_len may be more than 1.
    M_COLUMNS: columns of a program that hold query heads; M_SPLITS: splits that are merged at once; M_THREADS: see
    softmax.arrive_last.
    """
    if not CHUNK:
        q_len = 1
    used = GROUP * q_len  # columns
    blocks = (used + COLUMNS - 1) // COLUMNS
    PAGE: tl.constexpr = KEYS.page
    TILE: tl.constexpr = KEYS.tile
    TILES_PER_PAGE: tl.constexpr = PAGE // TILE
    K_CUT: tl.constexpr = KEYS.cut
    W_CUT: tl.constexpr = KEYS.window
    V_CUT: tl.constexpr = VALUES.cut
    V_DIM: tl.constexpr = VALUES.dim
    K_DTYPE: tl.constexpr = dtype_of(KEYS.dtype)

    if VALUES.offset != 1.0:
        value_offset = value_scale
    key_fields = Fields(key_codes, key_scale, key_offset, key_order)
    value_fields = Fields(value_codes, value_scale, value_offset, key_order)

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
    channel = tl.arange(0, triton.next_power_of_2(KEYS.dim))
    inside = (channel < KEYS.dim)[:, None] & real[None, :]
    x = tl.load(queries[None, :] + channel[:, None], mask=inside, other=0.0).to(tl.float32)
    shrink, factor = near_one(tl.max(tl.abs(x), 0), softmax_scale, False)
    q = ()
    whole_q = ()
    if not KEYS.ordered:
        q = load_query(queries, real, shrink, (), K_CUT, K_DTYPE)
        whole_q = q
        if KEYS.fold == "tile":
            whole_q = load_query(queries, real, shrink, (), W_CUT, K_DTYPE)

    best = tl.full([COLUMNS], float("-inf"), tl.float32)
    totals = tl.zeros([TILE, COLUMNS], tl.float32)
    acc = zeros(V_CUT, COLUMNS)
    offsets = no_offsets(VALUES, COLUMNS)

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
    key_factors = load_key_factors(key_fields, block, token, live, KEYS, True)
    value_factors = load_value_factors(
        value_fields, block * PAGE + token + lane, live, VALUES, True
    )
    for tile in tl.range(begin, end, num_stages=STAGES):
        token = (tile % TILES_PER_PAGE) * TILE
        k_factors = key_factors
        v_factors = value_factors
        # carried as a sum: Triton does not pipeline loops that hand a value on for two rounds
        next_block = page.to(tl.int64) * HEADS + head
        page = tl.load(table + tl.minimum(tile + 2, last) // TILES_PER_PAGE)
        next_token = (tl.minimum(tile + 1, last) % TILES_PER_PAGE) * TILE
        tile_q = q
        if KEYS.ordered:
            tile_q = load_query(queries, real, shrink, k_factors[2], K_CUT, K_DTYPE)
        key_factors = load_key_factors(key_fields, next_block, next_token, live, KEYS, False)
        value_factors = load_value_factors(
            value_fields, next_block * PAGE + next_token + lane, live, VALUES, False
        )

        scores = score_keys(key_fields, k_factors, block, token, tile_q, whole_q, KEYS)
        scores = bend(
            scores, factor, sink_tokens + tile * TILE + lane, lane, visible, HIDING, False
        )
        weights, keep, best = weigh(scores, factor, best, HIDING.bent, HIDING.hides, VALUES.lift)
        totals = tl.fma(totals, tl.broadcast_to(keep[None, :], totals.shape), weights)
        acc, offsets = add_values(
            value_fields, v_factors, block, token, weights, keep, acc, offsets, VALUES
        )
        block = next_block

    total = tl.sum(totals, 0) * (1.0 / 2.0**VALUES.lift)
    acc = settle(acc, offsets, VALUES)
    if VALUES.rotated > 0:  # the window's tokens, which follow, are not rotated
        acc = unrotate_parts(acc, V_CUT, VALUES.rotated)
    if split == num_splits - 1:
        best, total, acc = attend_window(
            queries, real, window_keys + row.to(tl.int64) * wk_row + head * wk_head, wk_slot,
            window_values + row.to(tl.int64) * wv_row + head * wv_head, wv_slot, exact, pages * PAGE, visible,
            softmax_scale, best, total, acc, KEYS, VALUES, HIDING, W_TILE,
        )  # fmt: skip

    seen = total > 0
    if num_splits == 1:
        norm = add_sink(best, total, sink_logits + query_head_of, SINKS)
        at = (row.to(tl.int64) * q_len + token_of) * (HEADS * GROUP) + query_head_of
        store_parts(out + at * V_DIM, acc, norm, seen, real, V_CUT)
    else:
        group = row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        bests += group * num_splits * (2 * M_COLUMNS)
        partial += group * num_splits * (M_COLUMNS * V_DIM)
        place = tl.arange(0, COLUMNS)
        kept = real & (place < M_COLUMNS)
        slot = split * M_COLUMNS + place
        tl.store(bests + split * M_COLUMNS + slot, best, mask=kept)
        tl.store(bests + (split + 1) * M_COLUMNS + slot, total, mask=kept)
        one = tl.full([COLUMNS], 1.0, tl.float32)
        store_parts(partial + slot * V_DIM, acc, one, seen, kept, V_CUT)
        if arrive_last(counters, group, num_splits, M_THREADS):
            merged = first_column + tl.arange(0, M_COLUMNS)
            head_of = head * GROUP + merged % GROUP
            to = (row.to(tl.int64) * q_len + merged // GROUP) * (HEADS * GROUP) + head_of
            merge_splits(
                partial, bests, sink_logits + head_of, out + to * V_DIM, num_splits, tl.arange(0, M_COLUMNS),
                merged < used, tl.arange(0, triton.next_power_of_2(V_DIM)), V_DIM, M_COLUMNS, M_SPLITS, SINKS,
            )  # fmt: skip
