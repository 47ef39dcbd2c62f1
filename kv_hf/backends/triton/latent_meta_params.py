"""Which latent kernel serves a spec: tile sizes, chunks and dtypes as compile-time arguments, and launch parameters.

Pure arithmetic, importable without Triton; the same arguments serve a launch and ahead-of-time compilation.
"""

from typing import Any, NamedTuple

import torch

from ...spec import PageSpec
from .meta_params import (
    BOOST,
    HIP,
    MIN_SIZE,
    Launch,
    compute_types,
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


class Chunks(NamedTuple):
    """How channels are cut: piece c * runs + r, run r of chunk c, holds `size` channels from its number * size on.

    Attributes:
        chunks, runs: how many, whose products make one batch, and pieces of each; powers of two.
        size, wide: channels of a piece, which share a scale, and the power of two that they are padded to.
        dim: all channels.
    """

    chunks: int
    runs: int
    size: int
    wide: int
    dim: int

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
        return cls(count, pieces // count, size, max(MIN_SIZE, power_of_two(size)), rank)

    @property
    def padded(self) -> int:
        """Channels with padding."""
        return self.chunks * self.runs * self.wide


class Latents(NamedTuple):
    """How tiles of latents and RoPE keys are read and multiplied.

    Attributes:
        code, bits: as in formats.Scheme; by_channel, by_token: whether scales are of channels, or of tokens.
        page, words: tokens and words of a page; group: tokens that share a scale by channel, or channels by token.
        stride: tokens between the places of a row of a tile. Where a page has fewer words than a product needs rows, the
            rows of several places lie one below another: copies are places of a word that are rows of a tile.
        rows, places: of a tile, each of whose tokens is one place of a row.
        step: places whose scores move the softmax at once; share: those of them that share a scale by channel.
        cut, rope: of the latents and of the RoPE keys; whole: of the latents where a load takes both runs of a chunk, or None.
        rope_code: as `code`, of RoPE keys.
        boost: weights are multiplied by it.
        window_tile: tokens of a tile of the window.
        dtype, rope_dtype, window_dtype, window_rope_dtype: of the products, by name.
        isa: as in meta_params.Operand.
    """

    code: str
    bits: int
    by_channel: bool
    by_token: bool
    page: int
    words: int
    group: int
    stride: int
    copies: int
    rows: int
    places: int
    step: int
    share: int
    cut: Chunks
    rope: Chunks
    whole: Chunks | None
    rope_code: str
    boost: float
    window_tile: int
    dtype: str
    rope_dtype: str
    window_dtype: str
    window_rope_dtype: str
    isa: int


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
    return {
        "HEADS": heads, "CHUNK": q_len > 1, "COLUMNS": COLUMNS, "LATENTS": latents(spec, query_dtype, isa),
        "W_COST": max(1, round(16 / spec.bits_per_element)), "HIDING": hiding(q_len, mask, False, sliding_window),
        "SINKS": sinks, "STAGES": num_stages,
    }  # fmt: skip


def latents(spec: PageSpec, query_dtype: torch.dtype, isa: int) -> Latents:
    """Return how pages of latents are read."""
    latent, rope = spec.sides
    scheme, page, code = latent.scheme, latent.page_size, latent.scheme.code
    cut, by_channel = Chunks.of(spec), code == "unsigned"
    dtypes = compute_types(spec, query_dtype)
    exact = dtypes[0] == "fp32"
    group = (scheme.scale_group or (0, latent.head_dim))[0 if by_channel else 1]
    stride, words = token_stride(spec), page // places(spec)
    step = min(4, page // stride)
    rope_size = max(MIN_SIZE, power_of_two(-(-rope.head_dim // cut.chunks)))
    whole = Chunks(cut.chunks, 1, 2 * cut.size, 2 * cut.wide, cut.dim)
    return Latents(
        code=code, bits=scheme.bits, by_channel=by_channel, by_token=code in ("signed", "float8"), page=page, words=words,
        group=group, stride=stride, copies=stride // words, rows=tile_rows(spec, query_dtype), places=page // stride,
        step=step, share=max(1, min(step, group // stride)) if by_channel else 1, cut=cut,
        rope=Chunks(cut.chunks, 1, rope_size, rope_size, rope.head_dim),
        whole=whole if by_channel and cut.runs == 2 and cut.size == cut.wide else None, rope_code=rope.scheme.code,
        boost=1.0 if exact else WEIGHT_BOOST if by_channel else BOOST[code],
        window_tile=32 if tile_tokens(spec, query_dtype) >= 32 else 16, dtype=dtypes[0], rope_dtype=dtypes[1],
        window_dtype=dtypes[2], window_rope_dtype=dtypes[3], isa=0 if exact else isa,
    )  # fmt: skip


def launch_parameters(isa: int) -> Launch:
    """Choose the launch parameters of a decode step: a warp for each chunk of the rank; splits by `most_splits`."""
    return Launch(4, 1 if isa == HIP else 2)


def most_splits(programs: int) -> int:
    """Return the splits that fill the GPU where one split takes `programs` programs."""
    return max(1, min(MAX_SPLITS, -(-PROGRAMS // programs)))
