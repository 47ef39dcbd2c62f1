"""The Triton kernels compiled for GPUs that are not here: instructions of the loop over pages, spills, shared memory.

The budgets are the project's speed promise as far as it can be kept without a GPU: an int4 cache is read at the
speed of memory only if unpacking takes no more instructions than the multiprocessor can issue meanwhile.
"""

import json
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from paged_inputs import page_spec
from paths import TESTS

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed (pip install -e '.[gpu]')"
)

# [arch, format, head_dim, group] -> instructions of the loop per stored number, rounded up; lower them with the code
BUDGETS = json.loads((TESTS / "triton_budgets.json").read_text())
SHARED = {"sm_80": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227}  # KiB per program
QUICK = {("int4", 128), ("int8", 128), ("int2_mixed+int2_rotated", 128)}
spec_of = partial(page_spec, heads=8, key_dim=128, dtype=torch.bfloat16)


def variants():
    for arch, name, dim, group, budget in BUDGETS:
        quick = arch == "sm_90" and group == 4 and (name, dim) in QUICK
        marks = () if quick else pytest.mark.slow
        yield pytest.param(arch, name, dim, group, budget, marks=marks)


def decode(spec, arch="sm_90", **options):
    import aot
    import sass

    return sass.read_cubin(aot.compile_decode(spec, arch, **options))


@pytest.mark.parametrize(("arch", "name", "dim", "group", "budget"), variants())
def test_decode_loop_keeps_its_budget(arch, name, dim, group, budget):
    from sass import instructions_per_number

    spec = spec_of(*name.split("+"), key_dim=dim)
    code = decode(spec, arch, group=group)
    assert code.count("LDL", "STL") == 0
    # outside of the loop, once per program: what ptxas of one or the other version leaves there
    assert code.spills <= (32 if "int2" in name else 8)
    assert code.shared <= SHARED[arch] * 1024
    assert code.count("LDGSTS") > 0
    assert any(op.startswith("LDGSTS") and op.endswith(".128") for op in code.loop)
    bytewise = {op for op in code.loop if op.startswith(("LDG", "LDS")) and ".U8" in op}
    assert bytewise <= ({"LDG.E.U8"} if "mixed" in name else set())  # a page's order of channels
    assert code.count("I2F") == 0
    assert instructions_per_number(code, spec, group) <= budget


@pytest.mark.parametrize(
    "pair",
    [
        ("int8", "int4"),
        *(pytest.param(p, marks=pytest.mark.slow) for p in (("exact", "int4"), ("fp8", "exact"))),
    ],
    ids=str,
)
def test_decode_of_mixed_formats_does_not_spill(pair):
    assert decode(spec_of(*pair)).spills == 0


OPTIONS = {
    "chunk-of-3": {"q_len": 3},
    "chunk-of-16": {"q_len": 16},
    "bool-mask": {"mask_dtype": torch.bool},
    "float-mask": {"mask_dtype": torch.bfloat16},
    "softcap-window-sinks": {
        "softcap": True,
        "sliding_window": True,
        "sinks": True,
    },
}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(one, marks=[pytest.mark.slow] * (name in ("chunk-of-16", "bool-mask")))
        for name, one in OPTIONS.items()
    ],
    ids=OPTIONS,
)
def test_decode_compiles_with_every_option(options):
    code = decode(spec_of("int4"), **options)
    assert code.spills == 0
    assert any(op.startswith("LDGSTS") and op.endswith(".128") for op in code.loop)


@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str
)
def test_decode_compiles_for_every_query_dtype(dtype):
    code = decode(spec_of("int4", dtype=dtype), query_dtype=dtype)
    assert len(code.loop) > 100
    assert code.shared <= SHARED["sm_90"] * 1024


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("page", [16, 32, 128, 256])
@pytest.mark.parametrize("name", ["exact", "int8", "int4"])
def test_decode_of_every_page_size_does_not_spill(name, page, arch):
    assert decode(spec_of(name, page_size=page), arch).spills == 0


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("int4", None),
        *(pytest.param(n, None, marks=pytest.mark.slow) for n in ("exact", "fp8", "int8", "int2")),
        pytest.param("int2_mixed", "int3_rotated", marks=pytest.mark.slow),
    ],
)
def test_kernels_compile_for_amd(name, values):
    """Not checked further: the tables and counts are NVIDIA's."""
    import aot

    spec = spec_of(name, values)
    assert "mfma" in aot.compile_decode(spec, "gfx942").asm["amdgcn"]
    assert aot.compile_seal_pair(spec, "gfx942").asm["amdgcn"]


@pytest.mark.parametrize(
    "pair",
    [
        ("int4", None),
        ("int2_mixed", "int3_rotated"),
        pytest.param(("fp8", None), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_seal_rounds_every_step_and_does_not_spill(pair):
    """No fused multiply-add and no approximate division: the bytes are those of the definition."""
    import aot
    import sass

    kernel = aot.compile_seal_pair(spec_of(*pair), "sm_90")
    assert "div.rn.f32" in kernel.asm["ptx"]
    assert "fma" not in kernel.asm["ptx"]
    assert "div.full" not in kernel.asm["ptx"]
    assert sass.read_cubin(kernel).spills == 0


@pytest.mark.parametrize("arch", ["sm_80", "gfx942"])
def test_small_kernels_compile(arch):
    import aot

    kind = "cubin" if arch.startswith("sm_") else "amdgcn"
    for values in ("int4", "int2_rotated"):
        assert aot.compile_combine(spec_of("int4", values, key_dim=96), arch).asm[kind]
    assert aot.compile_append_pair(arch, 96, 64).asm[kind]
