"""The Triton kernels compiled for GPUs that are not here: instructions of loops, spills, shared memory, how they round.

The budgets are the project's speed promise as far as it can be kept without a GPU: an int4 cache is read at the
speed of memory only if unpacking takes no more instructions than the multiprocessor can issue meanwhile.
"""

import json
import re
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from harness import TESTS, slow_but
from paged_inputs import PLAIN, latent_spec, page_spec

from kv_hf.formats import format_names, key_scheme
from kv_hf.spec import ROWS, SideSpec

pytest.importorskip("triton")
import aot
import sass
import triton

from kv_hf.backends.triton import meta_params, pages

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHARED = {"sm_80": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227}  # KiB per program
NAMES = format_names("keys", "values")
LATENTS = format_names("latent")
KEYS = (*NAMES, *PLAIN)
spec_of = partial(page_spec, heads=8, key_dim=128, dtype=BF16)
latents_of = partial(latent_spec, k_rope=None, rank=512, rope=64, page=64, dtype=BF16, layout=ROWS)


# -- attention ---------------------------------------------------------------------------------------------------------

# [arch, format, head_dim, group, instructions of the loop per stored number, rounded up]; lower them with the code
BUDGETS = json.loads((TESTS / "triton_budgets.json").read_text())
# [arch, format, instructions, loads and stores of spilled registers], of rank 512, 64 RoPE channels and pages of 64 tokens
LATENT_BUDGETS = json.loads((TESTS / "triton_latent_budgets.json").read_text())
QUICK = ("int4", "int8", "plain4")
with_its_ptxas = pytest.mark.skipif(
    not triton.__version__.startswith("3.6."),
    reason="budgets are those of triton 3.6, which is pinned",
)


def budgets():
    for arch, name, dim, group, budget in BUDGETS:
        spec = spec_of(name, key_dim=dim)
        # outside of the loop, once per program: what ptxas of one or the other version leaves there
        spills = 32 if "2" in name else 8
        quick = (arch, dim, group) == ("sm_90", 128, 4) and name in QUICK
        yield quick, arch, spec, group, budget, spills, f"{arch}-{name}-{dim}-{group}"
    for arch, name, budget, spills in LATENT_BUDGETS:
        quick = (arch, name) == ("sm_90", "int4")
        yield quick, arch, latents_of(name), 16, budget, spills, f"{arch}-latents-{name}"


@with_its_ptxas
@pytest.mark.parametrize(
    ("arch", "spec", "group", "budget", "spills"),
    [
        pytest.param(*row, id=name, marks=() if quick else pytest.mark.slow)
        for quick, *row, name in budgets()
    ],
)
def test_decode_loop_keeps_its_budget(arch, spec, group, budget, spills):
    code = sass.read_cubin(aot.compile_decode(spec, arch, group=group))
    assert code.spills <= spills
    limit = SHARED[arch] * 1024
    refused = spec.is_latent and meta_params.latent_bytes(spec, False, 90) > limit
    assert code.shared <= limit or refused
    assert any(op.startswith("LDGSTS") and op.endswith(".128") for op in code.loop)
    assert code.count("I2F") == 0
    assert sass.instructions_per_number(code, spec, group) <= budget
    if not spec.is_latent:
        assert code.count("LDL", "STL") == 0
        assert not [op for op in code.loop if op.startswith(("LDG", "LDS")) and ".U8" in op]


INT4, PAIRS = spec_of("int4"), (("int8", "int4"), ("exact", "int4"), ("fp8", "exact"))
VARIANTS = {
    **{"-".join(pair): (spec_of(*pair), {}) for pair in PAIRS},
    "chunk-of-3": (INT4, {"q_len": 3}),
    "chunk-of-16": (INT4, {"q_len": 16}),
    "bool-mask": (INT4, {"mask_dtype": torch.bool}),
    "float-mask": (INT4, {"mask_dtype": BF16}),
    "softcap-window-sinks": (INT4, {"softcap": True, "sliding_window": True, "sinks": True}),
    "float16": (spec_of("int4", dtype=FP16), {"query_dtype": FP16}),
    **{
        f"{name}-page-of-{page}-{arch}": (spec_of(name, page_size=page), {"arch": arch})
        for name, page, arch in product(("exact", "int8", "int4"), (16, 32, 128, 256), ("sm_80", "sm_90"))
    },
}  # fmt: skip
FEW = ("int8-int4", "chunk-of-3", "float-mask", "softcap-window-sinks", "float16")


