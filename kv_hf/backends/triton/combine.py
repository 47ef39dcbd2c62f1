"""Merge the splits of a decode step over latents, in a kernel of its own.

At batch 1 a few blocks of query rows are split into hundreds of programs: one program that merged a block would read
megabytes alone.
"""

import triton
import triton.language as tl

from .merge import add_sink, merge_splits


@triton.jit(
    do_not_specialize=["q_len", "num_splits"],
    do_not_specialize_on_alignment=["sink_logits"],
)
def combine_kernel(
    partial,  # [groups, num_splits, COLUMNS, V_DIM] fp32
    bests,  # [groups, num_splits, 2, COLUMNS] fp32: maxima in log2, and sums of weights
    sink_logits,  # [HEADS]
    out,  # [rows, q_len, HEADS, V_DIM]
    q_len,
    num_splits,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    V_DIM: tl.constexpr,
    SINKS: tl.constexpr,
    SPLITS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Merge one query row: grid (rows * HEADS * q_len, blocks of DIM channels).

    A group is what one program of the decode kernel takes: COLUMNS query rows of one row, heads side by side.
    SPLITS: splits that are read at once.
    """
    queries = HEADS * q_len
    row = tl.program_id(0) // queries
    column = tl.program_id(0) % queries
    blocks = (queries + COLUMNS - 1) // COLUMNS
    group = (row * blocks + column // COLUMNS).to(tl.int64)
    channel = tl.program_id(1) * DIM + tl.arange(0, DIM)
    place = column % COLUMNS + tl.zeros([1], tl.int32)
    best, total, acc = merge_splits(
        partial + group * num_splits * (COLUMNS * V_DIM), bests + group * num_splits * (2 * COLUMNS),
        num_splits, place, channel, V_DIM, COLUMNS, SPLITS,
    )  # fmt: skip
    head = column % HEADS + tl.zeros([1], tl.int32)
    norm = add_sink(best, total, sink_logits + head, SINKS)
    where = out + tl.program_id(0).to(tl.int64) * V_DIM + channel[None, :]
    result = (acc * norm[:, None]).to(out.dtype.element_ty)
    tl.store(where, result, mask=(channel < V_DIM)[None, :])
