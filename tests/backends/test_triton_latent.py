"""The Triton kernels for latents: decode and seal in the interpreter against the reference, and compiled for GPUs."""

import json
import re
from dataclasses import replace
from importlib.util import find_spec

import paged_inputs
import pytest
import torch
from interpreter import attend, attend_with_ptx, call, needs_interpreter
from paths import TESTS
from rounding import Rounding

from kv_hf.backends.base import AttentionCall, PagedKV
from kv_hf.backends.reference import attention as reference
from kv_hf.formats import format_names, k_rope_name, k_rope_scheme, latent_scheme
from kv_hf.quant.codec import decode, encode
from kv_hf.spec import LANES, PageSpec

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed (pip install -e '.[gpu]')"
)
FP32 = torch.float32
FEW = [(3, 5), (0, 2)]  # pages and exact tokens of each row
RAGGED = [(5, 11), (2, 20), (0, 3), (1, 4), (0, 0)]
HEADS = 3


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
    scheme = latent_scheme(name, group, tokens)
    return PageSpec.build_latent(
        scheme,
        k_rope_scheme(k_rope_name(rope, scheme), rope_dim),
        rank=rank,
        rope_dim=rope_dim,
        page_size=page,
        dtype=dtype,
        **options,
    )


def make_kv(name, *, rows=FEW, slots=40, poison=False, padding=0, **sizes):
    """Random pages and windows; `poison` fills pages and slots that nobody holds with nan."""
    spec = spec_of(name, **sizes)
    numbers = torch.Generator().manual_seed(0)
    held, page = sum(pages for pages, _ in rows), spec.keys.page_size
    order = torch.randperm(held + 2, generator=torch.Generator().manual_seed(1))
    stored, windows = [], []
    exact = torch.tensor([exact for _, exact in rows], dtype=torch.int32)
    for side in spec.sides:
        x = torch.randn(held, 1, page, side.head_dim, generator=numbers).to(side.dtype)
        encoded, _ = encode(x, side)
        fields = {}
        for field, (shape, dtype) in side.fields.items():
            fields[field] = torch.zeros(held + 2, *shape, dtype=dtype)
            if poison and dtype.is_floating_point:
                fields[field].fill_(float("nan"))
            fields[field][order[:held]] = encoded[field]
        stored.append(fields)
        window = torch.randn(len(rows), 1, slots, side.head_dim, generator=numbers).to(side.dtype)
        if poison:
            window[(torch.arange(slots) >= exact[:, None])[:, None]] = float("nan")
        windows.append(window)
    table = order[-1].repeat(len(rows), max(p for p, _ in rows)).to(torch.int32)
    first = 0
    for row, (pages, _) in enumerate(rows):
        table[row, :pages] = order[first : first + pages]
        first += pages
    tokens = torch.tensor([pages * page + e for pages, e in rows], dtype=torch.int32)
    seen = int(tokens.max()) + padding
    pages = torch.tensor([pages for pages, _ in rows], dtype=torch.int32)
    return PagedKV(
        *stored, spec, table, pages, *windows, exact, seen - tokens, seen, 4
    )  # fmt: skip


def make_query(kv, q_len=1, heads=HEADS, dtype=FP32):
    shape = (kv.rows, heads, q_len, kv.spec.query_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)


def check(query, kv, splits=2, kernel=attend, **options):
    """Compare with fp64: no error beyond what rounding in this kernel explains."""

    def called(*args, **given):
        return call(kernel, *args, splits=splits, **given)

    rounding = Rounding.of("triton", query.dtype)
    return paged_inputs.check(query, kv, called, rounding, **options)


# -- decode in the interpreter ---------------------------------------------------------------------------------------


@needs_interpreter
@pytest.mark.parametrize(
    ("name", "rope"),
    [*((name, None) for name in format_names("latent")), ("int4", "exact"), ("exact", "int8")],
)
def test_decode_reads_every_format(name, rope):
    kv = make_kv(name, rope=rope, poison=True)
    check(make_query(kv, 3), kv)