@with_its_ptxas
@pytest.mark.parametrize("name", slow_but(FEW, VARIANTS))
def test_decode_with_every_option_does_not_spill(name):
    spec, options = VARIANTS[name]
    code = sass.read_cubin(aot.compile_decode(spec, **{"arch": "sm_90", **options}))
    assert code.spills <= 8
    assert code.count("LDL", "STL") == 0
    assert any(op.startswith("LDGSTS") for op in code.loop)


def shared_variants():
    """What a program may take: of keys and values what any GPU has, an RTX 4090 or one of AMD."""
    for name, dim, dtype in product((*NAMES, *PLAIN), (16, 64, 96, 128, 256), (BF16, FP32)):
        spec = spec_of(name, key_dim=dim, dtype=dtype, groups=(None, 16 if dim % 32 else None))
        for q_len in (1, 3) if dtype == BF16 else (1,):
            yield f"{name}-{dim}-{dtype}-{q_len}", spec, q_len
    for name, rank, dtype in product(LATENTS, (128, 256, 512), (BF16, FP32)):
        if (name, dtype) != ("fp8_ds_mla", FP32):  # of 16-bit models
            yield f"latents-{name}-{rank}-{dtype}", latents_of(name, rank=rank, dtype=dtype), 1


MEMORY = {name: given for name, *given in shared_variants()}


NEAR_THE_LIMIT = ("int8-64-torch.bfloat16-1", "sm_90"), ("int8-256-torch.bfloat16-1", "gfx942")


@pytest.mark.parametrize(
    ("name", "arch"), slow_but(NEAR_THE_LIMIT, product(MEMORY, ("sm_90", "gfx942")))
)
def test_decode_takes_no_more_shared_memory_than_there_is_or_than_is_said(name, arch):
    spec, q_len = MEMORY[name]
    most = {"sm_90": 99 * 1024, "gfx942": 64 * 1024}[arch]
    group, dtype = 4, spec.keys.dtype
    if spec.is_latent:
        group, isa = 16, 90 if arch == "sm_90" else meta_params.HIP
        said = meta_params.latent_bytes(spec, dtype == FP32, isa)
        assert said <= (SHARED["sm_90"] * 1024 if arch == "sm_90" else most)
        most = said
    kernel = aot.compile_decode(spec, arch, query_dtype=dtype, q_len=q_len, group=group)
    assert kernel.metadata.shared <= most


# -- sealing and dense tensors --------------------------------------------------------------------------------------------

SEALED = {
    **{name: spec_of(name) for name in ("int4", "int3", "plain4", "fp8")},
    **{f"latents-{name}": latents_of(name) for name in ("fp8", "int4", "fp8_ds_mla")},
}


@pytest.mark.parametrize("name", slow_but(("int4", "int3", "latents-fp8"), SEALED))
def test_seal_rounds_every_step_and_does_not_spill(name):
    """No fused multiply-add and no approximate division: the bytes are those of the definition. Dense latents do not spill either."""
    spec = SEALED[name]
    kernel = aot.compile_seal_pair(spec, "sm_90")
    assert "div.rn.f32" in kernel.asm["ptx"]
    assert "fma" not in kernel.asm["ptx"]
    assert "div.full" not in kernel.asm["ptx"]
    assert sass.read_cubin(kernel).spills == 0
    if spec.is_latent:
        for side in spec.sides:
            assert sass.read_cubin(aot.compile_dense(side, "sm_90")).spills == 0


@pytest.mark.parametrize("name", slow_but(("int8", "int4"), NAMES))
def test_dense_kernel_compiles_to_wide_loads_and_stores(name):
    """16 bytes at a time, without spills; products and sums are rounded one by one, as the definition's."""
    for side in spec_of(name).sides:
        kernel = aot.compile_dense(side, "sm_90")
        code = sass.read_cubin(kernel)
        assert code.spills == 0
        ordered = bool(side.scheme.wide)  # by a page's channels, which are bytes
        scattered = {"STG.E.U16"} if ordered else set()
        assert {op for op in code.whole if op.startswith("STG")} == {"STG.E.128"} | scattered
        assert ordered or not any(op.startswith("LDG") and ".U8" in op for op in code.whole)
        assert "fma" not in kernel.asm["ptx"]
        assert name == "exact" or "cvt.rn.bf16" in kernel.asm["ptx"]


