"""Which kernel serves a spec: how a side lies in memory, tiles, chunks, foldings, dtypes, warps and stages.

Pure arithmetic, importable without Triton; the same arguments serve a launch and ahead-of-time compilation. Warps and stages
come from counting instructions and shared memory of compiled kernels (docs/kernels.md), not from measurements on a GPU.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

from ...quant.codec import block
from ...spec import PageSpec, SideSpec


class SideLayout(NamedTuple):
    """Codes, scales and offsets of one side of a page.

    Attributes:
        heads, page, dim: kv heads, tokens of a page and channels.
        code, bits: as in formats.Scheme.
        scale_tokens, scale_channels: one scale belongs to so many.
        offset_tokens, offset_channels: the same of offsets; 0 where there is none.
        token_contiguous, token_words: as in SideSpec.
        runs: codes of a byte, or of a word where token_words.
        width: bytes, words or numbers of a token; of keys of two widths, and of planes of codes, no meaning of its own.
        size: bytes, words or numbers of a token's codes.
        rotated: channels of a block of rotated numbers (quant/codec.py); 0: they are not rotated.
        centered: whether unsigned codes lie around 0 and have no offset.
        sections: of keys of two widths, (bits, bytes of a token, codes of a byte, first place, first byte) of the wide
            channels and of the others; else empty.
    """

    heads: int
    page: int
    dim: int
    code: str
    bits: int
    scale_tokens: int
    scale_channels: int
    offset_tokens: int
    offset_channels: int
    token_contiguous: bool
    token_words: bool
    runs: int
    width: int
    size: int
    rotated: int
    centered: bool
    sections: tuple[tuple[int, int, int, int, int], ...]


@cache
def side_layout(spec: SideSpec) -> SideLayout:
    """Return the layout of a side; SideSpec documents it."""
    scheme = spec.scheme
    runs = 16 // scheme.bits if spec.token_words else scheme.codes_per_byte
    return SideLayout(
        spec.num_kv_heads,
        spec.page_size,
        spec.head_dim,
        scheme.code,
        scheme.bits,
        *(scheme.scale_group or (1, 1)),
        *(scheme.offset_group or (0, 0)),
        spec.token_contiguous,
        spec.token_words,
        runs,
        spec.head_dim if spec.token_words else spec.head_dim // runs,
        spec.head_dim if spec.token_words or scheme.is_exact else spec.token_bits // 8,
        block(spec.head_dim) if scheme.rotated else 0,
        scheme.code == "unsigned" and scheme.offset_group is None,
        _sections(spec) if scheme.wide_channels else (),
    )


def _sections(spec: SideSpec) -> tuple[tuple[int, int, int, int, int], ...]:
    place = first = 0
    found = []
    for bits, channels in spec.runs:
        found.append((bits, channels * bits // 8, 8 // bits, place, first))
        place, first = place + channels, first + channels * bits // 8
    return tuple(found)


MAX_TILE = 64  # tokens
TOKEN_GROUPS = 2  # of the keys' scales in a tile: the scales of more would not fit into registers
MIN_SIZE = 16  # a matrix product's smallest inner size
MAX_COLUMNS = 16  # query columns of one program; more are spread over programs
TILE_BYTES = 36 * 1024  # bytes of one tile's keys and values: two of them lie in shared memory
FLOAT_BYTES = 32 * 1024  # the same of numbers unpacked to float32
W_TILE = 32  # most tokens of a tile of the window
SCATTERED = 8 * 1024  # bytes of shared memory that lie between buffers, or that reductions take
HIP_SCATTERED = 16 * 1024  # what reductions take on AMD, in place of tiles
MERGED = 16  # splits that a program merges at once, and
MERGED_NUMBERS = 64 * 32  # partial results of a warp meanwhile
HIP = -1  # the `isa` of AMD GPUs; 0 is the interpreter, NVIDIA's are compute capability * 10
# The factor that keeps weight * scale in float16's normal range: the largest scale times it stays below 65504
BOOST = {
    "none": 1.0, "float8": 2.0**8, "signed": 2.0**6, "unsigned4": 2.0**2, "unsigned3": 2.0, "unsigned2": 1.0
}  # fmt: skip


def power_of_two(size: int) -> int:
    """Return the smallest power of two of at least `size`."""
    return 1 << max(0, size - 1).bit_length()


def chunks(width: int, first: int = 0) -> tuple[tuple[int, int], ...]:
    """Cut `width` places from `first` on into (start, size) with sizes that are powers of two, at least 16.

    The last may reach past the end; what two chunks would pad as much as one is one.
    """
    whole = power_of_two(width)
    if width <= MIN_SIZE or whole == width:
        return ((first, max(whole, MIN_SIZE)),)
    half = whole // 2
    rest = chunks(width - half, first + half)
    if half + sum(size for _, size in rest) >= whole:
        return ((first, whole),)
    return ((first, half), *rest)


def in_float32(spec: PageSpec, query_dtype: torch.dtype) -> bool:
    """Return whether products are in float32: where queries, or numbers of either side, are."""
    return torch.float32 in (query_dtype, *(side.dtype for side in spec.sides))


def tile_tokens(spec: PageSpec, query_dtype: torch.dtype = torch.bfloat16) -> int:
    """Return the tokens of a tile: a page, a part of it, or one or two token groups of the keys' scales."""
    tile = min(spec.keys.page_size, MAX_TILE)
    scheme = spec.keys.scheme
    if scheme.code == "unsigned" and scheme.scale_group and scheme.scale_group[0] >= MIN_SIZE:
        tile = min(tile, TOKEN_GROUPS * scheme.scale_group[0])
    token_bytes = sum(side.token_bits for side in spec.sides) // 8
    most = TILE_BYTES
    if in_float32(spec, query_dtype):  # unpacked numbers go through shared memory
        token_bytes, most = sum(4 * side.head_dim for side in spec.sides), FLOAT_BYTES
    while tile > MIN_SIZE and tile * token_bytes > most:
        tile //= 2
    return tile


