"""The exact window of a row: its first tokens and its newest ones, read as they are."""

import triton
import triton.language as tl

from .keys import score_exact
from .softmax import LOG2E, bend, weigh
from .tiles import load_query, rescale
from .values import add_exact
from .visibility import window_slots


@triton.jit
def attend_window(
    queries, real, keys, key_slot, values, value_slot, exact, page_tokens, visible, softmax_scale, best, total, acc,
    K_DIM: tl.constexpr, V_WIDTH: tl.constexpr, V_RUNS: tl.constexpr, V_CHUNKS: tl.constexpr, W_CHUNKS: tl.constexpr,
    W_TILE: tl.constexpr, W_STAGES: tl.constexpr, W_KEY_DTYPE: tl.constexpr, W_VALUE_DTYPE: tl.constexpr,
    PRECISION: tl.constexpr, HIDING: tl.constexpr,
):  # fmt: skip
    """Add the window's tokens to the running softmax (best, total, acc) and return it.

    Args:
        keys, values: pointers to slot 0 of this row and head; slots from `exact` on are not read.
        visible: a Visibility.
        acc: parts of the pages' values, settled (see `values.settle`).
    """
    COLUMNS: tl.constexpr = total.shape[0]
    BENT: tl.constexpr = HIDING.bent
    one = tl.full([COLUMNS], 1.0, tl.float32)
    query = load_query(queries, real, K_DIM, K_DIM, W_CHUNKS, one, W_KEY_DTYPE)
    factor = one * (softmax_scale * LOG2E)
    for first in tl.range(0, exact, W_TILE, num_stages=W_STAGES):
        slot, held, at = window_slots(first, exact, page_tokens, visible.sink_tokens, W_TILE)
        scores = score_exact(keys + slot * key_slot, held, query, K_DIM, W_CHUNKS, True, PRECISION)
        scores = bend(scores, factor, at, held, visible, HIDING, True)
        weights, keep, best = weigh(scores, factor, best, BENT, True)
        total = total * keep + tl.sum(weights, 0)
        acc = add_exact(
            values + slot * value_slot, held, weights, rescale(acc, keep), V_WIDTH, V_RUNS, V_CHUNKS, True,
            W_VALUE_DTYPE, PRECISION,
        )  # fmt: skip
    return best, total, acc
