"""The Triton kernels for latents: what they take, and compiled for GPUs."""

import json
import re
from importlib.util import find_spec

import pytest
import torch
from paged_inputs import make_latents
from paths import TESTS

from kv_hf.formats import format_names, k_rope_name, k_rope_scheme, latent_scheme
from kv_hf.spec import LANES, LATENT_SIDES, PageSpec

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed (pip install -e '.[gpu]')"
)
FP32 = torch.float32
FEW = [(3, 5), (0, 2)]  # pages and exact tokens of each row
RAGGED = [(5, 11), (2, 20), (0, 3), (1, 4), (0, 0)]


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def spec_of(
    name,
    *,
    rope=None,
    rank=64,
    rope_dim=16,
    page=16,
    group=None,
    tokens=None,
    dtype=FP32,
    **options,
):
    """`group`: channels of a scale at 8 bits, `tokens`: tokens of a scale at 4 and 2 bits; None: the defaults."""
    rank = 128 if name == "fp8_ds_mla" and rank == 64 else rank
    scheme = latent_scheme(name, group or tokens)
    return PageSpec.build(
        scheme,
        k_rope_scheme(k_rope_name(rope, scheme), rope_dim),
        key_dim=rank,
        value_dim=rope_dim,
        page_size=page,
        dtype=dtype,
        **options,
        num_kv_heads=1,
        sides=LATENT_SIDES,
    )


def make_kv(name, *, rows=FEW, slots=40, poison=False, padding=0, **sizes):
    """Random pages and windows; `poison` fills pages and slots that nobody holds with nan."""
    held = {"rows": rows, "slots": slots, "poison": poison, "more_padding": padding}
    return make_latents(spec_of(name, **sizes), **held)


# -- support -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", format_names("latent"))
def test_support_takes_every_format_and_page(name):
    from kv_hf.backends.triton.support import _why_not_sizes

    for page in (16, 32, 64, 128, 256):
        for rank in (128, 256, 512):
            spec = spec_of(name, rank=rank, page=page, dtype=torch.bfloat16)
            assert _why_not_sizes(spec) is None


WHY_NOT = {
    "rank": ({"rank": 576}, "kv_lora_rank up to 512, and the latent have 576"),
    "rope": ({"rope_dim": 256}, "qk_rope_head_dim up to 192, and the k_rope have 256"),
    "few-channels": ({"rank": 512, "group": 4}, "kv_lora_rank 512 in groups of 4 makes 2048"),
    "few-tokens": ({"name": "int4", "page": 64, "tokens": 8}, "in 'int4', .* group_size 8"),
    "layout": ({"layout": LANES}, "the latent are in 'lanes'"),
    "page": ({"page": 8}, "at least 16 tokens, got 8"),
}


@pytest.mark.parametrize(("sizes", "says"), WHY_NOT.values(), ids=WHY_NOT)
def test_support_names_the_reason(sizes, says):
    from kv_hf.backends.triton.support import _why_not_sizes

    assert re.search(says, _why_not_sizes(spec_of(**{"name": "int8", **sizes})))


# -- compiled for GPUs that are not here -----------------------------------------------------------------------------

SHARED = {"sm_80": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227}  # KiB per program
# [arch, format] -> [instructions of the loop per stored number, loads and stores of spilled registers], rounded up
BUDGETS = json.loads((TESTS / "triton_latent_budgets.json").read_text())


def standard_spec(name, **sizes):
    sizes = {"rank": 512, "rope_dim": 64, "page": 64, "dtype": torch.bfloat16, **sizes}
    return spec_of(name, **sizes)


def compiled(spec, arch="sm_90", **options):
    import aot
    import sass

    return sass.read_cubin(aot.compile_decode(spec, arch, **{"group": 16, **options}))


def budgets():
    for arch, name, per_number, spills in BUDGETS:
        quick = arch == "sm_90" and name == "int4"
        yield pytest.param(arch, name, per_number, spills, marks=() if quick else pytest.mark.slow)


@needs_triton
@pytest.mark.parametrize(("arch", "name", "budget", "spills"), budgets())
def test_decode_loop_keeps_its_budget(arch, name, budget, spills):
    """Rank 512, 64 RoPE channels, pages of 64 tokens; 16 heads and 128 are the same loop."""
    from kv_hf.backends.triton.meta_params import tile_tokens

    spec = standard_spec(name)
    code = compiled(spec, arch)
    assert code.spills <= spills
    assert code.shared <= SHARED[arch] * 1024
    assert any(op.startswith("LDGSTS") and op.endswith(".128") for op in code.loop)
    assert code.count("I2F") == 0
    per_number = len(code.loop) * code.num_warps / (tile_tokens(spec) * spec.query_dim)
    assert per_number <= budget


OPTIONS = {
    "heads-128-chunk-of-3": {"group": 128, "q_len": 3},
    "bool-mask": {"mask_dtype": torch.bool},
    "float-mask-window-sinks": {
        "mask_dtype": torch.bfloat16,
        "sliding_window": True,
        "sinks": True,
    },
}


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_decode_compiles_with_every_option(options):
    code = compiled(standard_spec("fp8"), **options)
    assert code.shared <= SHARED["sm_90"] * 1024


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("name", format_names("latent"))
def test_kernels_compile_for_amd(name):
    import aot

    spec = standard_spec(name)
    assert "mfma" in aot.compile_decode(spec, "gfx942", group=16).asm["amdgcn"]
    if name != "exact":
        assert aot.compile_seal_pair(spec, "gfx942").asm["amdgcn"]


@needs_triton
@pytest.mark.parametrize(
    "name",
    [
        "fp8",
        pytest.param("int4", marks=pytest.mark.slow),
        pytest.param("fp8_ds_mla", marks=pytest.mark.slow),
    ],
)
def test_seal_rounds_every_step(name):
    """No fused multiply-add and no approximate division: the bytes are those of the definition."""
    import aot
    import sass

    kernel = aot.compile_seal_pair(standard_spec(name), "sm_90")
    assert "div.rn.f32" in kernel.asm["ptx"]
    assert "fma" not in kernel.asm["ptx"]
    assert "div.full" not in kernel.asm["ptx"]
    assert sass.read_cubin(kernel).spills == 0
