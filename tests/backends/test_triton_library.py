"""The kernels' launch table, and where they can run."""

import itertools
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from paged_inputs import latent_spec, make_kv, make_query, page_spec

from kv_hf.backends.base import AttentionCall
from kv_hf.backends.registry import load
from kv_hf.backends.triton import meta_params, support
from kv_hf.backends.triton.support import why_not
from kv_hf.formats import format_names
from kv_hf.spec import LANES, ROWS, PageSpec

CUDA = torch.device("cuda")
needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed (pip install -e '.[gpu]')"
)


def spec_of(keys="int4", values=None, **sizes):
    return page_spec(keys, values, **{"key_dim": 128, "dtype": torch.bfloat16, **sizes})


def latents_of(name, dtype=torch.bfloat16, rank=512):
    return latent_spec(name, None, rank=rank, rope=64, page=64, dtype=dtype, layout=ROWS)


@needs_triton
def test_attend_refuses_cpu_tensors_outside_of_the_interpreter():
    from kv_hf.errors import CacheOptionError

    kv = make_kv("int4")
    asked = AttentionCall(make_query(kv, dtype=torch.float32), kv, 0.1)
    with pytest.raises(CacheOptionError, match=r"'triton' needs a GPU.*TRITON_INTERPRET=1"):
        load("triton").attend(asked)


# -- support -------------------------------------------------------------------------------------------------------


