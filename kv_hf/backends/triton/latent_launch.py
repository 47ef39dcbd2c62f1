"""What a launch of the latent kernel takes: its plan."""

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
from .launch_arguments import LATENT_POINTERS
from .launch_plan import Plan, Shapes
from .tuning import Launch


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
        pointers=LATENT_POINTERS,
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
