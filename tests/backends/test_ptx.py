"""The emulated GPU: its instructions against their definitions, and faults that it has to notice (tools/ptx.py)."""

import math
import operator
import re
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from paged_inputs import make_kv, make_query
from triton_machine import attend, call, runs_kernels

from kv_hf.backends.base import AttentionCall

pytest.importorskip("triton")
import emulated_gpu
import ptx

LANES = 64
EDGES = [
    0.0,
    -0.0,
    1.0,
    -1.5,
    math.inf,
    -math.inf,
    math.nan,
    1e-40,
    3e38,
    2.5,
    -2.5,
    65520.0,
    448.0,
]
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}


def run(text, arrays, *, out=4, grid=1):
    """Run `text` on each element of arrays a, b, ..; d is what it makes, `out` bytes. Returns (d's bits, hazards).

    t is the thread, `to` where its d goes, s its word of shared memory, memory the address of all d, and r0 zero.
    """
    result = np.zeros(4096, np.uint8)
    params, loads = "", ""
    for name, array in zip("abc", arrays, strict=False):
        size = array.itemsize
        params += f".param .u64 {name}_in, "
        loads += (
            f".reg .b{8 * size} {name}; ld.param.b64 x, [{name}_in]; mad.wide.u32 x, t, {size}, x; "
        )
        loads += f"ld.global.b{8 * size} {name}, [x];\n"
    kernel = ptx.Kernel(f""".entry k({params}.param .u64 d_out) .reqntid {LANES} {{
        .reg .b32 t; .reg .b32 s; .reg .b64 x; .reg .b64 to; .reg .b64 memory; .reg .pred p; .reg .pred q;
        .reg .b{8 * out} d; .reg .b32 r<9>; .reg .b64 rd<9>; mov.u32 t, %tid.x; shl.b32 s, t, 2; mov.b32 r0, 0;
        {loads}
        ld.param.b64 memory, [d_out]; mad.wide.u32 to, t, {out}, memory;
        {text}
        ret; }}""")
    blocks = {array.ctypes.data: array.nbytes for array in (*arrays, result)}
    hazards = ptx.launch(kernel, (grid, 1, 1), 1024, list(blocks), blocks)
    return result.view(f"u{out}")[:LANES], hazards


def made(text, arrays, out):
    found, hazards = run(f"{text} st.global.b{8 * out} [to], d;", arrays, out=out)
    assert not hazards
    return found


def numbers(kind, seed, most=2**64):
    """Random bits of a type, with its edges."""
    random = np.random.default_rng(seed)
    if kind in DTYPES:
        x = torch.from_numpy(random.standard_normal(LANES) * np.exp(random.uniform(-9, 9, LANES)))
        x[random.permutation(LANES)[: len(EDGES)]] = torch.tensor(EDGES, dtype=torch.float64)
        x = x.to(DTYPES[kind])
        return x.view(getattr(torch, f"int{8 * x.itemsize}")).numpy().view(f"u{x.itemsize}")
    bits = int(kind[1:])
    x = random.integers(0, 2**64, LANES, dtype=np.uint64) % np.uint64(min(most, 2**64 - 1))
    if most > 2**63:
        x[:4] = 0, 2**64 - 1, 1 << (bits - 1), 7
    return x.astype(f"u{bits // 8}")


def signed(x, bits):
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def quotient(a, b):
    return -1 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def field(a, start, length, bits, is_signed):
    value = (a >> start) & ((1 << length) - 1)
    if not is_signed or length == 0:
        return value
    return signed(value, min(length, bits - start)) if start < bits else -(a < 0)


def permuted(a, b, selector):
    both, found = (b << 32) | a, 0
    for place in range(4):
        nibble = selector >> (4 * place) & 15
        byte = both >> (8 * (nibble & 7)) & 0xFF
        found |= (byte if nibble < 8 else 0xFF * (byte >> 7)) << (8 * place)
    return found


