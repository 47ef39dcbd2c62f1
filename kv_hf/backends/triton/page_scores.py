"""Scores of whole pages from a part of their codes: what page_summary.py says, for several pages at once.

Words are those of selection_launch.KeyWords, KEYS; the other channels of a page are replaced by their middles. Products are
batches, a token group (or page) each, so that a warp has whole groups. Knows nothing of rows, splits and budgets.
"""

import triton
import triton.language as tl

from ...page_summary import RANGED_PAGES
from .dequant import number, run_unit, tile_unit, unpack

ROWS = tl.constexpr(16)  # of a product, at least
RANGED = tl.constexpr(RANGED_PAGES)


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
