"""What a launch of the decode kernel takes: its plan."""

from ..base import PagedKV
from .decode import decode_kernel
from .launch_arguments import POINTERS
from .launch_plan import Plan, Shapes
from .meta_params import MIN_TILES, Launch, column_block, constants, launch_parameters, most_splits


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
        spec, group=group, isa=isa, num_warps=chosen.num_warps, num_stages=chosen.num_stages, softcap=shapes.softcap,
        **shapes.variant,
    )  # fmt: skip
    return Plan.of(
        kv, shapes, chosen, plain, kernel=decode_kernel, pointers=POINTERS, blocks=blocks, columns=plain["M_COLUMNS"],
        tile=plain["TILE"], min_tiles=MIN_TILES, max_splits=most_splits(shapes.rows * blocks),
    )  # fmt: skip
