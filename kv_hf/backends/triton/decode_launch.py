"""What a launch of the decode kernel takes: its plan and its run-time arguments."""

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
import triton.language as tl

from ..inputs import PagedKV
from .decode import decode_kernel
from .launch_plan import Plan, Shapes
from .meta_params import column_block, constants
from .tuning import MIN_TILES, Launch, launch_parameters, most_splits

TYPES = {"fp32": tl.float32, "fp16": tl.float16, "bf16": tl.bfloat16}


def triton_constants(plain: dict[str, Any]) -> dict[str, Any]:
    """Replace dtype names by Triton's dtypes."""
    return {k: TYPES[v] if k.endswith("_DTYPE") else v for k, v in plain.items()}


# query, codes, scales and offsets of both sides, windows
POINTERS = itemgetter(0, 4, 5, 6, 7, 8, 9, 13, 17)


def prepare(
    kv: PagedKV, shapes: Shapes, isa: int, shared: int | None, launch: Launch | None
) -> Plan:
    """Make the plan of a call over pages of keys and values.

    Args:
        isa: compute capability * 10 on NVIDIA, HIP on AMD, 0 in the interpreter.
        shared: bytes of shared memory that a program may take, None: any number.
        launch: warps, stages and splits, or None for those of tuning.py.
    """
    spec = kv.spec
    heads = spec.keys.num_kv_heads
    group = shapes.heads // heads
    columns = column_block(spec, group, shapes.q_len, isa)
    blocks = heads * -(-group * shapes.q_len // columns)
    chosen = launch or launch_parameters(
        spec, columns, isa, shapes.query_dtype, shared, shapes.mask
    )
    plain = constants(
        spec,
        query_dtype=shapes.query_dtype,
        group=group,
        q_len=shapes.q_len,
        isa=isa,
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        mask=shapes.mask,
        softcap=shapes.softcap,
        sliding_window=shapes.sliding_window,
        sinks=shapes.sinks,
    )
    shape, strides = shapes.result(spec.values.head_dim)
    return Plan(
        spec=spec,
        kernel=decode_kernel,
        constants=triton_constants(plain),
        options={"num_warps": chosen.num_warps, "enable_fp_fusion": True},
        arguments=arguments,
        pointers=POINTERS,
        rows=shapes.rows,
        blocks=blocks,
        shape=shape,
        strides=strides,
        columns=plain["M_COLUMNS"],
        dim=spec.values.head_dim,
        tiles_per_page=kv.page_size // plain["TILE"],
        min_tiles=MIN_TILES,
        max_splits=most_splits(shapes.rows * blocks),
        fixed_splits=chosen.num_splits,
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
    """Return the run-time arguments of the decode kernel in order.

    Args:
        at: what to hand over for a tensor, its address or itself; from `mask` to `counters` it was applied already,
            and what is absent is replaced by `out`.
    """
    keys, values = kv.key_pages, kv.value_pages
    key_scale, key_offset = keys.get("scale"), keys.get("offset")
    value_scale, value_offset = values.get("scale"), values.get("offset")
    table, window_keys, window_values = kv.block_table, kv.window_keys, kv.window_values
    query_row, query_head, query_token, _ = query.stride()
    key_row, key_head, key_slot, _ = window_keys.stride()
    value_row, value_head, value_slot, _ = window_values.stride()
    mask_row, mask_head, mask_query = mask_strides
    return (
        at(query), query_row, query_head, query_token,
        at(keys["codes"]),
        out if key_scale is None else at(key_scale), out if key_offset is None else at(key_offset),
        at(values["codes"]),
        out if value_scale is None else at(value_scale), out if value_offset is None else at(value_offset),
        at(table), table.stride(0), at(kv.num_pages),
        at(window_keys), key_row, key_head, key_slot,
        at(window_values), value_row, value_head, value_slot,
        at(kv.exact_lens), at(kv.padding), mask, mask_row, mask_head, mask_query,
        sink_logits, out, partial, bests, counters,
        softmax_scale, softcap or 1.0, sliding_window or 0, kv.sink_tokens, query.shape[2],
    )  # fmt: skip
