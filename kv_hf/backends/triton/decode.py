"""Decode attention over pages: one program walks a split of one row's pages for some queries of one kv head.

The definition of the result is backends/reference/attention.py. What a tile is, and how it is multiplied, say heads.py and
latent.py; here is what both share: which tokens a program sees, where its result goes, and how a call is launched. Query
columns are query heads of the kv head times q_len. Launches refuse to look into device tensors.

A split hands on its running softmax: the maximum in log2, the sum of weights and the sum of weighted values. The exact window
is a split of its own, the last: it counts as much as several pages, and its values are never rotated. A second kernel
merges the splits, a program for each query: on an H100 one program that merged those of a kv head took .08 to .38 us for each
of them, for 64 about as long as the data (results/gpu/tuning.jsonl).
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..base import AttentionCall, empty_output, mask_strides
from . import meta_params
from .dequant import unrotate
from .direct import SPECIALIZED, At, Fields, Kernel, Plan, Strided, planned, rows_of
from .heads import attend_heads, attend_window, columns_of, store_parts
from .latent import attend_latents
from .meta_params import MIN_TILES, most_splits, power_of_two
from .softmax import Visibility, add_sink, finite

NO_MASK = (0, 0, 0)  # its strides
COMBINED = tl.constexpr(64 * 64)  # numbers that one program of the combining kernel reads at once,
COMBINED_CHANNELS = 64  # and channels that it takes, where they are not rotated


class Results(NamedTuple):
    """Where the results of splits go.

    Attributes:
        partial: [programs of one split, splits, Queries.columns, dim], fp32; of rotated values, but in the last split.
        bests: [programs of one split, splits, 2, Queries.columns], fp32: maxima in log2, and sums of weights.
    """

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
    softmax_scale,
    softcap,
    sliding_window,
    q_len,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend the query columns of one (row, kv head, block of columns) to one split of the row's tokens.

    Grid: (rows, heads * blocks of columns, splits); the last split is the window. QUERIES, WINDOW: those of meta_params.
    KEYS, VALUES: meta_params.Operand, or meta_params.Latents and None. STAGES: tiles that are on their way at once.
    """
    columns = columns_of(query, q_len, QUERIES)
    q_len = columns.q_len
    COLUMNS: tl.constexpr = QUERIES.columns
    PAGE: tl.constexpr = KEYS.side.page
    TILES_PER_PAGE: tl.constexpr = KEYS.side.page // KEYS.tile
    V_DIM: tl.constexpr = KEYS.side.dim if VALUES is None else VALUES.side.dim
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    pages = tl.load(num_pages + columns.row)
    exact = tl.load(exact_lens + columns.row)
    left = tl.load(padding + columns.row)
    kv_len = pages * PAGE + exact
    # pointers to column 0 of each query's mask; of columns that are not real, to that of token 0
    masks = mask + columns.row * mask_row + columns.heads * mask_head
    masks += tl.where(columns.real, columns.tokens, 0) * mask_query
    at = kv_len - q_len + columns.tokens
    visible = Visibility(at, masks, left, sink_tokens, sliding_window, softcap, softmax_scale)

    group = columns.row * tl.num_programs(1) + tl.program_id(1)
    place = tl.arange(0, COLUMNS)
    partial = results.partial + ((group * num_splits + split) * COLUMNS + place) * V_DIM
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
        table = block_table + columns.row * table_width
        if begin < end:
            if VALUES is None:
                best, total, acc = attend_latents(
                    keys, values, columns, table, begin, end, visible, KEYS, QUERIES, STAGES
                )  # fmt: skip
                # by names of their own: triton 3.6 hands an attribute on as plain numbers
                K_CUT: tl.constexpr = KEYS.cut
                store_parts(partial, acc, columns.real, K_CUT, False)
            else:
                best, total, acc = attend_heads(
                    keys, values, columns, table, begin, end, visible, KEYS, VALUES, QUERIES, STAGES
                )  # fmt: skip
                V_CUT: tl.constexpr = VALUES.cut
                store_parts(partial, acc, columns.real, V_CUT, True)
    else:
        best, total, exact_acc = attend_window(
            window_keys, window_values, columns, exact, pages * PAGE, visible, WINDOW, QUERIES
        )  # fmt: skip
        OUT: tl.constexpr = WINDOW.key_cut if VALUES is None else WINDOW.value_cut
        store_parts(partial, exact_acc, columns.real, OUT, True)
    bests = results.bests + (group * num_splits + split) * (2 * COLUMNS) + place
    tl.store(bests, best, mask=columns.real)
    tl.store(bests + COLUMNS, total, mask=columns.real)