PAGES = [
    ("exact", 64, None), ("int8", 64, None), slow("int8", 32, None), slow("fp8", 128, None),
    ("int4", 64, None), ("int4", 64, 16), slow("int4", 32, None), slow("int4", 64, 32), slow("int4", 128, None),
    slow("int4", 128, 32), slow("int4", 256, 16),
    ("int2", 64, None), ("int2", 128, None), slow("int2", 32, None), slow("int2", 64, 16), slow("int2", 64, 64),
    slow("int2", 128, 128), slow("int2", 256, None), slow("int2", 512, 16),
]  # fmt: skip


@needs_interpreter
@pytest.mark.parametrize(("name", "page", "tokens"), PAGES, ids=str)
def test_decode_takes_every_page(name, page, tokens):
    """Places of a word lie in one token group or in several, and the words of small pages fill no tile alone."""
    kv = make_kv(name, page=page, tokens=tokens, slots=page + 26)
    check(make_query(kv), kv)


SIZES = {
    "no-rope": ("int4", {"rope_dim": 0}),
    "odd-rank": ("int4", {"rank": 240}),
    "rank-below-a-product": ("int2", {"rank": 8, "rope_dim": 8}),
    "two-runs": ("int4", {"rank": 128, "page": 64, "slots": 90}),
    "groups-of-16-channels": ("int8", {"group": 16}),
}
MORE_SIZES = {
    f"{name}-{sizes}": (name, {**SIZES[sizes][1]})
    for name in ("exact", "fp8", "int8", "int4", "int2")
    for sizes in SIZES
    if name != SIZES[sizes][0]
}


@needs_interpreter
@pytest.mark.parametrize(
    ("name", "sizes"),
    [*SIZES.values(), *(slow(*case) for case in MORE_SIZES.values())],
    ids=[*SIZES, *MORE_SIZES],
)
def test_decode_takes_every_size(name, sizes):
    kv = make_kv(name, **sizes)
    check(make_query(kv), kv)


@needs_interpreter
@pytest.mark.parametrize(
    ("name", "splits"),
    [("int4", 1), ("int4", 9), slow("int4", 3), slow("exact", 3), slow("int8", 9)],
)
def test_decode_of_ragged_rows_does_not_depend_on_its_splits(name, splits):
    """9 splits are more than any row has tiles; an empty row and queries before the first token give zeros."""
    kv = make_kv(name, rows=RAGGED, poison=True)
    out = check(make_query(kv, 3), kv, splits)
    assert torch.equal(out[4], torch.zeros_like(out[4]))


@needs_interpreter
def test_decode_spreads_many_heads_over_programs():
    kv = make_kv("int8")
    check(make_query(kv, 3, heads=7), kv)


@needs_interpreter
def test_decode_takes_a_cache_without_any_page():
    kv = make_kv("int4", rows=[(0, 7), (0, 0)])
    empty = [{n: t[:0] for n, t in pages.items()} for pages in (kv.key_pages, kv.value_pages)]
    check(make_query(kv, 3), replace(kv, key_pages=empty[0], value_pages=empty[1]))


def random_mask(kv, kind, q_len):
    mask = torch.rand(kv.rows, 1, q_len, kv.seen, generator=torch.Generator().manual_seed(7))
    if kind == "bool":
        return mask > 0.4
    return (3 * mask - 1).masked_fill(mask < 0.2, float("-inf"))


@needs_interpreter
@pytest.mark.parametrize(
    ("name", "kind"),
    [("int2", "bool"), ("int2", "float"), slow("exact", "bool"), slow("exact", "float")],
)
def test_decode_applies_masks(name, kind):
    kv = make_kv(name, rows=RAGGED[:3], padding=3)
    check(make_query(kv, 3), kv, mask=random_mask(kv, kind, 3))


@needs_interpreter
@pytest.mark.parametrize(
    ("name", "window"),
    [("int4", 1), ("int4", 30), slow("int4", 1000), slow("exact", 1), slow("exact", 30)],
)
def test_decode_sees_a_sliding_window(name, window):
    kv = make_kv(name, rows=RAGGED[:2])
    check(make_query(kv, 3), kv, splits=1, sliding_window=window)


