"""What PTX instructions do, on arrays of all threads of a program: those that Triton makes of the kernels.

`translate` makes a function of an instruction, which is given a program and the threads that take part (None: all).
Approximate instructions (ex2.approx, div.full) and products of matrices are computed in float64 and rounded once, and so
is fma, whose second rounding may differ by a place in one of 2^29.
"""

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from ptx_memory import WARP
from ptx_text import SIZES, Address, Instruction, Kernel, PtxError, Register

Step = Callable[[Any, Any], None]
NUMBERS = {
    "f16": "f2",
    "f16x2": "f2",
    "bf16": "u2",
    "bf16x2": "u2",
    "s16x2": "i2",
    "e4m3x2": "u1",
    "f32": "f4",
    "f64": "f8",
}


def code_of(kind: str) -> str:
    """Return numpy's type of a PTX type; packed types have that of their halves."""
    if kind == "pred":
        return "?"
    return NUMBERS.get(kind) or ("i" if kind[0] == "s" else "u") + str(SIZES[kind])


# -- arithmetic ------------------------------------------------------------------------------------------------------


def from_bf16(x):
    """Bits of bfloat16 to float32."""
    return (x.astype(np.uint32) << 16).view(np.float32)


def to_bf16(x):
    """float32 to bits of bfloat16, rounded to nearest even; nan becomes 0x7FFF."""
    bits = x.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(x != x, np.uint16(0x7FFF), rounded)


def flush(x):
    """Make float32 subnormals zeros of their sign."""
    small = np.abs(x) < np.finfo(np.float32).tiny
    return np.where(small, np.copysign(np.float32(0), x), x)


def fma(a, b, c):
    """a * b + c of floats."""
    return (a.astype(np.float64) * b + c).astype(a.dtype)


def least(a, b):
    """min; of floats, a number beats nan, and -0 is below +0."""
    if a.dtype.kind != "f":
        return np.minimum(a, b)
    found = np.fmin(a, b)
    zero = (found == 0) & (np.signbit(a) | np.signbit(b)) & (a == b)
    return np.where(zero, -np.abs(found), found)


def most(a, b):
    """max; of floats, a number beats nan, and +0 is above -0."""
    return np.maximum(a, b) if a.dtype.kind != "f" else -least(-a, -b)


def divide(a, b):
    """Division; that of integers truncates, and by zero gives all ones, as GPUs do."""
    if a.dtype.kind == "f":
        return a / b
    zero = b == 0
    safe = np.where(zero, b.dtype.type(1), b)
    quotient = a // safe
    quotient += ((a % safe != 0) & ((a < 0) != (safe < 0))).astype(a.dtype)
    return np.where(zero, ~a.dtype.type(0), quotient)


def widen(x):
    """Integers to those of twice as many bits."""
    return x.astype(f"{x.dtype.kind}{2 * x.itemsize}")


def multiply_high(a, b):
    """The upper half of a product."""
    bits = 8 * a.itemsize
    product = (a.astype(object) * b.astype(object)) >> bits
    return np.array([int(x) % 2**bits for x in product], f"u{a.itemsize}").view(a.dtype)


def shift_left(x, by):
    """shl: shifts by as many bits as there are give 0."""
    bits = 8 * x.itemsize
    return np.where(by < bits, x << (by % bits).astype(x.dtype), x.dtype.type(0))


def shift_right(x, by):
    """shr: shifts by as many bits as there are give 0, or the sign."""
    bits = 8 * x.itemsize
    if x.dtype.kind == "i":
        return x >> np.minimum(by, bits - 1).astype(x.dtype)
    return np.where(by < bits, x >> (by % bits).astype(x.dtype), x.dtype.type(0))


def rotate(low, high, by):
    """shf.l.wrap: the upper word of both, shifted left."""
    both = high.astype(np.uint64) << 32 | low
    return (both >> (32 - (by & 31)).astype(np.uint64)).astype(np.uint32)


def extract(x, start, length):
    """bfe: the field of `length` bits from `start` on, extended by its sign where x is signed."""
    wide = np.int64 if x.dtype.kind == "i" else np.uint64
    start, length = start & 255, (length & 255).astype(np.int64)
    field = x.astype(wide) >> np.minimum(start, 63).astype(wide)
    unused = np.clip(64 - length, 0, 63).astype(wide)
    field = (field << unused) >> unused
    return np.where(length == 0, wide(0), field).astype(x.dtype)


