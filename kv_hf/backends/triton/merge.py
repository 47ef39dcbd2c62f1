"""Merge the splits of a decode step: in the program that arrives last, or in a kernel of its own (combine.py).

A split hands on its running softmax: the maximum in log2, the sum of weights and the sum of weighted values. Knows
nothing of pages.
"""

import triton
import triton.language as tl

from .softmax import LOG2E


@triton.jit
def add_sink(best, total, logits, SINKS: tl.constexpr):
    """Add sink logits [columns] (pointers) to the running softmax; returns what to multiply the sums by."""
    top = best
    if SINKS:
        sink = tl.load(logits).to(tl.float32) * LOG2E
        top = tl.maximum(best, sink)
    shift = tl.where(top == float("-inf"), 0.0, top)
    keep = tl.exp2(best - shift)
    total = total * keep
    if SINKS:
        total += tl.exp2(sink - shift)
    return keep / tl.where(total > 0, total, 1.0)


@triton.jit
def arrive_last(counters, group, num_splits, THREADS: tl.constexpr):
    """Say that this program's partial result is written; return whether those of all other splits are, too.

    Writes of all threads happen before the count (a barrier, then a release at the GPU's scope by one thread), and
    what the last program reads happens after it. The last one sets the counter back for the next launch.
    THREADS: those of the program on AMD GPUs, whose barrier waits for no write: every wave releases its own; else 0.
    """
    if THREADS > 0:
        lane = tl.arange(0, THREADS)
        every = counters + group + tl.zeros([THREADS], tl.int32)
        tl.atomic_add(every, 0, mask=lane % 64 == 0, sem="release", scope="gpu")
    tl.debug_barrier()
    arrived = tl.atomic_add(counters + group, 1, sem="acq_rel", scope="gpu")
    last = arrived == num_splits - 1
    if last:
        tl.store(counters + group, 0)
    return last


@triton.jit
def load_splits(
    partial, bests, first, num_splits, column, channel, inside,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Load SPLITS splits from `first` on: maxima and sums [SPLITS, columns], values [SPLITS, columns, channels].

    From the second-level cache: another multiprocessor wrote them.
    """
    split = first + tl.arange(0, SPLITS)
    held = split < num_splits
    at = split[:, None] * COLUMNS + column[None, :]
    where = bests + split[:, None] * (2 * COLUMNS) + column[None, :]
    best = tl.load(where, mask=held[:, None], other=float("-inf"), cache_modifier=".cg")
    total = tl.load(where + COLUMNS, mask=held[:, None], other=0.0, cache_modifier=".cg")
    where = partial + at[:, :, None] * DIM + channel[None, None, :]
    x = tl.load(where, mask=held[:, None, None] & inside, other=0.0, cache_modifier=".cg")
    return best, total, x


@triton.jit
def merge_splits(
    partial,  # [num_splits, COLUMNS, DIM] fp32, of this row and block of columns
    bests,  # [num_splits, 2, COLUMNS] fp32: maxima in log2, and sums of weights
    num_splits,
    column,  # [COLUMNS], places in them that are wanted
    channel,  # [channels]
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Return the running softmax over all splits: maxima, sums [columns], values [columns, channels]."""
    best = tl.full(column.shape, float("-inf"), tl.float32)
    total = tl.zeros(column.shape, tl.float32)
    acc = tl.zeros([column.shape[0], channel.shape[0]], tl.float32)
    inside = (channel < DIM)[None, None, :]
    for first in tl.range(0, num_splits, SPLITS):
        bests_of, totals, x = load_splits(
            partial, bests, first, num_splits, column, channel, inside, DIM, COLUMNS, SPLITS
        )
        top = tl.maximum(best, tl.max(bests_of, 0))
        shift = tl.where(top == float("-inf"), 0.0, top)
        keep = tl.exp2(best - shift)
        weights = tl.exp2(bests_of - shift[None, :])
        total = total * keep + tl.sum(totals * weights, 0)
        acc = acc * keep[:, None] + tl.sum(x * weights[:, :, None], 0)
        best = top
    return best, total, acc


@triton.jit
def merge_columns(
    partial,
    bests,
    sink_logits,
    out,
    num_splits,
    first_token,
    head,
    first_column,
    used,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Merge the splits of a block of query columns of one kv head and store the result, see decode.py.

    first_token: of the row's new tokens in `out`, [tokens, HEADS * GROUP, DIM].
    """
    place = tl.arange(0, COLUMNS)
    column = first_column + place
    real = column < used
    query_head = head * GROUP + column % GROUP
    channel = tl.arange(0, triton.next_power_of_2(DIM))
    best, total, acc = merge_splits(
        partial, bests, num_splits, place, channel, DIM, COLUMNS, SPLITS
    )
    norm = add_sink(best, total, sink_logits + query_head, SINKS)
    at = (first_token + column // GROUP) * (HEADS * GROUP) + query_head
    where = out + at[:, None] * DIM + channel[None, :]
    result = (acc * norm[:, None]).to(out.dtype.element_ty)
    tl.store(where, result, mask=real[:, None] & (channel < DIM)[None, :])