@needs_interpreter
def test_decode_bounds_scores_by_a_softcap():
    kv = make_kv("int4", rows=RAGGED[:2])
    check(make_query(kv, 3), kv, softcap=0.7)


@needs_interpreter
@pytest.mark.parametrize("splits", [1, 2])
def test_decode_adds_sink_logits_to_the_denominator(splits):
    kv = make_kv("int8")
    check(make_query(kv, 3), kv, splits, sink_logits=torch.linspace(-1, 2, HEADS))


# -- what only NVIDIA GPUs run ---------------------------------------------------------------------------------------


def unpack_all_words(bits, code, isa):
    """Numbers that the PTX of a word's places gives for all 65,536 words (runs in the worker)."""
    import numpy as np
    from interpreter import ptx

    from kv_hf.backends.triton import dequant

    every = np.arange(65536, dtype=np.uint16)
    if bits < 8:
        texts = [dequant._take_place.fn(p, bits) for p in range(16 // bits)]
        outs = [ptx(text, every.view(np.uint32), 1)[0] for text in texts]
    else:
        make = dequant._signed if code == "signed" else dequant._by_shifts
        outs = ptx(make.fn(True), every.view(np.uint32), 2)
    return [np.ascontiguousarray(out).view(np.float16) for out in outs]


@needs_interpreter
@pytest.mark.parametrize(
    ("bits", "code"), [(2, "unsigned"), (4, "unsigned"), (8, "signed"), (8, "float8")], ids=str
)
def test_ptx_unpacks_every_word(bits, code):
    every = torch.arange(65536)
    for place, got in enumerate(call(unpack_all_words, bits, code, 80)):
        got = torch.from_numpy(got.copy())
        codes = (every >> (bits * place)) & ((1 << bits) - 1)
        if code == "unsigned":
            wanted = (codes << (bits * place % 8)).double() * 2.0**-24
        elif code == "signed":
            wanted = codes.to(torch.uint8).view(torch.int8).double()
        else:
            wanted = codes.to(torch.uint8).view(torch.float8_e4m3fn).double()
        finite = wanted.isfinite()
        assert torch.equal(got.double()[finite], wanted[finite])


@needs_interpreter
@pytest.mark.parametrize(
    ("name", "page"),
    [("int4", 64), ("int2", 64), ("int8", 64), slow("int4", 16), slow("int4", 128), slow("int2", 16),
     slow("int2", 32), slow("int2", 128), slow("int2", 256), slow("fp8", 16), slow("int8", 16)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("size", [1.0, slow(1e-3), slow(1e3)], ids=str)
def test_decode_with_ptx_errs_no_more_than_float16(name, page, size):
    """The NVIDIA branch: codes as float16 subnormals, units as powers of two, products in float16.

    Rounding a query times its scales moves a score by eps * sum |q| |code * scale|, and so all shares together by
    twice that. Each weight is rounded, times |code * scale| of at most twice the largest number, and the result is.
    """
    kv = make_kv(name, page=page, dtype=torch.float16, rows=[(3, 0), (1, 2)], slots=4)
    for field in {"scale", "offset"} & set(kv.key_pages):
        kv.key_pages[field].copy_((kv.key_pages[field].float() * size).half())
    query, scale = make_query(kv, 3, dtype=torch.float16), 0.1 / max(size, 1.0)
    expected = reference.paged_attention(AttentionCall(query.double(), kv, scale))
    out = call(attend_with_ptx, AttentionCall(query, kv, scale), isa=80)
    eps, moved = 2.0**-11, 0.0
    latents = kv.spec.keys
    stored = decode(kv.key_pages, latents, torch.float64)
    largest = max(float(stored.abs().max()), float(kv.residual_keys.abs().max()))
    if "offset" in kv.key_pages:  # else queries are multiplied as they are
        top = 2**latents.scheme.bits - 1
        offset = kv.key_pages["offset"].double()
        codes = stored - offset.repeat_interleave(page // offset.shape[2], 2)
        q = query[..., : latents.head_dim].double().abs()
        moved = eps * float((q.flatten(0, 2) @ codes.abs().flatten(0, 2).mT).max())
        moved += (
            2.0**-25 * top * latents.head_dim * 2 * float(query.abs().max())
        )  # of subnormal products
    allowed = (2 * scale * moved + 3 * eps) * largest
    assert float((out.double() - expected).abs().max()) <= allowed
    assert allowed < 0.05 * largest


# -- operators ---------------------------------------------------------------------------------------------------------


def generate(name, kernel):
    """Greedy tokens of a padded batch, the first layer's codes, and the kernel used (runs in the worker).

    The cache is made to believe that the CPU is a GPU: pages in layout "rows", kernels of Triton.
    """
    import transformers

    import kv_hf
    from kv_hf.backends import registry
    from kv_hf.cache import layer_formats, paged_cache
    from kv_hf.spec import ROWS

    kept = registry.why_not, layer_formats.layout_for, paged_cache.layout_for
    if kernel == "triton":
        registry.why_not = lambda *_: None
    layer_formats.layout_for = paged_cache.layout_for = lambda device: ROWS
    try:
        torch.manual_seed(0)
        config = transformers.DeepseekV3Config(
            vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
            topk_group=1, first_k_dense_replace=1, n_shared_experts=1, kv_lora_rank=16, q_lora_rank=None,
            qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=12, max_position_embeddings=512,
            pad_token_id=0, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        model = transformers.DeepseekV3ForCausalLM(config).eval()
        ids = torch.randint(1, 64, (2, 40))
        mask = torch.ones_like(ids)
        mask[0, :21] = 0
        cache = kv_hf.PagedCache(model.config, latent=name, page_size=16, kernel=kernel)
        tokens = model.generate(
            ids,
            attention_mask=mask,
            past_key_values=cache,
            max_new_tokens=12,
            min_new_tokens=12,
            do_sample=False,
        )
        first = cache.layers[0].store
        return tokens, first.pages.keys.fields["codes"], first.kernel.name
    finally:
        registry.why_not, layer_formats.layout_for, paged_cache.layout_for = kept


@needs_interpreter
@pytest.mark.parametrize("name", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_generate_with_triton_gives_the_tokens_and_bytes_of_the_reference(name):
    """The first layer's latents depend on the tokens alone, so that not a bit of them may differ."""
    tokens, codes, used = call(generate, name, "triton")
    expected, expected_codes, _ = generate(name, "reference")
    assert used == "triton"
    assert torch.equal(tokens, expected)
    assert len(codes) > 2
    assert torch.equal(codes.view(torch.uint8), expected_codes.view(torch.uint8))


# -- support -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", format_names("latent"))
def test_support_takes_every_format_and_page(name):
    from kv_hf.backends.triton.support import _why_not_sizes

    for page in (16, 32, 64, 128, 256):
        for rank in (128, 256, 512):
            spec = spec_of(name, rank=rank, page=page, dtype=torch.bfloat16)
            assert _why_not_sizes(torch.bfloat16, spec, 16) is None


WHY_NOT = {
    "rank": ({"rank": 576}, "kv_lora_rank up to 512, and the latent have 576"),
    "rope": ({"rope_dim": 256}, "qk_rope_head_dim up to 192, and the k_rope have 256"),
    "few-channels": ({"rank": 512, "group": 4}, "kv_lora_rank 512 in groups of 4 makes 2048"),
    "few-tokens": ({"name": "int4", "page": 64, "tokens": 8}, "in 'int4', .* key_group_size 8"),
    "layout": ({"layout": LANES}, "the latent are in 'lanes'"),
    "page": ({"page": 8}, "at least 16 tokens, got 8"),
}


@pytest.mark.parametrize(("sizes", "says"), WHY_NOT.values(), ids=WHY_NOT)
def test_support_names_the_reason(sizes, says):
    from kv_hf.backends.triton.support import _why_not_sizes

    assert re.search(says, _why_not_sizes(torch.bfloat16, spec_of(**{"name": "int8", **sizes}), 1))


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
