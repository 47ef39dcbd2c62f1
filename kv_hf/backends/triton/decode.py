"""Decode attention over pages: one program walks a split of one row's pages for some queries of one kv head.

The definition of the result is backends/reference/attention.py. What a tile is, and how it is multiplied, say heads.py and
latent.py; here is what both share: which tokens a program sees, where its result goes, and how a call is launched. Query
columns are query heads of the kv head times q_len. Launches refuse to look into device tensors.

A split hands on its running softmax: the maximum in log2, the sum of weights and the sum of weighted values. The exact window
is a split of its own, the last: it counts as much as several pages, and its values are never rotated. The program that
arrives last merges the splits. Over latents a kernel of its own does: at batch 1 a few blocks of query rows are split into
hundreds of programs, and one program that merged a block would read megabytes alone.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..base import AttentionCall, empty_output, mask_strides
from .dequant import unrotate
from .direct import (
    SPECIALIZED,
    At,
    Fields,
    Kernel,
    Plan,
    Scratch,
    Strided,
    kept,
    rows_of,
    step_of,
)
from .heads import attend_heads, attend_window, store_parts
from .latent import attend_latents, store_runs
from .meta_params import MIN_TILES, constants, most_splits, query_blocks
from .softmax import Visibility, add_sink, arrive_last, finite

NO_MASK = (0, 0, 0)  # its strides
COMBINED = tl.constexpr(64)  # channels that one program of the combining kernel takes,
COMBINED_SPLITS = tl.constexpr(64)  # and splits that it reads at once


class Results(NamedTuple):
    """Where results go.

    Attributes:
        out: [rows, q_len, heads * group, dim].
        partial: [programs of one split, splits, Splits.columns, dim], fp32; of rotated values, but in the last split.
        bests: [programs of one split, splits, 2, Splits.columns], fp32: maxima in log2, and sums of weights.
    """

    out: Any
    partial: Any
    bests: Any


@triton.jit(**SPECIALIZED)
def decode_kernel(
    query,  # Strided: [rows, heads * group, q_len, key dim]
    keys,  # Fields: codes [pages, heads, page, bytes]; of latents int16 words [pages, words, rank], or exact numbers
    values,  # Fields: codes [pages, heads, bytes, page], or as the keys' where exact; over latents RoPE keys [pages, page, dim]
    window_keys,  # Strided: [rows, heads, slots, key dim]
    window_values,  # Strided: [rows, heads, slots, value dim]
    results,  # Results
    block_table,  # [rows, table_width]
    table_width,
    num_pages,  # [rows]
    exact_lens,  # [rows]
    padding,  # [rows]
    sink_tokens,
    mask,  # [rows or 1, heads * group or 1, q_len, columns], strides 0 where 1
    mask_row,
    mask_head,
    mask_query,
    sink_logits,  # [heads * group]
    counters,  # [programs of one split] int32, zeros before and after
    softmax_scale,
    softcap,
    sliding_window,
    q_len,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    """Attend the query columns of one (row, kv head, block of columns) to one split of the row's tokens.

    Grid: (rows, heads * blocks of columns, splits); the last split is the window. The program that arrives last merges the
    splits (over latents, combine_kernel does). QUERIES, WINDOW, SPLITS, LAUNCH: those of meta_params. KEYS, VALUES:
    meta_params.Operand, or meta_params.Latents and None.
    """
    if not QUERIES.chunk:
        q_len = 1
    HEADS: tl.constexpr = QUERIES.heads
    GROUP: tl.constexpr = QUERIES.group
    COLUMNS: tl.constexpr = QUERIES.columns
    used = GROUP * q_len  # columns
    blocks = (used + COLUMNS - 1) // COLUMNS
    PAGE: tl.constexpr = KEYS.side.page
    TILES_PER_PAGE: tl.constexpr = KEYS.side.page // KEYS.tile
    STAGES: tl.constexpr = LAUNCH.num_stages
    V_DIM: tl.constexpr = KEYS.side.dim if VALUES is None else VALUES.side.dim
    M_COLUMNS: tl.constexpr = SPLITS.columns
    row = tl.program_id(0)
    head = tl.program_id(1) // blocks
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    first_column = (tl.program_id(1) % blocks) * COLUMNS
    column = first_column + tl.arange(0, COLUMNS)
    real = column < used
    query_head_of = head * GROUP + column % GROUP
    token_of = column // GROUP
    wide_row = row.to(tl.int64)
    pages = tl.load(num_pages + row)
    exact = tl.load(exact_lens + row)
    left = tl.load(padding + row)
    kv_len = pages * PAGE + exact
    # pointers to column 0 of each query's mask; of columns that are not real, to that of token 0
    masks = mask + wide_row * mask_row + query_head_of * mask_head
    masks += tl.where(real, token_of, 0) * mask_query
    visible = Visibility(
        kv_len - q_len + token_of, masks, left, sink_tokens, sliding_window, softcap
    )
    queries = query.pointer + wide_row * query.row + query_head_of * query.head
    queries += token_of * query.token

    group = wide_row * tl.num_programs(1) + tl.program_id(1)
    place = tl.arange(0, COLUMNS)
    kept = real & (place < M_COLUMNS)
    partial = results.partial + ((group * num_splits + split) * M_COLUMNS + place) * V_DIM
    best = tl.full([COLUMNS], float("-inf"), tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    if split < num_splits - 1:
        # the tiles of this split; those of pages that no query's sliding window reaches are left out
        first = 0
        tiles = pages * TILES_PER_PAGE
        if QUERIES.windowed:
            first = tl.maximum(kv_len - q_len + 1 - sliding_window - sink_tokens, 0) // PAGE
            first = tl.minimum(first * TILES_PER_PAGE, tiles)
        begin = tl.minimum(first + (tiles - first) * split // (num_splits - 1), tiles)
        end = tl.minimum(first + (tiles - first) * (split + 1) // (num_splits - 1), tiles)
        table = block_table + wide_row * table_width
        if begin < end:
            if VALUES is None:
                best, total, acc = attend_latents(
                    keys, values, queries, real, table, begin, end, visible, softmax_scale, KEYS, QUERIES, STAGES
                )  # fmt: skip
                # by names of their own: triton 3.6 hands an attribute on as plain numbers
                K_CUT: tl.constexpr = KEYS.cut
                store_runs(partial, acc, kept, K_CUT)
            else:
                best, total, acc = attend_heads(
                    keys, values, queries, real, table, begin, end, head, visible, softmax_scale, KEYS, VALUES, QUERIES, STAGES
                )  # fmt: skip
                V_CUT: tl.constexpr = VALUES.cut
                store_parts(partial, acc, kept, V_CUT)
    else:
        best, total, exact_acc = attend_window(
            queries, real, window_keys, window_values, wide_row, head, exact, pages * PAGE, visible, softmax_scale, WINDOW,
            QUERIES,
        )  # fmt: skip
        OUT: tl.constexpr = WINDOW.out
        store_parts(partial, exact_acc, kept, OUT)
    bests = results.bests + (group * num_splits + split) * (2 * M_COLUMNS) + place
    tl.store(bests, best, mask=kept)
    tl.store(bests + M_COLUMNS, total, mask=kept)

    if VALUES is not None and arrive_last(counters, group, num_splits, LAUNCH.threads):
        merged = first_column + tl.arange(0, M_COLUMNS)
        head_of = head * GROUP + merged % GROUP
        out_row = (wide_row * q_len + merged // GROUP) * (HEADS * GROUP) + head_of
        merge_splits(
            results, group, sink_logits + head_of, results.out + out_row * V_DIM, num_splits, tl.arange(0, M_COLUMNS),
            merged < used, tl.arange(0, triton.next_power_of_2(V_DIM)), V_DIM, M_COLUMNS, SPLITS.merged,
            VALUES.side.rotated, QUERIES.sinks,
        )  # fmt: skip


@triton.jit
def merge_splits(
    results, group, sink_logits, out, num_splits, column, real, channel, DIM: tl.constexpr, COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr, ROTATED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Merge the splits of some query columns and store the result.

    Args:
        results: Results; group: number (int64) of the block of query columns.
        sink_logits, out: [columns], pointers to the columns' own.
        column, real: [columns], places in the block that are wanted, which of them exist; channel: [channels].
        SPLITS: splits that are read at once; ROTATED: channels of a block of rotated numbers in all but the last, or 0.
    """
    bests = results.bests + group * num_splits * (2 * COLUMNS)
    partial = results.partial + group * num_splits * (COLUMNS * DIM)
    best = tl.full(column.shape, float("-inf"), tl.float32)
    total = tl.zeros(column.shape, tl.float32)
    acc = tl.zeros([column.shape[0], channel.shape[0]], tl.float32)
    last = num_splits
    if ROTATED > 0:
        last = num_splits - 1
    best, total, acc = _add_splits(
        best, total, acc, partial, bests, 0, last, column, channel, DIM, COLUMNS, SPLITS
    )
    if ROTATED > 0:
        acc = unrotate(acc, ROTATED, 1)
        best, total, acc = _add_splits(
            best, total, acc, partial, bests, last, num_splits, column, channel, DIM, COLUMNS, 1
        )
    norm = add_sink(best, total, sink_logits, SINKS)
    result = (acc * norm[:, None]).to(out.dtype.element_ty)
    inside = real[:, None] & (channel < DIM)[None, :]
    tl.store(out[:, None] + channel[None, :], result, mask=inside)


