"""The exact window of a row: its first tokens and its newest ones, read as they are."""

import triton
import triton.language as tl

from .keys import score_exact
from .softmax import LOG2E, bend, weigh
from .tiles import load_query, rescale
from .values import add_exact


@triton.jit
def attend_window(
    queries,
    real,
    keys,  # pointer to slot 0 of this row and head
    key_slot,
    values,
    value_slot,
    exact,
    page_tokens,
    sink_tokens,
    query_at,
    masks,
    left,
    softmax_scale,
    softcap,
    sliding_window,
    best,
    total,
    acc,
    K_DIM: tl.constexpr,
    V_WIDTH: tl.constexpr,
    V_RUNS: tl.constexpr,
    V_CHUNKS: tl.constexpr,
    W_CHUNKS: tl.constexpr,
    W_TILE: tl.constexpr,
    W_STAGES: tl.constexpr,
    W_KEY_DTYPE: tl.constexpr,
    W_VALUE_DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASK: tl.constexpr,
):
    """Add the window's tokens to the running softmax (best, total, acc) and return it.

    Slots below `sink_tokens` lie in front of the `page_tokens` tokens in pages, the others behind them; slots from
    `exact` on are not read. The parts of acc are those of the pages' values, settled (see `values.settle`).
    """
    COLUMNS: tl.constexpr = total.shape[0]
    one = tl.full([COLUMNS], 1.0, tl.float32)
    query = load_query(queries, real, K_DIM, K_DIM, W_CHUNKS, one, W_KEY_DTYPE)
    factor = one * (softmax_scale * LOG2E)
    for first in tl.range(0, exact, W_TILE, num_stages=W_STAGES):
        slot = first + tl.arange(0, W_TILE)
        held = slot < exact
        at = slot + tl.where(slot < sink_tokens, 0, page_tokens)
        scores = score_exact(keys + slot * key_slot, held, query, K_DIM, W_CHUNKS, True, PRECISION)
        scores = bend(
            scores, factor, at, held, query_at, softcap, sliding_window, masks, left, True, CAUSAL, WINDOWED,
            SOFTCAP, MASK,
        )  # fmt: skip
        weights, keep, best = weigh(scores, factor, best, SOFTCAP or MASK == "float", True)
        total = total * keep + tl.sum(weights, 0)
        acc = add_exact(
            values + slot * value_slot, held, weights, rescale(acc, keep), V_WIDTH, V_RUNS, V_CHUNKS, True,
            W_VALUE_DTYPE, PRECISION,
        )  # fmt: skip
    return best, total, acc
