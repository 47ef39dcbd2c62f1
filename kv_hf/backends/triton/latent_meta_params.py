"""Which latent kernel serves a spec: tile sizes, chunks and dtypes as compile-time arguments, and launch parameters.

Pure arithmetic, importable without Triton; the same arguments serve a launch and ahead-of-time compilation.
"""

from dataclasses import dataclass
from typing import Any

import torch

from ...spec import PageSpec
from .meta_params import (
    BOOST,
    HIP,
    MIN_SIZE,
    Launch,
    element_type,
    hiding,
    in_float32,
    power_of_two,
)

COLUMNS = 16  # query rows of a program; more are further programs
CHUNKS = 4  # of the rank: one for each warp
RUNS = 2  # of a chunk, where scales are of channels: the products of one lie beside the sums of all
TILE_BYTES = 32 * 1024  # bytes of one tile of words: two of them lie in shared memory
MAX_PADDED = 1024  # channels of a latent with the padding of its chunks
WEIGHT_BOOST = 2.0**15  # keeps weights of at most 1, without scales, in float16's normal range
PROGRAMS = (
    132 * 2
)  # programs that fill a large GPU: each takes half of a multiprocessor's registers
MAX_SPLITS = 256
MIN_TILES = 4  # tiles that a split should have at least
SCATTERED = 16 * 1024  # bytes of shared memory that reductions take, and RoPE keys
FLOAT_CHANNEL = 440  # bytes of a channel where int4 and int2 are multiplied in float32
COMBINED = 64  # channels that one program of the combining kernel takes,
COMBINED_SPLITS = 64  # and splits that it reads at once


