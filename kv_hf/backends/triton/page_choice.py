"""The choice of a row's pages by their attention mass: what the last program of a row does (selection.py).

Masses are not negative, so their bits as integers are in the order of the numbers: the least mass that is chosen is found
by halving a range of integers. All loops go over blocks of a row's pages, of which there may be any number.
"""

import triton
import triton.language as tl

from .softmax import LOG2E


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
