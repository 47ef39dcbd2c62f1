"""e4m3 codes and numbers, in every form that Triton code takes them in: the only place that knows a code's bits.

Sizes come from formats.linear.Float8Format. float16 has the same subnormals, FEWER exponents further down: a code's bits
moved to where float16 has exponent and mantissa are the number divided by LIFT. No nan is among the codes.
"""

import triton
import triton.language as tl

from ...formats.linear import SCALE_MAX as _SCALE_MAX
from ...formats.linear import Float8Format

_MANTISSA, _BIAS = Float8Format.mantissa_bits, Float8Format.exponent_bias
FEWER = 15 - _BIAS

SCALE_MAX = tl.constexpr(_SCALE_MAX)  # float16's largest number
MAGIC = tl.constexpr(1.5 * 2.0**23)  # adding it to a float leaves integers, rounded half to even
LIFT = tl.constexpr(2.0**FEWER)
TO_HALF = tl.constexpr(10 - _MANTISSA)  # bits that float16's mantissa has more
FROM_FLOAT = tl.constexpr(23 - _MANTISSA)  # bits that float32's mantissa has more
HALF_STEP = tl.constexpr((1 << (22 - _MANTISSA)) - 1)  # a bit less than half a code's step
EXPONENTS = tl.constexpr(
    (127 - _BIAS) << _MANTISSA
)  # what float32's exponent has more, in units of a code
LEAST_NORMAL = tl.constexpr((128 - _BIAS) << 23)  # of e4m3, as bits of a float32
SUBNORMALS = tl.constexpr(
    2.0 ** (_BIAS - 1 + _MANTISSA)
)  # e4m3's numbers below are multiples of 1 / SUBNORMALS


@triton.jit
def float8_to_float(code):
    """Return the numbers of e4m3 codes (int32 of 0 to 255) as fp32, by arithmetic that any target takes."""
    bits = ((code & 0x80) << 8) | ((code & 0x7F) << TO_HALF)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * LIFT


@triton.jit
def float_to_float8(x):
    """Return e4m3's bits of fp32 numbers within its range, rounded half to even; integer arithmetic, as torch rounds."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + HALF_STEP + ((size >> FROM_FLOAT) & 1)) >> FROM_FLOAT) - EXPONENTS
    below = ((tl.abs(x) * SUBNORMALS + MAGIC) - MAGIC).to(tl.int32)
    return tl.where(size < LEAST_NORMAL, below, normal) | ((bits >> 24) & 0x80)


@triton.constexpr_function
def _by_shifts(WORDS):
    """Return PTX that makes two pairs of float16 numbers of four codes: in order, or where WORDS the low codes first."""
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


@triton.jit
def from_float8(x, DTYPE: tl.constexpr, ISA: tl.constexpr):
    """Return the numbers of bytes of codes; see dequant.unpack."""
    if ISA >= 89:
        return x.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    elif ISA > 0:
        return tl.inline_asm_elementwise(
            _by_shifts(False), "=r,=r,r", args=[x], dtype=tl.float16, is_pure=True, pack=4
        )
    else:
        return float8_to_float(x.to(tl.int32)).to(DTYPE)


@triton.jit
def float16_pairs(x, PTX: tl.constexpr):
    """Return the two float16 numbers that PTX makes of each 16-bit word of x; it takes two words at a time."""
    return tl.inline_asm_elementwise(
        PTX, "=&r,=&r,r", args=[x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
    )


@triton.jit
def float8_pairs(x, ISA: tl.constexpr):
    """Return the low and the high numbers of 16-bit words of two codes, float16; ISA above 0, see words.unpack_words."""
    if ISA >= 89:
        return float16_pairs(
            x,
            """{
            .reg .b32 a;
            .reg .b16 low, high;
            prmt.b32 a, $2, 0, 0x3120;
            mov.b32 {low, high}, a;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
        )
    else:
        return float16_pairs(x, _by_shifts(True))
