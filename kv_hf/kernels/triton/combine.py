"""Merge the splits of a decode step by their log-sum-exp."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["columns", "num_splits"])
def combine_kernel(
    partial,  # [num_splits, columns, V_DIM] fp32; undefined where lse is -inf
    partial_lse,  # [num_splits, columns] fp32
    sink_logits,  # [NUM_HEADS]
    out,  # [columns, V_DIM]
    columns,
    num_splits,
    NUM_HEADS: tl.constexpr,
    Q_LEN: tl.constexpr,
    V_DIM: tl.constexpr,
    SINKS: tl.constexpr,
    SPLITS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Merge one query column: out = sum(exp(lse - top) * partial) / (sum(exp(lse - top)) + exp(sink - top)).

    Grid: (rows * NUM_HEADS * Q_LEN, blocks of DIM channels). SPLITS is the power of two from num_splits on, and so
    is DIM from V_DIM on where one block takes all channels.
    """
    column = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    lse = tl.load(
        partial_lse + split * columns + column, mask=split < num_splits, other=float("-inf")
    )
    top = tl.max(lse, 0)
    if SINKS:
        sink = tl.load(sink_logits + (tl.program_id(0) // Q_LEN) % NUM_HEADS).to(tl.float32)
        top = tl.maximum(top, sink)
    shift = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp(lse - shift)
    total = tl.sum(weight, 0)
    if SINKS:
        total += tl.exp(sink - shift)
    place = tl.program_id(1) * DIM + tl.arange(0, DIM)
    where = partial + (split[:, None] * columns + column) * V_DIM + place[None, :]
    inside = (lse > float("-inf"))[:, None] & (place < V_DIM)[None, :]
    x = tl.load(where, mask=inside, other=0.0)
    result = tl.sum(x * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + column * V_DIM + place, result.to(out.dtype.element_ty), mask=place < V_DIM)
