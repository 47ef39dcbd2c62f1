"""Where the Triton kernels can run, and the reasons why not."""

import sys
from dataclasses import replace
from importlib import import_module
from itertools import product

import pytest
import torch
from paged_inputs import latent_spec, make_kv, make_query, page_spec

from kv_hf.backends import triton as backend
from kv_hf.backends.base import AttentionCall
from kv_hf.backends.dispatch import load
from kv_hf.backends.triton import _why_not as why_not
from kv_hf.backends.triton import direct, meta_params
from kv_hf.errors import CacheOptionError
from kv_hf.formats import format_names, get_format
from kv_hf.spec import LANES, ROWS

CUDA = torch.device("cuda")


def spec_of(keys="int4", values=None, **sizes):
    return page_spec(keys, values, **{"key_dim": 128, "dtype": torch.bfloat16, **sizes})


def latents_of(name="int8", **sizes):
    sizes = {"rank": 512, "rope": 64, "page": 64, "dtype": torch.bfloat16, "layout": ROWS, **sizes}
    return latent_spec(name, None, **sizes)


def test_attend_refuses_cpu_tensors_outside_of_the_interpreter():
    pytest.importorskip("triton")
    kv = make_kv("int4")
    asked = AttentionCall(make_query(kv, dtype=torch.float32), kv, 0.1)
    with pytest.raises(CacheOptionError, match=r"'triton' needs a GPU.*TRITON_INTERPRET=1"):
        load("triton").attend(asked)


def test_what_kernels_are_told_is_fields_that_every_triton_hands_on():
    """Triton 3.9 makes tuples of its own, which have no properties, and whose own attributes go before fields."""
    language = pytest.importorskip("triton.language")
    modules = [import_module(f"{backend.__name__}.{name}") for name in ("decode", "selection")]
    told = {
        one
        for module in (meta_params, direct, *modules)
        for one in vars(module).values()
        if isinstance(one, type) and issubclass(one, tuple)
    }
    assert {"SideLayout", "ExactWindow", "Fields", "Results", "Visibility"} <= {
        one.__name__ for one in told
    }
    taken = set(dir(language.tuple([])))
    for one in told:
        computed = {name for name, held in vars(one).items() if isinstance(held, property)}
        assert not computed | taken.intersection(one._fields), one


# -- support -------------------------------------------------------------------------------------------------------


GPU = {"capability": (9, 0), "hip": None, "triton": "3.9.0", "available": True, "shared": 99 * 1024}


def pretend(monkeypatch, **changes):
    """Let torch tell of a GPU that is not here."""
    gpu = {**GPU, **changes}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu["available"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: gpu["capability"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Some GPU")
    monkeypatch.setattr(torch.version, "hip", gpu["hip"])
    monkeypatch.setattr(backend, "installed_version", lambda: gpu["triton"])
    monkeypatch.setattr(meta_params, "shared_memory", lambda where: gpu["shared"])


def test_why_not_refuses_transformed_numbers_that_no_kernel_restores(monkeypatch):
    """Rotated values of other arithmetic, and rotated keys."""
    pretend(monkeypatch)
    spec = spec_of("int8", "int3")
    for side, changes in (
        ("values", {"format": get_format("int8")}),
        ("keys", {"rotated": True}),
    ):
        own = getattr(spec, side)
        changed = replace(spec, **{side: replace(own, scheme=replace(own.scheme, **changes))})
        assert f"do not read {side}" in why_not(CUDA, changed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_why_not_finds_tiles_for_every_size_in_the_smallest_shared_memory(monkeypatch, dtype):
    """99 KiB of an RTX 4090 hold every format and dtype; latents in 16 bits too, but for 512 channels of 2 bits in
    pages of 64, and in float32 what an H200 holds."""
    for name, dim in product(format_names("keys", "values"), (64, 128, 256)):
        pretend(monkeypatch)
        assert why_not(CUDA, spec_of(name, key_dim=dim, dtype=dtype)) is None
    for name, page, rank in product(format_names("latent"), (16, 64, 256), (128, 512)):
        if dtype == torch.float32 and name == "fp8_ds_mla":
            continue
        spec = latents_of(name, page=page, rank=rank, dtype=dtype)
        pretend(monkeypatch)
        large = rank == 512 and (dtype == torch.float32 or (name, page) == ("int2", 64))
        assert why_not(CUDA, spec) is None or large
        pretend(monkeypatch, shared=232448)
        assert why_not(CUDA, spec) is None
    pretend(monkeypatch, capability=(0, 0), hip="6.2", shared=64 * 1024)
    assert why_not(torch.device("cuda:1"), spec_of()) is None


def test_installed_version_is_that_of_the_package_whatever_its_distribution_is_called(
    monkeypatch, tmp_path
):
    """ROCm's wheels are pytorch-triton-rocm and triton-rocm."""
    package = tmp_path / "triton"
    package.mkdir()
    (package / "__init__.py").write_text('"""isort:skip_file"""\n__version__ = \'3.7.1+rocm\'\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    backend.installed_version.cache_clear()
    try:
        assert backend.installed_version() == "3.7.1+rocm"
    finally:
        backend.installed_version.cache_clear()


WHY_NOT = {
    "cpu": ({"device": torch.device("cpu")}, {}, "the cache is on 'cpu'"),
    "fp64-pages": ({"spec": spec_of("exact", dtype=torch.float64)}, {}, "the keys are float64"),
    "page-size": ({"spec": spec_of(page_size=8)}, {}, "at least 16 tokens, got 8"),
    "head-dim": ({"spec": spec_of(key_dim=512)}, {}, "up to 256, and the keys have 512"),
    "layout": ({"spec": spec_of(layout=LANES)}, {}, "the keys are in 'lanes'"),
    "old-gpu": ({}, {"capability": (7, 5)}, "8.0 or newer, and Some GPU has 7.5"),
    "no-gpu": ({}, {"available": False}, "sees no GPU"),
    "old-triton": ({}, {"triton": "3.5.1"}, "need triton 3.6 or newer, and 3.5.1"),
    "shared-memory": (
        {"spec": latents_of(dtype=torch.float32)},
        {},
        "take 172,032 bytes of shared memory for int8 pages of 512 channels in float32, and Some GPU has 101,376; "
        "float16 and bfloat16 take less",
    ),
    "rank": ({"spec": latents_of(rank=576)}, {}, "kv_lora_rank up to 512, and the latent have 576"),
    "rope": ({"spec": latents_of(rope=256)}, {}, "qk_rope_head_dim up to 192, and the k_rope have 256"),
    "few-channels": ({"spec": latents_of(group=4)}, {}, "kv_lora_rank 512 in groups of 4 makes 2048"),
    "few-tokens": ({"spec": latents_of("int4", tokens=8)}, {}, "group_size 8"),
    "latent-layout": ({"spec": latents_of(layout=LANES)}, {}, "the latent are in 'lanes'"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "gpu", "says"), WHY_NOT.values(), ids=WHY_NOT)
def test_why_not_names_the_reason(monkeypatch, changes, gpu, says):
    pretend(monkeypatch, **gpu)
    asked = {"device": CUDA, "spec": spec_of(), **changes}
    assert says in why_not(**asked)


def test_why_not_says_when_triton_is_not_installed(monkeypatch):
    pretend(monkeypatch, triton=None)
    assert "pip install -e '.[gpu]'" in why_not(CUDA, spec_of())
