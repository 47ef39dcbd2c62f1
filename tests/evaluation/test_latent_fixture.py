"""A Llama rewritten with multi-head latent attention computes what the Llama computes with its slowest planes not turned."""

import pytest
import torch
import transformers
from measure.models.along_rank import along_the_rank
from measure.models.latent_fixture import (
    LatentFixture,
    embed_in_mla,
    principal_bases,
    whitened_bases,
)
from measure.models.packaged import resolve_model
from paths import ROOT
from tiny_models import make_model, tokens
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.youtu.modeling_youtu import YoutuRMSNorm

import kv_hf
from kv_hf.evaluation.accuracy import measure_accuracy
from kv_hf.evaluation.cache_bytes import layer_shapes, measure_held
from kv_hf.evaluation.cache_kinds import cache_kind
from kv_hf.hf import attention as hf_attention
from kv_hf.hf import latent as hf_latent
from kv_hf.texts import text_windows

STILL = 3  # planes of a kv head without RoPE; heads of 16 have 8


@pytest.fixture
def llama():
    changes = {"num_attention_heads": 6, "head_dim": 16, "hidden_size": 48}
    model = make_model("llama", torch.float64, **changes)
    with torch.no_grad():
        for parameter in model.parameters():  # attention that is far from uniform
            parameter.mul_(2.0 if parameter.ndim > 1 else 1.0)
    return model


@pytest.fixture
def norms_in_float64(monkeypatch):
    """transformers' norms round to float32, which would hide differences below it."""

    def forward(self, x):
        return (
            self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        )

    for norm in (LlamaRMSNorm, YoutuRMSNorm):
        monkeypatch.setattr(norm, "forward", forward)


def without_slow_planes(llama, ids, still=STILL):
    turning = llama.model.rotary_emb.inv_freq.clone()
    llama.model.rotary_emb.inv_freq[-still:] = 0.0
    try:
        return llama(ids).logits
    finally:
        llama.model.rotary_emb.inv_freq = turning


@torch.no_grad()
@pytest.mark.parametrize("rank", [None, 64])
@pytest.mark.parametrize("mixing", ["random", "none"])
def test_logits_are_those_of_the_llama_without_slow_rope(llama, norms_in_float64, mixing, rank):
    mla = embed_in_mla(llama, mixing=mixing, rank=rank, still_planes=STILL)
    ids = tokens(2, 60)
    expected = without_slow_planes(llama, ids)
    assert (expected - llama(ids).logits).abs().max() > 1e-3  # the planes matter here
    torch.testing.assert_close(mla(ids).logits, expected, rtol=0, atol=1e-11)
    assert mla.config.kv_lora_rank == (rank or 2 * (2 * STILL + 16))
    assert mla.config.qk_rope_head_dim == 2 * 2 * (8 - STILL)


@torch.no_grad()
def test_without_still_planes_it_is_the_llama(llama, norms_in_float64):
    mla = embed_in_mla(llama, still_planes=0)
    torch.testing.assert_close(
        mla(tokens(1, 40)).logits, llama(tokens(1, 40)).logits, rtol=0, atol=1e-11
    )


@torch.no_grad()
def test_principal_bases_sort_the_channels_of_the_latent_by_energy(llama, norms_in_float64):
    plain = embed_in_mla(llama, mixing="none", still_planes=STILL)
    ids = tokens(1, 100)
    mla = embed_in_mla(llama, mixing=principal_bases(plain, ids[0]), still_planes=STILL)
    torch.testing.assert_close(mla(ids).logits, plain(ids).logits, rtol=0, atol=1e-11)
    cache = transformers.DynamicCache(config=mla.config)
    mla(ids, past_key_values=cache)
    for layer in cache.layers:
        energy = layer.keys[0, 0].pow(2).sum(0)
        assert (energy.diff() <= 1e-9 * energy[0]).all()


@torch.no_grad()
def test_whitened_channels_have_one_energy_and_compute_the_same(llama, norms_in_float64):
    plain = embed_in_mla(llama, mixing="none", still_planes=STILL)
    ids = tokens(1, 100)
    bases = whitened_bases(plain, ids[0])
    mla = embed_in_mla(llama, mixing=bases, still_planes=STILL)
    torch.testing.assert_close(mla(ids).logits, plain(ids).logits, rtol=0, atol=1e-11)
    stock, mixed = (transformers.DynamicCache(config=plain.config) for _ in range(2))
    plain(ids, past_key_values=stock)
    mla(ids, past_key_values=mixed)
    for before, layer in zip(stock.layers, mixed.layers, strict=True):
        latents = before.keys[0, 0]
        axes = torch.linalg.eigvalsh(latents.T @ latents / 100)
        least = 1e-3 * axes.mean()
        found = torch.linalg.eigvalsh(layer.keys[0, 0].T @ layer.keys[0, 0] / 100)
        expected = (axes / axes.clamp(min=least)).sort()[0]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
        assert (expected > 1 - 1e-9).sum() > len(axes) // 2


