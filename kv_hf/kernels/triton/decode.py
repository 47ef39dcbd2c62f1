"""Decode attention over pages: one program walks a split of one row's pages for the queries of one kv head.

The definition of the result is kernels/reference.py. Tokens lie on the rows of the matrix products and query
columns (query heads of the kv head times q_len) on their columns, which costs half the products of the usual order
for 8 columns or fewer. Knows nothing of launch sizes and devices.
"""

import triton
import triton.language as tl

from .keys import load_key_factors, score_codes, score_exact
from .softmax import LN2, LOG2E, bend, weigh
from .tiles import chunk_size, chunk_start, load_query, rescale
from .values import add_codes, add_exact, load_value_factors, settle
from .window import attend_window


# not specialized: numbers that change while a sequence grows must not make new kernels
@triton.jit(
    do_not_specialize=[
        "table_row",
        "mask_row",
        "mask_head",
        "mask_query",
        "sliding_window",
        "sink_tokens",
    ]
)
def decode_kernel(
    query,  # [rows, heads * GROUP, Q_LEN, K_DIM]
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
    mask,  # [rows or 1, heads * GROUP or 1, Q_LEN, columns], strides 0 where 1
    mask_row,
    mask_head,
    mask_query,
    sink_logits,  # [heads * GROUP]
    out,  # [rows, heads * GROUP, Q_LEN, V_DIM], or fp32 with a leading [NUM_SPLITS]
    out_lse,  # [NUM_SPLITS, rows, heads * GROUP * Q_LEN] fp32, natural logarithm
    softmax_scale,
    softcap,
    sliding_window,
    sink_tokens,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    Q_LEN: tl.constexpr,
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
    K_DTYPE: tl.constexpr,
    V_CODE: tl.constexpr,
    V_BITS: tl.constexpr,
    V_DIM: tl.constexpr,
    V_WIDTH: tl.constexpr,
    V_CHUNKS: tl.constexpr,
    V_GROUP: tl.constexpr,
    V_FOLD: tl.constexpr,
    V_BOOST: tl.constexpr,
    V_DTYPE: tl.constexpr,
    W_CHUNKS: tl.constexpr,
    W_KEY_DTYPE: tl.constexpr,
    W_VALUE_DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASK: tl.constexpr,
    SINKS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    ISA: tl.constexpr,
):
    """Attend the query columns of one (row, kv head, block of columns) to one split of the row's tokens.

    Grid: (rows, HEADS * blocks of columns, NUM_SPLITS). The last split also attends to the window.
    """
    QUERIES: tl.constexpr = GROUP * Q_LEN
    BLOCKS: tl.constexpr = (QUERIES + COLUMNS - 1) // COLUMNS
    TILES_PER_PAGE: tl.constexpr = PAGE // TILE
    V_RUNS: tl.constexpr = V_DIM // V_WIDTH
    V_PARTS: tl.constexpr = len(V_CHUNKS) * V_RUNS
    BENT: tl.constexpr = SOFTCAP or MASK == "float"
    HIDES: tl.constexpr = CAUSAL or WINDOWED or MASK != "none"

    row = tl.program_id(0)
    head = tl.program_id(1) // BLOCKS
    split = tl.program_id(2)
    column = (tl.program_id(1) % BLOCKS) * COLUMNS + tl.arange(0, COLUMNS)
    real = column < QUERIES
    query_head_of = head * GROUP + tl.where(real, column // Q_LEN, 0)
    pages = tl.load(num_pages + row)
    exact = tl.load(exact_lens + row)
    left = tl.load(padding + row)
    kv_len = pages * PAGE + exact
    query_at = kv_len - Q_LEN + column % Q_LEN
    masks = mask + row.to(tl.int64) * mask_row + query_head_of * mask_head
    masks += (column % Q_LEN) * mask_query

    # the tiles of this split; those that no query's sliding window reaches are left out
    first = 0
    tiles = pages * TILES_PER_PAGE
    if WINDOWED:
        first = (kv_len - Q_LEN + 1 - sliding_window - sink_tokens) // TILE
        first = tl.minimum(tl.maximum(first, 0), tiles)
    # the window counts as W_COST times as much work per token as a page, so that the last split gets fewer tiles
    work = tiles - first
    if NUM_SPLITS > 1:
        work += exact * W_COST // TILE
    begin = tl.minimum(first + work * split // NUM_SPLITS, tiles)
    end = tl.minimum(first + work * (split + 1) // NUM_SPLITS, tiles)

    queries = query + row.to(tl.int64) * query_row + query_head_of * query_head
    queries += (column % Q_LEN) * query_token
    # a power of two that brings each query near 1: float16 products then neither overflow nor vanish
    channel = tl.arange(0, triton.next_power_of_2(K_DIM))
    inside = (channel < K_DIM)[:, None] & real[None, :]
    x = tl.load(queries[None, :] + channel[:, None], mask=inside, other=0.0).to(tl.float32)
    size = tl.maximum(tl.max(tl.abs(x), 0), 1e-30)
    exponent = size.to(tl.int32, bitcast=True) & 0x7F800000
    shrink = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
    factor = exponent.to(tl.float32, bitcast=True) * (softmax_scale * LOG2E)
    q = load_query(queries, real, K_DIM, K_WIDTH, K_CHUNKS, shrink, K_DTYPE)
    whole_q = q
    if K_FOLD == "tile":
        whole_q = load_query(queries, real, K_DIM, K_DIM, W_CHUNKS, shrink, K_DTYPE)

    best = tl.full([COLUMNS], float("-inf"), tl.float32)
    totals = tl.zeros([TILE, COLUMNS], tl.float32)
    acc = ()
    for p in tl.static_range(V_PARTS):
        acc = acc + (tl.zeros([chunk_size(V_CHUNKS, p // V_RUNS), COLUMNS], tl.float32),)
    offsets = ()
    if V_CODE == "unsigned" and V_FOLD == "token":
        for _ in tl.static_range(V_DIM // V_GROUP):
            offsets = offsets + (tl.zeros([TILE, COLUMNS], tl.float32),)

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
    key_offsets, key_scales = load_key_factors(
        key_scale, key_offset, block, token, live, PAGE, K_GROUP, K_DIM, K_WIDTH, K_CHUNKS, W_CHUNKS,
        K_FOLD, True,
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
        key_offsets, key_scales = load_key_factors(
            key_scale, key_offset, next_block, next_token, live, PAGE, K_GROUP, K_DIM, K_WIDTH, K_CHUNKS,
            W_CHUNKS, K_FOLD, False,
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
            scores = score_codes(
                keys, k_offsets, k_scales, key_offset, key_scale, groups, q, whole_q, K_DIM,
                K_WIDTH, K_CHUNKS, W_CHUNKS, K_CODE, K_BITS, K_FOLD,
                0 if K_FOLD == "element" else ISA, PRECISION,
            )  # fmt: skip
        scores = bend(
            scores, factor, sink_tokens + tile * TILE + lane, lane, query_at, softcap,
            sliding_window, masks, left, False, CAUSAL, WINDOWED, SOFTCAP, MASK,
        )  # fmt: skip
        weights, keep, best = weigh(scores, factor, best, BENT, HIDES)
        totals = tl.fma(totals, tl.broadcast_to(keep[None, :], totals.shape), weights)
        if V_FOLD == "none":
            values = value_codes + block * (PAGE * V_DIM) + (token + lane) * V_DIM
            acc = add_exact(
                values, real, weights, rescale(acc, keep), V_WIDTH, V_RUNS, V_CHUNKS, False, V_DTYPE, PRECISION
            )  # fmt: skip
        else:
            values = value_codes + block * (PAGE * V_WIDTH) + token + lane
            acc, offsets = add_codes(
                values, v_factors, value_scale, value_offset, block * PAGE + token + lane, weights,
                keep, acc, offsets, V_DIM, V_WIDTH, PAGE, V_CHUNKS, V_CODE, V_BITS, V_GROUP, V_FOLD,
                V_BOOST, V_DTYPE, 0 if V_FOLD == "element" else ISA, PRECISION,
            )  # fmt: skip

        block = next_block

    total = tl.sum(totals, 0)
    acc = settle(
        acc, offsets, V_WIDTH, V_RUNS, V_CHUNKS, V_CODE, V_BITS, V_GROUP, V_FOLD, V_BOOST, ISA
    )
    if split == NUM_SPLITS - 1:
        best, total, acc = attend_window(
            queries, real, window_keys + row.to(tl.int64) * wk_row + head * wk_head, wk_slot,
            window_values + row.to(tl.int64) * wv_row + head * wv_head, wv_slot, exact, pages * PAGE,
            sink_tokens, query_at, masks, left, softmax_scale, softcap, sliding_window, best, total, acc,
            K_DIM, V_WIDTH, V_RUNS, V_CHUNKS, W_CHUNKS, W_TILE, W_STAGES, W_KEY_DTYPE, W_VALUE_DTYPE,
            PRECISION, CAUSAL, WINDOWED, SOFTCAP, MASK,
        )  # fmt: skip

    if SINKS and NUM_SPLITS == 1:
        sink = tl.load(sink_logits + query_head_of).to(tl.float32) * LOG2E
        top = tl.maximum(best, sink)
        shift = tl.where(top == float("-inf"), 0.0, top)
        keep = tl.exp2(best - shift)
        total = total * keep + tl.exp2(sink - shift)
    else:
        keep = tl.full([COLUMNS], 1.0, tl.float32)
    # nothing seen: zeros from the only split, nothing at all from one of many
    seen = total > 0
    norm = keep / tl.where(seen, total, 1.0)
    at = (row.to(tl.int64) * HEADS + head) * QUERIES + column
    if NUM_SPLITS > 1:
        at += split.to(tl.int64) * tl.num_programs(0) * (HEADS * QUERIES)
        lse = tl.where(seen, best * LN2 + tl.log(tl.where(seen, total, 1.0)), float("-inf"))
        tl.store(out_lse + at, lse, mask=real)
        real = real & seen
    for p in tl.static_range(V_PARTS):
        place = chunk_start(V_CHUNKS, p // V_RUNS) + tl.arange(0, chunk_size(V_CHUNKS, p // V_RUNS))
        where = out + at[None, :] * V_DIM + ((p % V_RUNS) * V_WIDTH + place)[:, None]
        result = (acc[p] * norm[None, :]).to(out.dtype.element_ty)
        tl.store(where, result, mask=(place < V_WIDTH)[:, None] & real[None, :])
