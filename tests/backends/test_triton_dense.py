"""The kernel that writes a layer out densely, against its definition bit for bit; in the interpreter, and compiled."""

import re
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
import transformers
from paged_inputs import DTYPES, make_kv
from test_chunks import pretend_fused
from test_triton_latent import make_kv as make_latents
from test_triton_latent import spec_of as latents_of
from torch.utils._python_dispatch import TorchDispatchMode
from triton_machine import call, compiled_pairs, dense, runs_kernels

import kv_hf
from kv_hf.backends.reference.pages import dense_side
from kv_hf.bridge.masks import LazyMask
from kv_hf.formats import format_names, key_scheme
from kv_hf.hf import attention
from kv_hf.hf import dense as dense_attention

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed (pip install -e '.[gpu]')"
)


def check(kv):
    """Every bit of both sides is that of the definition."""
    for side in ("keys", "values"):
        expected, got = dense_side(kv, side), call(dense, kv, side)
        assert got.dtype == expected.dtype
        assert got.shape == expected.shape
        assert torch.equal(got.contiguous().view(torch.uint8), expected.view(torch.uint8)), side


MIXED = ("int2_mixed", "int4_mixed")
ROTATED = ("int2_rotated", "int3_rotated", "int4_rotated")
PAIRS = [
    *((name, name) for name in format_names("keys", "values")),
    *((keys, "exact") for keys in MIXED),
    *(("exact", values) for values in ROTATED),
]


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("keys", "values"), PAIRS)
def test_dense_kernel_writes_the_bits_of_the_definition(keys, values, dtype):
    rows = [(2, 11), (0, 3), (1, 4), (0, 0)]  # pages and exact tokens of each row
    options = {"value_group": 32} if values in ROTATED else {}
    check(
        make_kv(
            keys, values, rows=rows, dtype=dtype, key_dim=32, shuffle=1, poison=True, more_padding=5, **options
        )
    )  # fmt: skip


@runs_kernels
@pytest.mark.compiled
@pytest.mark.parametrize(("keys", "values"), compiled_pairs())
def test_compiled_dense_kernel_writes_the_bits_of_the_definition(keys, values):
    options = {"value_group": 32} if values in ROTATED else {}
    check(
        make_kv(
            keys,
            values,
            rows=[(2, 11), (0, 3)],
            dtype=torch.bfloat16,
            key_dim=32,
            poison=True,
            **options,
        )
    )


@runs_kernels
@pytest.mark.parametrize(
    ("keys", "values", "sizes"),
    [
        *(
            (keys, "exact", {"key_dim": dim, "value_dim": 16, "key_group": group, "page": 32})
            for keys in MIXED
            for dim, group in ((96, None), (80, 16), (256, 8))
        ),
        *(
            ("exact", values, {"key_dim": 16, "value_dim": dim, "value_group": group})
            for values in ROTATED
            for dim, group in ((96, 96), (80, 40), (256, 64))
        ),
    ],
)
def test_dense_kernel_takes_every_size_of_mixed_keys_and_rotated_values(keys, values, sizes):
    check(make_kv(keys, values, rows=[(1, 2)], heads=1, **sizes))


GROUPS = {
    "keys-of-16-tokens": {"page": 32, "key_group": 16},
    "keys-of-8-tokens": {"key_group": 8},
    "values-of-16-channels": {"value_group": 16},
    "values-of-8-channels": {"value_group": 8},
    "values-of-20-channels": {"key_dim": 80, "value_group": 20},
    "odd-dim": {"key_dim": 24, "value_group": 24},
    "wide": {"key_dim": 256},
    "page-of-128": {"page": 128, "rows": [(1, 30)], "key_dim": 32},
}


@runs_kernels
@pytest.mark.parametrize("options", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("name", ["int4", "int2"])
def test_dense_kernel_takes_every_group(name, options):
    check(make_kv(name, **{"rows": [(2, 7), (1, 2)], "heads": 1, "poison": True, **options}))


@runs_kernels
@pytest.mark.parametrize("name", format_names("latent"))
def test_dense_kernel_writes_latents(name):
    check_latents(name)


@runs_kernels
@pytest.mark.compiled
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow] * (n not in ("int4", "fp8_ds_mla")))
        for n in format_names("latent")
    ],
)
def test_compiled_dense_kernel_writes_latents(name):
    check_latents(name)