@torch.no_grad()
def test_groups_along_the_rank_are_measured_with_the_bytes_they_take(llama):
    model = embed_in_mla(llama.float(), rank=64)
    model.set_attn_implementation("kv_hf")
    rope = model.config.qk_rope_head_dim
    tokens_held = 4 + 64 * 10
    beside = (4 + 64) * (64 + rope) * 2 * 2 + 10 * 4
    # codes, and a scale and an offset per token and 64 or 32 of its numbers
    for name, page in {"int4": 64 * (32 + 4), "int2": 64 * (16 + 8)}.items():
        kind = along_the_rank(name)
        held = measure_held(model.config, [(1, 64, rope)] * 2, kind, tokens_held, 70)
        codes = 64 * rope + 2 + 2 * rope  # RoPE keys, as below
        assert held.bytes == 2 * 10 * (page + codes) + beside, name
    cache = along_the_rank("int4").make(model.config, 100)
    model(tokens(1, 69), past_key_values=cache)
    stock = transformers.DynamicCache(config=model.config)
    model(tokens(1, 69), past_key_values=stock)
    latents = stock.layers[0].keys[0, 0, 4:68]
    found = cache.layers[0].keys[0, 0, 4:68]
    low, high = latents.amin(1, keepdim=True), latents.amax(1, keepdim=True)
    step = (high - low) / 15
    assert ((found - latents).abs() <= 0.51 * step).all()
    assert (found - latents).abs().max() > 0.3 * step.min()


@torch.no_grad()
@pytest.mark.parametrize(
    ("cache", "expected"),
    [
        ("paged_int4:page_size=16", "absorbed"),
        ("paged_int4:page_size=16,mla=expand", "expanded"),
        ("paged_int4:page_size=64", "expanded"),
        ("dynamic", "expanded"),
    ],
)
def test_rows_say_how_pages_were_read(llama, monkeypatch, cache, expected):
    fixture = object.__new__(LatentFixture)
    fixture.model = embed_in_mla(llama.float(), still_planes=6)
    fixture.model.set_attn_implementation("kv_hf")
    seen = []

    def absorbs(module, mla, query):
        seen.append((query.shape[2], hf_latent.absorbs(module, mla, query)))
        return seen[-1][1]

    monkeypatch.setattr(hf_attention, "absorbs", absorbs)
    kind = cache_kind(cache)
    make = {cache: lambda: kind.make(fixture.model.config, 200)}
    measure_accuracy(fixture.model, list(tokens(1, 200)), make, 68)
    assert 16 <= hf_latent.longest_absorbed(fixture.model.model.layers[0].self_attn) < 64
    assert fixture.reads(kind) == expected
    longest = max(length for length, _ in seen[2:]) if seen else 0  # behind the prompt
    absorbed = {done for length, done in seen if length == longest}
    assert absorbed == ({expected == "absorbed"} if seen else set())


def test_tied_and_untied_embeddings_are_kept(llama):
    for tied in (False, True):
        source = make_model("llama", tie_word_embeddings=tied)
        mla = embed_in_mla(source)
        assert torch.equal(mla.lm_head.weight, source.lm_head.weight)
        assert (mla.lm_head.weight is mla.model.embed_tokens.weight) == tied


def test_what_cannot_be_rewritten_is_refused(llama):
    with pytest.raises(ValueError, match="only LlamaForCausalLM"):
        embed_in_mla(make_model("qwen2"))
    with pytest.raises(ValueError, match="biases"):
        embed_in_mla(make_model("llama", attention_bias=True))
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(ValueError, match="'linear'"):
        embed_in_mla(make_model("llama", rope_parameters=scaled))
    with pytest.raises(ValueError, match="rank must be at least 44, got 40"):
        embed_in_mla(llama, rank=40, still_planes=STILL)
    with pytest.raises(ValueError, match="still_planes must be 0 to 7, got 8"):
        embed_in_mla(llama, still_planes=8)
    with pytest.raises(ValueError, match="mixing must be"):
        embed_in_mla(llama, mixing="mixed")
    with pytest.raises(ValueError, match="mixing must be 2 bases"):
        embed_in_mla(llama, mixing=[torch.eye(3)] * 2)
    with pytest.raises(ValueError, match="mixing must be one of"):
        LatentFixture("smollm2-135m", mixing="mixed")