class Gpu:
    """What torch says of a GPU that is not here."""

    def __init__(
        self,
        monkeypatch,
        capability=(9, 0),
        hip=None,
        triton="3.9.0",
        available=True,
        shared=99 * 1024,
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Some GPU")
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(support, "installed_version", lambda: triton)
        monkeypatch.setattr(support, "shared_memory", lambda where: shared)


def test_why_not_has_nothing_against_a_gpu(monkeypatch):
    Gpu(monkeypatch)
    for name in format_names("keys", "values"):
        assert why_not(CUDA, spec_of(name)) is None
    for keys in ("int2_mixed", "int4_mixed"):
        for values in ("int2_rotated", "int3_rotated", "int4_rotated"):
            assert why_not(CUDA, spec_of(keys, values)) is None
    Gpu(monkeypatch, capability=(0, 0), hip="6.2", shared=64 * 1024)
    assert why_not(torch.device("cuda:1"), spec_of()) is None


def test_why_not_refuses_transformed_numbers_that_no_kernel_restores(monkeypatch):
    """Codes of three bits that are not rotated, rotated ones of other arithmetic, and rotated keys."""
    Gpu(monkeypatch)
    spec = spec_of("int8", "int3_rotated")
    for side, changes in (
        ("values", {"rotated": False}),
        ("values", {"code": "signed"}),
        ("keys", {"rotated": True}),
    ):
        own = getattr(spec, side)
        changed = replace(spec, **{side: replace(own, scheme=replace(own.scheme, **changes))})
        assert f"do not read {side}" in why_not(CUDA, changed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_why_not_finds_tiles_for_every_size_in_the_smallest_shared_memory(monkeypatch, dim, dtype):
    """99 KiB of an RTX 4090 hold every format and dtype; latents in 16 bits too, and in float32 what an H200 holds."""
    Gpu(monkeypatch)
    for name in format_names("keys", "values"):
        assert why_not(CUDA, spec_of(name, key_dim=dim, dtype=dtype)) is None
    for name in format_names("latent"):
        if dtype == torch.float32 and name == "fp8_ds_mla":
            continue
        spec = latents_of(name, dtype)
        Gpu(monkeypatch)
        assert (why_not(CUDA, spec) is None) == (dtype != torch.float32)
        Gpu(monkeypatch, shared=232448)
        assert why_not(CUDA, spec) is None


def test_installed_version_is_that_of_the_package_whatever_its_distribution_is_called(
    monkeypatch, tmp_path
):
    """ROCm's wheels are pytorch-triton-rocm and triton-rocm."""
    package = tmp_path / "triton"
    package.mkdir()
    (package / "__init__.py").write_text('"""isort:skip_file"""\n__version__ = \'3.7.1+rocm\'\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    support.installed_version.cache_clear()
    try:
        assert support.installed_version() == "3.7.1+rocm"
    finally:
        support.installed_version.cache_clear()


WHY_NOT = {
    "cpu": ({"device": torch.device("cpu")}, {}, "the cache is on 'cpu'"),
    "fp64-pages": ({"spec": spec_of("exact", dtype=torch.float64)}, {}, "the keys are float64"),
    "page-size": ({"spec": spec_of(page_size=8)}, {}, "at least 16 tokens, got 8"),
    "odd-page": ({"spec": spec_of(page_size=48)}, {}, "at least 16 tokens, got 48"),
    "head-dim": ({"spec": spec_of(key_dim=512)}, {}, "up to 256, and the keys have 512"),
    "layout": ({"spec": spec_of(layout=LANES)}, {}, "the keys are in 'lanes'"),
    "old-gpu": ({}, {"capability": (7, 5)}, "8.0 or newer, and Some GPU has 7.5"),
    "no-gpu": ({}, {"available": False}, "sees no GPU"),
    "old-triton": ({}, {"triton": "3.5.1"}, "need triton 3.6 or newer, and 3.5.1"),
    "shared-memory": (
        {"spec": latents_of("int8", torch.float32)},
        {},
        "take 172,032 bytes of shared memory for int8 pages of 512 channels in float32, and Some GPU has 101,376; "
        "float16 and bfloat16 take less",
    ),
}


@pytest.mark.parametrize(("changes", "gpu", "says"), WHY_NOT.values(), ids=WHY_NOT)
def test_why_not_names_the_reason(monkeypatch, changes, gpu, says):
    Gpu(monkeypatch, **gpu)
    asked = {"device": CUDA, "spec": spec_of(), **changes}
    assert says in why_not(**asked)


def test_why_not_says_when_triton_is_not_installed(monkeypatch):
    Gpu(monkeypatch, triton=None)
    assert "pip install -e '.[gpu]'" in why_not(CUDA, spec_of())


# -- launch parameters ---------------------------------------------------------------------------------------------


def test_chunks_cover_the_width_with_powers_of_two():
    for width in range(1, 257):
        cut = meta_params.chunks(width, 32)
        assert cut[0][0] == 32
        for (start, size), (following, _) in itertools.pairwise(cut):
            assert start + size == following
        assert all(size >= 16 and size & (size - 1) == 0 for _, size in cut)
        assert sum(size for _, size in cut) >= width
        assert sum(size for _, size in cut) - width < max(16, cut[-1][1])
    assert meta_params.chunks(128) == ((0, 128),)
    assert meta_params.chunks(96) == ((0, 64), (64, 32))
    assert meta_params.chunks(40) == ((0, 32), (32, 16))
    assert meta_params.chunks(24) == ((0, 32),)


def test_splits_fill_the_gpu_and_no_more():
    spec = spec_of("int4")
    assert meta_params.most_splits(spec, 1) == meta_params.MAX_SPLITS
    assert meta_params.most_splits(spec, 24) == meta_params.PROGRAMS // 24  # no power of two
    assert meta_params.most_splits(spec, 10**6) == 1
    for programs in (1, 8, 24, 64, 512):
        assert meta_params.most_splits(spec, programs) * programs <= meta_params.PROGRAMS


@pytest.mark.parametrize("name", format_names("keys", "values"))
def test_tiles_fit_into_shared_memory(name):
    for dim in (16, 64, 80, 128, 256):
        for page in (16, 64, 256):
            spec = spec_of(name, key_dim=dim, page_size=page)
            tile = meta_params.tile_tokens(spec)
            assert page % tile == 0
            bits = sum(side.token_bits for side in spec.sides)
            assert tile == 16 or tile * bits // 8 <= meta_params.TILE_BYTES


def test_codes_are_multiplied_in_float16_and_exact_numbers_in_their_own_dtype():
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    assert meta_params.compute_types(spec_of("int4"), bf16) == ("fp16", "fp16", "bf16", "bf16")
    assert meta_params.compute_types(spec_of("exact"), bf16) == ("bf16",) * 4
    assert meta_params.compute_types(spec_of("exact", dtype=fp16), fp16) == ("fp16",) * 4
    assert meta_params.compute_types(spec_of("int4"), fp32) == ("fp32",) * 4
    mixed = PageSpec(spec_of("fp8").keys, replace(spec_of("exact").values, dtype=bf16))
    assert meta_params.compute_types(mixed, bf16) == ("fp16", "bf16", "bf16", "bf16")
