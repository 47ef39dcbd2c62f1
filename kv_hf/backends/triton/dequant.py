"""Turn bytes of codes into numbers that a matrix unit takes, without interleaving channels or tokens, and undo rotations.

Decides the instructions; knows nothing of pages, scales or softmax. A byte holds the codes of places i, i + n,
.. (n = bytes of the run, see quant/codec.py), so a tile of bytes unpacks into one tile per place, its `runs`. Codes of 3
and 6 bits lie in two planes of bytes. Sizes of e4m3 come from formats.linear.Float8Format. float16 has the same subnormals, FEWER
exponents further down: a code's bits moved to where float16 has exponent and mantissa are the number divided by LIFT. No nan is
among the codes. Rotated values are sums and differences of two numbers, in the order of quant/codec.py.
"""

import triton
import triton.language as tl

from ...formats.linear import SCALE_MAX as _SCALE_MAX
from ...formats.linear import Float8Format
from .direct import Fields

_MANTISSA, _BIAS = Float8Format.mantissa_bits, Float8Format.exponent_bias
FEWER = 15 - _BIAS

SCALE_MAX = tl.constexpr(_SCALE_MAX)  # float16's largest number
MAGIC = tl.constexpr(1.5 * 2.0**23)  # adding it to a float leaves integers, rounded half to even
LIFT = tl.constexpr(2.0**FEWER)
TO_HALF = tl.constexpr(10 - _MANTISSA)  # bits that float16's mantissa has more
FROM_FLOAT = tl.constexpr(23 - _MANTISSA)  # bits that float32's mantissa has more
HALF_STEP = tl.constexpr((1 << (22 - _MANTISSA)) - 1)  # a bit less than half a code's step
# what float32's exponent has more, in units of a code
EXPONENTS = tl.constexpr((127 - _BIAS) << _MANTISSA)
LEAST_NORMAL = tl.constexpr((128 - _BIAS) << 23)  # of e4m3, as bits of a float32
# e4m3's numbers below are multiples of 1 / SUBNORMALS
SUBNORMALS = tl.constexpr(2.0 ** (_BIAS - 1 + _MANTISSA))


@triton.constexpr_function
def dtype_of(NAME):
    """Return the dtype of a name."""
    return {"fp32": tl.float32, "fp16": tl.float16, "bf16": tl.bfloat16}[NAME]


@triton.jit
def below(lane, HELD: tl.constexpr):
    """Say which numbers of `lane`, 0 to a power of two, are below HELD; where all are, loads need no mask."""
    if lane.numel > HELD:
        return lane < HELD
    else:
        return tl.full(lane.shape, True, tl.int1)


@triton.jit
def top_codes(place, SIDE: tl.constexpr):
    """Return the largest code at each place of a SideLayout's order, fp32."""
    top = tl.full(place.shape, SIDE.runs[0].top, tl.float32)
    for run in tl.static_range(1, len(SIDE.runs)):
        top = tl.where(place < SIDE.runs[run].place, top, SIDE.runs[run].top)
    return top


@triton.jit
def row_of(tensor, row, head):
    """Return the pointer to token 0 of a Strided, of one row (int64) and head."""
    return tensor.pointer + row * tensor.row + head * tensor.head