# opcode: (operands' types, "n": of at most 40; the result's; definition on Python's integers)
INTEGERS = {
    "add.s32": ("s32 s32", "s32", operator.add),
    "sub.s16": ("s16 s16", "s16", operator.sub),
    "mul.lo.s64": ("s64 s64", "s64", operator.mul),
    "mul.hi.u64": ("u64 u64", "u64", lambda a, b: a * b >> 64),
    "mul.hi.u16": ("u16 u16", "u16", lambda a, b: a * b >> 16),
    "mul.wide.s32": ("s32 s32", "s64", operator.mul),
    "mad.lo.s32": ("s32 s32 s32", "s32", lambda a, b, c: a * b + c),
    "mad.wide.u32": ("u32 u32 u64", "u64", lambda a, b, c: a * b + c),
    "div.s32": ("s32 s32", "s32", quotient),
    "rem.s32": ("s32 s32", "s32", lambda a, b: a - quotient(a, b) * b if b else a),
    "min.s64": ("s64 s64", "s64", min),
    "max.u32": ("u32 u32", "u32", max),
    "neg.s32": ("s32", "s32", operator.neg),
    "not.b32": ("u32", "u32", operator.invert),
    "and.b64": ("u64 u64", "u64", operator.and_),
    "xor.b16": ("u16 u16", "u16", operator.xor),
    "shl.b32": ("u32 n32", "u32", operator.lshift),
    "shr.u16": ("u16 n32", "u16", operator.rshift),
    "shr.s32": ("s32 n32", "s32", operator.rshift),
    "shf.l.wrap.b32": ("u32 u32 n32", "u32", lambda a, b, c: ((b << 32 | a) << (c % 32)) >> 32),
    "bfe.u32": ("u32 n32 n32", "u32", lambda a, b, c: field(a, b, c, 32, False)),
    "bfe.s32": ("s32 n32 n32", "s32", lambda a, b, c: field(a, b, c, 32, True)),
    "prmt.b32": ("u32 u32 u32", "u32", permuted),
    "popc.b64": ("u64", "u32", int.bit_count),
    "cvt.s64.s32": ("s32", "s64", int),
    "cvt.u64.u16": ("u16", "u64", int),
    "cvt.s8.s32": ("s32", "s16", lambda a: signed(a, 8)),
    "cvt.s16.s8": ("s16", "s16", lambda a: signed(a, 8)),
    "mov.b32": ("u32", "u32", int),
}  # fmt: skip


@pytest.mark.parametrize("opcode", INTEGERS)
def test_integers(opcode):
    kinds, to, definition = INTEGERS[opcode]
    kinds, size = kinds.split(), int(to[1:]) // 8
    arrays = [
        numbers(kind.replace("n", "u"), seed, 41 if kind[0] == "n" else 2**64)
        for seed, kind in enumerate(kinds)
    ]
    values = [
        [signed(int(x), int(k[1:])) if k[0] == "s" else int(x) for x in xs]
        for xs, k in zip(arrays, kinds, strict=True)
    ]
    found = made(f"{opcode} d, {', '.join('abc'[: len(kinds)])};", arrays, size)
    assert found.tolist() == [
        definition(*row) % (1 << 8 * size) for row in zip(*values, strict=True)
    ]


def floats(bits, kind):
    size = bits.itemsize
    return torch.from_numpy(bits.copy().view(f"i{size}")).view(DTYPES[kind])


def least(x, y, sign=1):
    """min of PTX, and max for sign -1: numbers beat nan, and -0 is below +0."""
    x, y = sign * x, sign * y
    found = torch.where((x < y) | y.isnan() | ((x == y) & x.signbit()), x, y)
    return sign * found


