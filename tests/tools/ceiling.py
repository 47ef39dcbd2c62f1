"""How fast a compiled decode loop could be if nothing but its instructions counted: an upper bound, not a measurement.

A multiprocessor issues 4 warp instructions per clock and an H200 was measured to copy 4.3 TB/s. So

    ceiling = (4 / instructions per number) / (numbers that memory delivers per clock and multiprocessor)

where a loop of n instructions run by w warps for a tile of m stored numbers takes n * w / m instructions per number.
Below 100 % the loop cannot keep up with memory; above, latency and other units decide. The bandwidth and the clock
are the H200's for every architecture: the figure compares kernels, not GPUs.
"""

from typing import Any

import torch

from kv_hf.backends.triton.meta_params import column_block, tile_tokens
from kv_hf.formats import format_names, is_shipped, key_scheme, value_scheme
from kv_hf.spec import PageSpec

ISSUE = 4  # warp instructions per clock and multiprocessor
COPY_BYTES = 4.3e12  # bytes per second, measured copy on an H200
MULTIPROCESSORS = 132
CLOCK = 1.755e9

FORMATS = tuple(name for name in format_names("keys", "values") if is_shipped(name))
PAIRS = ("int4_mixed+int3_rotated", "int2_mixed+int3_rotated", "int2_mixed+int2_rotated")
VARIANTS = (
    *(("sm_90", name, dim, 4) for name in FORMATS for dim in (64, 128, 256)),
    *(("sm_90", name, dim, 4) for name in ("int4", "int8") for dim in (80, 96, 192)),
    *(("sm_90", name, 128, 16) for name in FORMATS),
    *(("sm_90", name, dim, 16) for name in ("exact", "int4") for dim in (64, 256)),
    *((arch, name, 128, 4) for arch in ("sm_80", "sm_89", "sm_100") for name in FORMATS),
    *(("sm_90", name, dim, 4) for name in PAIRS for dim in (64, 128, 256)),
    *(("sm_90", name, 128, 16) for name in PAIRS),
)  # (architecture, format, head_dim, query heads of a kv head)


def standard_spec(name: str, dim: int) -> PageSpec:
    """Return the pages that the table is about: 64 tokens, bfloat16, keys and values in one format or in "keys+values"."""
    keys, _, values = name.partition("+")
    return PageSpec.build(
        key_scheme(keys),
        value_scheme(values or keys, 16 if name == "int2" and dim % 32 else None),
        num_kv_heads=8,
        key_dim=dim,
        value_dim=dim,
        page_size=64,
        dtype=torch.bfloat16,
    )


def instructions_per_number(code: Any, spec: PageSpec, group: int) -> float:
    """Return warp instructions of the loop over pages per stored number, for one query per query head.

    Args:
        code: sass.Code of a decode kernel for `spec` and `group` query heads of a kv head; query heads beyond a
            program's columns are other programs, which count as well.
    """
    numbers = tile_tokens(spec) * sum(side.head_dim for side in spec.sides)
    programs = -(-group // column_block(spec, group, 1, isa=90))
    return programs * len(code.loop) * code.num_warps / numbers


def ceiling(code: Any, spec: PageSpec, group: int) -> float:
    """Return the issue ceiling as a part of an H200's copy bandwidth (1.0 = as fast as memory)."""
    delivered = COPY_BYTES * 8 / spec.bits_per_element / (MULTIPROCESSORS * CLOCK)
    return ISSUE / instructions_per_number(code, spec, group) / delivered
