"""The choice of the pages that a step reads: one launch per layer.

The definition of the result is backends/reference/selection.py. Programs score stretches of a row's pages for one kv head;
the last one of a row turns scores into masses and chooses. Scores are those of a part of a page's codes (page_summary.py), for
several pages at once: words are those of selection_launch.KeyWords, KEYS, and middles stand for the other channels. Products are
batches, a token group (or page) each, so that a warp has whole groups. Pages are ranked by integers that are all different: masses are not
negative, so their bits are in the order of the numbers, and of equal ones the first page is better. The least of
the chosen is found by halving a range. All loops go over blocks of a row's pages, of which there may be any
number. Knows nothing of launch sizes and devices.
"""

import triton
import triton.language as tl

from ...page_summary import RANGED_PAGES
from ...read_budget import NEWEST_PAGES
from .dequant import Fields, dtype_of, number, run_unit, tile_unit, unpack
from .heads import ROWS, Window, attend_window, query_units
from .softmax import LOG2E, Visibility, add, arrive_last, cap, sum_of

RANGED = tl.constexpr(RANGED_PAGES)
NEWEST = tl.constexpr(NEWEST_PAGES)
# splits and columns whose sums the last program takes at once
MERGED_SPLITS, MERGED_COLUMNS = tl.constexpr(16), tl.constexpr(64)
# pages and columns whose masses it sums at once
SUMMED_PAGES, SUMMED_COLUMNS = tl.constexpr(128), tl.constexpr(32)
BLOCK = tl.constexpr(1024)  # pages that it counts at once
MOST_BITS = tl.constexpr(0x7FFFFFFF)  # more than the bits of any mass


