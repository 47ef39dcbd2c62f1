"""Run the Triton kernels in Triton's interpreter, in a process of its own.

TRITON_INTERPRET is read when triton is imported, and the tests of compiled kernels need the compiler in the same
pytest process. `call` therefore hands pickled arguments to a worker process that was started with the variable set.
"""

import multiprocessing
import os
import pickle
import re
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import pytest
import torch
from packaging.version import Version

from kv_hf.formats import key_scheme
from kv_hf.spec import PageSpec, PageWrite, SideSpec

_pool = None


def why_not():
    """The reason why the interpreter does not run here, or None."""
    try:
        triton = Version(version("triton"))
    except PackageNotFoundError:
        return "triton is not installed (pip install -e '.[gpu]'; wheels exist for Linux)"
    if triton < Version("3.9") and Version(version("numpy")) >= Version("2.4"):
        return f"the interpreter of triton {triton} fails in loops of dynamic length with numpy 2.4"
    return None


needs_interpreter = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def _run(pickled):
    function, args, options = pickle.loads(pickled)
    return pickle.dumps(function(*args, **options))


def _start():
    """Prepare the worker: one thread, and a third less time in the interpreter.

    Each call of a jitted function inside a kernel replaces all functions of triton.language anew, though they are
    replaced already while a kernel runs; an interpreter that works otherwise is left as it is.
    """
    import inspect

    import triton.language as tl
    from triton.runtime import interpreter

    torch.set_num_threads(1)
    if not hasattr(interpreter, "_LangPatchScope"):
        return
    replace_all = interpreter._patch_lang

    def replace_once(fn):
        modules = [value for value in fn.__globals__.values() if inspect.ismodule(value)]
        found = [module for module in modules if module in (tl, tl.core)]
        if found and not any(tl.core.is_builtin(module.load) for module in found):
            return interpreter._LangPatchScope()
        return replace_all(fn)

    interpreter._patch_lang = replace_once


def call(function, *args, **options):
    """Return function(*args, **options), computed in the worker; exceptions come through."""
    global _pool
    if _pool is None:
        _pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        os.environ["TRITON_INTERPRET"] = "1"
        try:
            _pool.submit(_start).result()
        finally:
            del os.environ["TRITON_INTERPRET"]
    return pickle.loads(_pool.submit(_run, pickle.dumps((function, args, options))).result())


# -- functions that run in the worker --------------------------------------------------------------------------


@contextmanager
def scratch():
    """Fill scratch with nan before a launch; yield what the launches were given; counters must end as zeros."""
    from kv_hf.backends.triton.direct import Scratch

    made, real = [], Scratch.parts

    def poisoned(self):
        *parts, counters = real(self)
        for part in parts:
            part.fill_(float("nan"))
        made.append((*parts, counters))
        return made[-1]

    Scratch.parts = poisoned
    try:
        yield made
    finally:
        Scratch.parts = real
    assert not any(bool(counters.any()) for *_, counters in made)


def attend(asked, *, splits=2):
    """The decode kernel as compiled for no GPU in particular; splits: 0 for what a launch would take."""
    from kv_hf.backends.triton import decode
    from kv_hf.backends.triton.direct import Plan

    rule = Plan.splits
    Plan.splits = (lambda self, width: splits) if splits else rule
    try:
        with scratch():
            return decode.paged_attention(asked)
    finally:
        Plan.splits = rule


