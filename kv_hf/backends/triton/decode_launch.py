"""What a launch of the decode kernel takes: its plan."""

from typing import Any

import triton.language as tl

from ..inputs import PagedKV
from .decode import decode_kernel
from .launch_arguments import POINTERS
from .launch_plan import Plan, Shapes
from .meta_params import column_block, constants
from .tuning import MIN_TILES, Launch, launch_parameters, most_splits

TYPES = {"fp32": tl.float32, "fp16": tl.float16, "bf16": tl.bfloat16}


def triton_constants(plain: dict[str, Any]) -> dict[str, Any]:
    """Replace dtype names by Triton's dtypes."""
    return {k: TYPES[v] if k.endswith("_DTYPE") else v for k, v in plain.items()}


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