def permute(a, b, selector):
    """prmt: bytes of (b, a) chosen by `selector`, or their signs."""
    table = np.concatenate((a.view(np.uint8).reshape(-1, 4), b.view(np.uint8).reshape(-1, 4)), 1)
    chosen = (selector[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)) & 15
    found = np.take_along_axis(table, (chosen & 7).astype(np.intp), 1)
    found = np.where(chosen > 7, (found.view(np.int8) >> 7).view(np.uint8), found)
    return np.ascontiguousarray(found).view(np.uint32)[:, 0]


def to_integer(x, to: str):
    """Floats to integers, towards zero and clamped; nan becomes 0."""
    limits, x = np.iinfo(to), np.trunc(x.astype(np.float64))
    inside = np.where((x > limits.min) & (x < limits.max), x, 0).astype(to)
    return np.where(
        x <= limits.min, limits.min, np.where(x >= limits.max, limits.max, inside)
    ).astype(to)


def interleave(low, high):
    """Two arrays to one of pairs, the first in the lower bits."""
    return np.ascontiguousarray(np.stack((low, high), 1)).reshape(-1)


def float8_numbers():
    """The numbers of all codes of e4m3, in float16."""
    codes = np.arange(256)
    exponent, low = (codes & 127) >> 3, (codes & 7) / 8
    size = np.where(exponent > 0, (1 + low) * 2.0 ** (exponent - 7), low * 2.0**-6)
    size = np.where(codes & 127 == 127, np.nan, size)
    return np.where(codes > 127, -size, size).astype(np.float16)


FLOAT8 = float8_numbers()


# -- across the lanes of a warp --------------------------------------------------------------------------------------


def by_warp(x):
    """Rows of the lanes of each warp."""
    return x.reshape(-1, WARP)


def shuffle_from(mode: str, thread, by, limits):
    """Return the thread that each thread reads by shfl; its own where that is not one of its segment."""
    lane, by, limits = thread % WARP, by.astype(np.int64) & 31, limits.astype(np.int64)
    segment, limit = limits >> 8 & 31, limits & 31
    first = lane & segment
    last = first | (limit & ~segment)
    if mode == "up":
        source = lane - by
        inside = source >= last
    else:
        source = lane ^ by if mode == "bfly" else first | (by & ~segment)
        inside = source <= last
    return thread - lane + np.where(inside, source, lane)


@cache
def fragments():
    """Where elements [16, 16] of A and [16, 8] of B lie among (register, lane, half of the register)."""
    lane = np.arange(WARP)
    group, pair = lane >> 2, 2 * (lane & 3)
    a, b = np.zeros((16, 16), np.intp), np.zeros((16, 8), np.intp)
    for half in range(2):
        for register in range(4):
            at = register * 2 * WARP + 2 * lane + half
            a[group + 8 * (register & 1), pair + half + 8 * (register >> 1)] = at
            if register < 2:
                b[pair + half + 8 * register, group] = at
    return a, b


def elements(registers, kind: str, order):
    """Registers of a fragment to float64 tiles [warps, *order's shape]."""
    words = np.stack(registers).reshape(len(registers), -1, WARP).swapaxes(0, 1)
    halves = np.ascontiguousarray(words).view(code_of(kind)).reshape(len(words), -1)
    x = halves[:, order]
    return (from_bf16(x) if kind == "bf16" else x).astype(np.float64)


def multiply_matrices(kind: str, a, b, c):
    """mma.m16n8k16: A B + C in float32; registers of A and B hold pairs of `kind`."""
    places = fragments()
    product = np.matmul(elements(a, kind, places[0]), elements(b, kind, places[1]))
    # registers of C: (rows, rows + 8) x two columns
    parts = product.reshape(-1, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, -1)
    return [
        (part + one.view(np.float32)).astype(np.float32) for part, one in zip(parts, c, strict=True)
    ]


# -- instructions that compute -----------------------------------------------------------------------------------------