@contextmanager
def compiled_for(isa):
    """Kernels as compiled for an NVIDIA GPU, their PTX carried out by `ptx`."""
    import triton.language as tl

    from kv_hf.backends.triton import support

    def inline_asm(text, constraints, args, dtype, is_pure, pack):
        words = [np.ascontiguousarray(x.handle.data).view(np.uint32).ravel() for x in args]
        kinds = dtype if isinstance(dtype, tuple) else (dtype,)
        # words that hold `pack` numbers
        each = [pack * (2 if kind == tl.float16 else 1) // 4 for kind in kinds]
        outs = iter(ptx(text, words[0], sum(each), *words[1:]))
        tiles = []
        for kind, count in zip(kinds, each, strict=True):
            both = np.ascontiguousarray(np.stack([next(outs) for _ in range(count)], -1))
            tile = both.view(np.float16 if kind == tl.float16 else np.uint8)
            tile = tile.reshape(args[0].handle.data.shape)
            shape = tl.block_type(kind, args[0].type.shape)
            tiles.append(tl.core.tensor(type(args[0].handle)(tile, kind), shape))
        return tuple(tiles) if isinstance(dtype, tuple) else tiles[0]

    kept = tl.inline_asm_elementwise
    tl.inline_asm_elementwise = inline_asm
    support.target_isa, real = (lambda where: isa), support.target_isa
    try:
        yield
    finally:
        tl.inline_asm_elementwise = kept
        support.target_isa = real


def attend_with_ptx(asked, *, isa, splits=2):
    """The decode kernel as compiled for an NVIDIA GPU."""
    with compiled_for(isa):
        return attend(asked, splits=splits)


def choose(asked, *, splits=3):
    """The kernel that chooses pages: (block table, numbers of pages, masses of pages, masses of windows)."""
    from kv_hf.backends.triton import selection

    rule, selection.splits = selection.splits, lambda *args: (16, splits)
    try:
        with scratch() as made:
            table, counts = selection.choose_pages(asked)
    finally:
        selection.splits = rule
    [(_, _, masses, _)] = made
    masses = masses.view(asked.kv.rows, -1)
    windows = masses.gather(1, asked.kv.num_pages[:, None].long())[:, 0]
    return table, counts, masses[:, : asked.kv.block_table.shape[1]], windows


def choose_with_ptx(asked, *, isa):
    """The kernel that chooses pages as compiled for an NVIDIA GPU."""
    with compiled_for(isa):
        return choose(asked)


def unpack_every_byte(bits):
    """Whether the PTX of each unpacking gives the right float16 bits for all 256 bytes."""
    from kv_hf.backends.triton import dequant

    every = np.arange(256, dtype=np.uint8)
    words = every.view(np.uint32)

    def run(text, runs):
        outs = ptx(text, words, 2 * runs)
        pairs = [np.stack(outs[2 * r : 2 * r + 2], -1) for r in range(runs)]
        return [np.ascontiguousarray(pair).view(np.float16).ravel() for pair in pairs]

    if bits < 8:
        runs = run(dequant._take_in_place.fn(bits), 8 // bits)
        right = [
            x.view(np.uint16) == ((every >> (bits * r)) & (2**bits - 1)) << (bits * r)
            for r, x in enumerate(runs)
        ]
        return bool(np.all(right))
    signed = run(dequant._signed.fn(False), 1)[0]
    shifted = run(dequant._by_shifts.fn(False), 1)[0]
    wanted = torch.from_numpy(every).view(torch.float8_e4m3fn).half().numpy()
    finite = (every & 0x7F) != 0x7F
    return bool(
        np.all(signed == every.view(np.int8))
        and np.array_equal(shifted[finite].view(np.uint16), wanted[finite].view(np.uint16))
    )


# -- a small PTX machine ---------------------------------------------------------------------------------------


def ptx(text, word, outputs, *words):
    """Carry out the PTX of an inline assembly on uint32 inputs; the operands after the outputs are the inputs."""
    registers = {f"${outputs + i}": one for i, one in enumerate((word, *words))}

    def value(name):
        name = name.strip()
        return registers[name] if name in registers else np.uint32(int(name, 0))

    def halves(name):
        x = np.asarray(value(name), np.uint32)
        return np.ascontiguousarray(np.broadcast_to(x, word.shape)).view(np.float16)

    for line in re.findall(r"([a-z][\w.]*)\s+([^;{}]+);", text):
        op, operands = line[0].split(".")[0], line[1].split(",")
        if line[0].startswith("reg"):
            continue
        target, *rest = operands
        if op == "mov":
            result = value(rest[0])
        elif op == "prmt":
            result = _permute(value(rest[0]), value(rest[1]), int(rest[2], 0))
        elif line[0].endswith("f16x2"):
            function = {"sub": np.subtract, "mul": np.multiply}[op]
            result = function(halves(rest[0]), halves(rest[1])).view(np.uint32)
        else:
            function = {
                "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "shr": np.right_shift,
                "shl": np.left_shift,
            }[op]  # fmt: skip
            result = function(value(rest[0]), value(rest[1]))
        registers[target.strip()] = result
    return [np.asarray(registers[f"${i}"], np.uint32) for i in range(outputs)]


def _permute(a, b, selector):
    both = np.uint64(a) | (np.uint64(b) << np.uint64(32))
    result = np.uint32(0)
    for place in range(4):
        nibble = (selector >> (4 * place)) & 15
        assert nibble < 8, "the sign replication of prmt is not emulated"
        byte = (both >> np.uint64(8 * nibble)) & np.uint64(255)
        result = result | (byte.astype(np.uint32) << np.uint32(8 * place))
    return result


# -- sealing and appending ------------------------------------------------------------------------------------------


def seal(tokens, jobs, fields, spec):
    """Seal one side in the worker; returns (fields, damaged), as the worker's tensors are copies.

    The other side holds no numbers, or exact ones where `spec` is the second side.
    """
    from kv_hf.backends.triton import seal as kernels

    second = spec.side in ("values", "k_rope")
    exact = key_scheme("exact").resolve(spec.page_size, 16, "keys")
    other = SideSpec(
        "keys", exact, spec.num_kv_heads, 16 if second else 0, spec.page_size, spec.dtype
    )
    others = {
        name: torch.zeros(len(fields["codes"]), *s, dtype=d)
        for name, (s, d) in other.fields.items()
    }
    plain = tokens.new_zeros(*tokens.shape[:3], other.head_dim)
    damaged = torch.zeros((), dtype=torch.uint8)
    sides, windows, pages = [(one, two)[:: -1 if second else 1] for one, two in (
        (spec, other), (tokens, plain), (fields, others)
    )]  # fmt: skip
    kernels.write(PageWrite(windows, pages, PageSpec(*sides), damaged, {}, jobs))
    return fields, damaged.bool()


def write_pair(windows, new, starts, skips, jobs, fields, spec, damaged):
    """Append and seal both sides in the worker; returns (windows, fields, damaged)."""
    from kv_hf.backends.triton import seal as kernels

    kernels.write(PageWrite(windows, fields, spec, damaged, {}, jobs, new, starts, skips))
    return windows, fields, damaged


def dense(kv, side):
    """Write a side out in the worker; memory that the kernel leaves alone holds nan.

    The interpreter cuts off where it turns float32 into bfloat16; here it rounds to even, as the GPUs do.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    from kv_hf.backends.triton.dense import dense_side

    builder = interpreter.InterpreterBuilder
    cut = builder.create_fp_trunc

    def rounded(self, x, wanted):
        if wanted.scalar != tl.bfloat16 or x.dtype.scalar != tl.float32:
            return cut(self, x, wanted)
        bits = torch.from_numpy(np.ascontiguousarray(x.data)).bfloat16().view(torch.int16)
        return type(x)(bits.numpy().view(np.uint16), tl.bfloat16)

    builder.create_fp_trunc = rounded
    torch.use_deterministic_algorithms(True)
    try:
        return dense_side(kv, side)
    finally:
        torch.use_deterministic_algorithms(False)
        builder.create_fp_trunc = cut