# opcode: (operands' types, the result's, definition in torch)
FLOATS = {
    "add.f32": ("f32 f32", "f32", torch.add),
    "sub.rn.f32": ("f32 f32", "f32", torch.sub),
    "mul.f16": ("f16 f16", "f16", torch.mul),
    "mul.f64": ("f64 f64", "f64", torch.mul),
    "div.rn.f32": ("f32 f32", "f32", torch.div),
    "fma.rn.f32": ("f32 f32 f32", "f32", lambda a, b, c: (a.double() * b.double() + c.double()).float()),
    "fma.rn.f16": ("f16 f16 f16", "f16", lambda a, b, c: (a.double() * b.double() + c.double()).half()),
    "min.f32": ("f32 f32", "f32", least),
    "max.bf16": ("bf16 bf16", "bf16", lambda x, y: least(x, y, -1)),
    "min.f16": ("f16 f16", "f16", least),
    "abs.bf16": ("bf16", "bf16", torch.abs),
    "neg.f32": ("f32", "f32", torch.neg),
    "ex2.approx.ftz.f32": ("f32", "f32", lambda x: torch.exp2(x.double()).float()),
    "cvt.rn.f16.f32": ("f32", "f16", torch.Tensor.half),
    "cvt.rn.bf16.f32": ("f32", "bf16", torch.Tensor.bfloat16),
    "cvt.f32.bf16": ("bf16", "f32", torch.Tensor.float),
    "cvt.f32.f16": ("f16", "f32", torch.Tensor.float),
    "cvt.rzi.f32.f32": ("f32", "f32", torch.trunc),
}  # fmt: skip


@pytest.mark.parametrize("opcode", FLOATS)
def test_floats(opcode):
    """The sign of zeros included; any nan is like any other."""
    kinds, to, definition = FLOATS[opcode]
    kinds = kinds.split()
    arrays = [numbers(kind, seed) for seed, kind in enumerate(kinds)]
    found = floats(
        made(f"{opcode} d, {', '.join('abc'[: len(kinds)])};", arrays, DTYPES[to].itemsize), to
    ).double()
    wanted = definition(*map(floats, arrays, kinds)).double()
    wanted = (
        torch.where(wanted.abs() < 2.0**-126, 0.0 * wanted, wanted) if "ftz" in opcode else wanted
    )
    assert torch.equal(found.nan_to_num(0.5), wanted.nan_to_num(0.5))
    assert torch.equal(found.signbit() | found.isnan(), wanted.signbit() | wanted.isnan())


def test_conversions_between_floats_and_integers():
    bits = numbers("f32", 0)
    limits = np.iinfo(np.int32)
    wanted = [
        0 if math.isnan(x) else max(limits.min, min(limits.max, int(np.clip(x, -1e18, 1e18))))
        for x in bits.view("f4").tolist()
    ]
    assert made("cvt.rzi.s32.f32 d, a;", [bits], 4).view("i4").tolist() == wanted
    integers = numbers("s32", 1)
    found = made("cvt.rn.f32.s32 d, a;", [integers], 4).view("f4")
    assert np.array_equal(found, integers.view("i4").astype("f4"))


def test_pairs_in_a_register():
    a, b = (numbers("f16", seed) for seed in (0, 1))
    both = [np.stack((x, x[::-1]), 1).copy().view("u4")[:, 0] for x in (a, b)]
    for opcode, function in (("mul.rn.f16x2", torch.mul), ("sub.rn.f16x2", torch.sub)):
        found = floats(made(f"{opcode} d, a, b;", both, 4).view("u2"), "f16")
        wanted = function(*(floats(x.view("u2"), "f16") for x in both))
        assert torch.equal(found.nan_to_num(0.5), wanted.nan_to_num(0.5))
    x, y = numbers("f32", 2), numbers("f32", 3)
    for kind in ("f16", "bf16"):
        found = floats(made(f"cvt.rn.{kind}x2.f32 d, a, b;", [x, y], 4).view("u2"), kind)
        for got, of in ((found[0::2], y), (found[1::2], x)):
            assert torch.equal(
                got.nan_to_num(0.5), floats(of, "f32").to(DTYPES[kind]).nan_to_num(0.5)
            )
    codes = numbers("u16", 4)
    got = floats(made("cvt.rn.f16x2.e4m3x2 d, a;", [codes], 4).view("u2"), "f16")
    wanted = torch.from_numpy(codes.view("u1").copy()).view(torch.float8_e4m3fn).half()
    assert torch.equal(got.nan_to_num(0.5), wanted.nan_to_num(0.5))


