"""The choice of the pages that a step reads: one launch per layer.

The definition of the result is backends/reference/selection.py. Programs score stretches of a row's pages for one kv head;
the last one of a row turns scores into masses and chooses. Masses are not negative, so their bits as integers are in the order
of the numbers: the least mass that is chosen is found by halving a range of integers. All loops go over blocks of a row's
pages, of which there may be any number. Knows nothing of launch sizes and devices.
"""

import triton
import triton.language as tl

from .keys import score_exact
from .page_scores import choose_words, load_page_query, score_pages
from .softmax import LOG2E, Visibility, arrive_last, bend, near_one, weigh
from .tiles import load_query


@triton.jit
def whole_columns(
    stats, totals, sink_logits, splits, blocks, used, HEADS: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr,
    SINKS: tl.constexpr, SPLITS: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """Store the log2 of all weights of each query column, and return the mass of what is read anyway, [1].

    Args:
        stats: of this row, [HEADS * blocks, splits + 1, 2, COLUMNS]: maxima in log2 and sums; the last of the splits is
            the window.
        totals: of this row, [HEADS * used], 0 where a column has no weights.
    """
    rest_mass = tl.zeros([MANY], tl.float32)
    for first in tl.range(0, HEADS * used, MANY):
        number = first + tl.arange(0, MANY)
        real = number < HEADS * used
        column = number % used
        group = (number // used) * blocks + column // COLUMNS
        start = stats + group.to(tl.int64) * ((splits + 1) * 2 * COLUMNS) + column % COLUMNS
        # the window and the sinks
        window = start + splits * (2 * COLUMNS)
        rest_best = tl.load(window, mask=real, other=float("-inf"), cache_modifier=".cg")
        rest_sum = tl.load(window + COLUMNS, mask=real, other=0.0, cache_modifier=".cg")
        if SINKS:
            head = (number // used) * GROUP + column % GROUP
            sink = tl.load(sink_logits + head, mask=real, other=0.0).to(tl.float32) * LOG2E
            top = tl.maximum(rest_best, sink)
            rest_sum = rest_sum * tl.exp2(rest_best - top) + tl.exp2(sink - top)
            rest_best = top
        best = rest_best
        total = rest_sum
        for split in tl.range(0, splits, SPLITS):
            at = split + tl.arange(0, SPLITS)
            inside = (at < splits)[:, None] & real[None, :]
            where = start[None, :] + (at * (2 * COLUMNS))[:, None]
            bests = tl.load(where, mask=inside, other=float("-inf"), cache_modifier=".cg")
            sums = tl.load(where + COLUMNS, mask=inside, other=0.0, cache_modifier=".cg")
            top = tl.maximum(best, tl.max(bests, 0))
            shift = tl.where(top == float("-inf"), 0.0, top)
            total = total * tl.exp2(best - shift) + tl.sum(
                sums * tl.exp2(bests - shift[None, :]), 0
            )
            best = top
        seen = total > 0
        whole = tl.where(seen, best + tl.log2(tl.where(seen, total, 1.0)), 0.0)
        tl.store(totals + number, whole, mask=real)
        rest_mass += tl.where(real & seen, rest_sum * tl.exp2(rest_best - whole), 0.0)
    return tl.sum(rest_mass, 0)


@triton.jit
def page_masses(
    scores, totals, masses, pages, room, columns, PAGES: tl.constexpr, MANY: tl.constexpr
):
    """Store the mass of each page of a row, and return the sum of all.

    Args:
        scores: of this row, [columns, room], log2 of the weights of whole pages; totals: [columns].
        masses: of this row, [room].
    """
    whole_mass = tl.zeros([PAGES], tl.float32)
    for first in tl.range(0, pages, PAGES):
        page = first + tl.arange(0, PAGES)
        held = page < pages
        mass = tl.zeros([PAGES], tl.float32)
        for start in tl.range(0, columns, MANY):
            column = start + tl.arange(0, MANY)
            inside = (column < columns)[:, None] & held[None, :]
            where = scores + column.to(tl.int64)[:, None] * room + page[None, :]
            score = tl.load(where, mask=inside, other=float("-inf"), cache_modifier=".cg")
            whole = tl.load(totals + column, mask=column < columns, other=0.0)
            mass += tl.sum(tl.exp2(score - whole[:, None]), 0)
        tl.store(masses + page, mass, mask=held)
        whole_mass += mass
    return tl.sum(whole_mass, 0)


@triton.jit
def _bits(mass):
    """Return masses as integers of the same order."""
    return tl.maximum(mass.to(tl.int32, bitcast=True), 0)


@triton.jit
def _from(masses, candidates, least, BLOCK: tl.constexpr):
    """Return how many candidates have at least the bits `least`, and their mass."""
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, candidates, BLOCK):
        page = first + tl.arange(0, BLOCK)
        x = tl.load(masses + page, mask=page < candidates, other=0.0)
        above = (page < candidates) & (_bits(x) >= least)
        count += above.to(tl.int32)
        mass += tl.where(above, x, 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def least_mass(masses, candidates, wanted, need, TOP: tl.constexpr, BLOCK: tl.constexpr):
    """Return (high, low, equals): chosen are candidates whose bits reach `high`, and the first `equals` of those from `low` on.

    Chosen are the `wanted` candidates of most mass; where TOP only so many that their mass reaches `need`.
    """
    low = wanted * 0
    high = low + 0x7FFFFFFF
    count_low = candidates
    count_high = low
    mass_high = need * 0.0
    # from `low` on there are enough, from `high` on there are not
    going = count_low > wanted
    if TOP:
        going = count_low > 1
    while going:
        middle = low + (high - low) // 2
        count, mass = _from(masses, candidates, middle, BLOCK)
        enough = count >= wanted
        if TOP:
            enough = enough | (mass >= need)
        low = tl.where(enough, middle, low)
        count_low = tl.where(enough, count, count_low)
        high = tl.where(enough, high, middle)
        count_high = tl.where(enough, count_high, count)
        mass_high = tl.where(enough, mass_high, mass)
        going = (high - low > 1) & (count_low - count_high > 1)
        if not TOP:
            going = going & (count_low > wanted)
    equals = tl.minimum(wanted, count_low) - count_high
    if TOP:
        one = tl.maximum(low, 1).to(tl.float32, bitcast=True)
        missing = tl.minimum((need - mass_high) / one, 1.0e8)
        several = missing.to(tl.int32)
        several += (several.to(tl.float32) < missing).to(tl.int32)
        several = tl.where(count_low - count_high > 1, several, 1)
        equals = tl.minimum(equals, tl.maximum(several, 1))
        equals = tl.where(need <= 0, 0, equals)
        high = tl.where(need <= 0, 0x7FFFFFFF, high)
    return high, low, equals


@triton.jit
def write_choice(
    masses,
    table,
    chosen,
    pages,
    candidates,
    width,
    all_pages,
    high,
    low,
    equals,
    BLOCK: tl.constexpr,
):
    """Write the ids of the chosen pages of a row in their order, zeros behind them; return how many there are.

    Chosen are all from `candidates` on, and what `least_mass` says.
    """
    written = pages * 0
    equal = pages * 0
    # of a row that is read whole, all pages are like the newest
    candidates = tl.where(all_pages > 0, 0, candidates)
    for first in tl.range(0, pages, BLOCK):
        page = first + tl.arange(0, BLOCK)
        held = page < pages
        x = tl.load(masses + page, mask=page < candidates, other=0.0)
        bits = _bits(x)
        tie = (page < candidates) & (bits >= low) & (bits < high)
        place = equal + tl.cumsum(tie.to(tl.int32), 0)  # from 1 on
        equal += tl.sum(tie.to(tl.int32), 0)
        taken = (
            ((page < candidates) & (bits >= high))
            | (tie & (place <= equals))
            | (page >= candidates)
        )
        taken = (taken & held).to(tl.int32)
        at = written + tl.cumsum(taken, 0) - 1
        ids = tl.load(table + page, mask=held, other=0)
        tl.store(chosen + at, ids, mask=(taken > 0) & (at < width))
        written += tl.sum(taken, 0)
    written = tl.minimum(written, width)
    for first in tl.range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(chosen + at, tl.zeros([BLOCK], tl.int32), mask=(at >= written) & (at < width))
    return written


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
