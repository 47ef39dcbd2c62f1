"""The choice of the pages that a step reads: two launches per layer, which refuse to look into device tensors.

The definition of the result is backends/reference/selection.py. Programs score stretches of a row's pages for one kv head, and
one more its exact window; a second kernel turns the scores of a row into masses and chooses. Scores are those of a part of a
page's codes (page_summary.py), for several pages at once: words are those of meta_params.KeyWords, KEYS, and middles stand for the other
channels. Products are batches, a unit (token group or page) each, so that a warp has whole units. Pages are ranked by
integers that are all different: masses are not negative, so their bits are in the order of the numbers, and of equal ones
the first page is better. The least of the chosen is found by trying WAYS places of a range at once. All loops go over blocks of a row's pages, of
which there may be any number.
"""

import struct
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources

from ...notices import warn_once
from ...page_summary import MIDDLE_TOKENS, RANGED_PAGES
from ...read_budget import NEWEST_PAGES
from ..base import AttentionCall
from ..reference import selection
from .dequant import dtype_of, number, run_unit, tile_unit, top_codes
from .direct import SPECIALIZED, At, Fields, Kernel, Plan, Strided, planned, rows_of
from .heads import attend_window, columns_of, load_runs, query_units
from .meta_params import HIP, ExactWindow, Queries, key_words, power_of_two
from .softmax import LOG2E, NO_WEIGHT, Visibility, cap, log2_sum

MIN_STRETCH = 512  # tokens of a program, at least
# the same where ranges come from codes, of which every program reads RANGED_PAGES pages
CODES_STRETCH = 2048
MAX_SPLITS = 63  # one less than the sums of a column that are read at once
STAGED_BYTES = 48 * 1024  # of the tiles that are on their way
PROGRAMS = 132 * 4  # that fill a large GPU
NO_LIMIT = 2**31 - 1  # pages
LEAST_ROOM = 64  # pages

RANGED = tl.constexpr(RANGED_PAGES)
RANGED_NUMBERS = tl.constexpr(256)  # of a piece of a page whose ranges are taken
MIDDLES = tl.constexpr(MIDDLE_TOKENS)
NEWEST = tl.constexpr(NEWEST_PAGES)
SUMS = tl.constexpr(MAX_SPLITS + 1)
# pages and columns whose masses are summed at once
SUMMED_PAGES, SUMMED_COLUMNS = tl.constexpr(128), tl.constexpr(32)
BLOCK = tl.constexpr(1024)  # pages that are counted at once
ROWS = tl.constexpr(16)  # the fewest rows of a matrix product
WAYS = tl.constexpr(16)  # places of a range of ranks that are tried at once
MOST_BITS = tl.constexpr(0x7FFFFFFF)  # more than the bits of any mass


# -- words -------------------------------------------------------------------------------------------------------------