@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize("compare", ["eq", "ne", "neu", "lt", "le", "gt", "ge", "num"])
def test_comparisons(compare, kind):
    a, b = numbers(kind, 0), numbers(kind, 1)
    b[::3] = a[::3]
    x, y = floats(a, kind), floats(b, kind)
    number = ~(x.isnan() | y.isnan())
    wanted = {"neu": x != y, "num": number}.get(compare)
    if wanted is None:
        wanted = getattr(operator, compare)(x, y) & number
    found = made(f"setp.{compare}.{kind} p, a, b; selp.b32 d, 1, 0, p;", [a, b], 4)
    assert found.tolist() == wanted.int().tolist()


@pytest.mark.parametrize("limits", [0x1F, 0, 0x181F])
@pytest.mark.parametrize(("mode", "by"), [("up", 3), ("bfly", 5), ("idx", 7)])
def test_shuffles(mode, by, limits):
    wanted = []
    for thread in range(LANES):
        lane, segment, limit = thread % 32, limits >> 8, limits & 31
        first, last = lane & segment, (lane & segment) | (limit & ~segment & 31)
        other = {"up": lane - by, "bfly": lane ^ by, "idx": first | (by & ~segment)}[mode]
        inside = other >= last if mode == "up" else other <= last
        wanted.append(thread - lane + (other if inside else lane))
    found = made(f"shfl.sync.{mode}.b32 d, t, {by}, {limits}, -1;", [], 4)
    assert found.tolist() == wanted


def test_warps_reduce():
    a = numbers("s32", 0)
    rows = a.view("i4").reshape(-1, 32)
    for name in ("add", "min", "max"):
        found = made(f"redux.sync.{name}.s32 d, a, -1;", [a], 4).view("i4").reshape(-1, 32)
        wanted = rows.sum(1, dtype=np.int32) if name == "add" else getattr(rows, name)(1)
        assert (found == wanted[:, None]).all()