@triton.jit
def _add_splits(
    sums, results, begin, end, channel, DIM: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """Add splits `begin` to `end` of a query to its running softmax; SPLITS are read at once.

    Args:
        sums: (maximum in log2, sum of weights, weighted values [channels]); results: Results, of the query.
    """
    best, total, acc = sums
    for first in tl.range(begin, end, SPLITS):
        split = first + tl.arange(0, SPLITS)
        held = split < end
        bests = results.bests + split * (2 * COLUMNS)
        others = tl.load(bests, mask=held, other=float("-inf"))
        totals = tl.load(bests + COLUMNS, mask=held, other=0.0)
        # a split without tokens has written nothing
        there = (held & (totals > 0))[:, None] & (channel < DIM)[None, :]
        where = results.partial + split[:, None] * (COLUMNS * DIM) + channel[None, :]
        x = tl.load(where, mask=there, other=0.0)
        top = tl.maximum(best, tl.max(others, 0))
        keep = tl.exp2(best - finite(top))
        weights = tl.exp2(others - finite(top))
        total = total * keep + tl.sum(totals * weights, 0)
        acc = acc * keep + tl.sum(x * weights[:, None], 0)
        best = top
    return best, total, acc


@triton.jit(**SPECIALIZED)
def combine_kernel(
    results,  # Results of decode_kernel
    out,  # [rows, q_len, heads * group, dim]
    sink_logits,  # [heads * group]
    q_len,
    num_splits,
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROTATED: tl.constexpr,
):
    """Merge the splits of one query and store the result.

    Grid: (rows * heads * group * q_len, blocks of CHANNELS channels). ROTATED: channels of a block of rotated values, or 0.
    """
    if not QUERIES.chunk:
        q_len = 1
    HEADS: tl.constexpr = QUERIES.heads
    GROUP: tl.constexpr = QUERIES.group
    COLUMNS: tl.constexpr = QUERIES.columns
    used = GROUP * q_len  # columns
    blocks = (used + COLUMNS - 1) // COLUMNS
    row_head = tl.program_id(0) // used
    column = tl.program_id(0) % used
    group = (row_head * blocks + column // COLUMNS).to(tl.int64)
    bests = results.bests + group * num_splits * (2 * COLUMNS) + column % COLUMNS
    partial = results.partial + (group * num_splits * COLUMNS + column % COLUMNS) * DIM
    own = Results(partial, bests)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    sums = (
        tl.full([], float("-inf"), tl.float32),
        tl.zeros([], tl.float32),
        tl.zeros([CHANNELS], tl.float32),
    )
    window = num_splits - 1
    sums = _add_splits(sums, own, 0, window, channel, DIM, COLUMNS, COMBINED // CHANNELS)
    if ROTATED > 0:
        sums = (sums[0], sums[1], unrotate(sums[2], ROTATED, 1))
    best, total, acc = _add_splits(sums, own, window, num_splits, channel, DIM, COLUMNS, 1)
    head_of = (row_head % HEADS) * GROUP + column % GROUP
    acc *= add_sink(best, total, sink_logits + head_of, QUERIES.sinks)
    out_row = ((row_head // HEADS) * q_len + column // GROUP).to(tl.int64) * (
        HEADS * GROUP
    ) + head_of
    tl.store(out + out_row * DIM + channel, acc.to(out.dtype.element_ty), mask=channel < DIM)


# -- launches ----------------------------------------------------------------------------------------------------------


def paged_attention(call: AttentionCall) -> torch.Tensor:
    """Attend as `reference.paged_attention` does, on the device of `query`, without waiting for it.

    Args:
        call: over keys and values, or over latents. `call.kv.launches` keeps the plan.
    Returns: [rows, heads, q_len, value dim], a view of a contiguous [rows, q_len, heads, value dim].
    """
    call, plan = planned(call, _prepare)
    query, kv, mask = call.query, call.kv, call.mask
    index = query.get_device()
    out = empty_output(query, kv)
    splits = plan.splits(kv.block_table.shape[1]) + 1  # the last is the window
    room = plan.parts(query)  # alive until the launch
    # `out` stands for what there is not
    sinks = out if call.sink_logits is None else call.sink_logits
    shown, strides = (out, NO_MASK) if mask is None else (mask, mask_strides(mask))

    def arguments(at: At) -> tuple[Any, ...]:
        return (
            Strided.of(at, query), Fields.of(at, kv.key_pages), Fields.of(at, kv.value_pages),
            Strided.of(at, kv.residual_keys), Strided.of(at, kv.residual_values), Results(*map(at, room)),
            *rows_of(at, kv), at(shown), *strides, float(call.softmax_scale), float(call.softcap or 1.0),
            call.sliding_window or 0, query.shape[2],
        )  # fmt: skip

    plan.kernel.launch(*plan.grid, splits, index, arguments)
    rows, heads, q_len, dim = out.shape
    plan.last.launch(
        rows * heads * q_len, -(-dim // plan.last.constants["CHANNELS"]), 1, index,
        lambda at: (Results(*map(at, room)), at(out), at(sinks), q_len, splits),
    )  # fmt: skip
    return out


def _prepare(call: AttentionCall, queries: meta_params.Queries, grid: tuple[int, int]) -> Plan:
    spec, dim = call.kv.spec, call.kv.spec.out_dim
    programs = grid[0] * grid[1]
    keys, values = meta_params.operands(spec, queries)
    num_warps, num_stages = meta_params.launch_parameters(spec, queries)
    attending = {
        "QUERIES": queries,
        "KEYS": keys,
        "VALUES": values,
        "WINDOW": meta_params.ExactWindow.of(spec, queries.full),
        "STAGES": num_stages,
    }
    most = most_splits(spec, programs)
    parts = programs * queries.columns * (most + 1)  # of all splits
    rotated = values.side.rotated if values else 0
    channels = power_of_two(dim) if rotated else min(COMBINED_CHANNELS, power_of_two(dim))
    merging = {"QUERIES": queries, "DIM": dim, "CHANNELS": channels, "ROTATED": rotated}
    return Plan(
        kernel=Kernel(spec, decode_kernel, attending, num_warps=num_warps),
        last=Kernel(spec, combine_kernel, merging),
        grid=grid,
        stretch=keys.tile * MIN_TILES,
        most=most,
        sizes=(parts * dim, 2 * parts),
    )