def check_latents(name):
    check(
        make_latents(
            name, rows=[(2, 11), (0, 3), (1, 4)], poison=True, padding=3, dtype=torch.bfloat16
        )
    )


@runs_kernels
def test_dense_kernel_writes_latents_without_rope_keys():
    check(make_latents("int4", rope_dim=0, page=32, tokens=16, rank=48))


@runs_kernels
def test_dense_kernel_clamps_to_float16():
    """A scale rounded up may push the largest code past float16's range."""
    kv = make_kv("int8", rows=[(1, 0)], dtype=torch.float16)
    kv.key_pages["scale"].fill_(600.0)
    check(kv)
    assert float(dense_side(kv, "keys").max()) == 65504.0


@runs_kernels
def test_dense_kernel_leaves_free_columns_zero():
    """A preallocated cache shows columns that hold no token yet."""
    kv = make_kv("int4", rows=[(3, 9), (2, 5)], poison=True)
    check(replace(kv, seen=kv.seen + 37))


@runs_kernels
def test_dense_kernel_reads_windows_of_any_strides():
    kv = make_kv("int8", rows=[(2, 9), (1, 5)])
    by_slot = kv.residual_keys.transpose(1, 2).contiguous().transpose(1, 2)
    by_channel = kv.residual_values.transpose(2, 3).contiguous().transpose(2, 3)
    check(replace(kv, residual_keys=by_slot, residual_values=by_channel))


@needs_triton
def test_dense_constants_cut_tiles_that_fill_the_grid():
    """A row's parts of pages and its other columns are TILE columns each, so that the grid needs no lengths."""
    from kv_hf.backends.triton.dense import dense_constants

    for name in format_names("keys", "values"):
        for page in (16, 64, 256):
            spec = make_kv(name, page=page, rows=[(1, 3)], slots=8).spec
            for side in spec.sides:
                plain = dense_constants(side)
                assert page % plain["TILE"] == 0
                assert plain["TILE"] * plain["WIDE"] <= 8192


def spec_of(name, dim=128):
    return make_kv(name, rows=[(1, 0)], key_dim=dim, heads=8, page=64, dtype=torch.bfloat16).spec


@needs_triton
@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow] * (n not in ("int8", "int4")))
        for n in format_names("keys", "values")
    ],
)
def test_dense_kernel_compiles_to_wide_loads_and_stores(name, side):
    """16 bytes at a time, without spills; products and sums are rounded one by one, as the definition's."""
    import aot
    import sass

    kernel = aot.compile_dense(getattr(spec_of(name), side), "sm_90")
    code = sass.read_cubin(kernel)
    assert code.spills == 0
    assert {op for op in code.whole if op.startswith("STG")} == {"STG.E.128"}
    assert not any(op.startswith("LDG") and ".U8" in op for op in code.whole)
    assert "fma" not in kernel.asm["ptx"]
    assert name == "exact" or "cvt.rn.bf16" in kernel.asm["ptx"]


@needs_triton
@pytest.mark.parametrize(
    "arch", ["gfx942", *(pytest.param(one, marks=pytest.mark.slow) for one in ("sm_80", "sm_100"))]
)
def test_dense_kernel_compiles_for_other_gpus(arch):
    import aot

    kind = "cubin" if arch.startswith("sm_") else "amdgcn"
    for name in ("int4", "fp8"):
        for side in spec_of(name).sides:
            assert aot.compile_dense(side, arch).asm[kind]


@needs_triton
@pytest.mark.parametrize("name", ["int4", pytest.param("fp8_ds_mla", marks=pytest.mark.slow)])
def test_dense_kernel_of_latents_compiles_without_spills(name):
    import aot
    import sass

    spec = latents_of(name, rank=512, rope_dim=64, page=64, dtype=torch.bfloat16)
    for side in spec.sides:
        assert sass.read_cubin(aot.compile_dense(side, "sm_90")).spills == 0


# -- what a chunk launches -------------------------------------------------------------------------------------------


class Operators(TorchDispatchMode):
    """Counts torch's operators that launch something, and those that wait for a device."""

    VIEWS = (
        "view",
        "slice",
        "select",
        "detach",
        "alias",
        "expand",
        "unsqueeze",
        "transpose",
        "new_empty",
        "empty",
    )

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name not in self.VIEWS:
            self.found[name] += 1
        return function(*args, **(kwargs or {}))