@triton.jit
def _add_splits(
    best, total, acc, partial, bests, begin, end, column, channel, DIM: tl.constexpr, COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Add splits `begin` to `end` to (best, total, acc); they are read from the second-level cache: other multiprocessors wrote them."""
    inside = channel < DIM
    for first in tl.range(begin, end, SPLITS):
        split = first + tl.arange(0, SPLITS)
        held = split < end
        at = split[:, None] * COLUMNS + column[None, :]
        where = bests + split[:, None] * (2 * COLUMNS) + column[None, :]
        others = tl.load(where, mask=held[:, None], other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(where + COLUMNS, mask=held[:, None], other=0.0, cache_modifier=".cg")
        where = partial + at[:, :, None] * DIM + channel[None, None, :]
        there = held[:, None, None] & inside[None, None, :]
        x = tl.load(where, mask=there, other=0.0, cache_modifier=".cg")
        x = tl.where(sums[:, :, None] > 0, x, 0.0)  # a split without tokens writes nothing
        top = tl.maximum(best, tl.max(others, 0))
        shift = finite(top)
        keep = tl.exp2(best - shift)
        weights = tl.exp2(others - shift[None, :])
        total = total * keep + tl.sum(sums * weights, 0)
        acc = acc * keep[:, None] + tl.sum(x * weights[:, :, None], 0)
        best = top
    return best, total, acc


@triton.jit(**SPECIALIZED)
def combine_kernel(
    results,  # Results, of programs of COLUMNS query columns
    sink_logits,  # [HEADS]
    q_len,
    num_splits,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    V_DIM: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Merge one query row: grid (rows * HEADS * q_len, blocks of channels).

    A group is what one program of the decode kernel takes: COLUMNS query rows of one row, heads side by side.
    """
    queries = HEADS * q_len
    row = tl.program_id(0) // queries
    column = tl.program_id(0) % queries
    blocks = (queries + COLUMNS - 1) // COLUMNS
    group = (row * blocks + column // COLUMNS).to(tl.int64)
    one = tl.arange(0, 1)
    merge_splits(
        results, group, sink_logits + column % HEADS + one,
        results.out + tl.program_id(0).to(tl.int64) * V_DIM + one, num_splits, column % COLUMNS + one, one == 0,
        tl.program_id(1) * COMBINED + tl.arange(0, COMBINED), V_DIM, COLUMNS, COMBINED_SPLITS, 0, SINKS,
    )  # fmt: skip


# -- launches ----------------------------------------------------------------------------------------------------------


def paged_attention(call: AttentionCall) -> torch.Tensor:
    """Attend as `reference.paged_attention` does, on the device of `query`, without waiting for it.

    Args:
        call: over keys and values, or over latents. `call.kv.launches` keeps the plan.
    Returns: [rows, heads, q_len, value dim], a view of a contiguous [rows, q_len, heads, value dim].
    """
    query, kv, mask, sink_logits = call.query, call.kv, call.mask, call.sink_logits
    index = query.get_device()
    strides = query.stride()
    if strides[3] != 1:
        query = query.contiguous()
        strides = query.stride()
    mask_kind: Any = None
    strides_of_mask = NO_MASK
    if mask is not None:
        mask = mask if mask.stride(-1) == 1 else mask.contiguous()
        strides_of_mask = mask_strides(mask)
        mask_kind = mask.dtype, strides_of_mask[0] >> 31
    key = (
        id(kv.spec), query.shape, strides, query.dtype, kv.residual_keys.stride(), kv.residual_values.stride(), mask_kind,
        call.softcap is None, call.sliding_window is None, None if sink_logits is None else sink_logits.dtype, index,
    )  # fmt: skip
    plan = kept(kv.launches, key, lambda: _prepare(call))
    out = empty_output(query, kv)
    splits = plan.splits(kv.block_table.shape[1]) + 1  # the last is the window
    room = plan.scratch.parts()  # alive until the launch
    sinks = out if sink_logits is None else sink_logits
    shown = out if mask is None else mask

    def arguments(at: At) -> tuple[Any, ...]:
        partial, bests, counters = map(at, room)
        # `out` stands for what there is not
        return (
            Strided(at(query), *strides[:3]), Fields.of(at, kv.key_pages), Fields.of(at, kv.value_pages),
            Strided.of(at, kv.residual_keys), Strided.of(at, kv.residual_values), Results(at(out), partial, bests),
            *rows_of(at, kv), at(shown), *strides_of_mask, at(sinks), counters, float(call.softmax_scale),
            float(call.softcap or 1.0), call.sliding_window or 0, query.shape[2],
        )  # fmt: skip

    plan.kernel.launch(plan.rows, plan.blocks, splits, index, arguments)
    if plan.combine is not None:
        rows, heads, q_len, dim = out.shape
        plan.combine.launch(
            rows * heads * q_len, -(-dim // COMBINED.value), 1, index,
            lambda at: (Results(at(out), at(room[0]), at(room[1])), at(sinks), q_len, splits),
        )  # fmt: skip
    return out


def _prepare(call: AttentionCall) -> Plan:
    query, spec = call.query, call.kv.spec
    step = step_of(call)
    rows = query.shape[0]
    dim, blocks, plain = spec.out_dim, query_blocks(spec, step), constants(spec, step)
    most = most_splits(spec, rows * blocks)
    columns = plain["SPLITS"].columns
    parts = rows * blocks * columns * (most + 1)  # of all splits
    combine = None
    if spec.is_latent:
        merging = {"HEADS": step.heads, "COLUMNS": columns, "V_DIM": dim, "SINKS": step.sinks}
        combine = Kernel(spec, combine_kernel, merging)
    return Plan(
        kernel=Kernel(spec, decode_kernel, plain, plain["LAUNCH"].num_warps),
        rows=rows,
        blocks=blocks,
        stretch=plain["KEYS"].tile * MIN_TILES,
        most=most,
        scratch=Scratch((parts * dim, 2 * parts), rows * blocks, query.device),
        combine=combine,
    )
