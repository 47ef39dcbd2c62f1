"""Launch parameters by format, head size, query columns and architecture; no tuning at run time.

The warps and stages come from counting instructions and shared memory of ahead-of-time compiled kernels
(docs/kernels.md), not from measurements on a GPU.
"""

from dataclasses import dataclass

import torch

from ...spec import PageSpec
from .meta_params import HIP, shared_bytes, tile_tokens

PROGRAMS = (
    132 * 8
)  # programs that fill a large GPU: 132 multiprocessors with 8 resident programs each
MIN_TILES = 4  # tiles that a split should have at least
MAX_SPLITS = 64


@dataclass(frozen=True)
class Launch:
    """Launch parameters of the decode kernel.

    Attributes:
        num_warps, num_stages: of the compiled kernel.
        num_splits: programs that share a row's tiles; 0: by the width of the block table.
    """

    num_warps: int
    num_stages: int
    num_splits: int = 0


def launch_parameters(
    spec: PageSpec,
    columns: int,
    isa: int,
    query_dtype: torch.dtype = torch.bfloat16,
    shared: int | None = None,
    mask: str = "none",
) -> Launch:
    """Choose the launch parameters of a decode step; splits by `most_splits`.

    Args:
        columns: query columns of a program; isa: compute capability * 10, or 0.
        shared: bytes of shared memory that a program may take: fewer stages where they are few; None: any number.
        mask: "none", "bool" or "float".
    """
    num_warps, num_stages = warps_and_stages(spec, columns, isa, query_dtype, mask)
    if shared is not None:
        while num_stages > 1 and shared_bytes(spec, query_dtype, columns, num_stages, isa) > shared:
            num_stages -= 1
    return Launch(num_warps, num_stages)


def most_splits(programs: int) -> int:
    """Return the splits that fill the GPU where one split takes `programs` programs."""
    return max(1, min(MAX_SPLITS, PROGRAMS // programs))


def warps_and_stages(
    spec: PageSpec,
    columns: int,
    isa: int,
    query_dtype: torch.dtype = torch.bfloat16,
    mask: str = "none",
) -> tuple[int, int]:
    """Return (num_warps, num_stages).

    Two warps: four would turn the products into warpgroup ones, which take the unpacked codes through shared
    memory. One warp where a tile has little work or the codes' bits are few (fewer barriers and repeated loads), and
    where nothing else wants its registers: at 128 channels a mask does beside four bits. Four where the accumulators of 16 columns
    would not fit into two warps' registers.
    """
    tile = tile_tokens(spec, query_dtype)
    dim = max(side.head_dim for side in spec.sides)
    two_bits = any(side.scheme.bits == 2 for side in spec.sides)
    packed = any(0 < side.scheme.bits < 8 for side in spec.sides)
    if columns == 16 and dim > 128:
        num_warps = 4
    elif tile == 16 or (
        packed
        and columns == 8
        and (dim < 128 or (dim == 128 and (two_bits or tile == 32 or mask == "none")))
    ):
        num_warps = 1
    else:
        num_warps = 2
    # two bits at 256 channels, gathered queries in 16 columns: the third stage costs registers that are not there
    gathered = spec.keys.scheme.wide_channels > 0 and columns == 16 and dim >= 128
    return num_warps, 2 if isa == HIP or (dim > 128 and two_bits) or gathered else 3
