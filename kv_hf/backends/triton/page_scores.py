"""Scores of whole pages from a part of their codes: what page_summary.py says, for several pages at once.

Words are those of selection_meta_params.KeyWords. Their numbers are decoded to float32, the other channels of a page are
replaced by their middles. Knows nothing of rows, splits and budgets.
"""

import triton
import triton.language as tl

from .float8 import float8_to_float


@triton.jit
def _numbers(x, r, KEYS: tl.constexpr):
    """Return the codes of run `r` of bytes x as fp32, or exact numbers; any shape."""
    if KEYS.code == "none":
        return x.to(tl.float32)
    else:
        wide = x.to(tl.int32)
        if KEYS.code == "float8":
            return float8_to_float(wide)
        else:
            code = wide ^ 128
            if KEYS.code == "unsigned":
                code = (wide >> (r * KEYS.bits)) & ((1 << KEYS.bits) - 1)
            # the low bits of 2^23: quicker than a conversion
            number = (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
            return number - 128.0 if KEYS.code == "signed" else number


@triton.jit
def _ranges_of_scales(
    scale,
    table,
    pages,
    head,
    inside,
    place,
    HEADS: tl.constexpr,
    RANGED: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Sum the scales of RANGED pages, all runs and token groups: [padded words, part]."""
    GROUPS: tl.constexpr = KEYS.page // KEYS.group
    sample = tl.arange(0, RANGED)
    count = tl.maximum(tl.minimum(pages, RANGED), 1)
    held = (sample < count) & (sample < pages)
    page = tl.load(table + (2 * sample + 1) * pages // (2 * count), mask=held, other=0)
    first = (page.to(tl.int64) * HEADS + head) * (GROUPS * KEYS.dim)
    inside = held[:, None, None] & inside[None, :, :]
    found = tl.zeros(place.shape, tl.float32)
    for g in tl.static_range(GROUPS):
        for r in tl.static_range(KEYS.runs):
            at = first[:, None, None] + (g * KEYS.dim + r * KEYS.width + place)[None, :, :]
            found += tl.sum(tl.load(scale + at, mask=inside, other=0.0).to(tl.float32), 0)
    return found


@triton.jit
def _ranges_of_codes(
    codes,
    scale,
    table,
    pages,
    head,
    inside,
    place,
    HEADS: tl.constexpr,
    RANGED: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Sum the ranges of the numbers of RANGED pages: [padded words, part]."""
    found = tl.zeros(place.shape, tl.float32)
    count = tl.minimum(pages, RANGED)
    for sample in tl.range(0, count):
        page = tl.load(table + (2 * sample + 1) * pages // (2 * count))
        block = page.to(tl.int64) * HEADS + head
        high = tl.full(place.shape, float("-inf"), tl.float32)
        low = tl.full(place.shape, float("inf"), tl.float32)
        for first in tl.static_range(0, KEYS.page, KEYS.ranged):
            token = first + tl.arange(0, KEYS.ranged)
            at = (token * KEYS.row)[:, None, None] + place[None, :, :]
            x = tl.load(
                codes + block * (KEYS.page * KEYS.row) + at, mask=inside[None, :, :], other=0
            )
            number = _numbers(x, 0, KEYS)
            high = tl.maximum(high, tl.max(number, 0))
            low = tl.minimum(low, tl.min(number, 0))
        span = high - low
        if KEYS.kind == "codes":
            span = span * tl.load(scale + block).to(tl.float32)
        found += span
    return found


@triton.jit
def choose_words(
    codes, scale, table, pages, head, HEADS: tl.constexpr, RANGED: tl.constexpr, ALL: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """Return the numbers of the words of a row and head that are read, [slots], int32; -1 in slots without one.

    Args:
        table: pointer to the row's page ids, of which there are `pages`.
    """
    slot = tl.arange(0, KEYS.slots)
    if ALL or KEYS.kind == "order":
        return tl.where(slot < KEYS.read, slot, -1)
    else:
        word = tl.arange(0, KEYS.padded)
        place = word[:, None] * KEYS.part + tl.arange(0, KEYS.part)[None, :]
        inside = place < KEYS.width
        if KEYS.kind == "scales":
            ranges = _ranges_of_scales(
                scale, table, pages, head, inside, place, HEADS, RANGED, KEYS
            )
        else:
            ranges = _ranges_of_codes(
                codes, scale, table, pages, head, inside, place, HEADS, RANGED, KEYS
            )
        ranges = tl.where(inside, ranges, 0.0)
        size = tl.where(word < KEYS.words, tl.sum(ranges, 1), -1.0)
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
def load_page_query(queries, real, factor, words, order, KEYS: tl.constexpr):
    """Load the query columns for scores of pages, times `factor`, in float32.

    Args:
        queries: [columns], pointers to channel 0; real: [columns], which exist.
        order: pointer to the page's channels by place, where KEYS has an order.
    Returns: for every run [slots * part, columns], the channels that are read; and [channels, columns], the others.
    """
    DEPTH: tl.constexpr = KEYS.slots * KEYS.part
    place, inside = _places(words, KEYS)
    parts = ()
    for r in tl.static_range(KEYS.runs):
        channel = r * KEYS.width + place
        if KEYS.kind == "order":
            channel = tl.load(order + channel).to(tl.int32)
        channel = tl.reshape(channel, [DEPTH])
        held = tl.reshape(inside, [DEPTH])[:, None] & real[None, :]
        x = tl.load(queries[None, :] + channel[:, None], mask=held, other=0.0)
        parts = parts + (x.to(tl.float32) * factor,)
    channel = tl.arange(0, triton.next_power_of_2(KEYS.dim))
    held = (channel < KEYS.dim) & (_is_read(words, channel, KEYS) == 0)
    if KEYS.kind == "order":
        channel = tl.load(order + channel, mask=channel < KEYS.dim, other=0).to(tl.int32)
    x = tl.load(queries[None, :] + channel[:, None], mask=held[:, None] & real[None, :], other=0.0)
    return parts, x.to(tl.float32) * factor


@triton.jit
def _middles(codes, scale, offset, block, KEYS: tl.constexpr):
    """Return the middles of all channels (by place, where there is an order) of pages: [pages, channels], fp32."""
    GROUPS: tl.constexpr = KEYS.page // KEYS.group
    PADDED: tl.constexpr = triton.next_power_of_2(KEYS.dim)
    channel = tl.arange(0, PADDED)
    inside = (channel < KEYS.dim)[None, :]
    channel = channel[None, :]
    block = block[:, None]
    if KEYS.kind == "codes":
        return tl.load(offset + block * KEYS.dim + channel, mask=inside, other=0.0).to(tl.float32)
    elif KEYS.kind == "tokens":
        first = codes + block * (KEYS.page * KEYS.row) + channel
        found = tl.zeros([block.shape[0], PADDED], tl.float32)
        for i in tl.static_range(len(KEYS.middles)):
            found += tl.load(first + KEYS.middles[i] * KEYS.row, mask=inside, other=0.0).to(
                tl.float32
            )
        return found * (1.0 / len(KEYS.middles))
    else:
        found = tl.zeros([block.shape[0], PADDED], tl.float32)
        for g in tl.static_range(GROUPS):
            at = (block * GROUPS + g) * KEYS.dim + channel
            s = tl.load(scale + at, mask=inside, other=0.0).to(tl.float32)
            found += tl.load(offset + at, mask=inside, other=0.0).to(tl.float32) + KEYS.middle * s
        return found * (1.0 / GROUPS)


@triton.jit
def score_pages(
    codes, scale, offset, table, first, end, head, query, rest, words, HEADS: tl.constexpr, ALL: tl.constexpr,
    PRECISION: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Return the scores [pages * page, columns] of the tokens of a tile of pages, and which of these exist, [pages].

    Args:
        table: pointer to the row's page ids, of which first, .. and those below `end` are scored; what stands for others
            is any number.
        query, rest: of `load_page_query`.
    """
    GROUPS: tl.constexpr = KEYS.page // KEYS.group
    UNITS: tl.constexpr = KEYS.pages * GROUPS  # token groups
    DEPTH: tl.constexpr = KEYS.slots * KEYS.part
    COLUMNS: tl.constexpr = rest.shape[1]
    TOKENS: tl.constexpr = KEYS.pages * KEYS.page
    unit = tl.arange(0, UNITS)
    at = first + unit // GROUPS
    # what is not held is read from page 0, which is there, and hidden afterwards
    block = tl.load(table + at, mask=at < end, other=0).to(tl.int64) * HEADS + head
    place, _ = _places(words, KEYS)
    token = tl.arange(0, KEYS.group)
    start = block * (KEYS.page * KEYS.row) + (unit % GROUPS) * (KEYS.group * KEYS.row)
    within = (token * KEYS.row)[:, None, None] + place[None, :, :]
    x = tl.load(codes + (start[:, None, None, None] + within[None, :, :, :]))
    scores = tl.zeros([TOKENS, COLUMNS], tl.float32)
    for r in tl.static_range(KEYS.runs):
        number = _numbers(x, r, KEYS)
        if KEYS.kind == "codes":
            factor = tl.load(scale + block).to(tl.float32)[:, None, None, None]
            base = (block * KEYS.dim)[:, None, None] + place[None, :, :]
            number = number * factor + tl.load(offset + base).to(tl.float32)[:, None, :, :]
        elif KEYS.kind != "tokens":
            base = ((block * GROUPS + unit % GROUPS) * KEYS.dim)[:, None, None]
            base = base + (r * KEYS.width + place)[None, :, :]
            factor = tl.load(scale + base).to(tl.float32)[:, None, :, :]
            number = number * factor + tl.load(offset + base).to(tl.float32)[:, None, :, :]
        number = tl.reshape(number, [TOKENS, DEPTH])
        scores = tl.dot(number, query[r], scores, input_precision=PRECISION)
    page = first + tl.arange(0, KEYS.pages)
    if not ALL:
        block = tl.load(table + page, mask=page < end, other=0).to(tl.int64) * HEADS + head
        middles = _middles(codes, scale, offset, block, KEYS)
        if KEYS.pages == 1:
            bias = tl.sum(tl.trans(middles) * rest, 0)[None, :]
        else:
            bias = tl.dot(middles, rest, input_precision=PRECISION)
        bias = tl.broadcast_to(bias[:, None, :], [KEYS.pages, KEYS.page, COLUMNS])
        scores += tl.reshape(bias, [TOKENS, COLUMNS])
    return scores, page < end