# opcode's beginning: (result and operands: t the instruction's type, w twice as wide, u 32 bits, p predicates; function)
SIMPLE: dict[str, tuple[str, Callable[..., Any]]] = {
    "add": ("ttt", operator.add),
    "sub": ("ttt", operator.sub),
    "mul": ("ttt", operator.mul),
    "mul.hi": ("ttt", multiply_high),
    "mul.wide": ("wtt", lambda a, b: widen(a) * widen(b)),
    "mad.lo": ("tttt", lambda a, b, c: a * b + c),
    "mad.wide": ("wttw", lambda a, b, c: widen(a) * widen(b) + c),
    "fma": ("tttt", fma),
    "div": ("ttt", divide),
    "div.full": ("ttt", lambda a, b: (a.astype(np.float64) / b).astype(a.dtype)),
    "abs": ("tt", np.abs),
    "neg": ("tt", operator.neg),
    "min": ("ttt", least),
    "max": ("ttt", most),
    "and": ("ttt", operator.and_),
    "or": ("ttt", operator.or_),
    "xor": ("ttt", operator.xor),
    "not": ("tt", operator.invert),
    "shl": ("ttu", shift_left),
    "shr": ("ttu", shift_right),
    "shf.l.wrap": ("uuuu", rotate),
    "bfe": ("ttuu", extract),
    "prmt": ("uuuu", permute),
    "popc": ("ut", lambda x: np.bitwise_count(x).astype(np.uint32)),
    "ex2.approx": ("tt", lambda x: np.exp2(x.astype(np.float64)).astype(x.dtype)),
    "selp": ("tttp", lambda a, b, p: np.where(p, a, b)),
    "mov": ("tt", np.asarray),
    "setp.eq": ("ptt", operator.eq),
    "setp.ne": ("ptt", lambda a, b: (a < b) | (a > b) if a.dtype.kind == "f" else a != b),
    "setp.neu": ("ptt", operator.ne),
    "setp.lt": ("ptt", operator.lt),
    "setp.le": ("ptt", operator.le),
    "setp.gt": ("ptt", operator.gt),
    "setp.ge": ("ptt", operator.ge),
    "setp.num": ("ptt", lambda a, b: (a == a) & (b == b)),
}
# parts of an opcode that change nothing here
HINT_NAMES = "rn lo uni sync aligned cg ca global shared shared::cta param ftz rzi"
HINTS = frozenset(HINT_NAMES.split())


def translate(one: Instruction, kernel: Kernel) -> Step:
    """Return what carries out an instruction; guarded ones for the threads whose predicate says so."""
    make = HANDLERS.get(one.parts[0], simple)
    step = make(one, kernel)
    if one.guard is None:
        return step
    guard, negated = one.guard, one.negated

    def guarded(program, mask):
        taken = program.taken(guard, negated)
        step(program, taken if mask is None else taken & mask)

    return guarded


def refuse(one: Instruction, known: tuple[str, ...]):
    """Raise for parts of an opcode that are neither types nor known."""
    unknown = {*one.parts[1:]} - SIZES.keys() - HINTS - {*known}
    if unknown:
        raise PtxError(f"unknown instruction {'.'.join(one.parts)}: {unknown}")


@cache
def key_of(parts: tuple[str, ...]) -> str:
    """Return the longest key of SIMPLE that an opcode begins with."""
    keys = [key for key in SIMPLE if key.split(".") == [*parts[: key.count(".") + 1]]]
    if not keys:
        raise PtxError(f"unknown instruction {'.'.join(parts)}")
    return max(keys, key=len)


def simple(one: Instruction, kernel: Kernel) -> Step:
    """Translate by SIMPLE."""
    key = key_of(one.parts)
    refuse(one, (*key.split("."),))
    letters, function = SIMPLE[key]
    kind = one.types[-1]
    kinds = {"t": kind, "u": "b32", "p": "pred", "w": f"{kind[0]}{16 * SIZES[kind]}"}
    to, *given = one.operands
    sources = [
        source(kernel, o, kinds[letter]) for letter, o in zip(letters[1:], given, strict=True)
    ]
    function = of_numbers(function, kind, letters, "ftz" in one.parts)
    pair = to if isinstance(to, tuple) else (to,)
    halves = kind in ("f16x2", "bf16x2") and letters[0] == "p"

    def step(program, mask):
        found = function(*(program.read(place) for place in sources))
        for number, register in enumerate(pair):
            program.write(register, found[number::2] if halves else found, mask)

    return step


def of_numbers(
    function: Callable[..., Any], kind: str, letters: str, flushed: bool
) -> Callable[..., Any]:
    """Let a function of float32 compute in bfloat16, or without subnormals, if that is what it is given."""
    before = from_bf16 if kind.startswith("bf16") else flush if flushed else None
    if before is None:
        return function
    after = to_bf16 if before is from_bf16 else flush
    own = [letter == "t" for letter in letters]

    def computed(*given):
        found = function(
            *(before(x) if is_own else x for is_own, x in zip(own[1:], given, strict=True))
        )
        return after(found) if own[0] else found

    return computed


