"""Latents in chunks of channels: words of codes to numbers, and the places of a word side by side.

A 16-bit word holds codes of one channel and of tokens that lie a page's words apart (see spec.SideSpec), so a tile of
words unpacks into one tile of tokens per place, and may be read along channels and along tokens alike. Tiles are
[chunks of channels, rows of words, channels of a chunk]; knows nothing of pages, splits and softmax.

Where scales and offsets belong to channels, the query gets the scales once per group of tokens, and sums of products get them
once per group: codes stay as they are.

    score  += (q * scale) @ codes + q . offset
    acc    += (weights @ codes) * scale + (sum of weights) * offset
"""

import triton
import triton.language as tl

from .dequant import float8_pairs, float16_pairs, numbers, tile_unit
from .tiles import dtype_of


@triton.constexpr_function
def all_unit(LATENTS):
    """Return what all codes of a tile are multiplied by."""
    return tile_unit(LATENTS.bits, LATENTS.isa)


@triton.constexpr_function
def step_unit(STEP, LATENTS):
    """Return what the codes of the first of the places that are step `STEP` of a tile's are multiplied by besides."""
    place = STEP * LATENTS.copies
    return 2.0 ** (place * LATENTS.bits % 8) if LATENTS.isa > 0 and LATENTS.bits < 8 else 1.0


