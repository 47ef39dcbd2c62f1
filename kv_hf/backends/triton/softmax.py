"""Scores to weights: what queries see, and one step of the online softmax in units of log2.

Knows nothing of where keys and values come from. Tokens lie along the first axis, query columns along the second.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Visibility(NamedTuple):
    """What the meta_params.Queries needs to know of the queries of a program.

    Attributes:
        query_at: [columns], positions of the queries.
        masks: [columns], pointers to column 0 of each query's mask; left: the column of token 0.
        sink_tokens, sliding_window, softcap, softmax_scale: as in AttentionCall and PagedKV.
    """

    query_at: Any
    masks: Any
    left: Any
    sink_tokens: Any
    sliding_window: Any
    softcap: Any
    softmax_scale: Any


LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NO_WEIGHT = tl.constexpr(-1.0e38)  # log2 of a weight of 0, where numbers are finite


@triton.jit
def _tanh(x):
    """tanh to about an ulp: by exp2 where that loses nothing, and below 1 by its continued fraction."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    far = (1.0 - e) / (1.0 + e)
    s = tl.minimum(x * x, 1.0)
    above = 135135.0 + s * (17325.0 + s * (378.0 + s))
    below = 135135.0 + s * (62370.0 + s * (3150.0 + s * 28.0))
    return tl.where(tl.abs(x) < 1.0, x * (above / below), tl.where(x < 0, -far, far))


@triton.jit
def cap(scores, factor, softcap):
    """Return raw scores in log2, bounded by a softcap; factor: raw to log2, of a shape that broadcasts."""
    return _tanh(scores * (factor * (LN2 / softcap))) * (softcap * LOG2E)


@triton.jit
def below_one(size, softmax_scale):
    """Return the powers of two [columns] that bring numbers of `size` to the upper half of 0 to 1.

    float16 products of queries times these neither overflow nor vanish. Also returned is what turns their scores into
    log2.
    """
    exponent = tl.maximum(size, 1e-30).to(tl.int32, bitcast=True) & 0x7F800000
    shrink = (0x7E800000 - exponent).to(tl.float32, bitcast=True)
    return shrink, exponent.to(tl.float32, bitcast=True) * (softmax_scale * (2.0 * LOG2E))


@triton.jit
def bend(scores, factor, at, held, visible, QUERIES: tl.constexpr):
    """Apply softcap, the mask and the sliding window; hidden scores become -inf.

    Args:
        scores: [tokens, columns] fp32, raw; factor: [columns], raw to log2.
        at: [tokens], positions of the tokens; held: [tokens], which exist.
        visible: a Visibility; QUERIES: the meta_params.Queries.
    Returns: scores, in log2 where a softcap or an additive mask asked for it (`bent`), else still raw.
    """
    if QUERIES.capped:
        scores = cap(scores, factor[None, :], visible.softcap)
    elif QUERIES.mask == "float":
        scores = scores * factor[None, :]
    if QUERIES.mask != "none":
        where = visible.masks[None, :] + (at + visible.left)[:, None]
        chosen = tl.load(where, mask=held[:, None], other=0)
        if QUERIES.mask == "float":
            added = chosen.to(tl.float32)
            # the lowest finite numbers stay finite in log2: a query that sees nothing else averages over them
            finite = tl.maximum(added * LOG2E, -3.0e38)
            scores += tl.where(added == float("-inf"), added, finite)
        else:
            scores = tl.where(chosen != 0, scores, float("-inf"))
    elif QUERIES.causal:
        scores = tl.where(at[:, None] <= visible.query_at[None, :], scores, float("-inf"))
    if QUERIES.windowed:
        near = at[:, None] > (visible.query_at - visible.sliding_window)[None, :]
        scores = tl.where(near, scores, float("-inf"))
    return tl.where(held[:, None], scores, float("-inf"))


@triton.jit
def weigh(scores, factor, best, BENT: tl.constexpr, HIDES: tl.constexpr):
    """Move the running maximum and turn scores into weights.

    Args:
        scores: [tokens, columns] fp32; log2 where BENT, else raw with `factor` [columns] > 0 to log2.
        best: [columns] fp32, the running maximum in log2.
        HIDES: whether some scores may be -inf.
    Returns: weights [tokens, columns], keep [columns] (what to multiply earlier sums by), the new maximum.
    """
    top = tl.max(scores, 0)
    top = tl.maximum(best, top if BENT else top * factor)
    shift = finite(top) if HIDES else top
    keep = tl.exp2(best - shift)
    if BENT:
        weights = tl.exp2(scores - shift[None, :])
    else:
        weights = tl.exp2(tl.fma(scores, factor[None, :], -shift[None, :]))
    return weights, keep, top


@triton.jit
def finite(top):
    """Return running maxima that may be subtracted: 0 where nothing has been seen."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def log2_sum(x, AXIS: tl.constexpr):
    """Return the log2 of sums along an axis of weights whose log2 is x, finite: NO_WEIGHT stands for a weight of 0."""
    top = tl.max(x, AXIS)
    return top + tl.log2(tl.sum(tl.exp2(x - tl.expand_dims(top, AXIS)), AXIS))


@triton.jit
def add_sink(best, total, logits, SINKS: tl.constexpr):
    """Add sink logits [columns] (pointers) to the running softmax; returns what to multiply the sums by."""
    top = best
    if SINKS:
        sink = tl.load(logits).to(tl.float32) * LOG2E
        top = tl.maximum(best, sink)
    shift = finite(top)
    keep = tl.exp2(best - shift)
    total = total * keep
    if SINKS:
        total += tl.exp2(sink - shift)
    return keep / tl.where(total > 0, total, 1.0)