@dataclass(frozen=True)
class Chunks:
    """How the rank is cut: piece c * runs + r, run r of chunk c, holds `size` channels from its number * size on.

    Attributes:
        count, runs: chunks, whose products make one batch, and pieces of each; powers of two.
        size, wide: channels of a piece, which share a scale, and the power of two that they are padded to.
    """

    count: int
    runs: int
    size: int
    wide: int

    @classmethod
    def of(cls, spec: PageSpec) -> "Chunks":
        """Cut the latents of `spec`: one piece for each group of scales, or more where groups are few."""
        rank, scheme = spec.keys.head_dim, spec.keys.scheme
        by_channel = scheme.code == "unsigned"
        size = power_of_two(rank)
        if scheme.scale_group and not by_channel:
            size = scheme.scale_group[1]
        least = CHUNKS * (RUNS if by_channel else 1)
        while size % (2 * MIN_SIZE) == 0 and power_of_two(-(-rank // size)) < least:
            size //= 2
        pieces = power_of_two(-(-rank // size))
        count = min(CHUNKS, pieces)
        return cls(count, pieces // count, size, max(MIN_SIZE, power_of_two(size)))

    @property
    def padded(self) -> int:
        """Channels with padding."""
        return self.count * self.runs * self.wide


def places(spec: PageSpec) -> int:
    """Return the tokens whose codes share a word; 1 where latents are exact."""
    return 16 // spec.keys.scheme.bits if spec.keys.scheme.bits else 1


def token_stride(spec: PageSpec) -> int:
    """Return the tokens between the places of a row of a tile: the words of a page, or more where those are too few."""
    return max(MIN_SIZE, spec.keys.page_size // places(spec))


def tile_rows(spec: PageSpec, query_dtype: torch.dtype = torch.bfloat16) -> int:
    """Return the rows of a tile, a part of a page."""
    rows = 32
    # more tokens leave no registers for their scores, or no shared memory for their numbers in float32
    if places(spec) > 2 or in_float32(spec, query_dtype):
        rows = MIN_SIZE
    width = Chunks.of(spec).padded * (spec.keys.dtype.itemsize if places(spec) == 1 else 2)
    while rows > MIN_SIZE and rows * width > TILE_BYTES:
        rows //= 2
    return min(rows, token_stride(spec))


def tile_tokens(spec: PageSpec, query_dtype: torch.dtype = torch.bfloat16) -> int:
    """Return the tokens of a tile."""
    return tile_rows(spec, query_dtype) * (spec.keys.page_size // token_stride(spec))


def compute_types(spec: PageSpec, query_dtype: torch.dtype) -> tuple[str, str, str, str]:
    """Return the dtypes of the products with latent pages, RoPE pages, and the window's latents and RoPE keys.

    As meta_params.compute_types: codes in float16, exact numbers in their own dtype, everything in float32 if anything is.
    """
    own = [element_type(side.dtype) for side in spec.sides]
    if in_float32(spec, query_dtype):
        return ("fp32",) * 4
    pages = ["fp16" if not s.scheme.is_exact else t for s, t in zip(spec.sides, own, strict=True)]
    return pages[0], pages[1], own[0], own[1]


def shared_bytes(spec: PageSpec, query_dtype: torch.dtype, isa: int) -> int:
    """Return the most bytes of shared memory that a program of the latent kernel takes (tests/backends/test_triton_shared.py).

    In 16 bits a tile of words, the queries and reductions; in float32 also the numbers of a tile, as keys and as values.
    """
    padded, rope = Chunks.of(spec).padded, spec.values.head_dim
    full = in_float32(spec, query_dtype)
    rows = tile_rows(spec, query_dtype)
    if isa == HIP:
        both = full and spec.keys.scheme.code in ("signed", "float8")  # places of a word
        return rows * padded * (4 if full else 2) * (2 if both else 1)
    queries = COLUMNS * (padded + rope) * (4 if full else 2)
    if not full:
        return 32 * padded * 2 + queries + SCATTERED
    if spec.keys.scheme.code == "unsigned":
        return FLOAT_CHANNEL * padded
    return 2 * tile_tokens(spec, query_dtype) * padded * 4 + queries + rows * rope * 4


def latent_constants(
    spec: PageSpec,
    *,
    query_dtype: torch.dtype,
    heads: int,
    q_len: int,
    isa: int,
    num_stages: int,
    mask: str = "none",
    sliding_window: bool = False,
    sinks: bool = False,
) -> dict[str, Any]:
    """Return the latent kernel's compile-time arguments; dtypes by name, as meta_params.constants gives them.

    Args:
        spec: of latents, layout "rows".
        heads: query heads; isa: compute capability * 10 on NVIDIA, HIP on AMD, 0 in the interpreter.
        mask: "none", "bool" or "float".
    """
    latent, rope = spec.sides
    cut = Chunks.of(spec)
    types = compute_types(spec, query_dtype)
    exact = types[0] == "fp32"
    code = latent.scheme.code
    boost = WEIGHT_BOOST if code == "unsigned" else BOOST[code]
    group = (latent.scheme.scale_group or (0, latent.head_dim))[0 if code == "unsigned" else 1]
    tokens = tile_tokens(spec, query_dtype)
    stride = token_stride(spec)
    step = min(4, latent.page_size // stride)  # places whose scores move the softmax at once
    return {
        "HEADS": heads, "CHUNK": q_len > 1, "COLUMNS": COLUMNS, "PAGE": latent.page_size,
        "RANK": latent.head_dim, "CODE": code, "BITS": latent.scheme.bits, "GROUP": group,
        "WORDS": latent.page_size // places(spec), "STRIDE": stride, "ROWS": tile_rows(spec, query_dtype),
        "STEP": step, "SHARE": max(1, min(step, group // stride)) if code == "unsigned" else 1,
        "CHUNKS": cut.count, "RUNS": cut.runs, "SIZE": cut.size, "WIDE": cut.wide,
        "BOOST": 1.0 if exact else boost, "L_DTYPE": types[0],
        "ROPE": rope.head_dim, "ROPE_CODE": rope.scheme.code,
        "ROPE_WIDE": max(MIN_SIZE, power_of_two(-(-rope.head_dim // cut.count))), "ROPE_DTYPE": types[1],
        "W_TILE": 32 if tokens >= 32 else 16, "W_COST": max(1, round(16 / spec.bits_per_element)),
        "W_DTYPE": types[2], "W_ROPE_DTYPE": types[3], "PRECISION": "ieee",
        "HIDING": hiding(q_len, mask, False, sliding_window), "SINKS": sinks,
        "STAGES": num_stages, "ISA": 0 if exact else isa,
    }  # fmt: skip


def warps_and_stages(spec: PageSpec, isa: int) -> tuple[int, int]:
    """Return (num_warps, num_stages): a warp for each chunk of the rank."""
    return 4, 1 if isa == HIP else 2


def launch_parameters(spec: PageSpec, isa: int) -> Launch:
    """Choose the launch parameters of a decode step; splits by `most_splits`."""
    return Launch(*warps_and_stages(spec, isa))


def most_splits(programs: int) -> int:
    """Return the splits that fill the GPU where one split takes `programs` programs."""
    return max(1, min(MAX_SPLITS, -(-PROGRAMS // programs)))