def _window_bytes(spec: PageSpec) -> int:
    """Bytes of a token of the window in shared memory."""
    return sum(power_of_two(side.head_dim) * side.dtype.itemsize for side in spec.sides)


def window_tile(spec: PageSpec) -> int:
    """Return the tokens of a tile of the window."""
    return W_TILE if W_TILE * _window_bytes(spec) <= TILE_BYTES else MIN_SIZE


def shared_bytes(
    spec: PageSpec, query_dtype: torch.dtype, columns: int, stages: int, isa: int
) -> int:
    """Return the most bytes of shared memory that a program of the decode kernel takes.

    Tiles on their way; one operand as it is multiplied, where codes are unpacked through shared memory (in float32, and
    on AMD); two copies of the queries, and weights; later a tile of the window in their place. What compiled kernels
    take is at most that (tests/backends/test_triton_shared.py).
    """
    tile = tile_tokens(spec, query_dtype)
    size = 4 if in_float32(spec, query_dtype) else 2
    encoded = not all(side.scheme.is_exact for side in spec.sides)
    widest = power_of_two(max(side.head_dim for side in spec.sides))
    pages = max(1, stages - 1) * tile * sum(side.token_bits for side in spec.sides) // 8
    if encoded and (size == 4 or isa == HIP):
        pages += tile * widest * size
    window = window_tile(spec) * _window_bytes(spec)
    weights = columns * size  # of a token
    if isa == HIP:
        pages += 0 if encoded else tile * weights
        return max(pages, window + window_tile(spec) * weights, HIP_SCATTERED)
    queries = columns * widest * size
    pages += 2 * queries + tile * weights
    return max(pages, window + queries) + SCATTERED