def pretend_attention(monkeypatch):
    """Let the CPU pass for a GPU on which attention is one operator (torch makes no bias under a dispatch mode)."""
    pretend_fused(monkeypatch)
    monkeypatch.setattr(dense_attention, "causal_lower_right", lambda *sizes: None)
    fused = lambda query, *others, **options: torch.ops.aten.empty_like.default(query)  # noqa: E731
    monkeypatch.setattr(dense_attention, "scaled_dot_product_attention", fused)


def long_turn(gpu, past, rows):
    """Launches and operators of one layer's update, of its dense keys and values, and of its attention."""
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1
    )
    cache = kv_hf.PagedCache(config, keys="int4", page_size=16, kernel="triton")
    padding = torch.arange(rows)[:, None] * 33
    cache.observe_padding((torch.arange(past) >= padding).long())
    cache.update(*torch.zeros(2, rows, 2, past, 64, dtype=torch.bfloat16), 0)
    before = len(gpu.launches)
    keys, values = cache.update(*torch.zeros(2, rows, 2, 100, 64, dtype=torch.bfloat16), 0)
    with Operators() as written:
        for side in ("keys", "values"):
            keys.view_of_pages.dense(side)
    query = torch.zeros(rows, 4, 100, 64, dtype=torch.bfloat16)
    shape = (rows, 1, 100, past + 100)
    mask = LazyMask(shape, query.device, pytest.fail, causal=True)
    with Operators() as attended:
        attention.kv_hf_attention(torch.nn.Module(), query, keys, values, mask)
    return gpu.names()[before:], written.found, attended.found


@needs_triton
def test_dense_kernel_is_compiled_once_for_tables_anywhere():
    """Block tables and lengths of other batches begin elsewhere, and texts have other lengths."""
    from fake_driver import pretend_gpu

    from kv_hf.backends.triton.dense import dense_side as by_kernel

    def shifted(tensor, by):
        return torch.cat([tensor.new_zeros(by), tensor.flatten()])[by:].view(tensor.shape)

    with pretend_gpu() as gpu:
        for by, rows in enumerate([[(3, 5)], [(1, 2), (2, 9)], [(8, 1), (0, 3), (1, 1)]]):
            kv = make_kv("int4", rows=rows, dtype=torch.bfloat16)
            names = ("block_table", "num_pages", "exact_lens", "padding")
            moved = {name: shifted(getattr(kv, name), by) for name in names}
            by_kernel(replace(kv, **moved), "keys")
        assert gpu.variants == {"dense_kernel": 1}


@needs_triton
@pytest.mark.parametrize("rows", [1, 3])
def test_long_turns_launch_no_more_on_longer_texts(monkeypatch, rows):
    """Nor do they wait for the device, whatever their rows hold."""
    from fake_driver import pretend_gpu

    pretend_attention(monkeypatch)
    with pretend_gpu() as gpu, torch.no_grad():
        short, long = (long_turn(gpu, past, rows) for past in (200, 3000))
        assert gpu.variants["dense_kernel"] == 2  # keys and values
    assert short == long
    launches, written, attended = short
    assert [name for name in launches if name == "dense_kernel"] == 4 * ["dense_kernel"]
    assert launches[-2:] == 2 * ["dense_kernel"]
    assert not written
    assert attended == {"empty_like": 1, "clone": 1}  # attention, and its result made contiguous


@needs_triton
def test_codes_outside_of_a_part_are_shifted_by_no_undefined_amount(monkeypatch):
    """Tiles in front of the narrow part shifted by less than 0. Triton stored numbers that nothing had computed."""
    import aot

    from kv_hf.backends.triton import dense
    from kv_hf.spec import SideSpec

    scheme = key_scheme("int2_mixed", 8).resolve(32, 256, "keys")
    side = SideSpec("keys", scheme, 1, 256, 32, torch.float32)
    narrow = dense.dense_constants(side) | {"WIDE": 16, "TILE": 8}
    monkeypatch.setattr(dense, "dense_constants", lambda side: narrow)
    code = aot.compile_dense(side, "sm_90").asm["llir"]
    assert "st.global" in code
    assert not re.search(r"st\.global.*poison", code)
