"""The choice of the pages that a step reads: one launch per layer.

The definition of the result is backends/reference/selection.py. Programs score stretches of a row's pages for one kv head;
the last one of a row turns scores into masses and chooses. Knows nothing of launch sizes and devices.
"""

import triton
import triton.language as tl

from .keys import score_exact
from .merge import arrive_last
from .page_choice import least_mass, page_masses, whole_columns, write_choice
from .page_scores import choose_words, load_page_query, score_pages
from .softmax import LOG2E, bend, near_one, weigh
from .tiles import load_query
from .visibility import Visibility

STEPWISE = ("table_row", "width", "most", "share", "from_tokens", "q_len")
UNALIGNED = (
    "key_order", "held_words", "block_table", "num_pages", "exact_lens", "sink_logits", "chosen", "chosen_pages", "counters"
)  # fmt: skip


@triton.jit
def _pages_to_choose(
    pages, exact, most, share, from_tokens, PAGE: tl.constexpr, NEWEST: tl.constexpr
):
    """Return how many pages of a row are read at most, and whether all are because the row is short (1, or 0).

    share: the bits of a float64.
    """
    part = share.to(tl.float64, bitcast=True) * pages.to(tl.float64)
    limit = tl.minimum(most, part.to(tl.int32))
    limit = tl.minimum(pages, tl.maximum(limit, NEWEST))
    short = (pages * PAGE + exact < from_tokens).to(tl.int32)
    return tl.where(short > 0, pages, limit), short


@triton.jit
def _add_weights(score, best, total):
    """Add scores in log2 to running maxima and sums of weights of the same shape."""
    top = tl.maximum(best, score)
    shift = tl.where(top == float("-inf"), 0.0, top)
    return top, total * tl.exp2(best - shift) + tl.exp2(score - shift)


