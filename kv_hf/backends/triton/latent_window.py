"""The exact window of a row of latents: its first tokens and its newest ones, read as they are."""

import triton
import triton.language as tl

from .softmax import LOG2E, bend, weigh
from .visibility import window_slots
from .words import load_tile, score_rope


@triton.jit
def attend_latent_window(
    queries, real, latents, latent_slot, ropes, rope_slot, exact, page_tokens, visible, softmax_scale, best, total, acc,
    RANK: tl.constexpr, SIZE: tl.constexpr, ROPE: tl.constexpr, ROPE_WIDE: tl.constexpr, W_TILE: tl.constexpr,
    DTYPE: tl.constexpr, ROPE_DTYPE: tl.constexpr, PRECISION: tl.constexpr,
    HIDING: tl.constexpr,
):  # fmt: skip
    """Add the window's tokens to the running softmax (best, total, acc) and return it; see window.attend_window.

    latents, ropes: pointers to slot 0 of this row; acc: runs of [chunks, columns, wide].
    """
    CHUNKS: tl.constexpr = acc[0].shape[0]
    COLUMNS: tl.constexpr = acc[0].shape[1]
    WIDE: tl.constexpr = acc[0].shape[2]
    RUNS: tl.constexpr = len(acc)
    BENT: tl.constexpr = HIDING.bent
    q = ()
    for r in tl.static_range(RUNS):
        one = load_tile(queries, real, r * SIZE, CHUNKS, RUNS * SIZE, SIZE, WIDE, RANK, True)
        q = q + (one.to(DTYPE),)
    q_rope = q[0]
    if ROPE > 0:
        q_rope = load_tile(
            queries + RANK, real, 0, CHUNKS, ROPE_WIDE, ROPE_WIDE, ROPE_WIDE, ROPE, True
        ).to(ROPE_DTYPE)
    factor = tl.full([COLUMNS], 1.0, tl.float32) * (softmax_scale * LOG2E)
    for first in tl.range(0, exact, W_TILE, num_stages=1):
        slot, held, at = window_slots(first, exact, page_tokens, visible.sink_tokens, W_TILE)
        scores = tl.zeros([CHUNKS, COLUMNS, W_TILE], tl.float32)
        numbers = ()
        for r in tl.static_range(RUNS):
            rows = latents + slot * latent_slot
            x = load_tile(rows, held, r * SIZE, CHUNKS, RUNS * SIZE, SIZE, WIDE, RANK, True).to(
                DTYPE
            )
            scores = tl.dot(q[r], tl.trans(x, (0, 2, 1)), scores, input_precision=PRECISION)
            numbers = numbers + (x,)
        if ROPE > 0:
            scores = score_rope(
                scores, q_rope, ropes + slot * rope_slot, 1.0, held, CHUNKS, ROPE_WIDE, ROPE,
                "none", True, 0, PRECISION,
            )  # fmt: skip
        scores = tl.trans(tl.sum(scores, 0))
        scores = bend(scores, factor, at, held, visible, HIDING, True)
        weights, keep, best = weigh(scores, factor, best, BENT, True)
        total = total * keep + tl.sum(weights, 0)
        w = tl.broadcast_to(tl.trans(weights)[None, :, :], [CHUNKS, COLUMNS, W_TILE]).to(DTYPE)
        new = ()
        for r in tl.static_range(RUNS):
            part = acc[r] * keep[None, :, None]
            new = new + (tl.dot(w, numbers[r], part, input_precision=PRECISION),)
        acc = new
    return best, total, acc