def source(kernel: Kernel, operand, kind: str) -> tuple[int, int, str]:
    """Return what Program.read takes: a place, the bytes that count of it, and their type."""
    if isinstance(operand, str):
        named = {"global_smem": 0} | kernel.places
        operand = kernel.special(operand) if operand.startswith("%") else named[operand]
    if isinstance(operand, int):
        bits = int(operand != 0) if kind == "pred" else operand
        operand = kernel.constant(bits, SIZES[kind])
    return operand.place, SIZES[kind], code_of(kind)


# -- instructions of other forms -------------------------------------------------------------------------------------


def move(one: Instruction, kernel: Kernel) -> Step:
    """mov, also between a register and the registers of its parts."""
    to, of = one.operands
    size = SIZES[one.types[-1]]
    if isinstance(to, tuple):
        place, part = source(kernel, of, one.types[-1]), size // len(to)

        def step(program, mask):
            parts = program.read(place).view(f"u{part}").reshape(-1, len(to))
            for number, register in enumerate(to):
                program.write(register, parts[:, number].copy(), mask)

    elif isinstance(of, tuple):
        places = [source(kernel, item, f"b{8 * size // len(of)}") for item in of]

        def step(program, mask):
            parts = np.stack([program.read(place) for place in places], 1)
            program.write(to, parts.view(f"u{size}")[:, 0], mask)

    else:
        return simple(one, kernel)
    return step


def convert(one: Instruction, kernel: Kernel) -> Step:
    """cvt."""
    refuse(one, ())
    to, of = one.types[-2:]
    target, *given = one.operands
    places = [source(kernel, operand, of) for operand in given]
    read = {"bf16": from_bf16, "e4m3x2": FLOAT8.__getitem__}.get(of, np.asarray)
    code = code_of(to)

    def number(x):
        if of in NUMBERS and to not in NUMBERS:
            return to_integer(x, code)
        x = np.trunc(x) if "rzi" in one.parts else x
        return to_bf16(x) if to.startswith("bf16") else x.astype(code)

    def step(program, mask):
        found = [number(read(program.read(place))) for place in places]
        program.write(target, found[0] if len(found) == 1 else interleave(*reversed(found)), mask)

    return step


def address_of(kernel: Kernel, operand: Address) -> Callable[[Any], Any]:
    """Return what gives addresses [threads] in a program."""
    size = SIZES[operand.base.kind] if isinstance(operand.base, Register) else 4
    place = source(kernel, operand.base, f"b{8 * size}")
    offset = np.array(operand.offset % 2 ** (8 * size), f"u{size}")
    return lambda program: program.read(place) + offset


def items(operand):
    """Return the registers of a vector, or the one."""
    return operand if isinstance(operand, tuple) else (operand,)


def load(one: Instruction, kernel: Kernel) -> Step:
    """ld."""
    refuse(one, ("v2", "v4"))
    kind, to, line = one.types[-1], items(one.operands[0]), one.line
    size, code = SIZES[kind], code_of(kind)
    address, space = address_of(kernel, one.operands[1]), one.space

    def step(program, mask):
        loaded = program.spaces[space].load(program, line, address(program), size, len(to), mask)
        for register, bits in zip(to, loaded, strict=True):
            program.write(register, bits.view(code), mask)

    return step


def store(one: Instruction, kernel: Kernel) -> Step:
    """st."""
    refuse(one, ("v2", "v4"))
    address, space, line = address_of(kernel, one.operands[0]), one.space, one.line
    kind = f"b{8 * SIZES[one.types[-1]]}"
    places = [source(kernel, value, kind) for value in items(one.operands[1])]

    def step(program, mask):
        values = [program.read(place) for place in places]
        program.spaces[space].store(program, line, address(program), values, mask)

    return step


def copy(one: Instruction, kernel: Kernel) -> Step:
    """cp.async, its commits and waits."""
    refuse(one, ("async", "commit_group", "wait_group"))
    if "commit_group" in one.parts:
        return lambda program, mask: program.commit()
    if "wait_group" in one.parts:
        return lambda program, mask: program.wait(one.operands[0])
    size = one.operands[2]
    to, of = (address_of(kernel, operand) for operand in one.operands[:2])
    given = source(kernel, one.operands[3] if len(one.operands) > 3 else size, "b32")

    def step(program, mask):
        program.copy(one.line, to(program), of(program), size, program.read(given), mask)

    return step