def test_codes_outside_of_a_part_are_shifted_by_no_undefined_amount(monkeypatch):
    """Tiles in front of the narrow part shifted by less than 0. Triton stored numbers that nothing had computed."""
    scheme = key_scheme("int3", 8).resolve(32, 256, "keys")
    side = SideSpec("keys", scheme, 1, 256, 32, FP32)
    narrow = pages.dense_constants(side) | {"WIDE": 16, "TILE": 8}
    monkeypatch.setattr(pages, "dense_constants", lambda side: narrow)
    code = aot.compile_dense(side, "sm_90").asm["llir"]
    assert "st.global" in code
    assert not re.search(r"st\.global.*poison", code)


# -- the choice of pages ------------------------------------------------------------------------------------------------


def compiled_choice(keys, arch="sm_90", **options):
    return sass.read_cubin(aot.compile_selection(spec_of(keys, "exact"), arch, **options))


# instructions of a warp for a tile of its 64 tokens, rounded up; attention takes 896 for plain4 (docs/kernels.md)
CHOICES = {"plain4": 560, "exact": 480, "int4": 1060}


@pytest.mark.parametrize("keys", slow_but(("plain4", "int4"), CHOICES))
def test_choice_keeps_its_budget(keys):
    for indexed, more in ((False, 1.0), (True, 1.1)):
        code = compiled_choice(keys, indexed=indexed)
        assert code.count("LDL", "STL") == 0
        assert code.spills <= 8
        assert code.shared <= 64 * 1024
        assert code.count("HMMA") > 0
        assert code.count("I2F.") == 0
        assert len(code.loop) <= more * CHOICES[keys]


ASKED = {
    "everything": {"q_len": 3, "softcap": True, "sinks": True},
    "nothing": {},
    "index": {"indexed": True},
}
EVERY_CHOICE = product(KEYS, ("sm_80", "sm_90", "sm_100"), ASKED)


@pytest.mark.parametrize(
    ("keys", "arch", "asked"), slow_but([("int4", "sm_80", "everything")], EVERY_CHOICE)
)
def test_choice_with_every_option_does_not_spill(keys, arch, asked):
    code = compiled_choice(keys, arch, **ASKED[asked])
    assert code.count("LDL", "STL") == 0
    assert code.shared <= 99 * 1024


@pytest.mark.parametrize("keys", slow_but(("int4",), KEYS))
def test_choice_of_float32_fits_into_shared_memory(keys):
    """Tiles of 16 pages took 200 KiB at 128 channels, and at 256 more than an H100 has: the reference chose."""
    spec = spec_of(keys, "exact", key_dim=256, page_size=16, dtype=FP32)
    kernel = aot.compile_selection(spec, "sm_90", query_dtype=FP32)
    assert kernel.metadata.shared <= SHARED["sm_90"] * 1024


# -- other GPUs -----------------------------------------------------------------------------------------------------------

AMD = {name: spec_of(name) for name in (*NAMES, *PLAIN)} | {
    **{f"latents-{name}": latents_of(name) for name in LATENTS},
}


@pytest.mark.parametrize("name", slow_but(("int4",), AMD))
def test_kernels_compile_for_amd(name):
    """Not checked further: the tables and counts are NVIDIA's."""
    spec, arch = AMD[name], "gfx942"
    assert "mfma" in aot.compile_decode(spec, arch, group=16 if spec.is_latent else 4).asm["amdgcn"]
    if name != "latents-exact":
        assert aot.compile_seal_pair(spec, arch).asm["amdgcn"]
    for side in spec.sides:
        assert aot.compile_dense(side, arch).asm["amdgcn"]
    if not spec.is_latent:
        kernel = aot.compile_selection(replace(spec, values=INT4.values), arch)
        assert kernel.metadata.shared <= 64 * 1024