def column_block(spec: PageSpec, group: int, q_len: int, isa: int) -> int:
    """Return the query columns of a program: 8 (not on AMD, whose matrix units have no such shape) or 16.

    More columns need more than two warps' registers, and four warps unpack through shared memory: programs that
    read the same pages from the second-level cache issue no more instructions altogether.
    """
    if isa == HIP:
        return 16
    most = MAX_COLUMNS if max(side.head_dim for side in spec.sides) <= 128 else 8
    if q_len > 1:  # one variant for chunks of every length
        return most
    return min(max(8, power_of_two(group)), most)


def merged_splits(columns: int, dim: int, num_warps: int) -> int:
    """Return the splits that a program merges at once: as many as its registers hold."""
    return max(1, min(MERGED, num_warps * MERGED_NUMBERS // (columns * power_of_two(dim))))


def element_type(dtype: torch.dtype) -> str:
    """Return Triton's name of a dtype (as in pointer types)."""
    return {
        torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.uint8: "u8",
        torch.bool: "u8", torch.int16: "i16", torch.int32: "i32",
    }[dtype]  # fmt: skip


def compute_types(spec: PageSpec, query_dtype: torch.dtype) -> tuple[str, str, str, str]:
    """Return the dtypes of the products with key pages, value pages, window keys and window values.

    Codes are multiplied in float16, into which they fit exactly, whatever the model's dtype: it has three bits more
    than bfloat16, and its range is kept by powers of two (see BOOST and the kernel's `shrink`). Exact numbers are
    multiplied in their own dtype. float32 queries (or pages) are multiplied in float32.
    """
    window = [element_type(side.dtype) for side in spec.sides]
    if in_float32(spec, query_dtype):
        return ("fp32",) * 4
    pages = [
        own if s.scheme.is_exact else "fp16" for s, own in zip(spec.sides, window, strict=True)
    ]
    return pages[0], pages[1], window[0], window[1]


def _key_fold(side: SideSpec) -> str:
    if side.scheme.is_exact:
        return "none"
    if side.scheme.code != "unsigned":
        return "page"
    assert side.scheme.scale_group is not None
    return "tile" if side.scheme.scale_group[0] >= MIN_SIZE else "element"


def _key_sections(side: SideSpec) -> tuple[tuple[Any, ...], ...]:
    """Return the sections of keys of two widths (see keys.py), or none."""
    return tuple((*section, chunks(section[1])) for section in side_layout(side).sections)


def rotated_chunks(width: int, group: int) -> tuple[tuple[int, int, int], ...]:
    """Cut `width` places of rotated values into (start, size, places): equal powers of two that lie within `group`.

    The transform then sums pairs within chunks, or pairs of chunks. Sizes are at least 16, places need not be.
    """
    places = width & -width
    if group < width:
        places = min(places, group & -group)
    return tuple((start, max(places, MIN_SIZE), places) for start in range(0, width, places))


def _value_fold(side: SideSpec) -> tuple[str, int, tuple[tuple[int, ...], ...]]:
    """How scales apply, channels of a scale, and the chunks: each part must lie within one scale's channels."""
    fold, group, cut = _plain_value_fold(side)
    if side.scheme.rotated:
        width = side.head_dim // side.scheme.codes_per_byte
        cut = rotated_chunks(width, group if fold == "token" else width)
    return fold, group, cut


def _plain_value_fold(side: SideSpec) -> tuple[str, int, tuple[tuple[int, ...], ...]]:
    width = side.head_dim // side.scheme.codes_per_byte
    if side.scheme.is_exact:
        return "none", side.head_dim, chunks(width)
    assert side.scheme.scale_group is not None
    group = side.scheme.scale_group[1]
    if group % width == 0:
        return "token", group, chunks(width)
    if width % group == 0 and group >= MIN_SIZE:
        starts = range(0, width, group)
        return "token", group, tuple(c for start in starts for c in chunks(group, start))
    return "element", group, chunks(width)


class Hiding(NamedTuple):
    """What hides tokens from queries, or bends their scores.

    Attributes:
        causal, windowed, capped: whether positions, a sliding window and a softcap count.
        mask: "none", "bool" or "float".
        bent: whether scores are in log2 before weights are taken from them.
        hides: whether some scores of pages may be -inf.
    """

    causal: bool
    windowed: bool
    capped: bool
    mask: str
    bent: bool
    hides: bool


def hiding(q_len: int, mask: str, softcap: bool, sliding_window: bool) -> Hiding:
    """Return what hides tokens in a call; a mask covers causality."""
    causal = q_len > 1 and mask == "none"
    bent, hides = softcap or mask == "float", causal or sliding_window or mask != "none"
    return Hiding(causal, sliding_window, softcap, mask, bent, hides)


def constants(
    spec: PageSpec,
    *,
    query_dtype: torch.dtype,
    group: int,
    q_len: int,
    isa: int,
    num_warps: int,
    num_stages: int,
    mask: str = "none",
    softcap: bool = False,
    sliding_window: bool = False,
    sinks: bool = False,
) -> dict[str, Any]:
    """Return the decode kernel's compile-time arguments.

    Args:
        spec: layout "rows".
        group: query heads of a kv head.
        q_len: chunks of all lengths above 1 share a variant.
        isa: compute capability * 10 on NVIDIA, HIP on AMD, 0 in the interpreter.
        mask: "none", "bool" or "float".
    Dtypes are given by name; `launch` and `aot` replace them by Triton's.
    """
    keys, values = spec.sides
    tile = tile_tokens(spec, query_dtype)
    columns = column_block(spec, group, q_len, isa)
    merged = columns if q_len > 1 else min(columns, power_of_two(group))
    types = compute_types(spec, query_dtype)
    exact = types[0] == "fp32"
    wide = keys.scheme.wide_channels > 0
    k_width = keys.token_bits // 8 if wide else keys.head_dim // keys.scheme.codes_per_byte
    v_fold, v_group, v_chunks = _value_fold(values)
    code = values.scheme.code
    boost = 1.0 if exact else BOOST[f"{code}{values.scheme.bits}" if code == "unsigned" else code]
    # codes around 0 have an offset all the same, in units of their scale
    centered = code == "unsigned" and values.scheme.offset_group is None
    offset = -0.5 * ((1 << values.scheme.bits) - 1) if centered else 1.0
    return {
        "HEADS": keys.num_kv_heads, "GROUP": group, "CHUNK": q_len > 1, "COLUMNS": columns,
        "PAGE": keys.page_size, "TILE": tile, "W_TILE": window_tile(spec),
        "W_COST": max(1, round(16 / spec.bits_per_element)), "W_STAGES": 2,
        "K_CODE": keys.scheme.code, "K_BITS": keys.scheme.bits, "K_DIM": keys.head_dim,
        "K_WIDTH": k_width, "K_CHUNKS": chunks(k_width), "K_SECTIONS": _key_sections(keys),
        "K_GROUP": keys.scheme.scale_group[0] if keys.scheme.scale_group else keys.page_size,
        "K_FOLD": _key_fold(keys), "K_DTYPE": types[0],
        "V_CODE": code, "V_BITS": values.scheme.bits, "V_DIM": values.head_dim,
        "V_WIDTH": values.head_dim // values.scheme.codes_per_byte, "V_CHUNKS": v_chunks,
        "V_GROUP": v_group, "V_FOLD": v_fold, "V_OFFSET": offset, "V_BYTES": values.token_bits // 8,
        "V_ROTATED": block(values.head_dim) if values.scheme.rotated else 0, "V_BOOST": boost, "V_DTYPE": types[1],
        "W_CHUNKS": chunks(keys.head_dim), "W_KEY_DTYPE": types[2], "W_VALUE_DTYPE": types[3],
        "PRECISION": "ieee", "HIDING": hiding(q_len, mask, softcap, sliding_window), "SINKS": sinks, "M_COLUMNS": merged, "M_SPLITS": merged_splits(merged, values.head_dim, num_warps), "STAGES": num_stages,
        "M_THREADS": 64 * num_warps if isa == HIP else 0,
        "ISA": 0 if exact else isa,
    }  # fmt: skip


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