def test_matrices():
    """Rows that lanes give become fragments, whose product is that of the matrices; stmatrix is ldmatrix's inverse."""
    random = np.random.default_rng(0)
    a, b = (
        random.standard_normal((16, 16)).astype("f2"),
        random.standard_normal((16, 8)).astype("f2"),
    )
    tiles = [a[:8, :8], a[8:, :8], a[:8, 8:], a[8:, 8:], b[:8], b[8:]]
    words = np.stack(tiles).view("u4").reshape(-1)
    padded = np.zeros(256, "u4")
    padded[: len(words)] = words
    result = np.zeros((4, 32), "f4")
    kernel = ptx.Kernel("""
        .entry k(.param .u64 given, .param .u64 out) .reqntid 32 {
        .reg .b32 t; .reg .b32 at; .reg .b32 u; .reg .b32 r<20>; .reg .b64 x; .reg .b64 y;
        mov.u32 t, %tid.x; ld.param.b64 x, [given]; mad.wide.u32 x, t, 32, x; shl.b32 at, t, 5;
        cp.async.cg.shared.global [at], [x], 16; cp.async.cg.shared.global [at+16], [x+16], 16;
        cp.async.commit_group; cp.async.wait_group 0; bar.sync 0;
        shl.b32 u, t, 4;
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {r0, r1, r2, r3}, [u];
        ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {r4, r5}, [u+512]; bar.sync 0;
        stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [u], {r4, r5}; bar.sync 0;
        ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {r4, r5}, [u];
        mov.b32 r6, 0f3F800000;
        mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {r7, r8, r9, r10}, {r0, r1, r2, r3}, {r4, r5}, {r6, r6, r6, r6};
        ld.param.b64 y, [out]; mad.wide.u32 y, t, 4, y;
        st.global.b32 [y], r7; st.global.b32 [y+128], r8; st.global.b32 [y+256], r9; st.global.b32 [y+384], r10; ret; }""")
    blocks = {array.ctypes.data: array.nbytes for array in (padded, result)}
    assert not ptx.launch(kernel, (1, 1, 1), 1024, list(blocks), blocks)
    found = np.empty((16, 8))
    for register, lane in np.ndindex(4, 32):
        found[lane // 4 + 8 * (register // 2), lane % 4 * 2 + register % 2] = result[register, lane]
    assert np.allclose(found, a.astype("f8") @ b.astype("f8") + 1, rtol=1e-6)


def test_threads_that_part_meet_again():
    """A loop of as many turns as a says, and branches within it."""
    text = """mov.b32 r2, 0; mov.b32 d, 0;
    LOOP: setp.ge.u32 p, r2, a; @p bra DONE;
    add.u32 r2, r2, 1; and.b32 r4, r2, 1; setp.eq.u32 p, r4, 0; @p bra EVEN;
    add.u32 d, d, 100; bra.uni NEXT;
    EVEN: add.u32 d, d, 1;
    NEXT: bra.uni LOOP;
    DONE: shfl.sync.bfly.b32 d, d, 1, 31, -1;"""
    a = numbers("u32", 0, 40)
    turns = [int(a[thread ^ 1]) for thread in range(LANES)]
    assert made(text, [a], 4).tolist() == [(n + 1) // 2 * 100 + n // 2 for n in turns]


# -- faults that are noticed -------------------------------------------------------------------------------------------

NEIGHBOUR = "st.shared.b32 [s], t; {} xor.b32 r1, s, {}; ld.shared.b32 d, [r1];"
COPY = "shl.b32 r1, t, 4; mad.wide.u32 rd1, t, 16, memory; cp.async.cg.shared.global [r1], [rd1], 16; cp.async.commit_group;"
COPY += "{} xor.b32 r1, r1, 16; ld.shared.b32 d, [r1];"
# what threads do: what is told of it, None where it is right
WITHIN_A_PROGRAM = {
    NEIGHBOUR.format("bar.sync 0;", 128): None,
    NEIGHBOUR.format("", 128): "reads shared memory that thread",
    NEIGHBOUR.format("bar.warp.sync -1;", 4): None,
    NEIGHBOUR.format("bar.warp.sync -1;", 128): "reads shared memory that thread",
    NEIGHBOUR.format("", 4): "reads shared memory that thread",
    NEIGHBOUR.format("bar.sync 0;", 128) + "st.shared.b32 [s], 7;": "writes shared memory that thread .* read",
    NEIGHBOUR.format("bar.sync 0;", 128) + "bar.sync 0; st.shared.b32 [s], 7;": None,
    "ld.shared.b32 d, [s];": "nobody wrote",
    "st.shared.b32 [r0], t;": "different values",
    "st.shared.b32 [r0], 5;": None,
    "and.b32 r1, t, 1; add.s32 r1, r1, 0x3f9d6906; st.shared.b32 [r0], r1;": None,  # copies of a sum
    "st.global.b32 [memory], t;": "different values to the same place of global memory",
    COPY.format("cp.async.wait_group 0; bar.sync 0;"): None,
    COPY.format("cp.async.wait_group 0;"): "reads shared memory that thread",
    COPY.format("cp.async.wait_group 1; bar.sync 0;"): "wait_group missing",
    "setp.lt.u32 p, t, 32; @p bra ONE; bar.sync 0; bra.uni END; ONE: bar.sync 0; END:": "different barriers",
}  # fmt: skip


@pytest.mark.parametrize("text", WITHIN_A_PROGRAM)
def test_faults_within_a_program_are_noticed(text):
    _, hazards = run(text, [])
    told = WITHIN_A_PROGRAM[text]
    assert not hazards if told is None else re.search(told, hazards[0])


# what four programs do, r1 the program's number and rd1 its place
BETWEEN_PROGRAMS = {
    "st.global.b32 [rd1], t; bar.sync 0; ld.global.b32 d, [rd1];": None,
    "ld.global.b32 d, [memory]; st.global.b32 [rd1+256], d;": None,
    "st.global.b32 [to], t;": None,  # the same value
    "st.global.b32 [to], r1;": "writes global memory that program 0 wrote",
    "st.global.b32 [rd1], t; bar.sync 0; ld.global.b32 d, [to];": "reads global memory that program 0 wrote",
    "st.global.b32 [rd1], t; ld.global.b32 d, [rd1+256];": "writes global memory that program 0 read",
    "ld.global.b32 d, [to+768]; st.global.b32 [rd1], t;": "writes global memory that program 0 read",
}  # fmt: skip


@pytest.mark.parametrize("text", BETWEEN_PROGRAMS)
def test_faults_between_programs_are_noticed(text):
    _, hazards = run(f"mov.u32 r1, %ctaid.x; mad.wide.u32 rd1, r1, 256, to; {text}", [], grid=4)
    told = BETWEEN_PROGRAMS[text]
    assert not hazards if told is None else re.search(told, hazards[0])


# what faults on a GPU: what is told of it
REFUSED = {
    "ld.global.b32 d, [to+3844];": "global memory that ends at .* out of bounds",
    "ld.global.v4.b32 {r1, r2, r3, r4}, [to];": "misaligned",
    "st.shared.b32 [s+772], t;": "out of bounds",
    "ld.shared.v2.b32 {r1, r2}, [s];": "misaligned",
    "setp.lt.u32 p, t, 5; @p bra OUT; shfl.sync.bfly.b32 d, t, 1, 31, -1; OUT:": "lanes of a warp are missing",
    "shfl.sync.bfly.b32 d, t, 1, 31, 255;": "a part of a warp",
    "tex.1d.v4.f32.s32 d, t;": "unknown instruction",
    "atom.global.add.u32 d, [memory], 1;": "unknown instruction",
    "add.sat.s32 d, t, t;": "unknown instruction",
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_what_a_gpu_would_fault_on_is_refused(text):
    with pytest.raises(ptx.PtxError, match=REFUSED[text]):
        run(text, [])


def test_arguments_are_those_that_a_kernel_was_compiled_for():
    source = SimpleNamespace(
        name="k",
        signature={"x": "*fp32", "pair": ("i32", "constexpr"), "N": "constexpr"},
        constants={(1, 1): 1, (2,): 4},
        attrs={(0,): [["tt.divisibility", 16]]},
    )
    assert emulated_gpu.packed(source, (32, (-1, 1), 4)) == [32, -1]
    wrong = {
        "multiples of": (36, (1, 1), 4),
        "no i32": (32, (2**31, 1), 4),
        "compiled as 1": (32, (1, 2), 4),
        "compiled as 4": (32, (1, 1), 5),
    }
    for told, given in wrong.items():
        with pytest.raises(ptx.PtxError, match=told):
            emulated_gpu.packed(source, given)


# -- faults in the decode kernel -----------------------------------------------------------------------------------------

# edits of its PTX: what is told of it
FAULTS = {
    "none": (lambda text: text, None),
    "no-barriers": (
        lambda text: text.replace("bar.sync", "// bar.sync"),
        "without a barrier|nobody wrote",
    ),
    "no-wait": (
        lambda text: text.replace("cp.async.wait_group", "// cp.async.wait_group"),
        "wait_group missing",
    ),
    "rows-in-one-place": (
        lambda text: text.replace("%nctaid.y", "0"),
        "writes global memory that program . wrote",
    ),
}


@runs_kernels
@pytest.mark.compiled
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_decode_kernel_are_noticed(fault):
    edit, told = FAULTS[fault]
    kv = make_kv("int4", heads=1, rows=[(9, 3), (5, 2)], dtype=torch.float16)
    asked = AttentionCall(make_query(kv, dtype=torch.float16), kv, 0.1)
    kernel = ptx.Kernel

    def faulty(text):
        return kernel(edit(text))

    emulated_gpu.compiled.cache_clear()
    with patch.object(ptx, "Kernel", faulty):
        if told is None:
            call(partial(attend, splits=3), asked)
        else:
            with pytest.raises(AssertionError, match=told):
                call(partial(attend, splits=3), asked)
    emulated_gpu.compiled.cache_clear()


@runs_kernels
@pytest.mark.compiled
def test_a_page_that_is_not_there_is_noticed():
    kv = make_kv("int4", heads=1, rows=[(9, 3)], dtype=torch.float16)
    kv.block_table[0, 4] = len(kv.key_pages["codes"]) + 1000
    with pytest.raises(ptx.PtxError, match="out of bounds"):
        call(attend, AttentionCall(make_query(kv, dtype=torch.float16), kv, 0.1))
