"""Decode attention over pages: one program walks a split of one row's pages for some queries of one kv head.

The definition of the result is backends/reference/attention.py. What a tile is, and how it is multiplied, say heads.py and
latent.py; here is what both share: which tokens a program sees, and where its result goes. Query columns are
query heads of the kv head times q_len. Knows nothing of launch sizes and devices.
"""

import triton
import triton.language as tl

from .dequant import Fields
from .direct import SPECIALIZED
from .heads import Window, attend_heads, store_parts
from .latent import attend_latents, store_runs
from .softmax import Visibility, add_sink, arrive_last, merge_splits


@triton.jit
def _store(pointers, acc, norm, seen, held, KEYS: tl.constexpr, VALUES: tl.constexpr):
    """Store sums of values times norm [columns], zeros where not `seen`, where `held`, at `pointers` [columns]."""
    # by names of their own: triton 3.6 hands an attribute on as plain numbers
    if VALUES is None:
        K_CUT: tl.constexpr = KEYS.cut
        store_runs(pointers, acc, norm, seen, held, K_CUT)
    else:
        V_CUT: tl.constexpr = VALUES.cut
        store_parts(pointers, acc, norm, seen, held, V_CUT)


@triton.jit(**SPECIALIZED)
def decode_kernel(
    query,  # [rows, heads * GROUP, q_len, K_DIM]
    query_row,
    query_head,
    query_token,
    key_codes,  # [pages, heads, PAGE, bytes]; of latents int16 words [pages, WORDS, RANK], or exact numbers
    key_scale,
    key_offset,
    value_codes,  # [pages, heads, bytes, PAGE], or as the keys' where exact; over latents RoPE keys [pages, PAGE, ROPE]
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
    arrives last merges the splits (over latents, combine_kernel does). KEYS, VALUES: meta_params.Operand, or
    meta_params.Latents and None. CHUNK: whether q_len may be more than 1. M_COLUMNS: columns of a program that hold
    query heads; M_SPLITS: splits that are merged at once; M_THREADS: see softmax.arrive_last.
    """
    if not CHUNK:
        q_len = 1
    used = GROUP * q_len  # columns
    blocks = (used + COLUMNS - 1) // COLUMNS
    PAGE: tl.constexpr = KEYS.side.page
    TILES_PER_PAGE: tl.constexpr = KEYS.side.page // KEYS.tile
    V_DIM: tl.constexpr = KEYS.side.dim if VALUES is None else VALUES.side.dim
    row = tl.program_id(0)
    head = tl.program_id(1) // blocks
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    first_column = (tl.program_id(1) % blocks) * COLUMNS
    column = first_column + tl.arange(0, COLUMNS)
    real = column < used
    query_head_of = head * GROUP + column % GROUP
    token_of = column // GROUP
    wide_row = row.to(tl.int64)
    pages = tl.load(num_pages + row)
    exact = tl.load(exact_lens + row)
    left = tl.load(padding + row)
    kv_len = pages * PAGE + exact
    # pointers to column 0 of each query's mask; of columns that are not real, to that of token 0
    masks = mask + wide_row * mask_row + query_head_of * mask_head
    masks += tl.where(real, token_of, 0) * mask_query
    visible = Visibility(
        kv_len - q_len + token_of, masks, left, sink_tokens, sliding_window, softcap
    )

    # the tiles of this split; those of pages that no query's sliding window reaches are left out
    first = 0
    tiles = pages * TILES_PER_PAGE
    if HIDING.windowed:
        first = tl.maximum(kv_len - q_len + 1 - sliding_window - sink_tokens, 0) // PAGE
        first = tl.minimum(first * TILES_PER_PAGE, tiles)
    # the last split attends to the window, which counts as W_COST times as much work per token as a page
    work = tiles - first + exact * W_COST // KEYS.tile
    begin = tl.minimum(first + work * split // num_splits, tiles)
    end = tl.minimum(first + work * (split + 1) // num_splits, tiles)

    queries = query + wide_row * query_row + query_head_of * query_head + token_of * query_token
    table = block_table + wide_row * table_row
    window = Window(
        window_keys + wide_row * wk_row + head * wk_head, wk_slot, window_values + wide_row * wv_row + head * wv_head,
        wv_slot, exact, pages * PAGE, split == num_splits - 1,
    )  # fmt: skip
    keys = Fields(key_codes, key_scale, key_offset, key_order)
    values = Fields(value_codes, value_scale, value_offset, key_order)
    if VALUES is None:
        best, total, acc = attend_latents(
            keys, values, queries, real, table, begin, end, window, visible, softmax_scale, KEYS, HIDING, W_TILE, STAGES
        )  # fmt: skip
    else:
        best, total, acc = attend_heads(
            keys, values, queries, real, table, begin, end, head, window, visible, softmax_scale, HEADS, KEYS, VALUES,
            HIDING, W_TILE, STAGES,
        )  # fmt: skip

    seen = total > 0
    if num_splits == 1:
        norm = add_sink(best, total, sink_logits + query_head_of, SINKS)
        at = (wide_row * q_len + token_of) * (HEADS * GROUP) + query_head_of
        _store(out + at * V_DIM, acc, norm, seen, real, KEYS, VALUES)
    else:
        group = wide_row * tl.num_programs(1) + tl.program_id(1)
        bests += group * num_splits * (2 * M_COLUMNS)
        partial += group * num_splits * (M_COLUMNS * V_DIM)
        place = tl.arange(0, COLUMNS)
        kept = real & (place < M_COLUMNS)
        slot = split * M_COLUMNS + place
        tl.store(bests + split * M_COLUMNS + slot, best, mask=kept)
        tl.store(bests + (split + 1) * M_COLUMNS + slot, total, mask=kept)
        one = tl.full([COLUMNS], 1.0, tl.float32)
        _store(partial + slot * V_DIM, acc, one, seen, kept, KEYS, VALUES)
        if VALUES is not None and arrive_last(counters, group, num_splits, M_THREADS):
            merged = first_column + tl.arange(0, M_COLUMNS)
            head_of = head * GROUP + merged % GROUP
            to = (wide_row * q_len + merged // GROUP) * (HEADS * GROUP) + head_of
            merge_splits(
                partial, bests, sink_logits + head_of, out + to * V_DIM, num_splits, tl.arange(0, M_COLUMNS),
                merged < used, tl.arange(0, triton.next_power_of_2(V_DIM)), V_DIM, M_COLUMNS, M_SPLITS, SINKS,
            )  # fmt: skip
