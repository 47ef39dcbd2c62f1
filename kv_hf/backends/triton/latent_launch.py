"""What a launch of the latent kernel takes: its plan."""

from ..base import PagedKV
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
from .meta_params import Launch
from .softmax import combine_kernel


def prepare(
    kv: PagedKV, shapes: Shapes, isa: int, shared: int | None, launch: Launch | None
) -> Plan:
    """Make the plan of a call over pages of latents; arguments as decode_launch.prepare takes them."""
    spec = kv.spec
    blocks = -(-shapes.heads * shapes.q_len // COLUMNS)
    rank = spec.out_dim
    chosen = launch or launch_parameters(spec, isa)
    plain = latent_constants(
        spec, heads=shapes.heads, isa=isa, num_stages=chosen.num_stages, **shapes.variant
    )
    combined = {
        "HEADS": shapes.heads, "COLUMNS": COLUMNS, "V_DIM": rank, "SINKS": shapes.sinks,
        "SPLITS": COMBINED_SPLITS, "DIM": COMBINED,
    }  # fmt: skip
    programs = shapes.rows * shapes.heads * shapes.q_len
    return Plan.of(
        kv, shapes, chosen, plain, kernel=latent_kernel, pointers=LATENT_POINTERS, blocks=blocks, columns=COLUMNS,
        tile=tile_tokens(spec, shapes.query_dtype), min_tiles=MIN_TILES,
        max_splits=most_splits(shapes.rows * blocks),
        combine=(combine_kernel, combined, programs, -(-rank // COMBINED)),
    )  # fmt: skip