def load_matrix(one: Instruction, kernel: Kernel) -> Step:
    """ldmatrix: each 8 lanes give the rows of a matrix of 8 x 8 halves."""
    refuse(one, ("m8n8", "x1", "x2", "x4", "trans"))
    to, address = items(one.operands[0]), address_of(kernel, one.operands[1])

    def step(program, mask):
        program.together(one.line, mask)
        givers = program.givers(len(to), mask)
        rows = program.spaces["shared"].load(program, one.line, address(program), 8, 2, givers)
        matrices = np.stack(rows, 1).view(np.uint16).reshape(-1, 4, 8, 8)
        if "trans" in one.parts:
            matrices = matrices.swapaxes(2, 3)
        for number, register in enumerate(to):
            words = np.ascontiguousarray(matrices[:, number]).view(np.uint32)
            program.write(register, words.reshape(-1), mask)

    return step


def store_matrix(one: Instruction, kernel: Kernel) -> Step:
    """stmatrix."""
    refuse(one, ("m8n8", "x1", "x2", "x4", "trans"))
    address, of = address_of(kernel, one.operands[0]), items(one.operands[1])
    places = [source(kernel, operand, "b32") for operand in of]

    def step(program, mask):
        program.together(one.line, mask)
        matrices = np.zeros((program.threads // WARP, 4, 8, 8), np.uint16)
        for number, place in enumerate(places):
            matrix = program.read(place).view(np.uint16).reshape(-1, 8, 8)
            matrices[:, number] = matrix.swapaxes(1, 2) if "trans" in one.parts else matrix
        rows = matrices.reshape(-1, 8).view(np.uint64)
        givers = program.givers(len(of), mask)
        where = address(program)
        program.spaces["shared"].store(program, one.line, where, [rows[:, 0], rows[:, 1]], givers)

    return step


def shuffle(one: Instruction, kernel: Kernel) -> Step:
    """shfl."""
    refuse(one, ("up", "bfly", "idx"))
    to, *given = one.operands
    value, by, limits, members = (source(kernel, operand, "b32") for operand in given)

    def step(program, mask):
        program.together(one.line, mask, members)
        places = shuffle_from(one.parts[2], program.lanes, program.read(by), program.read(limits))
        program.write(to, program.read(value)[places], mask)

    return step


def reduce_warp(one: Instruction, kernel: Kernel) -> Step:
    """redux: over the lanes of each warp, for all of them."""
    refuse(one, ("add", "min", "max"))
    to, value, given = one.operands
    place, members = source(kernel, value, one.types[-1]), source(kernel, given, "b32")
    reduce = {"add": np.add, "min": np.minimum, "max": np.maximum}[one.parts[2]].reduce

    def step(program, mask):
        program.together(one.line, mask, members)
        lanes = by_warp(program.read(place))
        program.write(to, np.repeat(reduce(lanes, 1, dtype=lanes.dtype), WARP), mask)

    return step


def multiply(one: Instruction, kernel: Kernel) -> Step:
    """mma of pairs of 16 bits with sums in float32."""
    refuse(one, ("m16n8k16", "row", "col"))
    if one.types not in (["f32", kind, kind, "f32"] for kind in ("f16", "bf16")):
        raise PtxError(f"unknown types of {'.'.join(one.parts)}")
    to, *factors = one.operands
    places = [[source(kernel, operand, "b32") for operand in factor] for factor in factors]

    def step(program, mask):
        program.together(one.line, mask)
        given = [[program.read(place) for place in factor] for factor in places]
        for register, found in zip(to, multiply_matrices(one.types[1], *given), strict=True):
            program.write(register, found, mask)

    return step


def barrier(one: Instruction, kernel: Kernel) -> Step:
    """bar.sync 0, at which programs stop by themselves, and bar.warp.sync."""
    refuse(one, ("warp",))
    if "warp" not in one.parts:
        if one.operands != [0] or one.guard is not None:
            raise PtxError("a barrier of some of the threads")
        return nothing
    members = source(kernel, one.operands[0], "b32")

    def step(program, mask):
        program.together(one.line, mask, members)
        program.new_turn(mask)

    return step


def leave(one: Instruction, kernel: Kernel) -> Step:
    """bra and ret, which programs follow by themselves."""
    refuse(one, ())
    return nothing


def nothing(program, mask):
    """Do nothing."""


HANDLERS: dict[str, Callable[[Instruction, Kernel], Step]] = {
    "mov": move,
    "cvt": convert,
    "ld": load,
    "st": store,
    "cp": copy,
    "ldmatrix": load_matrix,
    "stmatrix": store_matrix,
    "shfl": shuffle,
    "redux": reduce_warp,
    "mma": multiply,
    "bar": barrier,
    "bra": leave,
    "ret": leave,
}