@triton.jit
def move_to_block(fields, block, SIDE: tl.constexpr):
    """Move Fields of page 0 and head 0 on to number `block` (page * heads + head, int64) of pages and heads."""
    codes = fields.codes + block * (SIDE.page * SIDE.size // SIDE.places)
    scale, offset, order = fields.scale, fields.offset, fields.order + block * SIDE.dim
    if SIDE.code != "none":
        scale += block * ((SIDE.page // SIDE.scale_tokens) * (SIDE.dim // SIDE.scale_channels))
        if SIDE.offset_tokens > 0:
            groups: tl.constexpr = SIDE.dim // SIDE.offset_channels
            offset += block * ((SIDE.page // SIDE.offset_tokens) * groups)
    return Fields(codes, scale, offset, order)


@triton.jit
def float_to_float8(x):
    """Return e4m3's bits of fp32 numbers within its range, rounded half to even; integer arithmetic, as torch rounds."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + HALF_STEP + ((size >> FROM_FLOAT) & 1)) >> FROM_FLOAT) - EXPONENTS
    below = ((tl.abs(x) * SUBNORMALS + MAGIC) - MAGIC).to(tl.int32)
    return tl.where(size < LEAST_NORMAL, below, normal) | ((bits >> 24) & 0x80)


@triton.jit
def number(x, PLACE: tl.constexpr, CODE: tl.constexpr, BITS: tl.constexpr):
    """Return the numbers that the codes at place PLACE of bytes or words x stand for, fp32, by arithmetic that any target takes."""
    code = (x.to(tl.int32) >> (PLACE * BITS)) & ((1 << BITS) - 1)
    if CODE == "float8":
        bits = ((code & 0x80) << 8) | ((code & 0x7F) << TO_HALF)
        return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * LIFT
    elif CODE == "signed":
        # the low bits of 2^23: quicker than a conversion
        return ((code ^ 128) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
    else:
        return code.to(tl.float32)


# Where the PTX branch leaves an unsigned code in place, run r holds code * 2^(r * bits) * UNIT: the bits of
# a code are the low bits of a float16 subnormal. Matrix units take float16 subnormals exactly (Fasi et al.,
# "Numerical behavior of NVIDIA tensor cores", PeerJ CS 2021), and the factor goes into scales that are there anyway.
UNIT = 2.0**-24


@triton.constexpr_function
def run_unit(RUN, BITS, ISA):
    """Return what the codes of run `RUN` of bytes, or of a place of words, are multiplied by, relative to `tile_unit`."""
    if low_plane(BITS):  # pairs of runs out of bytes of wider codes, see `unpack_planes`
        RUN, BITS = RUN // 2, 2 * low_plane(BITS)
    return 2.0 ** (RUN * BITS % 8) if ISA > 0 and BITS < 8 else 1.0


@triton.constexpr_function
def tile_unit(BITS, ISA):
    """Return what all codes of a tile are multiplied by; unsigned ones of all bits by the same."""
    return UNIT if ISA > 0 and BITS < 8 else 1.0


@triton.jit
def unpack(x, CODE: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr, ISA: tl.constexpr):
    """Unpack a tile of bytes or words into a tile of numbers for every place of them: its runs.

        run[r] = code of place r * tile_unit * run_unit(r)

    Args:
        x: uint8 or int16 codes, or the numbers themselves where CODE is "none"; any shape, of words with an even last size.
        CODE, BITS: as in formats.Scheme.
        DTYPE: dtype of the result; the PTX branch only knows float16.
        ISA: NVIDIA's compute capability * 10; 0 or less for code that any target (and the interpreter) takes.
    Returns: tuple of tensors of x's shape.
    """
    if CODE == "none":
        return (x.to(DTYPE),)
    elif ISA <= 0:
        tiles = ()
        for place in tl.static_range(x.dtype.primitive_bitwidth // BITS):
            tiles = tiles + (number(x, place, CODE, BITS).to(DTYPE),)
        return tiles
    elif CODE == "unsigned" and x.dtype == tl.int16:
        # one place at a time: the others' numbers would fill the registers meanwhile
        tiles = ()
        for place in tl.static_range(16 // BITS):
            tiles = tiles + _run_ptx(x, _take_place(place, BITS), 1)
        return tiles
    elif CODE == "unsigned":
        return _run_ptx(x, _take_in_place(BITS), 8 // BITS)
    elif CODE == "float8" and ISA >= 89 and x.dtype == tl.uint8:
        return (x.to(tl.float8e4nv, bitcast=True).to(DTYPE),)
    else:
        RUNS: tl.constexpr = x.dtype.primitive_bitwidth // 8
        return _run_ptx(x, _of_bytes(CODE, ISA, RUNS > 1), RUNS)


# -- PTX ---------------------------------------------------------------------------------------------------------------


@triton.constexpr_function
def _halves(RUNS):
    return (tl.float16,) * RUNS


@triton.jit
def _run_ptx(x, TEXT: tl.constexpr, RUNS: tl.constexpr):
    """Return RUNS tiles of float16 that TEXT makes of x, of which it takes 32 bits at a time."""
    PACK: tl.constexpr = 32 // x.dtype.primitive_bitwidth
    # the constraints of registers that it makes of one; it may write some before it has read
    REGISTERS: tl.constexpr = "=&r," * (RUNS * PACK // 2) + "r"
    DTYPES: tl.constexpr = _halves(RUNS)
    return tl.inline_asm_elementwise(TEXT, REGISTERS, [x], DTYPES, True, PACK)


@triton.constexpr_function
def _of_bytes(CODE, ISA, WORDS):
    """Return PTX that makes two pairs of float16 numbers of four codes: in order, or where WORDS, those of low bytes first."""
    if CODE == "signed":
        return _signed(WORDS)
    return _BY_HARDWARE if ISA >= 89 else _by_shifts(WORDS)


_BY_HARDWARE = tl.constexpr("""{
    .reg .b32 a;
    .reg .b16 low, high;
    prmt.b32 a, $2, 0, 0x3120;
    mov.b32 {low, high}, a;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
    }""")


@triton.constexpr_function
def _by_shifts(WORDS):
    """Return PTX of e4m3's codes for GPUs that do not convert them, see `_of_bytes`."""
    # prmt puts two codes each into the high bytes of a register's halves
    first, second = (0x2404, 0x3414) if WORDS else (0x1404, 0x3424)
    lift = (15 + FEWER << 10) * 0x10001
    kept = (0x7F << 10 - _MANTISSA) * 0x10001
    return f"""{{
        .reg .b32 a, b, s, t, c;
        prmt.b32 a, $2, 0, {first:#06x};
        prmt.b32 b, $2, 0, {second:#06x};
        and.b32 s, a, 0x80008000;
        and.b32 t, b, 0x80008000;
        shr.u32 a, a, {8 - (10 - _MANTISSA)};
        shr.u32 b, b, {8 - (10 - _MANTISSA)};
        and.b32 a, a, {kept:#x};
        and.b32 b, b, {kept:#x};
        or.b32 a, a, s;
        or.b32 b, b, t;
        mov.b32 c, {lift:#x};
        mul.rn.f16x2 $0, a, c;
        mul.rn.f16x2 $1, b, c;
        }}"""


@triton.constexpr_function
def _signed(WORDS):
    """Return PTX of int8, see `_of_bytes`: code + 128 becomes the low bits of the float16 number 1024 + (code + 128)."""
    first, second = (0x4240, 0x4341) if WORDS else (0x4140, 0x4342)
    return f"""{{
        .reg .b32 a, b, c;
        xor.b32 a, $2, 0x80808080;
        mov.b32 c, 0x64806480;
        prmt.b32 b, a, 0x64646464, {first:#06x};
        sub.rn.f16x2 $0, b, c;
        prmt.b32 b, a, 0x64646464, {second:#06x};
        sub.rn.f16x2 $1, b, c;
        }}"""


@triton.constexpr_function
def _take_in_place(BITS):
    """PTX that leaves the codes of four bytes where they lie, two words of two float16 subnormals for each run."""
    runs = 8 // BITS
    lines = [".reg .b32 a, b;"]
    lines += [
        f"prmt.b32 {to}, ${2 * runs}, 0, {at};" for to, at in (("a", "0x4140"), ("b", "0x4342"))
    ]
    for run in range(runs):
        mask = ((1 << BITS) - 1 << run * BITS) * 0x10001
        lines += [f"and.b32 ${2 * run + i}, {word}, {mask:#010x};" for i, word in enumerate("ab")]
    return "{\n" + "\n".join(lines) + "\n}"


@triton.constexpr_function
def _take_place(PLACE, BITS):
    """PTX that leaves the codes of one place of words where they lie in their byte, as `_take_in_place` does."""
    mask = ((1 << BITS) - 1 << PLACE * BITS % 8) * 0x10001
    return f"{{ .reg .b32 a; shr.u32 a, $1, {PLACE * BITS // 8 * 8}; and.b32 $0, a, {mask}; }}"


# -- codes in planes ---------------------------------------------------------------------------------------------------


@triton.constexpr_function
def low_plane(BITS):
    """Return the bits of the first of the two planes (formats.base.planes) of codes of BITS bits; 0 where they lie in one."""
    return {3: 2, 6: 4}.get(BITS, 0)


@triton.jit
def unpack_planes(low, even, odd, LOW: tl.constexpr, DTYPE: tl.constexpr, ISA: tl.constexpr):
    """Unpack codes of 3 or 6 bits into 4 or 2 runs of numbers, as `unpack` does: one of each code of a byte of the first plane.

    Args:
        low: uint8, the LOW low bits of 8 / LOW codes each.
        even, odd: uint8, the other bits of twice as many codes, where the first, third, .. belong to `low`, or the second,
            fourth, ..; the other one is 0.
    """
    if ISA > 0:
        a, b = tl.inline_asm_elementwise(
            _pair_planes(LOW), "=&r,=&r,r,r,r", args=[low, even, odd], dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4
        )  # fmt: skip
    else:
        KEEP: tl.constexpr = 0x33 if LOW == 2 else 0x0F
        TOP: tl.constexpr = 0x44 if LOW == 2 else 0x30
        high = even | (odd >> (LOW // 2))
        a, b = (low & KEEP) | ((high << LOW) & TOP), ((low >> LOW) & KEEP) | (high & TOP)
    a = unpack(a, "unsigned", 2 * LOW, DTYPE, ISA)
    b = unpack(b, "unsigned", 2 * LOW, DTYPE, ISA)
    runs = ()
    for run in tl.static_range(len(a)):
        runs = runs + (a[run], b[run])
    return runs


@triton.constexpr_function
def _pair_planes(LOW):
    """PTX that puts the high bits of codes above their low ones, for four bytes at once: those of even places, and of odd ones."""
    keep, top = (0x33333333, 0x44444444) if LOW == 2 else (0x0F0F0F0F, 0x30303030)
    return f"""{{
        .reg .b32 a, b, c;
        shr.u32 c, $4, {LOW // 2};
        or.b32 c, c, $3;
        and.b32 a, $2, {keep:#x};
        shl.b32 b, c, {LOW};
        and.b32 b, b, {top:#x};
        or.b32 $0, a, b;
        shr.u32 a, $2, {LOW};
        and.b32 a, a, {keep:#x};
        and.b32 b, c, {top:#x};
        or.b32 $1, a, b;
        }}"""


# -- rotations ---------------------------------------------------------------------------------------------------------


@triton.constexpr_function
def stages(SIZE):
    """Return how many times two numbers are summed in a transform of SIZE numbers."""
    return SIZE.bit_length() - 1


@triton.jit
def _sum_apart(x, APART: tl.constexpr):
    """Replace numbers of x [any shape] that lie APART in memory order by their sum and their difference."""
    pairs = tl.permute(tl.reshape(x, [x.numel // (2 * APART), 2, APART]), (0, 2, 1))
    first, second = tl.split(pairs)
    pairs = tl.permute(tl.join(first + second, first - second), (0, 2, 1))
    return tl.reshape(pairs, x.shape)


@triton.jit
def unrotate(x, SIZE: tl.constexpr, STEP: tl.constexpr):
    """Transform runs of SIZE numbers of x that lie STEP apart in memory order; all sizes are powers of two."""
    for stage in tl.static_range(stages(SIZE)):
        x = _sum_apart(x, STEP << stage)
    return x