@triton.jit
def whole_columns(
    stats, totals, sink_logits, splits, blocks, used, HEADS: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Store the log2 of all weights of each query column, and return the mass of what is read anyway.

    Args:
        stats: of this row, [HEADS * blocks, splits + 1, 2, COLUMNS]: maxima in log2 and sums; the last of the splits is
            the window.
        totals: of this row, [HEADS * used], 0 where a column has no weights.
    """
    rest_mass = tl.zeros([MERGED_COLUMNS], tl.float32)
    for first in tl.range(0, HEADS * used, MERGED_COLUMNS):
        number = first + tl.arange(0, MERGED_COLUMNS)
        real = number < HEADS * used
        column = number % used
        group = (number // used) * blocks + column // COLUMNS
        start = stats + group.to(tl.int64) * ((splits + 1) * 2 * COLUMNS) + column % COLUMNS
        # the window and the sinks
        window = start + splits * (2 * COLUMNS)
        best = tl.load(window, mask=real, other=float("-inf"), cache_modifier=".cg")
        total = tl.load(window + COLUMNS, mask=real, other=0.0, cache_modifier=".cg")
        if SINKS:
            head = (number // used) * GROUP + column % GROUP
            sink = tl.load(sink_logits + head, mask=real, other=0.0).to(tl.float32) * LOG2E
            best, total = add(best, total, sink, 1.0)
        rest_best = best
        rest_sum = total
        for split in tl.range(0, splits, MERGED_SPLITS):
            at = split + tl.arange(0, MERGED_SPLITS)
            inside = (at < splits)[:, None] & real[None, :]
            where = start[None, :] + (at * (2 * COLUMNS))[:, None]
            bests = tl.load(where, mask=inside, other=float("-inf"), cache_modifier=".cg")
            sums = tl.load(where + COLUMNS, mask=inside, other=0.0, cache_modifier=".cg")
            best, total = add(best, total, *sum_of(bests, sums))
        seen = total > 0
        whole = tl.where(seen, best + tl.log2(tl.where(seen, total, 1.0)), 0.0)
        tl.store(totals + number, whole, mask=real)
        rest_mass += tl.where(real & seen, rest_sum * tl.exp2(rest_best - whole), 0.0)
    return tl.sum(rest_mass, 0)


@triton.jit
def page_masses(scores, totals, masses, pages, room, columns):
    """Store the mass of each page of a row, and return the sum of all.

    Args:
        scores: of this row, [columns, room], log2 of the weights of whole pages; totals: [columns].
        masses: of this row, [room].
    """
    whole_mass = tl.zeros([SUMMED_PAGES], tl.float32)
    for first in tl.range(0, pages, SUMMED_PAGES):
        page = first + tl.arange(0, SUMMED_PAGES)
        held = page < pages
        mass = tl.zeros([SUMMED_PAGES], tl.float32)
        for start in tl.range(0, columns, SUMMED_COLUMNS):
            column = start + tl.arange(0, SUMMED_COLUMNS)
            inside = (column < columns)[:, None] & held[None, :]
            where = scores + column.to(tl.int64)[:, None] * room + page[None, :]
            score = tl.load(where, mask=inside, other=float("-inf"), cache_modifier=".cg")
            whole = tl.load(totals + column, mask=column < columns, other=0.0)
            mass += tl.sum(tl.exp2(score - whole[:, None]), 0)
        tl.store(masses + page, mass, mask=held)
        whole_mass += mass
    return tl.sum(whole_mass, 0)


@triton.jit
def _ranks(masses, first, candidates):
    """Return BLOCK pages from `first` on, their masses and ranks: a better page's is larger, -1 from `candidates` on."""
    page = first + tl.arange(0, BLOCK)
    mass = tl.load(masses + page, mask=page < candidates, other=0.0)
    bits = tl.maximum(mass.to(tl.int32, bitcast=True), 0).to(tl.int64)
    return page, mass, tl.where(page < candidates, bits * candidates + (candidates - 1 - page), -1)


@triton.jit
def least_rank(masses, candidates, wanted, need, TOP: tl.constexpr):
    """Return the least rank of the `wanted` best candidates; where TOP of only so many that their mass reaches `need`."""
    low = tl.zeros([], tl.int64)
    high = candidates.to(tl.int64) * MOST_BITS
    count_low = candidates
    count_high = candidates * 0 - 1  # not even the best of all is known to be chosen
    # from `low` on there are enough, from `high` on there are not
    going = count_low > wanted
    if TOP:
        going = count_low > 0
    while going:
        middle = low + (high - low) // 2
        counts = tl.zeros([BLOCK], tl.int32)
        sums = tl.zeros([BLOCK], tl.float32)
        for first in tl.range(0, candidates, BLOCK):
            _, mass, rank = _ranks(masses, first, candidates)
            counts += (rank >= middle).to(tl.int32)
            sums += tl.where(rank >= middle, mass, 0.0)
        count = tl.sum(counts, 0)
        enough = count >= wanted
        if TOP:
            enough = enough | (tl.sum(sums, 0) >= need)
        low = tl.where(enough, middle, low)
        count_low = tl.where(enough, count, count_low)
        high = tl.where(enough, high, middle)
        count_high = tl.where(enough, count_high, count)
        going = count_low > wanted
        if TOP:
            going = count_low - count_high > 1
    return low


@triton.jit
def write_choice(masses, table, chosen, pages, candidates, width, least):
    """Write the ids of the chosen pages of a row in their order, zeros behind them; return how many there are.

    Chosen are the candidates of rank `least` or better, and all pages behind the candidates.
    """
    written = pages * 0
    for first in tl.range(0, pages, BLOCK):
        page, _, rank = _ranks(masses, first, candidates)
        taken = ((page < pages) & ((page >= candidates) | (rank >= least))).to(tl.int32)
        at = written + tl.cumsum(taken, 0) - 1
        ids = tl.load(table + page, mask=page < pages, other=0)
        tl.store(chosen + at, ids, mask=(taken > 0) & (at < width))
        written += tl.sum(taken, 0)
    written = tl.minimum(written, width)
    for first in tl.range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(chosen + at, tl.zeros([BLOCK], tl.int32), mask=(at >= written) & (at < width))
    return written


@triton.jit
def _pages_to_choose(pages, exact, most, share, from_tokens, PAGE: tl.constexpr):
    """Return how many pages of a row are read at most: all where the row is short. share: the bits of a float64."""
    part = share.to(tl.float64, bitcast=True) * pages.to(tl.float64)
    limit = tl.minimum(pages, tl.maximum(tl.minimum(most, part.to(tl.int32)), NEWEST))
    return tl.where(pages * PAGE + exact < from_tokens, pages, limit)


@triton.jit
def _page_sums(
    products, unit_factor, bias, factor, softcap, KEYS: tl.constexpr, CAPPED: tl.constexpr
):
    """Return the log2 of each page's summed weights [pages, columns]; the other arguments are of `score_pages`."""
    GROUPS: tl.constexpr = KEYS.page // KEYS.group
    PAGES: tl.constexpr = KEYS.pages
    COLUMNS: tl.constexpr = products.shape[2]
    if CAPPED:
        score = products * unit_factor[:, None, None] + bias[:, None, :]
        score = cap(score, factor[None, None, :], softcap)
    else:
        scaled = (unit_factor[:, None] * factor[None, :])[:, None, :]
        bias = (bias * factor[None, :])[:, None, :]
        score = tl.fma(
            products, tl.broadcast_to(scaled, products.shape), tl.broadcast_to(bias, products.shape)
        )
    top = tl.max(score, 1)
    of_page = top + tl.log2(tl.sum(tl.exp2(score - top[:, None, :]), 1))
    if GROUPS > 1:
        of_page = tl.reshape(of_page, [PAGES, GROUPS, COLUMNS])
        top = tl.max(of_page, 1)
        of_page = top + tl.log2(tl.sum(tl.exp2(of_page - top[:, None, :]), 1))
    return of_page


# -- scores of pages ---------------------------------------------------------------------------------------------------


@triton.jit
def _ranges(keys, block, held, place, inside, KEYS: tl.constexpr):
    """Sum the ranges of the numbers at `place` of a run over pages: [words, part], fp32.

    Args:
        block: [pages], page * heads + head, where `held`; place: [words, part], where `inside`.
    """
    GROUPS: tl.constexpr = KEYS.page // KEYS.group
    RUNS: tl.constexpr = KEYS.runs
    CODE: tl.constexpr = KEYS.code
    there = held[:, None, None] & inside[None, :, :]
    if KEYS.kind == "scales":
        ranges = tl.zeros(there.shape, tl.float32)
        for g in tl.static_range(GROUPS):
            for r in tl.static_range(RUNS):
                at = (block * (GROUPS * KEYS.dim))[:, None, None]
                at = at + (g * KEYS.dim + r * KEYS.width + place)[None, :, :]
                ranges += tl.load(keys.scale + at, mask=there, other=0.0).to(tl.float32)
    else:
        high = tl.full(there.shape, float("-inf"), tl.float32)
        low = -high
        for first in tl.range(0, KEYS.page, KEYS.ranged):
            token = first + tl.arange(0, KEYS.ranged)
            at = (block[:, None] * KEYS.page + token[None, :]) * KEYS.row
            at = at[:, :, None, None] + place[None, None, :, :]
            x = tl.load(keys.codes + at, mask=there[:, None, :, :], other=0)
            x = x.to(tl.float32) if CODE == "none" else number(x, 0, CODE, 8)
            high = tl.maximum(high, tl.max(x, 1))
            low = tl.minimum(low, tl.min(x, 1))
        ranges = high - low
        if KEYS.kind == "codes":
            scale = tl.load(keys.scale + block, mask=held, other=0.0).to(tl.float32)
            ranges = ranges * scale[:, None, None]
    return tl.sum(ranges, 0)


@triton.jit
def choose_words(keys, held_words, table, pages, head, HEADS: tl.constexpr, KEYS: tl.constexpr):
    """Return the numbers of the words of a row and head that are read, [slots], int32; -1 in slots without one.

    Args:
        keys: Fields; held_words: pointer to the words that an index holds, [heads, words]; of nothing where pages are whole.
        table: pointer to the row's page ids, of which there are `pages`, at least one.
    """
    slot = tl.arange(0, KEYS.slots)
    if KEYS.all or KEYS.kind == "order":
        return tl.where(slot < KEYS.read, slot, -1)
    elif KEYS.indexed:
        return tl.load(held_words + head * KEYS.read + slot, mask=slot < KEYS.read, other=-1)
    else:
        word = tl.arange(0, KEYS.padded)
        place = word[:, None] * KEYS.part + tl.arange(0, KEYS.part)[None, :]
        sample = tl.arange(0, RANGED)
        count = tl.minimum(pages, RANGED)
        page = tl.load(
            table + (2 * sample + 1) * pages // (2 * count), mask=sample < count, other=0
        )
        block = page.to(tl.int64) * HEADS + head
        size = tl.sum(_ranges(keys, block, sample < count, place, place < KEYS.width, KEYS), 1)
        if KEYS.turn:
            other = (word + KEYS.turn) % KEYS.words
            size += tl.sum(tl.where(other[:, None] == word[None, :], size[None, :], 0.0), 1)
        size = tl.where(word < KEYS.words, size, -1.0)
        above = size[None, :] > size[:, None]
        above = above | ((size[None, :] == size[:, None]) & (word[None, :] < word[:, None]))
        rank = tl.sum(above.to(tl.int32), 1)
        chosen = tl.sum(tl.where(rank[:, None] == slot[None, :], word[:, None], 0), 0)
        return tl.where(slot < KEYS.read, chosen, -1)


@triton.jit
def _places(words, KEYS: tl.constexpr):
    """Return the places of words' bytes in a run, and which are real: [slots, part]; others are some real place."""
    place = tl.maximum(words, 0)[:, None] * KEYS.part + tl.arange(0, KEYS.part)[None, :]
    real = (words >= 0)[:, None] & (place < KEYS.width)
    if KEYS.width % KEYS.part:
        place = tl.minimum(place, KEYS.width - 1)
    return place, real


@triton.jit
def _is_read(words, channel, KEYS: tl.constexpr):
    """Say of channels (places where there is an order) whether they are read token by token."""
    if KEYS.kind == "order":
        return channel < KEYS.wide
    else:
        word = (channel % KEYS.width) // KEYS.part
        return tl.max((word[:, None] == words[None, :]).to(tl.int32), 1) > 0


@triton.jit
def load_page_query(queries, real, shrink, words, order, KEYS: tl.constexpr, DTYPE: tl.constexpr):
    """Load the query columns for scores of a tile of pages, times `shrink` [columns], as batches of products take them.

    Args:
        queries: [columns], pointers to channel 0; real: [columns], which exist.
        order: [1], or [units] pointers to the pages' channels by place, where KEYS has an order.
    Returns: for every run [1 or units, slots * part, columns], the channels that are read; and [1 or units, channels,
        columns], all, or where KEYS has exact numbers the others.
    """
    DEPTH: tl.constexpr = KEYS.slots * KEYS.part
    UNITS: tl.constexpr = order.shape[0]
    RUNS: tl.constexpr = KEYS.runs
    place, inside = _places(words, KEYS)
    held = tl.reshape(inside, [1, DEPTH, 1]) & real[None, None, :]
    parts = ()
    for r in tl.static_range(RUNS):
        channel = tl.reshape(r * KEYS.width + place, [1, DEPTH])
        x = _gather(queries, tl.broadcast_to(channel, [UNITS, DEPTH]), order, True, held, KEYS)
        parts = parts + ((x * shrink[None, None, :]).to(DTYPE),)
    channel = tl.arange(0, triton.next_power_of_2(KEYS.dim))
    some = channel < KEYS.dim
    if KEYS.kind == "tokens":
        some = some & (_is_read(words, channel, KEYS) == 0)
    channel = tl.broadcast_to(channel[None, :], [UNITS, channel.shape[0]])
    held = some[None, :, None] & real[None, None, :]
    x = _gather(queries, channel, order, some[None, :], held, KEYS)
    return parts, (x * shrink[None, None, :]).to(DTYPE)


@triton.jit
def _gather(queries, channel, order, some, held, KEYS: tl.constexpr):
    """Load channels [units, channels] (places, where there is an order, of which `some` exist) of query columns, fp32."""
    if KEYS.kind == "order":
        channel = tl.load(order[:, None] + channel, mask=some, other=0).to(tl.int32)
    x = tl.load(queries[None, None, :] + channel[:, :, None], mask=held, other=0.0)
    return x.to(tl.float32)


@triton.jit
def _bases(keys, block, unit, words, DTYPE: tl.constexpr, KEYS: tl.constexpr):
    """Return what the query is multiplied by once per token group: [units, channels].

    Offsets, and in channels that are not read the middles of codes; the middles of an index of exact numbers.
    """
    GROUPS: tl.constexpr = KEYS.page // KEYS.group
    channel = tl.arange(0, triton.next_power_of_2(KEYS.dim))
    inside = (channel < KEYS.dim)[None, :]
    if KEYS.kind == "codes" or KEYS.kind == "tokens":
        where = keys.offset + (block * KEYS.dim)[:, None] + channel[None, :]
        return tl.load(where, mask=inside, other=0.0).to(DTYPE)
    else:
        at = ((block * GROUPS + unit % GROUPS) * KEYS.dim)[:, None] + channel[None, :]
        base = tl.load(keys.offset + at, mask=inside, other=0.0)
        steps = tl.load(keys.scale + at, mask=inside, other=0.0)
        read = _is_read(words, channel, KEYS)[None, :]
        to_middle = tl.where(read, 0.0, KEYS.middle).to(DTYPE)
        return tl.fma(steps.to(DTYPE), tl.broadcast_to(to_middle, steps.shape), base.to(DTYPE))


@triton.jit
def _bias(keys, block, unit, query, words, KEYS: tl.constexpr):
    """Return the products of the query with what stands for all tokens of a unit: [units, columns], fp32.

    As a product with rows that are all equal, or are the tokens that are averaged: sums stay in the warp that has the
    scores, and nothing is computed before it.
    """
    UNITS: tl.constexpr = block.shape[0]
    CHANNELS: tl.constexpr = query.shape[1]
    DTYPE: tl.constexpr = query.dtype
    query = tl.broadcast_to(query, [UNITS, CHANNELS, query.shape[2]])
    if KEYS.kind == "tokens" and not KEYS.indexed:
        row = tl.arange(0, ROWS)
        token = (2 * (row % KEYS.middles) + 1) * KEYS.page // (2 * KEYS.middles)
        channel = tl.arange(0, CHANNELS)
        where = keys.codes + (block * (KEYS.page * KEYS.row))[:, None, None]
        where = where + (token * KEYS.row)[None, :, None] + channel[None, None, :]
        rows = tl.load(where, mask=(channel < KEYS.dim)[None, None, :], other=0.0).to(DTYPE)
        return tl.sum(tl.dot(rows, query, input_precision="ieee"), 1) * (1.0 / ROWS)
    else:
        bases = _bases(keys, block, unit, words, DTYPE, KEYS)
        rows = tl.broadcast_to(bases[:, None, :], [UNITS, ROWS, CHANNELS])
        return tl.max(tl.dot(rows, query, input_precision="ieee"), 1)


@triton.jit
def score_pages(keys, block, unit, query, whole_query, words, KEYS: tl.constexpr):
    """Return the raw scores of the tokens of some pages: products [units, tokens of a unit, columns], their factor and bias.

    A unit is a token group. Scores are products * factor [units or 1] + bias [units, columns].

    Args:
        keys: Fields; block: [units], page * heads + head; unit: [units], numbers whose remainders are the group in its page.
        query, whole_query: of `load_page_query`.
    """
    GROUPS: tl.constexpr = KEYS.page // KEYS.group
    TOKENS: tl.constexpr = KEYS.group
    UNITS: tl.constexpr = block.shape[0]
    DEPTH: tl.constexpr = KEYS.slots * KEYS.part
    COLUMNS: tl.constexpr = whole_query.shape[2]
    DTYPE: tl.constexpr = whole_query.dtype
    CODE: tl.constexpr = KEYS.code
    RUNS: tl.constexpr = KEYS.runs
    place, _ = _places(words, KEYS)
    stored = place
    if KEYS.indexed:
        slot = tl.minimum(tl.arange(0, KEYS.slots), KEYS.read - 1)
        stored = slot[:, None] * KEYS.part + tl.arange(0, KEYS.part)[None, :]
    token = tl.arange(0, TOKENS)
    start = block * (KEYS.page * KEYS.row) + (unit % GROUPS) * (TOKENS * KEYS.row)
    within = (token * KEYS.row)[:, None, None] + stored[None, :, :]
    x = tl.load(keys.codes + (start[:, None, None, None] + within[None, :, :, :]))
    runs = unpack(tl.reshape(x, [UNITS, TOKENS, DEPTH]), CODE, KEYS.bits, DTYPE, KEYS.isa)
    scores = tl.zeros([UNITS, TOKENS, COLUMNS], tl.float32)
    factor = tl.full([1], 1.0, tl.float32)
    if KEYS.kind == "codes":
        factor = tl.load(keys.scale + block).to(tl.float32)
    elif (
        KEYS.kind != "tokens"
    ):  # codes of eight bits lie in the same subnormals as those of four and of two
        factor = factor * (1.0 / tile_unit(4, KEYS.isa))
    for r in tl.static_range(RUNS):
        q = query[r]
        if KEYS.kind == "scales" or KEYS.kind == "order":
            at = ((block * GROUPS + unit % GROUPS) * KEYS.dim)[:, None, None]
            at = at + (r * KEYS.width + place)[None, :, :]
            steps = tl.reshape(tl.load(keys.scale + at), [UNITS, DEPTH]).to(DTYPE)
            q = (q * (1.0 / run_unit(r, KEYS.bits, KEYS.isa))).to(DTYPE) * steps[:, :, None]
        q = tl.broadcast_to(q, [UNITS, DEPTH, COLUMNS])
        scores = tl.dot(runs[r], q, scores, input_precision="ieee")
    bias = tl.zeros([UNITS, COLUMNS], tl.float32)
    if KEYS.kind != "tokens" or not KEYS.all:
        bias = _bias(keys, block, unit, whole_query, words, KEYS)
    return scores, factor, bias


# -- a step ------------------------------------------------------------------------------------------------------------

STEPWISE = ("table_row", "width", "most", "share", "from_tokens", "q_len")
UNALIGNED = (
    "key_order", "held_words", "block_table", "num_pages", "exact_lens", "sink_logits", "chosen", "chosen_pages", "counters"
)  # fmt: skip


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
    HIDING: tl.constexpr,
    SINKS: tl.constexpr,
    TOP: tl.constexpr,
    M_THREADS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Score one split of a row's pages for the query columns of one (kv head, block of columns); the last of a row chooses.

    Grid: (rows, HEADS * blocks of columns, splits). KEYS: a selection_launch.KeyWords. HIDING: of the window, which the last
    split also takes. TOP: whether masses have to reach top_p. A row of which all is read anyway is not scored.
    """
    if not CHUNK:
        q_len = 1
    GROUPS: tl.constexpr = KEYS.page // KEYS.group
    PAGES: tl.constexpr = KEYS.pages
    PAGE: tl.constexpr = KEYS.page
    DTYPE: tl.constexpr = dtype_of(KEYS.dtype)
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
    wanted = _pages_to_choose(pages, exact, most, share, from_tokens, PAGE)
    scored = wanted < pages
    if TOP:
        scored = pages * PAGE + exact >= from_tokens
    wide_row = row.to(tl.int64)
    table = block_table + wide_row * table_row
    scores += wide_row * (HEADS * used) * room
    stats += wide_row * tl.num_programs(1) * (splits + 1) * (2 * COLUMNS)
    totals += wide_row * (HEADS * used + 1)
    masses += wide_row * room

    if scored:
        keys = Fields(key_codes, key_scale, key_offset, key_order)
        queries = query + wide_row * query_row + (head * GROUP + column % GROUP) * query_head
        queries += token_of * query_token
        shrink, factor = query_units(queries, real, softmax_scale, KEYS.dim)
        # each place of a tile has its own sums so far: no exchange between warps in the loop
        best = tl.full([PAGES, COLUMNS], float("-inf"), tl.float32)
        total = tl.zeros([PAGES, COLUMNS], tl.float32)
        tiles = (pages + PAGES - 1) // PAGES
        begin = tiles * split // splits
        end = tiles * (split + 1) // splits
        if begin < end:
            unit = tl.arange(0, PAGES * GROUPS)
            words = choose_words(keys, held_words, table, pages, head, HEADS, KEYS)
            if KEYS.kind != "order":
                order = key_order + tl.zeros([1], tl.int32)
                read, all_channels = load_page_query(
                    queries, real, shrink, words, order, KEYS, DTYPE
                )
            for tile in tl.range(begin, end, num_stages=STAGES):
                at = tile * PAGES + unit // GROUPS
                # what is not there is read from page 0, and hidden afterwards
                block = tl.load(table + at, mask=at < pages, other=0).to(tl.int64) * HEADS + head
                if KEYS.kind == "order":
                    order = key_order + block * KEYS.dim
                    read, all_channels = load_page_query(
                        queries, real, shrink, words, order, KEYS, DTYPE
                    )
                products, unit_factor, bias = score_pages(
                    keys, block, unit, read, all_channels, words, KEYS
                )
                of_page = _page_sums(
                    products, unit_factor, bias, factor, softcap, KEYS, HIDING.capped
                )
                page = tile * PAGES + tl.arange(0, PAGES)
                held = page < pages
                of_page = tl.where(held[:, None], of_page, float("-inf"))
                where = scores + (head * used + column).to(tl.int64)[None, :] * room + page[:, None]
                tl.store(where, of_page, mask=held[:, None] & real[None, :])
                best, total = add(best, total, of_page, 1.0)
        best, total = sum_of(best, total)
        place = tl.program_id(1).to(tl.int64) * (splits + 1) * (2 * COLUMNS) + tl.arange(0, COLUMNS)
        tl.store(stats + place + split * (2 * COLUMNS), best)
        tl.store(stats + place + split * (2 * COLUMNS) + COLUMNS, total)
        if split == splits - 1:
            window = window_keys + wide_row * wk_row + head * wk_head
            window = Window(window, wk_slot, window, wk_slot, exact, 0, True)
            visible = Visibility(exact - q_len + token_of, queries, 0, 0, 0, softcap)
            best = tl.full([COLUMNS], float("-inf"), tl.float32)
            total = tl.zeros([COLUMNS], tl.float32)
            best, total, _ = attend_window(
                queries, real, window, visible, softmax_scale, best, total, (), KEYS, None, HIDING, KEYS.window_tile
            )  # fmt: skip
            tl.store(stats + place + splits * (2 * COLUMNS), best)
            tl.store(stats + place + splits * (2 * COLUMNS) + COLUMNS, total)

    if arrive_last(counters, row, tl.num_programs(1) * splits, M_THREADS):
        least = tl.zeros([], tl.int64)
        candidates = pages * 0  # where all are read, all are like the newest
        if scored:
            candidates = tl.maximum(pages - NEWEST, 0)
            rest = whole_columns(
                stats, totals, sink_logits, splits, blocks, used, HEADS, GROUP, COLUMNS, SINKS
            )
            tl.store(totals + HEADS * used, rest)
            tl.debug_barrier()
            whole = page_masses(scores, totals, masses, pages, room, HEADS * used)
            tl.debug_barrier()
            newest = candidates + tl.arange(0, triton.next_power_of_2(NEWEST))
            newest_mass = tl.load(masses + newest, mask=newest < pages, other=0.0)
            need = top_p * (rest + whole) - (rest + tl.sum(newest_mass, 0))
            least = least_rank(masses, candidates, wanted - (pages - candidates), need, TOP)
        count = write_choice(
            masses, table, chosen + wide_row * width, pages, candidates, width, least
        )
        tl.store(chosen_pages + row, count)
