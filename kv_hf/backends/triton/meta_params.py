"""How pages are read: how a side lies in memory, tiles, chunks, foldings, dtypes, warps and stages.

Pure arithmetic, importable without Triton; the same arguments serve a launch and ahead-of-time compilation. Call `target_isa`
and `shared_memory`, which ask torch, through the module: tests patch them. Warps and stages
come from counting instructions and shared memory of compiled kernels (docs/kernels.md), not from measurements on a GPU.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

from ...formats.base import planes
from ...formats.linear import Float8Format, SignedFormat
from ...page_summary import summary_words, turned_by, word_channels
from ...quant.codec import block
from ...spec import PageSpec, SideSpec
from ..base import AttentionCall


class Plane(NamedTuple):
    """A plane of codes in a token's bytes.

    Keys of several widths have planes for each; codes of 3 and 6 bits have one of their low bits, and one of the others.

    Attributes:
        bits, low: how many of a code's bits, from which one on.
        place, places: of the first channel, and how many; byte: the first.
    """

    bits: int
    low: int
    place: int
    places: int
    byte: int


class Run(NamedTuple):
    """Channels, or places of an order, whose codes have the same bits.

    Attributes:
        place: the first; top: the largest code.
    """

    place: int
    top: float


class SideLayout(NamedTuple):
    """Codes, scales and offsets of one side of a page.

    Attributes:
        heads, page, dim: kv heads, tokens of a page and channels.
        code, bits: as in formats.Scheme; bits of the last run.
        scale_tokens, scale_channels: one scale belongs to so many.
        offset_tokens, offset_channels: the same of offsets; 0 where there is none.
        token_contiguous: as in SideSpec.
        places: tokens whose codes share a word (SideSpec.token_words), or 1.
        size: bytes, words or numbers of a token's codes.
        rotated: channels of a block of rotated numbers (quant/codec.py); 0: they are not rotated.
        clip: part of a range that codes of the last run span, but all of it in front.
        ordered: whether channels lie in an order that a row's pages share; a field, because triton 3.9 hands on no properties.
        runs: the widest first.
        planes: of codes, in a token's bytes.
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
    places: int
    size: int
    rotated: int
    clip: float
    ordered: bool
    runs: tuple[Run, ...]
    planes: tuple[Plane, ...]


@cache
def side_layout(spec: SideSpec) -> SideLayout:
    """Return the layout of a side; SideSpec documents it."""
    scheme = spec.scheme
    return SideLayout(
        spec.num_kv_heads,
        spec.page_size,
        spec.head_dim,
        scheme.code,
        scheme.bits,
        *(scheme.scale_group or (1, 1)),
        *(scheme.offset_group or (0, 0)),
        spec.token_contiguous,
        16 // scheme.bits if spec.token_words else 1,
        spec.head_dim if spec.token_words or scheme.is_exact else spec.token_bits // 8,
        block(spec.head_dim) if scheme.rotated else 0,
        scheme.clip,
        len(spec.runs) > 1,
        *_runs(spec),
    )


def _runs(spec: SideSpec) -> tuple[tuple[Run, ...], tuple[Plane, ...]]:
    runs: list[Run] = []
    lie: list[Plane] = []
    place = byte = 0
    for bits, places in spec.runs:
        low = 0
        for plane in planes(bits):
            lie.append(Plane(plane, low, place, places, byte))
            low, byte = low + plane, byte + places * plane // 8
        runs.append(Run(place, TOPS.get(spec.scheme.code, float((1 << bits) - 1))))
        place += places
    return tuple(runs), tuple(lie)


class Part(NamedTuple):
    """Channels that one operand of a product, or each of a batch of products (over latents), holds.

    Attributes:
        place: the first; held: how many there are; size: with what is padding, a power of two.
        batch: products, a power of two, or 0: product b of part p has the channels from (b * parts + p) * held on; end: behind it
            all is padding.
    """

    place: int
    held: int
    size: int
    batch: int = 0
    end: int = 0


