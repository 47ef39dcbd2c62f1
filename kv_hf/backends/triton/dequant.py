"""Turn bytes of codes into numbers that a matrix unit takes, without interleaving channels or tokens.

Decides the instructions; knows nothing of pages, scales or softmax. A byte holds the codes of places i, i + n,
.. (n = bytes of the run, see quant/codec.py), so a tile of bytes unpacks into one tile per place, its `runs`. Codes of three bits lie in two planes of bytes.
"""

import triton
import triton.language as tl

from .float8 import from_float8

# Where the PTX branch leaves an unsigned code in place, run r holds code * 2^(r * bits) * UNIT: the bits of
# a code are the low bits of a float16 subnormal. Matrix units take float16 subnormals exactly (Fasi et al.,
# "Numerical behavior of NVIDIA tensor cores", PeerJ CS 2021), and the factor goes into scales that are there anyway.
UNIT = 2.0**-24


@triton.constexpr_function
def run_unit(RUN, BITS, ISA):
    """Return what the codes of run `RUN` are multiplied by, relative to `tile_unit`."""
    if BITS == 3:  # unpacked from bytes of two codes of four bits (see `pair_planes`)
        return 16.0 if ISA > 0 and RUN >= 4 else 1.0
    return 2.0 ** (RUN * BITS) if ISA > 0 and BITS < 8 else 1.0


@triton.constexpr_function
def tile_unit(BITS, ISA):
    """Return what all codes of a tile are multiplied by."""
    return UNIT if ISA > 0 and BITS < 8 else 1.0


@triton.jit
def unpack(x, CODE: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr, ISA: tl.constexpr):
    """Unpack a tile into 8 / BITS runs of numbers.

        run[r] = code of place r * tile_unit * run_unit(r)

    Args:
        x: uint8 codes, or the numbers themselves where CODE is "none"; any shape.
        CODE, BITS: as in formats.Scheme.
        DTYPE: dtype of the result; the PTX branch only knows float16.
        ISA: 0 for code that any target (and the interpreter) takes, else NVIDIA's compute capability * 10.
    Returns: tuple of tensors of x's shape.
    """
    if CODE == "none":
        return (x.to(DTYPE),)
    elif CODE == "float8":
        return (from_float8(x, DTYPE, ISA),)
    elif CODE == "signed":
        return (_from_signed(x, DTYPE, ISA),)
    elif ISA > 0 and BITS == 8:
        return (_bytes_in_place(x),)
    elif ISA > 0:
        return _halves_in_place(x) if BITS == 4 else _quarters_in_place(x)
    elif BITS == 8:
        return (x.to(tl.float32).to(DTYPE),)
    elif BITS == 4:
        return ((x & 15).to(tl.float32).to(DTYPE), (x >> 4).to(tl.float32).to(DTYPE))
    else:
        return (
            (x & 3).to(tl.float32).to(DTYPE),
            ((x >> 2) & 3).to(tl.float32).to(DTYPE),
            ((x >> 4) & 3).to(tl.float32).to(DTYPE),
            (x >> 6).to(tl.float32).to(DTYPE),
        )


@triton.jit
def unpack_planes(first, second, third, DTYPE: tl.constexpr, ISA: tl.constexpr):
    """Unpack codes of 3 bits into 8 runs of numbers, as `unpack` does.

    Args:
        first, second: uint8 tiles of the plane of the low two bits, of which a byte holds four runs: the bytes of the even
            runs of eight, and of the odd ones.
        third: of the plane of the third bits, of which a byte holds eight runs.
    """
    a, b = pair_planes(first, third, 0, ISA)
    c, d = pair_planes(second, third, 1, ISA)
    a0, a4 = unpack(a, "unsigned", 4, DTYPE, ISA)
    a2, a6 = unpack(b, "unsigned", 4, DTYPE, ISA)
    a1, a5 = unpack(c, "unsigned", 4, DTYPE, ISA)
    a3, a7 = unpack(d, "unsigned", 4, DTYPE, ISA)
    return (a0, a1, a2, a3, a4, a5, a6, a7)


@triton.jit
def pair_planes(low, high, ODD: tl.constexpr, ISA: tl.constexpr):
    """Put the third bits of codes above their low two: bytes of runs 0 and 4, and of runs 2 and 6, in 4 bits each.

    Args:
        low: uint8, four codes' low two bits; high: uint8, eight codes' third bits, of which those at ODD, ODD + 2, ..
            belong to `low`.
    """
    if ISA > 0:
        return tl.inline_asm_elementwise(
            _pair_planes(ODD), "=&r,=&r,r,r", args=[low, high], dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4
        )  # fmt: skip
    else:
        high = high >> ODD
        return (low & 0x33) | ((high & 0x11) << 2), ((low >> 2) & 0x33) | (high & 0x44)


@triton.constexpr_function
def _pair_planes(ODD):
    """PTX of `pair_planes` for four bytes at once."""
    return f"""{{
        .reg .b32 a, b;
        and.b32 a, $2, 0x33333333;
        and.b32 b, $3, {0x11111111 << ODD:#x};
        shl.b32 b, b, {2 - ODD};
        or.b32 $0, a, b;
        shr.u32 a, $2, 2;
        and.b32 a, a, 0x33333333;
        and.b32 b, $3, {0x44444444 << ODD:#x};
        shr.u32 b, b, {ODD};
        or.b32 $1, a, b;
        }}"""


@triton.jit
def _from_signed(x, DTYPE: tl.constexpr, ISA: tl.constexpr):
    """int8 to numbers: code + 128 becomes the low bits of the float16 number 1024 + (code + 128)."""
    if ISA > 0:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c;
            xor.b32 a, $2, 0x80808080;
            prmt.b32 b, a, 0x64646464, 0x4342;
            prmt.b32 a, a, 0x64646464, 0x4140;
            mov.b32 c, 0x64806480;
            sub.rn.f16x2 $0, a, c;
            sub.rn.f16x2 $1, b, c;
            }""",
            "=r,=r,r",
            args=[x],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        return x.to(tl.int8, bitcast=True).to(tl.float32).to(DTYPE)


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


@triton.jit
def _bytes_in_place(x):
    return tl.inline_asm_elementwise(
        _take_in_place(8), "=&r,=&r,r", args=[x], dtype=tl.float16, is_pure=True, pack=4
    )


@triton.jit
def _halves_in_place(x):
    return tl.inline_asm_elementwise(
        _take_in_place(4), "=&r,=&r,=&r,=&r,r", args=[x], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
    )  # fmt: skip


@triton.jit
def _quarters_in_place(x):
    return tl.inline_asm_elementwise(
        _take_in_place(2), "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r", args=[x],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=4,
    )  # fmt: skip