@torch.no_grad()
def test_caches_of_latents_can_be_measured(llama):
    """Distances and bytes: everything the evaluation does with a cache, on pages of latents."""
    model = embed_in_mla(llama.float(), rank=64)
    model.set_attn_implementation("kv_hf")
    names = ["paged_exact", "paged_int8", "paged_int4", "paged_int4:latent=fp8,k_rope=int8"]
    kinds = {name: cache_kind(f"{name}{',' if ':' in name else ':'}page_size=16") for name in names}
    make = {name: lambda kind=kind: kind.make(model.config, 100) for name, kind in kinds.items()}
    found = measure_accuracy(model, list(tokens(2, 100)), make, 40)
    exact, int8, int4, fp8 = (found[name].kl_mean for name in names)
    assert abs(exact) < 1e-6 < int8 < int4
    assert int8 < fp8 < int4
    shapes = layer_shapes(model)
    rope = model.config.qk_rope_head_dim
    assert shapes == [(1, 64, rope)] * 2
    held = {
        name: measure_held(model.config, shapes, kind, 4 + 16 * 20, 40)
        for name, kind in kinds.items()
    }
    # 20 pages; sinks, the open page and the table beside them
    beside = (4 + 16) * (64 + rope) * 2 * 2 + 20 * 4
    rope_codes = 16 * rope + 2 + 2 * rope  # a scale per page, an offset per channel
    page = {
        "paged_exact": 16 * (64 + rope) * 2,
        "paged_int8": 16 * (64 + 2) + rope_codes,  # a group of 64: one scale
        "paged_int4": 16 * 32 + 64 * 4 + rope_codes,  # a scale and an offset per channel
    }
    for name, size in page.items():
        assert held[name].bytes == 2 * 20 * size + beside, name
    assert held["paged_exact"].bytes_exact == 324 * (64 + rope) * 2 * 2


def test_the_table_has_the_newest_rows_of_each_basis(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import eval_tables

    same = dict.fromkeys(("model", "model_revision", "dtype", "text_digest", "machine"), "x")
    same |= {"date": "2026-01-02", "threads": 1}
    same |= {"kv_lora_rank": 64, "qk_rope_head_dim": 20, "windows": 2, "window": 100, "prompt": 40}
    same |= {"tokens": 120, "bytes_exact": 3000, "bytes_per_token": 12.0, "top1": 0.9}
    same |= dict.fromkeys(("kl_low", "kl_high", "kl_median", "kl_p99"), 0.5)
    same |= {"perplexity_exact": 7.0, "perplexity": 7.5, "reads": "absorbed"}
    rows = [
        same | {"mixing": mixing, "cache": cache, "stored_bits": bits, "kl_mean": kl}
        for mixing, cache, bits, kl in [
            ("random", "paged_int4", 4.5, 0.25),
            ("whitened", "paged_int4", 4.5, 0.75),
            ("random", "int4 along the rank", 4.6, 0.35),
            ("random", "paged_int4", 4.5, 0.125),
        ]
    ]
    text = eval_tables.latent_accuracy_table(rows)
    assert "0.25" not in text  # measured again since
    of_random, of_whitened = text.split("turned at random")
    assert of_random.index("| int4 along the rank |") < of_random.index("| `paged_int4` |")
    assert "| 0.12 (0.50 to 0.50) |" in of_random and "30 bytes per token" in of_random
    assert (
        "| 0.75 (0.50 to 0.50) |" in of_whitened
        and "| `paged_int4` | absorbed | 4.50 | 12 |" in of_whitened
    )
    found = [eval_tables.finer_digits(kl) for kl in (-3e-9, 0.0000436, 0.000697, 0.0028, 0.0562)]
    assert found == ["0.00000", "0.000044", "0.00070", "0.00280", "0.0562"]
    assert eval_tables.latent_accuracy_table([]).startswith("No run has been recorded yet")


def test_recommend_refuses_latents(llama):
    mla = embed_in_mla(llama.float())
    with pytest.raises(kv_hf.errors.UnsupportedModelError, match="latent"):
        kv_hf.recommend(mla, "bits=4.5", text=[list(range(3, 60))], prompt=20)


@pytest.mark.slow
@torch.no_grad()
def test_a_real_model_in_mla_form_computes_the_same(norms_in_float64):
    folder = resolve_model("smollm2-135m")
    llama = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    mla = embed_in_mla(llama, rank=256)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor(text_windows(tokenizer, "lincoln_1862", 200, 1))
    expected = without_slow_planes(llama, ids, still=8)
    assert expected.abs().max() > 10
    torch.testing.assert_close(mla(ids).logits, expected, rtol=0, atol=1e-9)