class Chunk(NamedTuple):
    """Bytes of a token, or its exact numbers, that are loaded at once.

    Attributes:
        bits: of a code.
        byte, held, size: as `Part.place` and so on, in bytes; of codes in planes, those of the first plane.
        start: number of the first byte in its plane; second, half: where the second plane begins, and its bytes. A code at
            byte i of the first plane has its other bits at byte i, or i - half.
        first: number of the part that the first codes of the bytes are; those of the other codes follow.
    """

    bits: int
    byte: int
    held: int
    size: int
    start: int
    second: int
    half: int
    first: int


class Cut(NamedTuple):
    """How the channels of one side are cut: chunks of what lies in memory, and parts that are multiplied."""

    chunks: tuple[Chunk, ...]
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, runs: Sequence[tuple[int, int]], groups: int = 1) -> "Cut":
        """Cut runs of channels (SideSpec.runs); groups: equal ones of a plane's bytes or of numbers, each cut by itself."""
        found: list[Chunk] = []
        parts: list[Part] = []
        place = byte = 0
        for bits, channels in runs:
            each = codes_of_bytes(bits)
            width = channels // each
            # of keys of several widths there are many parts already: more would not fit into registers
            pieces = groups * (1 if len(runs) > 1 else cuts_of_plane(bits, channels))
            share = width // pieces
            cuts = [cut for number in range(pieces) for cut in chunks(share, number * share)]
            for at, held, size in cuts:
                found.append(
                    Chunk(bits, byte + at, held, size, at, byte + width, width // 2, len(parts))
                )
                parts += [Part(place + run * width + at, held, size) for run in range(each)]
            place, byte = place + channels, byte + channels * bits // 8
        return cls(tuple(found), tuple(parts))


def codes_of_bytes(bits: int) -> int:
    """Return the codes that a byte of their first plane holds; 1 of numbers."""
    return max(1, 8 // planes(bits)[0])


def cuts_of_plane(bits: int, channels: int) -> int:
    """Return in how many pieces the bytes of a run's first plane are cut: halves, which share those of the second, if they fill products."""
    return len(planes(bits)) if channels // codes_of_bytes(bits) >= 2 * MIN_SIZE else 1


class Operand(NamedTuple):
    """How one side is multiplied by the decode kernel.

    Attributes:
        side: where it lies; tile: tokens of a tile.
        fold: how scales apply: "none", "page" or "tile" (keys: of the page, or of groups of tokens), "token" (values: of
            each token), or "element" where none of these fits: each number gets its own before it is multiplied.
        groups: of numbers with scales of their own: of a tile's tokens (keys, fold "tile"), or of channels (values, "token").
        dtype: of the products, by name.
        isa: as in Queries; 0 or less for instructions that any target and the interpreter takes.
        cut: of the codes; offsets: of the keys' offsets.
        boost: weights times scales of values are multiplied by it.
    """

    side: SideLayout
    tile: int
    fold: str
    groups: int
    dtype: str
    isa: int
    cut: Cut
    offsets: Cut | None = None
    boost: float = 1.0


MAX_TILE = 64  # tokens
TOKEN_GROUPS = 2  # of the keys' scales in a tile: the scales of more would not fit into registers
MIN_SIZE = 16  # a matrix product's smallest inner size
MAX_COLUMNS = 16  # query columns of one program; more are spread over programs
TILE_BYTES = 36 * 1024  # bytes of one tile's keys and values: two of them lie in shared memory
FLOAT_BYTES = 32 * 1024  # the same of numbers unpacked to float32
W_TILE = 32  # most tokens of a tile of the window
FLOATS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}  # Triton's names
TOPS = {"none": 0.0, "float8": Float8Format.top, "signed": SignedFormat.top}  # largest codes
HIP = -1  # the `isa` of AMD GPUs; 0 is the interpreter, NVIDIA's are compute capability * 10


def power_of_two(size: int) -> int:
    """Return the smallest power of two of at least `size`."""
    return 1 << max(0, size - 1).bit_length()


def chunks(width: int, first: int = 0) -> tuple[tuple[int, int, int], ...]:
    """Cut `width` places from `first` on into (start, held, size) with sizes that are powers of two, at least 16.

    The last may hold less than its size; what two chunks would pad as much as one is one.
    """
    whole = max(power_of_two(width), MIN_SIZE)
    half = whole // 2
    if MIN_SIZE < width < whole:
        rest = chunks(width - half, first + half)
        if half + sum(size for _, _, size in rest) < whole:
            return ((first, half, half), *rest)
    return ((first, width, whole),)


def in_float32(spec: PageSpec, query_dtype: torch.dtype) -> bool:
    """Return whether products are in float32: where queries, or numbers of either side, are."""
    return torch.float32 in (query_dtype, *(side.dtype for side in spec.sides))


def tile_tokens(spec: PageSpec, full: bool = False) -> int:
    """Return the tokens of a tile: a page, a part of it, or one or two token groups of the keys' scales."""
    if spec.is_latent:
        return tile_rows(spec, full) * (spec.keys.page_size // token_stride(spec))
    keys = side_layout(spec.keys)
    tile = min(keys.page, MAX_TILE)
    if keys.code == "unsigned":
        tile = min(tile, max(MIN_SIZE, TOKEN_GROUPS * keys.scale_tokens))
    token_bytes = sum(side.token_bits for side in spec.sides) // 8
    most = TILE_BYTES
    if full:  # unpacked numbers go through shared memory
        token_bytes, most = sum(4 * side.head_dim for side in spec.sides), FLOAT_BYTES
    while tile > MIN_SIZE and tile * token_bytes > most:
        tile //= 2
    return tile


def column_block(spec: PageSpec, group: int, chunk: bool, isa: int) -> int:
    """Return the query columns of a program: 8 (not on AMD, whose matrix units have no such shape) or 16.

    More columns need more than two warps' registers, and four warps unpack through shared memory: programs that
    read the same pages from the second-level cache issue no more instructions altogether, and of keys of several
    widths fewer. Chunks of every length share one variant.
    """
    if isa == HIP or spec.is_latent:
        return MAX_COLUMNS
    narrow = max(side.head_dim for side in spec.sides) <= 128
    most = MAX_COLUMNS if narrow and not spec.keys.scheme.wide else 8
    return most if chunk else min(max(8, power_of_two(group)), most)


class Queries(NamedTuple):
    """What a kernel is compiled for beside its pages: how queries are spread over programs, what hides tokens or bends scores.

    Attributes:
        heads, group: kv heads, and query heads of each.
        columns: of a program.
        chunk: whether a row has more than one query; sinks: whether there are sink logits.
        causal, windowed, capped: whether positions, a sliding window and a softcap count; a mask covers causality.
        mask: "none", "bool" or "float".
        bent: whether scores are in log2 before weights are taken from them.
        hides: whether some scores of pages may be -inf.
        full: whether products are in float32.
        isa: HIP on AMD, else compute capability * 10 of the NVIDIA GPU whose instructions unpack codes, or 0: in float32, in the
            interpreter.
    """

    heads: int
    group: int
    columns: int
    chunk: bool
    sinks: bool
    causal: bool
    windowed: bool
    capped: bool
    mask: str
    bent: bool
    hides: bool
    full: bool
    isa: int

    @classmethod
    def of(cls, call: AttentionCall, isa: int) -> "Queries":
        """Return those of a call."""
        spec, mask = call.kv.spec, "none"
        if call.mask is not None:
            mask = "bool" if call.mask.dtype == torch.bool else "float"
        heads, chunk = spec.keys.num_kv_heads, call.query.shape[2] > 1
        group, causal = call.query.shape[1] // heads, chunk and mask == "none"
        windowed, capped = call.sliding_window is not None, call.softcap is not None
        columns, full = column_block(spec, group, chunk, isa), in_float32(spec, call.query.dtype)
        return cls(
            heads,
            group,
            columns,
            chunk,
            call.sink_logits is not None,
            causal,
            windowed,
            capped,
            mask,
            bent=capped or mask == "float",
            hides=causal or windowed or mask != "none",
            full=full,
            isa=min(isa, 0) if full else isa,
        )

    def blocks(self, q_len: int) -> int:
        """Return the programs of one split of a row."""
        return self.heads * -(-self.group * q_len // self.columns)


def product_type(side: SideSpec, full: bool, *, window: bool = False) -> str:
    """Return the dtype of the products with pages of a side, or with its window.

    Codes are multiplied in float16, into which they fit exactly, whatever the model's dtype: it has three bits more
    than bfloat16, and its range is kept by powers of two (see `weight_boost` and the kernel's `shrink`). Exact numbers are
    multiplied in their own dtype. float32 queries (or pages) are multiplied in float32.
    """
    if full:
        return "fp32"
    return FLOATS[side.dtype] if window or side.scheme.is_exact else "fp16"


def _keys_of(spec: PageSpec, queries: Queries) -> Operand:
    """Return how keys are multiplied."""
    side, layout, tile = spec.keys, side_layout(spec.keys), tile_tokens(spec, queries.full)
    fold = "none" if side.scheme.is_exact else "page"
    if layout.code == "unsigned":
        fold = "tile" if layout.scale_tokens >= MIN_SIZE else "element"
    cut = whole(side) if fold == "element" else Cut.of(side.runs)
    return Operand(
        side=layout,
        tile=tile,
        fold=fold,
        groups=max(1, tile // layout.scale_tokens) if fold == "tile" else 1,
        dtype=product_type(side, queries.full),
        isa=queries.isa,
        cut=cut,
        offsets=whole(side),
    )


def _values_of(spec: PageSpec, queries: Queries) -> Operand:
    """Return how values are multiplied: each part lies within one scale's channels, or numbers get their own scales."""
    side, layout = spec.values, side_layout(spec.values)
    bits, channels = side.runs[0]
    width = channels // codes_of_bytes(bits) // cuts_of_plane(bits, channels)
    group = layout.scale_channels
    within = group % width == 0 or (width % group == 0 and group >= MIN_SIZE)
    fold = "none" if side.scheme.is_exact else "token" if within else "element"
    return Operand(
        side=layout,
        tile=tile_tokens(spec, queries.full),
        fold=fold,
        groups=layout.dim // group if fold == "token" else 0,
        boost=1.0 if queries.full else weight_boost(layout),
        dtype=product_type(side, queries.full),
        isa=queries.isa,
        cut=Cut.of(side.runs, max(1, width // group)) if fold == "token" else whole(side),
    )


def weight_boost(side: SideLayout) -> float:
    """Return the power of two that keeps weight * scale in float16's normal range: the largest scale times it stays below 65504."""
    return 2.0 ** max(
        0, int(side.runs[-1].top).bit_length() - (2 if side.code == "unsigned" else 1)
    )


def whole(side: SideSpec) -> Cut:
    """Return how the channels of numbers are cut that are not codes."""
    return Cut.of([(8 * side.dtype.itemsize, side.head_dim)])


class ExactWindow(NamedTuple):
    """How the exact window is multiplied.

    Attributes:
        key_cut, value_cut: how the channels of either side are cut; value_cut: None where weights alone are asked for.
        rank: channels of a latent, behind which a query has those for RoPE keys, which are the values then; or 0.
        tile: tokens at once.
        key_dtype, value_dtype: of the products with either side, by name.
    """

    key_cut: Cut
    value_cut: Cut | None
    rank: int
    tile: int
    key_dtype: str
    value_dtype: str

    @classmethod
    def of(cls, spec: PageSpec, full: bool, *, chooses: bool = False) -> "ExactWindow":
        """Return that of a step, or of the choice of pages before it, which reads no values."""
        keys, values = (whole(side) for side in spec.sides)
        bytes_ = sum(power_of_two(side.head_dim) * side.dtype.itemsize for side in spec.sides)
        wide = spec.is_latent or W_TILE * bytes_ > TILE_BYTES
        rank = spec.keys.head_dim if spec.is_latent else 0
        types = [product_type(side, full, window=True) for side in spec.sides]
        return cls(keys, None if chooses else values, rank, MIN_SIZE if wide else W_TILE, *types)


# -- latents -----------------------------------------------------------------------------------------------------------

BATCH = 4  # products of a part of latents: one for each warp
PARTS = (
    2  # of a latent, where scales are of channels: the products of one lie beside the sums of all
)
WORD_BYTES = 32 * 1024  # bytes of one tile of words: two of them lie in shared memory
MAX_PADDED = 1024  # channels of a latent with the padding of its parts
WEIGHT_BOOST = 2.0**15  # keeps weights of at most 1, without scales, in float16's normal range
REDUCED = 32 * 1024  # bytes of shared memory that reductions take, and RoPE keys
REDUCED_2_BITS = 72 * 1024  # the same of 2 bits in pages of 64 tokens, as compiled
FLOAT_CHANNEL = 448  # bytes of a channel where int4 and int2 are multiplied in float32


def batched(batch: int, count: int, size: int, dim: int) -> Cut:
    """Cut `dim` channels into `count` equal parts of a batch each, whose products have `size` channels."""
    part = Part(0, size, max(MIN_SIZE, power_of_two(size)), batch, dim)
    return Cut((), (part,) * count)


def latent_cut(spec: PageSpec) -> Cut:
    """Cut the latents of `spec`: a product of a part for each group of scales, or more where groups are few."""
    rank, scheme = spec.keys.head_dim, spec.keys.scheme
    by_channel = scheme.code == "unsigned"
    size = power_of_two(rank)
    if scheme.scale_group and not by_channel:
        size = scheme.scale_group[1]
    least = BATCH * (PARTS if by_channel else 1)
    while size % (2 * MIN_SIZE) == 0 and power_of_two(-(-rank // size)) < least:
        size //= 2
    pieces = power_of_two(-(-rank // size))
    batch = min(BATCH, pieces)
    return batched(batch, pieces // batch, size, rank)


def padded_rank(spec: PageSpec) -> int:
    """Return the channels of a latent with the padding of its parts."""
    return sum(part.batch * part.size for part in latent_cut(spec).parts)


class Latents(NamedTuple):
    """How tiles of latents and RoPE keys are read and multiplied.

    Attributes:
        side: where they lie; fold: how scales apply: "none", "channel" or "token", which they are of.
        tile: tokens of a tile.
        stride: tokens between the places of a row of a tile. Where a page has fewer words than a product needs rows, the
            rows of several places lie one below another: copies are places of a word that are rows of a tile.
        rows: of a tile, each of whose tokens is one place of a row.
        step: places whose scores move the softmax at once; share: those of them that share a scale by channel.
        cut, rope: of the latents and of the RoPE keys; whole: of the latents where a load takes both parts, or None.
        rope_code: as `code`, of RoPE keys.
        boost: weights are multiplied by it.
        dtype, rope_dtype: of the products, by name.
        isa: as in Queries.
    """

    side: SideLayout
    fold: str
    tile: int
    stride: int
    copies: int
    rows: int
    step: int
    share: int
    cut: Cut
    rope: Cut
    whole: Cut | None
    rope_code: str
    boost: float
    dtype: str
    rope_dtype: str
    isa: int


def token_stride(spec: PageSpec) -> int:
    """Return the tokens between the places of a row of a tile: the words of a page, or more where those are too few."""
    return max(MIN_SIZE, spec.keys.page_size // side_layout(spec.keys).places)


def tile_rows(spec: PageSpec, full: bool) -> int:
    """Return the rows of a tile, a part of a page."""
    rows = 32
    places = side_layout(spec.keys).places
    # more tokens leave no registers for their scores, or no shared memory for their numbers in float32
    if places > 2 or full:
        rows = MIN_SIZE
    width = padded_rank(spec) * (spec.keys.dtype.itemsize if places == 1 else 2)
    while rows > MIN_SIZE and rows * width > WORD_BYTES:
        rows //= 2
    return min(rows, token_stride(spec))


def latent_bytes(spec: PageSpec, full: bool, isa: int) -> int:
    """Return the most bytes of shared memory that a program of the decode kernel takes over latents.

    In 16 bits a tile of words, the queries and reductions; in float32 also the numbers of a tile, as keys and as values. What
    compiled kernels take is at most that, and over keys and values at most what any GPU has (tests/backends/test_triton_compiled.py).
    """
    padded, rope = padded_rank(spec), spec.values.head_dim
    rows = tile_rows(spec, full)
    if isa == HIP:
        both = full and spec.keys.scheme.code in ("signed", "float8")  # places of a word
        window = 2 * MIN_SIZE * padded * (4 if full else 2)  # as keys and as values
        return max(window, rows * padded * (4 if full else 2) * (2 if both else 1), 16 * 1024)
    queries = MAX_COLUMNS * (padded + rope) * (4 if full else 2)
    if not full:
        most = (spec.keys.scheme.bits, spec.keys.page_size) == (2, 64)
        return 32 * padded * 2 + queries + (REDUCED_2_BITS if most else REDUCED)
    if spec.keys.scheme.code == "unsigned":
        return max(FLOAT_CHANNEL * padded, 64 * 1024)
    return 2 * tile_tokens(spec, full) * padded * 4 + queries + rows * rope * 4


def _latents(spec: PageSpec, queries: Queries) -> Latents:
    """Return how pages of latents are read."""
    latent, rope = spec.sides
    side, page, code = side_layout(latent), latent.page_size, latent.scheme.code
    cut, fold = latent_cut(spec), {"none": "none", "unsigned": "channel"}.get(code, "token")
    part = cut.parts[0]
    by_channel = fold == "channel"
    stride = token_stride(spec)
    at_once = min(4, page // stride)
    rope_size = max(MIN_SIZE, power_of_two(-(-rope.head_dim // part.batch)))
    both = by_channel and len(cut.parts) == 2 and part.held == part.size
    return Latents(
        side=side,
        fold=fold,
        tile=tile_tokens(spec, queries.full),
        stride=stride,
        copies=stride * side.places // page,
        rows=tile_rows(spec, queries.full),
        step=at_once,
        share=max(1, min(at_once, side.scale_tokens // stride)) if by_channel else 1,
        cut=cut,
        rope=batched(part.batch, 1, rope_size, rope.head_dim),
        whole=batched(part.batch, 1, 2 * part.size, latent.head_dim) if both else None,
        rope_code=rope.scheme.code,
        boost=1.0 if queries.full else WEIGHT_BOOST if by_channel else weight_boost(side),
        dtype=product_type(latent, queries.full),
        rope_dtype=product_type(rope, queries.full),
        isa=queries.isa,
    )


# -- the choice of pages -----------------------------------------------------------------------------------------------

CHOICE_WARPS = 4  # as of any kernel that asks for no other number
CHOICE_TOKENS = 256  # of the pages that a program scores at once


class KeyWords(NamedTuple):
    """What of a page's keys is read, and where it lies: all channels, or words of the first channels whose codes lie together.

    Attributes:
        side: where the keys of whole pages lie.
        indexed: whether the pages are an index, which holds the words that are read one after the other.
        row: bytes or numbers of a token, as far as they are there; cut: where those are that are read.
        group: tokens that share scales and offsets, which are a unit: a page, where its channels have an offset alone.
        runs: codes of a byte; width: bytes or numbers of a run.
        part: bytes or numbers of a word; words: words of the section. Of codes in planes all these are of the first plane.
        turn: words from one to the one that RoPE turns with it (page_summary.turned_by), or 0.
        read: words that are read; slots: places for them, a power of two.
        pages: pages of a tile.
        dtype: of the products with pages, by name; isa: as in Queries.
    """

    side: SideLayout
    indexed: bool
    row: int
    cut: Cut
    group: int
    runs: int
    width: int
    part: int
    words: int
    turn: int
    read: int
    slots: int
    pages: int
    dtype: str
    isa: int


def key_words(spec: PageSpec, queries: Queries, indexed: bool) -> KeyWords:
    """Return what is read of the keys of pages (layout "rows"), or of an index of them (page_summary.part_fields)."""
    keys, side = spec.keys, side_layout(spec.keys)
    bits, channels = keys.runs[0]
    runs = codes_of_bytes(bits)
    row, width = side.size, channels // runs
    part = len(word_channels(keys)[0]) // runs
    words, second = -(-width // part), width
    read = min(summary_words(keys), words)
    if indexed:  # whole words, one after the other
        size = 1 if keys.scheme.bits else keys.dtype.itemsize
        row, second = 4 * summary_words(keys) // size, 4 * words
    # a warp has a whole unit at least; products in float32 go through shared memory, where more have no room
    pages = CHOICE_WARPS if queries.full else max(CHOICE_WARPS, CHOICE_TOKENS // side.page)
    slots = max(power_of_two(read), MIN_SIZE // part)
    chunk = Chunk(bits, 0, slots * part, slots * part, 0, second, width // 2, 0)
    return KeyWords(
        side=side,
        indexed=indexed,
        row=row,
        cut=Cut((chunk,), ()),
        group=side.offset_tokens or side.page,
        runs=runs,
        width=width,
        part=part,
        words=words,
        turn=turned_by(keys),
        read=read,
        slots=slots,
        pages=pages,
        dtype=product_type(keys, queries.full),
        isa=queries.isa,
    )


# -- a launch ----------------------------------------------------------------------------------------------------------


def operands(spec: PageSpec, queries: Queries) -> tuple[Operand, Operand] | tuple[Latents, None]:
    """Return how both sides of pages are multiplied; of latents the first says it of both. spec: layout "rows"."""
    if spec.is_latent:
        return _latents(spec, queries), None
    return _keys_of(spec, queries), _values_of(spec, queries)


PROGRAMS = 132 * 8  # that fill a large GPU: 8 on each of 132 multiprocessors, and
LATENT_PROGRAMS = 132 * 2  # over latents, where each takes half of the registers
MIN_TILES = 4  # tiles that a split should have at least
MAX_SPLITS, MAX_LATENT_SPLITS = 64, 256


def launch_parameters(spec: PageSpec, queries: Queries) -> tuple[int, int]:
    """Choose (warps, stages) of a decode step; splits by `most_splits`.

    Over latents a warp for each product of a part. Else two warps: four would turn the products into warpgroup ones, which take the unpacked codes through shared
    memory. One warp where a tile has little work or the codes' bits are few (fewer barriers and repeated loads), and
    where nothing else wants its registers: at 128 channels a mask does beside four bits. Four where the accumulators of 16 columns
    would not fit into two warps' registers.
    """
    if spec.is_latent:
        return BATCH, 1 if queries.isa == HIP else 2
    columns, tile = queries.columns, tile_tokens(spec, queries.full)
    dim = max(side.head_dim for side in spec.sides)
    two_bits = any(side.scheme.bits == 2 for side in spec.sides)
    packed = any(0 < side.scheme.bits < 8 for side in spec.sides)
    if columns == 16 and dim > 128:
        num_warps = 4
    elif tile == 16 or (
        packed
        and columns == 8
        and (dim < 128 or (dim == 128 and (two_bits or tile == 32 or queries.mask == "none")))
    ):
        num_warps = 1
    else:
        num_warps = 2
    # one warp hides more behind its own instructions: two stages were up to 8 % faster on an H100 (results/gpu/tuning.jsonl)
    two = num_warps == 1 or queries.isa == HIP
    # keys of several widths, two bits at 256 channels: the third stage costs registers that are not there
    two = two or bool(spec.keys.scheme.wide) or (dim > 128 and two_bits)
    num_stages = 2 if two else 3
    return num_warps, num_stages


def most_splits(spec: PageSpec, programs: int) -> int:
    """Return the splits that fill the GPU where one split takes `programs` programs."""
    if spec.is_latent:
        return max(1, min(MAX_LATENT_SPLITS, -(-LATENT_PROGRAMS // programs)))
    return max(1, min(MAX_SPLITS, PROGRAMS // programs))


# -- devices -----------------------------------------------------------------------------------------------------------

RESERVED = 1024  # bytes of a multiprocessor's shared memory that CUDA keeps for each program


def target_isa(device: torch.device) -> int:
    """Return compute capability * 10 of an NVIDIA device, HIP for an AMD one, 0 for the interpreter."""
    if device.type != "cuda":
        return 0
    if torch.version.hip:
        return HIP
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def shared_memory(device: torch.device) -> int | None:
    """Return the bytes of shared memory that one program may take there, or None where nothing limits it."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return int(properties.shared_memory_per_block)
    # newer versions of torch have it
    optin = getattr(properties, "shared_memory_per_block_optin", None)
    return int(optin or properties.shared_memory_per_multiprocessor - RESERVED)