@triton.jit
def _window_sums(
    queries, real, keys, key_slot, exact, token_of, factor, softcap, q_len, K_DIM: tl.constexpr, W_CHUNKS: tl.constexpr,
    W_TILE: tl.constexpr, PRECISION: tl.constexpr, HIDING: tl.constexpr, COLUMNS: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Return maxima in log2 and sums of weights [columns] of the exact tokens; see reference.selection._window_scores."""
    one = tl.full([COLUMNS], 1.0, tl.float32)
    query = load_query(queries, real, K_DIM, K_DIM, W_CHUNKS, one, DTYPE)
    visible = Visibility(exact - q_len + token_of, queries, 0, 0, 0, softcap)
    best = tl.full([COLUMNS], float("-inf"), tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    for first in tl.range(0, exact, W_TILE):
        slot = first + tl.arange(0, W_TILE)
        held = slot < exact
        scores = score_exact(keys + slot * key_slot, held, query, K_DIM, W_CHUNKS, True, PRECISION)
        scores = bend(scores, factor, slot, held, visible, HIDING, True)
        weights, keep, best = weigh(scores, factor, best, HIDING.bent, True)
        total = total * keep + tl.sum(weights, 0)
    return best, total


@triton.jit(do_not_specialize=STEPWISE, do_not_specialize_on_alignment=UNALIGNED)
def choose_kernel(
    query,  # [rows, heads * GROUP, q_len, dim]
    query_row,
    query_head,
    query_token,
    key_codes,  # [pages, heads, page, bytes]
    key_scale,
    key_offset,  # of an index of exact keys: their middles, [pages, heads, 1, dim]
    key_order,  # [pages, heads, dim], of keys of two widths
    held_words,  # [heads, words], int32, of an index
    block_table,  # [rows, table_row]
    table_row,
    num_pages,  # [rows]
    window_keys,  # [rows, heads, slots, dim]
    wk_row,
    wk_head,
    wk_slot,
    exact_lens,  # [rows]
    sink_logits,  # [heads * GROUP]
    chosen,  # [rows, width], written
    chosen_pages,  # [rows], written
    scores,  # [rows, heads * GROUP * q_len, room] fp32: log2 of the summed weights of a page
    stats,  # [rows, programs of one split, splits + 1, 2, COLUMNS] fp32: maxima in log2, and sums of weights
    totals,  # [rows, heads * GROUP * q_len + 1] fp32: log2 of all weights of a column; last, the mass of the window
    masses,  # [rows, room] fp32
    counters,  # [rows] int32, zeros before and after
    room,  # pages that there is room for, a multiple of 16
    width,
    most,
    share,
    from_tokens,
    q_len,
    softmax_scale,
    softcap,
    top_p,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEYS: tl.constexpr,
    ALL: tl.constexpr,
    RANGED: tl.constexpr,
    NEWEST: tl.constexpr,
    W_TILE: tl.constexpr,
    W_CHUNKS: tl.constexpr,
    W_DTYPE: tl.constexpr,
    K_DTYPE: tl.constexpr,
    ISA: tl.constexpr,
    PRECISION: tl.constexpr,
    HIDING: tl.constexpr,
    PAGE_HIDING: tl.constexpr,
    SINKS: tl.constexpr,
    TOP: tl.constexpr,
    M_SPLITS: tl.constexpr,
    M_COLUMNS: tl.constexpr,
    S_PAGES: tl.constexpr,
    S_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    M_THREADS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Score one split of a row's pages for the query columns of one (kv head, block of columns); the last of a row chooses.

    Grid: (rows, HEADS * blocks of columns, splits). KEYS: a selection_meta_params.KeyWords. The last split also takes the
    window. A row of which all is read anyway is not scored.
    """
    if not CHUNK:
        q_len = 1
    PAGE: tl.constexpr = KEYS.page
    GROUPS: tl.constexpr = KEYS.page // KEYS.group
    used = GROUP * q_len  # columns
    blocks = (used + COLUMNS - 1) // COLUMNS
    row = tl.program_id(0)
    head = tl.program_id(1) // blocks
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    column = (tl.program_id(1) % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    real = column < used
    token_of = column // GROUP
    pages = tl.load(num_pages + row)
    exact = tl.load(exact_lens + row)
    wanted, short = _pages_to_choose(pages, exact, most, share, from_tokens, PAGE, NEWEST)
    is_all = short
    if not TOP:
        is_all = (wanted == pages).to(tl.int32)
    wide_row = row.to(tl.int64)
    table = block_table + wide_row * table_row
    scores += wide_row * (HEADS * used) * room
    stats += wide_row * tl.num_programs(1) * (splits + 1) * (2 * COLUMNS)
    totals += wide_row * (HEADS * used + 1)
    masses += wide_row * room

    if is_all == 0:
        queries = query + wide_row * query_row + (head * GROUP + column % GROUP) * query_head
        queries += token_of * query_token
        channel = tl.arange(0, triton.next_power_of_2(KEYS.dim))
        inside = (channel < KEYS.dim)[:, None] & real[None, :]
        x = tl.load(queries[None, :] + channel[:, None], mask=inside, other=0.0).to(tl.float32)
        shrink, factor = near_one(tl.max(tl.abs(x), 0), softmax_scale, False)
        one = tl.full([COLUMNS], 1.0, tl.float32)
        best = tl.full([KEYS.pages, COLUMNS], float("-inf"), tl.float32)
        total = tl.zeros([KEYS.pages, COLUMNS], tl.float32)
        tiles = (pages + KEYS.pages - 1) // KEYS.pages
        begin = tiles * split // splits
        end = tiles * (split + 1) // splits
        visible = Visibility(column, queries, 0, 0, 0, softcap)
        if begin < end:
            unit = tl.arange(0, KEYS.pages * GROUPS)
            words = choose_words(
                key_codes, key_scale, held_words, table, pages, head, HEADS, RANGED, ALL, KEYS
            )  # fmt: skip
            if KEYS.kind != "order":
                order = key_order + tl.zeros([1], tl.int32)
                read, all_channels = load_page_query(
                    queries, real, shrink, words, order, KEYS, K_DTYPE
                )
            for tile in tl.range(begin, end, num_stages=STAGES):
                at = tile * KEYS.pages + unit // GROUPS
                # what is not there is read from page 0, and hidden afterwards
                block = tl.load(table + at, mask=at < pages, other=0).to(tl.int64) * HEADS + head
                if KEYS.kind == "order":
                    order = key_order + block * KEYS.dim
                    read, all_channels = load_page_query(
                        queries, real, shrink, words, order, KEYS, K_DTYPE
                    )
                products, unit_factor, bias = score_pages(
                    key_codes, key_scale, key_offset, block, unit, read, all_channels, words, ALL, ISA, PRECISION, KEYS
                )  # fmt: skip
                if PAGE_HIDING.capped:
                    score = products * unit_factor[:, None, None] + bias[:, None, :]
                    score = tl.reshape(score, [KEYS.pages * PAGE, COLUMNS])
                    score = bend(score, factor, column, real, visible, PAGE_HIDING, False)
                    score = tl.reshape(score, [KEYS.pages * GROUPS, KEYS.group, COLUMNS])
                else:
                    scaled = (unit_factor[:, None] * factor[None, :])[:, None, :]
                    bias = (bias * factor[None, :])[:, None, :]
                    score = tl.fma(
                        products,
                        tl.broadcast_to(scaled, products.shape),
                        tl.broadcast_to(bias, products.shape),
                    )
                top = tl.max(score, 1)
                sums = tl.sum(tl.exp2(score - top[:, None, :]), 1)
                of_page = top + tl.log2(sums)
                if GROUPS > 1:
                    of_page = tl.reshape(of_page, [KEYS.pages, GROUPS, COLUMNS])
                    top = tl.max(of_page, 1)
                    of_page = top + tl.log2(tl.sum(tl.exp2(of_page - top[:, None, :]), 1))
                page = tile * KEYS.pages + tl.arange(0, KEYS.pages)
                held = page < pages
                of_page = tl.where(held[:, None], of_page, float("-inf"))
                where = scores + (head * used + column).to(tl.int64)[None, :] * room + page[:, None]
                tl.store(where, of_page, mask=held[:, None] & real[None, :])
                best, total = _add_weights(of_page, best, total)
        # each place of a tile has its own sums so far: no exchange between warps in the loop
        top = tl.max(best, 0)
        shift = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(total * tl.exp2(best - shift[None, :]), 0)
        best = top
        place = tl.program_id(1).to(tl.int64) * (splits + 1) * (2 * COLUMNS) + tl.arange(0, COLUMNS)
        tl.store(stats + place + split * (2 * COLUMNS), best)
        tl.store(stats + place + split * (2 * COLUMNS) + COLUMNS, total)
        if split == splits - 1:
            keys = window_keys + wide_row * wk_row + head * wk_head
            best, total = _window_sums(
                queries, real, keys, wk_slot, exact, token_of, one * (softmax_scale * LOG2E), softcap, q_len, KEYS.dim,
                W_CHUNKS, W_TILE, PRECISION, HIDING, COLUMNS, W_DTYPE,
            )  # fmt: skip
            tl.store(stats + place + splits * (2 * COLUMNS), best)
            tl.store(stats + place + splits * (2 * COLUMNS) + COLUMNS, total)

    programs = tl.num_programs(1) * splits
    if arrive_last(counters, row, programs, M_THREADS):
        candidates = tl.maximum(pages - NEWEST, 0)
        high = pages * 0
        low = pages * 0
        equals = pages * 0
        if is_all == 0:
            window = whole_columns(
                stats, totals, sink_logits, splits, blocks, used, HEADS, GROUP, COLUMNS, SINKS, M_SPLITS, M_COLUMNS
            )  # fmt: skip
            tl.store(totals + HEADS * used, window)
            tl.debug_barrier()
            whole = page_masses(
                scores, totals, masses, pages, room, HEADS * used, S_PAGES, S_COLUMNS
            )
            tl.debug_barrier()
            newest = candidates + tl.arange(0, triton.next_power_of_2(NEWEST))
            newest_mass = tl.load(masses + newest, mask=newest < pages, other=0.0)
            need = top_p * (window + whole) - (window + tl.sum(newest_mass, 0))
            wanted = wanted - (pages - candidates)
            high, low, equals = least_mass(masses, candidates, wanted, need, TOP, BLOCK)
        chosen += wide_row * width
        count = write_choice(
            masses, table, chosen, pages, candidates, width, is_all, high, low, equals, BLOCK
        )  # fmt: skip
        tl.store(chosen_pages + row, count)
