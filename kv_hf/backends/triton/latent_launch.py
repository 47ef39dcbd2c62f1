"""What a launch of the latent kernel takes: its plan and its run-time arguments."""

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch

from ..inputs import PagedKV
from .combine import combine_kernel
from .decode_launch import triton_constants
from .latent import latent_kernel
from .latent_meta_params import (
    COLUMNS,
    COMBINED,
    COMBINED_SPLITS,
    MIN_TILES,
    latent_constants,
    launch_parameters,
    most_splits,
    tile_tokens,
)
from .launch_plan import Plan, Shapes
from .tuning import Launch

# query, codes, scales and offsets of both sides, windows
POINTERS = itemgetter(0, 4, 5, 6, 7, 8, 9, 13, 16)


def prepare(
    kv: PagedKV, shapes: Shapes, isa: int, shared: int | None, launch: Launch | None
) -> Plan:
    """Make the plan of a call over pages of latents; arguments as decode_launch.prepare takes them."""
    spec = kv.spec
    blocks = -(-shapes.heads * shapes.q_len // COLUMNS)
    rank = spec.out_dim
    chosen = launch or launch_parameters(spec, isa)
    plain = latent_constants(
        spec,
        query_dtype=shapes.query_dtype,
        heads=shapes.heads,
        q_len=shapes.q_len,
        isa=isa,
        num_stages=chosen.num_stages,
        mask=shapes.mask,
        sliding_window=shapes.sliding_window,
        sinks=shapes.sinks,
    )
    combined = {
        "HEADS": shapes.heads, "COLUMNS": COLUMNS, "V_DIM": rank, "SINKS": shapes.sinks,
        "SPLITS": COMBINED_SPLITS, "DIM": COMBINED,
    }  # fmt: skip
    shape, strides = shapes.result(rank)
    return Plan(
        spec=spec,
        kernel=latent_kernel,
        constants=triton_constants(plain),
        options={"num_warps": chosen.num_warps, "enable_fp_fusion": True},
        arguments=arguments,
        pointers=POINTERS,
        rows=shapes.rows,
        blocks=blocks,
        shape=shape,
        strides=strides,
        columns=COLUMNS,
        dim=rank,
        tiles_per_page=kv.page_size // tile_tokens(spec, shapes.query_dtype),
        min_tiles=MIN_TILES,
        max_splits=most_splits(shapes.rows * blocks),
        fixed_splits=chosen.num_splits,
        combine=(
            combine_kernel,
            combined,
            shapes.rows * shapes.heads * shapes.q_len,
            -(-rank // COMBINED),
        ),
    )


def arguments(
    at: Callable[[torch.Tensor], Any],
    query: torch.Tensor,
    kv: PagedKV,
    mask: Any,
    mask_strides: tuple[int, ...],
    sink_logits: Any,
    out: Any,
    partial: Any,
    bests: Any,
    counters: Any,
    softmax_scale: float,
    softcap: float | None,
    sliding_window: int | None,
) -> tuple[Any, ...]:
    """Return the run-time arguments of the latent kernel in order; the same as decode_launch.arguments takes."""
    latents, ropes = kv.key_pages, kv.value_pages
    scale, offset = latents.get("scale"), latents.get("offset")
    rope_scale, rope_offset = ropes.get("scale"), ropes.get("offset")
    table, window, window_rope = kv.block_table, kv.window_keys, kv.window_values
    query_row, query_head, query_token, _ = query.stride()
    row, _, slot, _ = window.stride()
    rope_row, _, rope_slot, _ = window_rope.stride()
    mask_row, mask_head, mask_query = mask_strides
    return (
        at(query), query_row, query_head, query_token,
        at(latents["codes"]), out if scale is None else at(scale), out if offset is None else at(offset),
        at(ropes["codes"]), out if rope_scale is None else at(rope_scale),
        out if rope_offset is None else at(rope_offset),
        at(table), table.stride(0), at(kv.num_pages),
        at(window), row, slot, at(window_rope), rope_row, rope_slot,
        at(kv.exact_lens), at(kv.padding), mask, mask_row, mask_head, mask_query,
        sink_logits, out, partial, bests,
        softmax_scale, sliding_window or 0, kv.sink_tokens, query.shape[2],
    )  # fmt: skip