@triton.jit
def unpack_words(
    x, CODE: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr, ISA: tl.constexpr
):  # fmt: skip
    """Unpack int16 words into 16 / BITS tiles of numbers, code * tile_unit * place_unit(place) in DTYPE.

    Args:
        x: words, or the numbers themselves where CODE is "none"; any shape whose last size is even.
        CODE, BITS: as in formats.Scheme; DTYPE: of the result; the PTX branch only knows float16.
        ISA: 0 for code that any target (and the interpreter) takes, else NVIDIA's compute capability * 10.
    """
    if CODE == "none":
        return (x.to(DTYPE),)
    elif ISA <= 0:
        return numbers(x, 16 // BITS, CODE, BITS, DTYPE)
    elif CODE == "signed":
        return _signed_pairs(x)
    elif CODE == "float8":
        return float8_pairs(x, ISA)
    else:
        # one place at a time: the others' numbers would fill the registers meanwhile
        tiles = ()
        for place in tl.static_range(16 // BITS):
            tiles = tiles + (_place(x, place, BITS),)
        return tiles


@triton.jit
def _halves(x):
    """Split [chunks, rows, 2 * wide] into the first and the last `wide` channels of each chunk."""
    WIDE: tl.constexpr = x.shape[2] // 2
    return tl.split(tl.trans(x.reshape(x.shape[0], x.shape[1], 2, WIDE), (0, 1, 3, 2)))


@triton.jit
def _one_below_another(tiles, COPIES: tl.constexpr):
    """Stack COPIES (1, 2, 4 or 8) tiles [chunks, rows, wide] at a time along their rows."""
    if COPIES == 1:
        return tiles
    elif COPIES == 2:
        return _stack_pairs(tiles)
    elif COPIES == 4:
        return _stack_pairs(_stack_pairs(tiles))
    else:
        return _stack_pairs(_stack_pairs(_stack_pairs(tiles)))


@triton.jit
def _stack_pairs(tiles):
    CHUNKS: tl.constexpr = tiles[0].shape[0]
    ROWS: tl.constexpr = tiles[0].shape[1]
    WIDE: tl.constexpr = tiles[0].shape[2]
    pairs = ()
    for i in tl.static_range(len(tiles) // 2):
        pair = tl.trans(tl.join(tiles[2 * i], tiles[2 * i + 1]), (0, 3, 1, 2))
        pairs = pairs + (pair.reshape(CHUNKS, 2 * ROWS, WIDE),)
    return pairs


@triton.jit
def _signed_pairs(x):
    """int8: code + 128 becomes the low bits of the float16 number 1024 + (code + 128)."""
    return float16_pairs(
        x,
        """{
        .reg .b32 a, b, c;
        xor.b32 a, $2, 0x80808080;
        mov.b32 c, 0x64806480;
        prmt.b32 b, a, 0x64646464, 0x4240;
        sub.rn.f16x2 $0, b, c;
        prmt.b32 b, a, 0x64646464, 0x4341;
        sub.rn.f16x2 $1, b, c;
        }""",
    )


@triton.constexpr_function
def _take_place(PLACE, BITS):
    """PTX that leaves the codes of one place where they lie in their byte: the low bits of float16 subnormals."""
    mask = ((1 << BITS) - 1 << PLACE * BITS % 8) * 0x10001
    return f"{{ .reg .b32 a; shr.u32 a, $1, {PLACE * BITS // 8 * 8}; and.b32 $0, a, {mask}; }}"


@triton.jit
def _place(x, PLACE: tl.constexpr, BITS: tl.constexpr):
    return tl.inline_asm_elementwise(
        _take_place(PLACE, BITS), "=r,r", args=[x], dtype=tl.float16, is_pure=True, pack=2
    )


@triton.jit
def side_by_side(tiles):
    """Put 1, 2 or 4 tiles [chunks, columns, rows] together: [chunks, columns, rows * places], places fastest."""
    PLACES: tl.constexpr = len(tiles)
    whole = tiles[0]
    if PLACES == 2:
        whole = tl.join(tiles[0], tiles[1])
    elif PLACES == 4:
        whole = tl.join(tl.join(tiles[0], tiles[2]), tl.join(tiles[1], tiles[3]))
    return whole.reshape(tiles[0].shape[0], tiles[0].shape[1], tiles[0].shape[2] * PLACES)


@triton.jit
def apart(x, PLACES: tl.constexpr):
    """Undo `side_by_side` for one chunk: [columns, rows * places] to tiles of [columns, rows]."""
    COLUMNS: tl.constexpr = x.shape[0]
    ROWS: tl.constexpr = x.shape[1] // PLACES
    if PLACES == 1:
        return (x,)
    elif PLACES == 2:
        first, second = tl.split(x.reshape(COLUMNS, ROWS, 2))
        return (first, second)
    else:
        even, odd = tl.split(x.reshape(COLUMNS, ROWS, 2, 2))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        return (first, second, third, fourth)


@triton.jit
def sum_of_parts(parts, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Return [columns], the sums of COUNT tiles [columns, rows] from number FIRST on."""
    added = parts[FIRST]
    for i in tl.static_range(FIRST + 1, FIRST + COUNT):
        added += parts[i]
    return tl.sum(added, 1)


@triton.jit
def load_tile(rows, held, RUN: tl.constexpr, CUT: tl.constexpr, HELD: tl.constexpr):
    """Load run RUN of the channels of `rows` [rows], pointers to channel 0, as [chunks, rows, wide]; zeros where there are none.

    CUT: latent_meta_params.Chunks; `held` [rows]: which exist (read where HELD).
    """
    place = tl.arange(0, CUT.wide)[None, None, :]
    first = tl.arange(0, CUT.chunks)[:, None, None] * (CUT.runs * CUT.size)
    channel = first + place + RUN * CUT.size
    where = rows[None, :, None] + channel
    if HELD:
        inside = held[None, :, None] & (place < CUT.size) & (channel < CUT.dim)
        return tl.load(where, mask=inside, other=0)
    elif CUT.size < CUT.wide or CUT.chunks * CUT.runs * CUT.size > CUT.dim:
        return tl.load(where, mask=(place < CUT.size) & (channel < CUT.dim), other=0)
    else:
        return tl.load(where)


@triton.jit
def load_runs(rows, held, CUT: tl.constexpr, HELD: tl.constexpr):
    """Load all runs, see `load_tile`."""
    RUNS: tl.constexpr = CUT.runs
    runs = ()
    for r in tl.static_range(RUNS):
        runs = runs + (load_tile(rows, held, r, CUT, HELD),)
    return runs


@triton.jit
def load_numbers(rows, LATENTS: tl.constexpr):
    """Load a tile's words, `rows` points to channel 0 of each [rows], and unpack them: tiles run by run and place by place."""
    CUT: tl.constexpr = LATENTS.cut
    WHOLE: tl.constexpr = LATENTS.whole
    DTYPE: tl.constexpr = dtype_of(LATENTS.dtype)
    CODE: tl.constexpr = LATENTS.code
    if WHOLE is not None:
        runs = _halves(load_tile(rows, rows, 0, WHOLE, False))
    else:
        runs = load_runs(rows, rows, CUT, False)
    numbers = ()
    for r in tl.static_range(len(runs)):
        places = unpack_words(runs[r], CODE, LATENTS.bits, DTYPE, LATENTS.isa)
        numbers = numbers + (_one_below_another(places, LATENTS.copies),)
    return numbers


@triton.jit
def load_scales(scale, block, token, live, LATENTS: tl.constexpr, GUARD: tl.constexpr):
    """Load the scales of a tile by token, place by place and run by run, each [chunks, rows].

    Args:
        token: [rows], the tokens of place 0 in their page; live: where GUARD, 1, or 0 for zeros.
    """
    CUT: tl.constexpr = LATENTS.cut
    RUNS: tl.constexpr = CUT.runs
    PLACES: tl.constexpr = LATENTS.places
    GROUPS: tl.constexpr = CUT.dim // LATENTS.group
    scales = ()
    if LATENTS.by_token:
        for p in tl.static_range(PLACES):
            for r in tl.static_range(RUNS):
                group = (tl.arange(0, CUT.chunks) * RUNS + r) * CUT.size // LATENTS.group
                at = (block * LATENTS.page + token + p * LATENTS.stride)[None, :] * GROUPS
                where = scale + (at + tl.minimum(group, GROUPS - 1)[:, None])
                if GUARD:
                    there = (tl.zeros(token.shape, tl.int32) < live)[None, :]
                    scales = scales + (tl.load(where, mask=there, other=0.0),)
                else:
                    scales = scales + (tl.load(where),)
    return scales


@triton.jit
def score_rope(
    scores, query, keys, scale, held, CUT: tl.constexpr, CODE: tl.constexpr, HELD: tl.constexpr, ISA: tl.constexpr
):  # fmt: skip
    """Add the products of RoPE keys to scores [chunks, columns, rows]: each chunk takes its part of the channels.

    Args:
        query: [chunks, columns, wide]; keys: [rows], pointers to channel 0 of each token.
        scale: of encoded keys, whose offsets are added elsewhere; held: [rows], which exist (read where HELD).
    """
    x = load_tile(keys, held, 0, CUT, HELD)
    if CODE == "none":
        k = tl.trans(x.to(query.dtype), (0, 2, 1))
        return tl.dot(query, k, scores, input_precision="ieee")
    else:
        # bytes as the low half of words: RoPE keys are few, and words unpack without any exchange between threads
        k = unpack_words(x.to(tl.int16), CODE, 8, query.dtype, ISA)[0]
        product = tl.dot(query, tl.trans(k, (0, 2, 1)), input_precision="ieee")
        return scores + product * scale


@triton.jit
def store_runs(pointers, acc, norm, seen, held, CUT: tl.constexpr):
    """Store runs of acc [chunks, columns, wide] times norm [columns], zeros where not `seen`, where `held`."""
    place = tl.arange(0, CUT.wide)[None, None, :]
    for r in tl.static_range(len(acc)):
        channel = (tl.arange(0, CUT.chunks)[:, None, None] * CUT.runs + r) * CUT.size + place
        inside = held[None, :, None] & (place < CUT.size) & (channel < CUT.dim)
        result = tl.where(seen[None, :, None], acc[r] * norm[None, :, None], 0.0)
        where = pointers[None, :, None] + channel
        tl.store(where, result.to(pointers.dtype.element_ty), mask=inside)


@triton.jit
def load_channels(factors, RUN: tl.constexpr, CUT: tl.constexpr, CACHE: tl.constexpr):
    """Load the scales or offsets of channels, `factors` points to channel 0's, as [chunks, wide]; cut as in `load_tile`."""
    place = tl.arange(0, CUT.wide)[None, :]
    first = tl.arange(0, CUT.chunks)[:, None] * (CUT.runs * CUT.size)
    channel = first + place + RUN * CUT.size
    if CUT.size < CUT.wide or CUT.chunks * CUT.runs * CUT.size > CUT.dim:
        inside = (place < CUT.size) & (channel < CUT.dim)
        return tl.load(factors + channel, mask=inside, other=0, cache_modifier=CACHE)
    else:
        return tl.load(factors + channel, cache_modifier=CACHE)


@triton.jit
def load_factors(scale, offset, block, token, LATENTS: tl.constexpr):
    """Load scales and offsets by channel of a tile's places, group by group and run by run, each [chunks, wide].

    Args:
        token: of the first place, of which there are LATENTS.step, in its page.
    """
    CUT: tl.constexpr = LATENTS.cut
    RUNS: tl.constexpr = CUT.runs
    STEP: tl.constexpr = LATENTS.step
    SHARE: tl.constexpr = LATENTS.share
    factors = ()
    if LATENTS.by_channel:
        for i in tl.static_range(0, STEP, SHARE):
            at = first_factor(block, token + i * LATENTS.stride, LATENTS)
            for r in tl.static_range(RUNS):
                # the hint keeps these loads apart from those of `score_channels`
                by = load_channels(scale + at, r, CUT, ".ca")
                o = load_channels(offset + at, r, CUT, ".ca")
                factors = factors + (by, o)
    return factors


@triton.jit
def first_factor(block, token, LATENTS: tl.constexpr):
    """Return the number of channel 0's scale by channel, of token `token` in page `block`."""
    return (block * (LATENTS.page // LATENTS.group) + token // LATENTS.group) * LATENTS.cut.dim


@triton.jit
def score_offsets(scores, query, offsets, RUN: tl.constexpr, CUT: tl.constexpr):
    """Add query . offsets to scores [chunks, columns, rows], the same in all rows.

    As a matrix product of columns that are all equal: exact products, and no sums across threads.
    """
    shape: tl.constexpr = [query.shape[0], query.shape[2], scores.shape[2]]
    o = load_channels(offsets, RUN, CUT, "").to(query.dtype)
    equal = tl.broadcast_to(o[:, :, None], shape)
    return tl.dot(query, equal, scores, input_precision="ieee")


@triton.jit
def score_channels(
    numbers, query, bias, scale, offset, row_unit, FIRST: tl.constexpr, LATENTS: tl.constexpr
):
    """Score the places from FIRST on of one token group: tiles [chunks, columns, rows], one per place.

    Args:
        numbers: of `load_numbers`; query: run by run, [chunks, columns, wide].
        bias: [chunks, columns, rows], what all scores begin with.
        scale, offset: pointers to channel 0's of the group; row_unit: [rows], the units of a place's rows.
    """
    CUT: tl.constexpr = LATENTS.cut
    SHARE: tl.constexpr = LATENTS.share
    products = ()
    for _ in tl.static_range(SHARE):
        products = products + (tl.zeros(bias.shape, tl.float32),)
    for r in tl.static_range(len(numbers)):
        bias = score_offsets(bias, query[r], offset, r, CUT)
        by = load_channels(scale, r, CUT, "")
        scaled = query[r] * by.to(query[r].dtype)[:, None, :]
        more = ()
        for i in tl.static_range(SHARE):
            k = tl.trans(numbers[r][FIRST + i], (0, 2, 1))
            more = more + (tl.dot(scaled, k, products[i], input_precision="ieee"),)
        products = more
    scores = ()
    for i in tl.static_range(SHARE):
        unit = row_unit * (1.0 / (all_unit(LATENTS) * step_unit(FIRST + i, LATENTS)))
        unit = tl.broadcast_to(unit[None, None, :], bias.shape)
        scores = scores + (tl.fma(products[i], unit, bias),)
    return scores


@triton.jit
def add_channels(
    acc, numbers, parts, held, by, offset, row_unit, FIRST: tl.constexpr, PART: tl.constexpr, LATENTS: tl.constexpr
):  # fmt: skip
    """Add the weighted codes of one token group and run to acc [chunks, columns, wide], in units of boost * tile_unit.

    Args:
        numbers: codes place by place, the group's from FIRST on; parts: weights [columns, rows], from PART on.
        held: [columns], the group's sum of weights; by, offset: [chunks, wide], its scales and offsets.
    """
    SHARE: tl.constexpr = LATENTS.share
    DTYPE: tl.constexpr = dtype_of(LATENTS.dtype)
    product = tl.zeros(acc.shape, tl.float32)
    for i in tl.static_range(SHARE):
        unit = row_unit * (LATENTS.boost / step_unit(FIRST + i, LATENTS))
        w = (parts[PART + i] * unit[None, :]).to(DTYPE)
        w = tl.broadcast_to(w[None, :, :], [acc.shape[0], w.shape[0], w.shape[1]])
        product = tl.dot(w, numbers[FIRST + i], product, input_precision="ieee")
    by = tl.broadcast_to(by.to(tl.float32)[:, None, :], acc.shape)
    held = held * (LATENTS.boost * all_unit(LATENTS))
    return tl.fma(product, by, acc) + held[None, :, None] * offset.to(tl.float32)[:, None, :]