@triton.jit
def _ranges(keys, block, held, place, inside, KEYS: tl.constexpr):
    """Sum the ranges of the numbers at `place` of a run over pages: [words, part], fp32.

    Args:
        block: [pages], page * heads + head, where `held`; place: [words, part], where `inside`.
    """
    CODE: tl.constexpr = KEYS.side.code
    DIM: tl.constexpr = KEYS.side.dim
    PAGE: tl.constexpr = KEYS.side.page
    there = held[:, None, None] & inside[None, :, :]
    if CODE == "unsigned":
        GROUPS: tl.constexpr = PAGE // KEYS.group
        RUNS: tl.constexpr = KEYS.runs
        ranges = tl.zeros(there.shape, tl.float32)
        for g in tl.static_range(GROUPS):
            for r in tl.static_range(RUNS):
                at = (block * (GROUPS * DIM))[:, None, None]
                at = at + (g * DIM + r * KEYS.width + place)[None, :, :]
                ranges += tl.load(keys.scale + at, mask=there, other=0.0).to(tl.float32)
    else:
        AT_ONCE: tl.constexpr = max(1, min(PAGE, RANGED_NUMBERS // place.numel))
        high = tl.full(there.shape, float("-inf"), tl.float32)
        low = -high
        for first in tl.range(0, PAGE, AT_ONCE):
            token = first + tl.arange(0, AT_ONCE)
            at = (block[:, None] * PAGE + token[None, :]) * KEYS.row
            at = at[:, :, None, None] + place[None, None, :, :]
            x = tl.load(keys.codes + at, mask=there[:, None, :, :], other=0)
            x = x.to(tl.float32) if CODE == "none" else number(x, 0, CODE, 8)
            high = tl.maximum(high, tl.max(x, 1))
            low = tl.minimum(low, tl.min(x, 1))
        ranges = high - low
        if CODE != "none":
            scale = tl.load(keys.scale + block, mask=held, other=0.0).to(tl.float32)
            ranges = ranges * scale[:, None, None]
    return tl.sum(ranges, 0)


@triton.jit
def _choose_words(keys, held_words, table, pages, head, KEYS: tl.constexpr):
    """Return the numbers of the words of a row and head that are read, [slots], int32; -1 in slots without one.

    Args:
        keys: Fields; held_words: pointer to the words that an index holds, [heads, words]; of nothing where pages are whole.
        table: pointer to the row's page ids, of which there are `pages`, at least one.
    """
    slot = tl.arange(0, KEYS.slots)
    if KEYS.read == KEYS.words:
        return tl.where(slot < KEYS.read, slot, -1)
    elif KEYS.indexed:
        return tl.load(held_words + head * KEYS.read + slot, mask=slot < KEYS.read, other=-1)
    else:
        word = tl.arange(0, triton.next_power_of_2(KEYS.words))
        place = word[:, None] * KEYS.part + tl.arange(0, KEYS.part)[None, :]
        inside = place < KEYS.width
        sample = tl.arange(0, RANGED)
        count = tl.minimum(pages, RANGED)
        at = (2 * sample + 1) * pages // (2 * count)
        page = tl.load(table + at, mask=sample < count, other=0)
        block = page.to(tl.int64) * KEYS.side.heads + head
        size = tl.sum(_ranges(keys, block, sample < count, place, inside, KEYS), 1)
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
    WIDTH: tl.constexpr = KEYS.width
    place = tl.maximum(words, 0)[:, None] * KEYS.part + tl.arange(0, KEYS.part)[None, :]
    real = (words >= 0)[:, None] & (place < WIDTH)
    if WIDTH % KEYS.part:  # else loads would no longer be known to be of numbers side by side
        place = tl.minimum(place, WIDTH - 1)
    return place, real


@triton.jit
def _is_read(words, channel, KEYS: tl.constexpr):
    """Say of channels (places where there is an order) whether they are read token by token."""
    WIDTH: tl.constexpr = KEYS.width
    word = (channel % WIDTH) // KEYS.part
    in_words = tl.max((word[:, None] == words[None, :]).to(tl.int32), 1) > 0
    return in_words & (channel < WIDTH * KEYS.runs)


# -- scores of pages ---------------------------------------------------------------------------------------------------


@triton.jit
def _gather(queries, real, shrink, channel, inside, order, KEYS: tl.constexpr):
    """Load channels [channels], where `inside`, of query columns: [channels, columns], times `shrink` [columns].

    order: pointer to the row's channels by place, where KEYS has an order.
    """
    DTYPE: tl.constexpr = dtype_of(KEYS.dtype)
    if KEYS.side.ordered:
        channel = tl.load(order + channel, mask=inside, other=0).to(tl.int32)
    held = inside[:, None] & real[None, :]
    x = tl.load(queries[None, :] + channel[:, None], mask=held, other=0.0)
    return (x.to(tl.float32) * shrink[None, :]).to(DTYPE)


@triton.jit
def _page_query(queries, real, shrink, words, order, KEYS: tl.constexpr):
    """Load the query columns as scores of a tile of pages take them; arguments as `_gather`'s.

    Returns: for every run [slots * part, columns], the channels that are read; and [channels, columns], all, or where KEYS has
        exact numbers the others.
    """
    DEPTH: tl.constexpr = KEYS.slots * KEYS.part
    RUNS: tl.constexpr = KEYS.runs
    place, inside = _places(words, KEYS)
    parts = ()
    for r in tl.static_range(RUNS):
        channel = tl.reshape(r * KEYS.width + place, [DEPTH])
        held = tl.reshape(inside, [DEPTH])
        parts = parts + (_gather(queries, real, shrink, channel, held, order, KEYS),)
    channel = tl.arange(0, triton.next_power_of_2(KEYS.side.dim))
    some = channel < KEYS.side.dim
    if KEYS.side.code == "none":
        some = some & (_is_read(words, channel, KEYS) == 0)
    return parts, _gather(queries, real, shrink, channel, some, order, KEYS)


@triton.jit
def _bias(keys, unit, query, words, KEYS: tl.constexpr):
    """Return the products of the query with what stands for all tokens of a unit: [units, columns], fp32.

    These are offsets, in channels that are not read with the middles of codes, and of exact numbers the middles of an index
    or the mean of some tokens. As a product with rows that are these tokens, or all equal: sums stay in the warp that has the scores, and
    nothing is computed before it.
    """
    SIDE: tl.constexpr = KEYS.side
    UNITS: tl.constexpr = unit.shape[0]
    CHANNELS: tl.constexpr = query.shape[0]
    DTYPE: tl.constexpr = query.dtype
    query = tl.broadcast_to(query[None, :, :], [UNITS, CHANNELS, query.shape[1]])
    channel = tl.arange(0, CHANNELS)
    inside = channel < SIDE.dim
    if SIDE.code == "none" and not KEYS.indexed:
        row = tl.arange(0, ROWS)
        token = (2 * (row % MIDDLES) + 1) * SIDE.page // (2 * MIDDLES)
        where = keys.codes + (unit * (KEYS.group * KEYS.row))[:, None, None]
        where = where + (token * KEYS.row)[None, :, None] + channel[None, None, :]
        rows = tl.load(where, mask=inside[None, None, :], other=0.0).to(DTYPE)
    else:
        at = (unit * SIDE.dim)[:, None] + channel[None, :]
        base = tl.load(keys.offset + at, mask=inside[None, :], other=0.0).to(DTYPE)
        if SIDE.code == "unsigned":
            steps = tl.load(keys.scale + at, mask=inside[None, :], other=0.0).to(DTYPE)
            middle = 0.5 * top_codes(channel, SIDE)
            to_middle = tl.where(_is_read(words, channel, KEYS), 0.0, middle).to(DTYPE)
            base = tl.fma(steps, to_middle[None, :], base)
        rows = tl.broadcast_to(base[:, None, :], [UNITS, ROWS, CHANNELS])
    return tl.sum(tl.dot(rows, query, input_precision="ieee"), 1) * (1.0 / ROWS)


@triton.jit
def _page_sums(keys, unit, query, whole_query, words, factor, softcap, KEYS: tl.constexpr, QUERIES: tl.constexpr):  # fmt: skip
    """Return the log2 of the summed weights of the pages that some units belong to: [pages, columns].

    Args:
        keys: Fields; unit: [units], numbers among those of all pages and heads.
        query, whole_query: of `_page_query`; factor: [columns], brings scores to log2.
    """
    TOKENS: tl.constexpr = KEYS.group
    UNITS: tl.constexpr = unit.shape[0]
    DEPTH: tl.constexpr = KEYS.slots * KEYS.part
    COLUMNS: tl.constexpr = whole_query.shape[1]
    DTYPE: tl.constexpr = whole_query.dtype
    CODE: tl.constexpr = KEYS.side.code
    place, _ = _places(words, KEYS)
    stored = place
    if KEYS.indexed:
        slot = tl.minimum(tl.arange(0, KEYS.slots), KEYS.read - 1)
        stored = slot[:, None] * KEYS.part + tl.arange(0, KEYS.part)[None, :]
    token = unit[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
    pointers = (keys.codes + token * KEYS.row)[:, :, None, None]
    CUT: tl.constexpr = KEYS.cut
    runs = load_runs(pointers, stored[None, None, :, :], CUT, 0, 1, KEYS, DTYPE)
    products = tl.zeros([UNITS, TOKENS, COLUMNS], tl.float32)
    by = tl.full([1], 1.0, tl.float32)
    if CODE == "unsigned":
        # codes of eight bits lie in the same subnormals as those of four and of two
        by = by * (1.0 / tile_unit(4, KEYS.isa))
    elif CODE != "none":
        by = tl.load(keys.scale + unit).to(tl.float32)
    for r in tl.static_range(len(runs)):
        q = query[r][None, :, :]
        if CODE == "unsigned":
            at = (r * KEYS.width + place)[None, :, :]
            at = (unit * KEYS.side.dim)[:, None, None] + at
            steps = tl.reshape(tl.load(keys.scale + at), [UNITS, DEPTH]).to(DTYPE)
            q = (q * (1.0 / run_unit(r, CUT.chunks[0].bits, KEYS.isa))).to(DTYPE) * steps[
                :, :, None
            ]
        q = tl.broadcast_to(q, [UNITS, DEPTH, COLUMNS])
        products = tl.dot(
            tl.reshape(runs[r], [UNITS, TOKENS, DEPTH]), q, products, input_precision="ieee"
        )
    bias = tl.zeros([UNITS, COLUMNS], tl.float32)
    if CODE != "none" or KEYS.read < KEYS.words:
        bias = _bias(keys, unit, whole_query, words, KEYS)
    if QUERIES.capped:
        score = products * by[:, None, None] + bias[:, None, :]
        score = cap(score, factor[None, None, :], softcap)
    else:
        by, bias = by[:, None] * factor[None, :], bias * factor[None, :]
        score = tl.fma(products, by[:, None, :], bias[:, None, :])
    sums = log2_sum(score, 1)
    if KEYS.pages < UNITS:
        sums = log2_sum(tl.reshape(sums, [KEYS.pages, UNITS // KEYS.pages, COLUMNS]), 1)
    return sums


@triton.jit
def _score_pages(
    keys, held_words, table, pages, columns, visible, scores, KEYS: tl.constexpr, QUERIES: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """Store the log2 of the summed weights of the pages of this program's split, and return that of all: [columns].

    scores: [columns], pointers to the numbers of a column's pages.
    """
    PAGES: tl.constexpr = KEYS.pages
    GROUPS: tl.constexpr = KEYS.side.page // KEYS.group
    queries, real, head = columns.queries, columns.real, columns.head
    shrink, factor = query_units(queries, real, visible.softmax_scale, KEYS.side.dim)
    tiles = (pages + PAGES - 1) // PAGES
    split, splits = tl.program_id(2), tl.num_programs(2) - 1
    begin, end = tiles * split // splits, tiles * (split + 1) // splits
    # each place of a tile has its own sum so far: no exchange between warps in the loop
    best = tl.full([PAGES, real.shape[0]], NO_WEIGHT, tl.float32)
    total = tl.full(best.shape, 1.0, tl.float32)
    if begin < end:
        number = tl.arange(0, PAGES * GROUPS)
        words = _choose_words(keys, held_words, table, pages, head, KEYS)
        order = keys.order
        if KEYS.side.ordered:  # that of all pages of the row
            first = tl.load(table + begin * PAGES).to(tl.int64)
            order += (first * KEYS.side.heads + head) * KEYS.side.dim
        read, all_channels = _page_query(queries, real, shrink, words, order, KEYS)
        for tile in tl.range(begin, end, num_stages=STAGES):
            at = tile * PAGES + number // GROUPS
            # what is not there is read from page 0, and hidden afterwards
            block = tl.load(table + at, mask=at < pages, other=0)
            block = block.to(tl.int64) * KEYS.side.heads + head
            unit = block * GROUPS + number % GROUPS
            of_page = _page_sums(
                keys, unit, read, all_channels, words, factor, visible.softcap, KEYS, QUERIES
            )
            page = tile * PAGES + tl.arange(0, PAGES)
            held = page < pages
            of_page = tl.where(held[:, None], of_page, NO_WEIGHT)
            tl.store(scores[None, :] + page[:, None], of_page, mask=held[:, None] & real[None, :])
            top = tl.maximum(best, of_page)
            total = total * tl.exp2(best - top) + tl.exp2(of_page - top)
            best = top
    return log2_sum(best + tl.log2(total), 0)


# -- the choice --------------------------------------------------------------------------------------------------------


@triton.jit
def _pages_to_choose(pages, exact, most, share, from_tokens, PAGE: tl.constexpr):
    """Return how many pages of a row are read: all where the row is short.

    share: the bits of a float64.
    """
    part = share.to(tl.float64, bitcast=True) * pages.to(tl.float64)
    limit = tl.minimum(pages, tl.maximum(tl.minimum(most, part.to(tl.int32)), NEWEST))
    long = pages * PAGE + exact >= from_tokens
    return tl.where(long, limit, pages)


@triton.jit
def _page_masses(scores, sums, masses, pages, splits, columns, room):
    """Store the mass of each page of a row.

    Args:
        scores: of this row, [columns, room], log2 of the weights of whole pages.
        sums: of this row, [columns, splits], log2 of the weights of stretches of pages; last of the window.
        masses: of this row, [room].
    """
    split = tl.arange(0, SUMS)
    for start in tl.range(0, columns, SUMMED_COLUMNS):
        column = start + tl.arange(0, SUMMED_COLUMNS)
        real = column < columns
        there = real[:, None] & (split < splits)[None, :]
        at = sums + (column * splits)[:, None] + split[None, :]
        x = tl.load(at, mask=there, other=NO_WEIGHT)
        whole = log2_sum(x, 1)
        whole = tl.where(whole == NO_WEIGHT, 0.0, whole)
        for first in tl.range(0, pages, SUMMED_PAGES):
            page = first + tl.arange(0, SUMMED_PAGES)
            held = page < pages
            inside = real[:, None] & held[None, :]
            where = scores + column.to(tl.int64)[:, None] * room + page[None, :]
            score = tl.load(where, mask=inside, other=NO_WEIGHT)
            mass = tl.sum(tl.exp2(score - whole[:, None]), 0)
            # of the columns before
            mass += tl.load(masses + page, mask=held & (start > 0), other=0.0)
            tl.store(masses + page, mass, mask=held)


@triton.jit
def _ranks(masses, first, pages):
    """Return BLOCK pages from `first` on and their ranks: a better page's is larger, the newest are best, -1 is none."""
    page = first + tl.arange(0, BLOCK)
    mass = tl.load(masses + page, mask=page < pages, other=0.0)
    bits = tl.maximum(mass.to(tl.int32, bitcast=True), 0)
    bits = tl.where(page < pages - NEWEST, bits, MOST_BITS).to(tl.int64)
    return page, tl.where(page < pages, bits * pages + (pages - 1 - page), -1)


@triton.jit
def _least_rank(masses, pages, wanted):
    """Return the least rank of the `wanted` best pages."""
    # from `low` on there are enough, from `high` on there are not
    low = tl.zeros([], tl.int64)
    high = (pages.to(tl.int64) * MOST_BITS) + pages
    count_low = pages
    while count_low > wanted:
        middle = low + (high - low) * (1 + tl.arange(0, WAYS)) // (WAYS + 1)
        counts = tl.zeros([WAYS], tl.int32)
        for first in tl.range(0, pages, BLOCK):
            rank = _ranks(masses, first, pages)[1]
            counts += tl.sum((rank[:, None] >= middle[None, :]).to(tl.int32), 0)
        enough = counts >= wanted
        low = tl.max(tl.where(enough, middle, low), 0)
        high = tl.min(tl.where(enough, high, middle), 0)
        count_low = tl.min(tl.where(enough, counts, count_low), 0)
    return low


@triton.jit
def _write_choice(masses, table, chosen, pages, width, least):
    """Write the ids of a row's pages of rank `least` or better in their order, zeros behind them; return how many there are."""
    written = pages * 0
    for first in tl.range(0, pages, BLOCK):
        page, rank = _ranks(masses, first, pages)
        taken = (rank >= least).to(tl.int32)
        at = written + tl.cumsum(taken, 0) - 1
        ids = tl.load(table + page, mask=page < pages, other=0)
        tl.store(chosen + at, ids, mask=(taken > 0) & (at < width))
        written += tl.sum(taken, 0)
    written = tl.minimum(written, width)
    for first in tl.range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(chosen + at, tl.zeros([BLOCK], tl.int32), mask=(at >= written) & (at < width))
    return written


# -- a step ------------------------------------------------------------------------------------------------------------


class Scores(NamedTuple):
    """What the programs of a row tell the one that chooses.

    Attributes:
        pages: [rows, heads * group * q_len, room] fp32: log2 of the summed weights of a page.
        sums: [rows, heads * group * q_len, splits] fp32: the same of a split's pages; last, of the window and the sinks.
        masses: [rows, room] fp32, of the pages.
    """

    pages: Any
    sums: Any
    masses: Any


@triton.jit(**SPECIALIZED)
def score_kernel(
    query,  # Strided: [rows, heads * group, q_len, dim]
    keys,  # Fields: codes [pages, heads, page, bytes]; offsets of an index of exact keys: their middles, [pages, heads, 1, dim]
    held_words,  # [heads, words], int32, of an index
    window_keys,  # Strided: [rows, heads, slots, dim]
    scratch,  # Scores
    block_table,  # [rows, table_width]
    table_width,
    num_pages,  # [rows]
    exact_lens,  # [rows]
    sink_logits,  # [heads * group]
    most,
    share,
    from_tokens,
    room,  # at least as many pages as there are, a multiple of 16
    q_len,
    softmax_scale,
    softcap,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Score one split of a row's pages for the query columns of one (kv head, block of columns).

    Grid: (rows, heads * blocks of columns, splits); the last split is the window. KEYS: a KeyWords. QUERIES, WINDOW, STAGES: as
    of decode_kernel. A row of which all is read anyway is not scored.
    """
    columns = columns_of(query, q_len, QUERIES)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    # of all heads
    number = columns.head * columns.used + columns.number
    count = QUERIES.heads * columns.used
    pages = tl.load(num_pages + columns.row)
    exact = tl.load(exact_lens + columns.row)
    scored = _pages_to_choose(pages, exact, most, share, from_tokens, KEYS.side.page) < pages
    table = block_table + columns.row * table_width
    scores = scratch.pages + (columns.row * count + number) * room
    sums = scratch.sums + columns.row * count * splits
    at = exact - columns.q_len + columns.tokens
    visible = Visibility(at, columns.queries, 0, 0, 0, softcap, softmax_scale)

    if scored:
        if split < splits - 1:
            of_split = _score_pages(
                keys, held_words, table, pages, columns, visible, scores, KEYS, QUERIES, STAGES
            )
        else:
            best, total, _ = attend_window(
                window_keys, window_keys, columns, exact, 0, visible, WINDOW, QUERIES
            )
            of_split = tl.maximum(best + tl.log2(total), NO_WEIGHT)
            if QUERIES.sinks:
                sink = tl.load(sink_logits + columns.heads, mask=columns.real, other=0.0)
                of_split = log2_sum(tl.join(of_split, sink.to(tl.float32) * LOG2E), 1)
        tl.store(sums + number * splits + split, of_split, mask=columns.real)


@triton.jit(**SPECIALIZED)
def choose_kernel(
    scratch,  # Scores of score_kernel
    block_table,  # [rows, table_width]
    table_width,
    num_pages,  # [rows]
    exact_lens,  # [rows]
    chosen,  # [rows, width], written
    chosen_pages,  # [rows], written
    most,
    share,
    from_tokens,
    room,
    width,
    columns,
    num_splits,
    PAGE: tl.constexpr,
):
    """Choose the pages of one row, of which score_kernel has scored `columns` query columns. Grid: (rows,)."""
    row = tl.program_id(0)
    wide_row = row.to(tl.int64)
    pages = tl.load(num_pages + row)
    exact = tl.load(exact_lens + row)
    wanted = _pages_to_choose(pages, exact, most, share, from_tokens, PAGE)
    masses = scratch.masses + wide_row * room
    least = tl.zeros([], tl.int64)  # all
    if wanted < pages:
        _page_masses(
            scratch.pages + wide_row * columns * room, scratch.sums + wide_row * columns * num_splits, masses, pages,
            num_splits, columns, room,
        )  # fmt: skip
        tl.debug_barrier()
        least = _least_rank(masses, pages, wanted)
    table = block_table + wide_row * table_width
    count = _write_choice(masses, table, chosen + wide_row * width, pages, width, least)
    tl.store(chosen_pages + row, count)


def choose_pages(call: AttentionCall) -> selection.Choice:
    """Choose as `reference.selection.choose_pages` does, in two launches on the device of the query, without waiting for it.

    Args:
        call: over keys and values, with a budget; its keys may be an index (PagedKV.words). `call.kv.launches` keeps
            the plan.
    Returns: a block table [rows, kv.budget.width(..)] and the pages of each row [rows], both int32.
    """
    width = call.kv.block_table.shape[1]
    room = max(LEAST_ROOM, power_of_two(width))
    call, plan = planned(call, _prepare, room)
    query, kv, budget, sinks = call.query, call.kv, call.kv.budget, call.sink_logits
    assert budget is not None
    index = query.get_device()
    if plan.refused:
        return selection.choose_pages(call)
    keys = kv.key_pages
    if kv.words is not None:
        # an index holds bytes, which are read as what they are of, and the middles of exact keys
        codes = keys["codes"].view(kv.spec.keys.code_dtype)
        keys = {**keys, "codes": codes, "offset": keys.get("middle", keys.get("offset", codes))}
    # no launch takes a float64: its bits are an integer
    (share,) = struct.unpack("<q", struct.pack("<d", 1.0 if budget.share is None else budget.share))
    chosen = kv.block_table.new_empty((kv.rows, budget.width(width, kv.page_size)))
    pages = kv.block_table.new_empty(kv.rows)
    scratch = plan.parts(query)  # alive until the launch

    most = NO_LIMIT if budget.pages is None else budget.pages
    limits = most, share, min(budget.from_tokens, NO_LIMIT), room
    splits = plan.splits(width) + 1
    heads, q_len = query.shape[1:3]

    def to_score(at: At) -> tuple[Any, ...]:
        absent = at(kv.num_pages)
        return (
            Strided.of(at, query), Fields.of(at, keys), absent if kv.words is None else at(kv.words),
            Strided.of(at, kv.residual_keys), Scores(*map(at, scratch)), *rows_of(at, kv)[:4],
            absent if sinks is None else at(sinks), *limits, q_len, float(call.softmax_scale), float(call.softcap or 1.0),
        )  # fmt: skip

    def to_choose(at: At) -> tuple[Any, ...]:
        return (
            Scores(*map(at, scratch)), *rows_of(at, kv)[:4], at(chosen), at(pages), *limits,
            chosen.shape[1], heads * q_len, splits,
        )  # fmt: skip

    try:
        plan.kernel.launch(*plan.grid, splits, index, to_score)
        plan.last.launch(kv.rows, 1, 1, index, to_choose)
    except OutOfResources as error:
        plan.refused = True
        reason = f"the GPU refuses the kernel ({error})"
        warn_once(
            f"read: triton: {reason}",
            "The pages that a step reads are chosen by 'reference', slower than by 'triton', and not in CUDA graphs: "
            f"{reason}",
        )
        return selection.choose_pages(call)
    return chosen, pages


def _prepare(call: AttentionCall, queries: Queries, grid: tuple[int, int], room: int) -> Plan:
    kv = call.kv
    rows, heads, q_len, _ = call.query.shape
    words = key_words(kv.spec, queries, kv.words is not None)
    size = 4 if queries.full else kv.spec.keys.code_dtype.itemsize
    staged = STAGED_BYTES // (words.pages * words.side.page * words.slots * words.part * size)
    constants = {
        "QUERIES": queries,
        "KEYS": words,
        "WINDOW": ExactWindow.of(kv.spec, queries.full, chooses=True),
        "STAGES": max(1, min(2 if queries.isa == HIP else 3, staged)),
    }
    by_codes = words.side.code != "unsigned" and words.read < words.words and not words.indexed
    most = max(1, min(MAX_SPLITS, PROGRAMS // (rows * grid[1])))
    columns = rows * heads * q_len
    return Plan(
        kernel=Kernel(kv.spec, score_kernel, constants),
        last=Kernel(kv.spec, choose_kernel, {"PAGE": kv.page_size}),
        grid=grid,
        stretch=CODES_STRETCH if by_codes else MIN_STRETCH,
        most=most,
        sizes=(columns * room, columns * (most + 1), rows * room),
    )
