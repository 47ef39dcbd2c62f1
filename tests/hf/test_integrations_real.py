"""Adapters, pipelines and changed weights of a real model (SmolLM2-135M), whose matrices are sampled, not read whole."""

import pytest
import torch
import transformers
from measure.models.packaged import resolve_model

import kv_hf
from kv_hf.cache.identity import described, weights_of
from kv_hf.texts import load_text

pytestmark = pytest.mark.slow
PAGES = {"cache_implementation": "paged_exact"}
GREEDY = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture(scope="module")
def path():
    return resolve_model("smollm2-135m")


@pytest.fixture(scope="module")
def tokenizer(path):
    return transformers.AutoTokenizer.from_pretrained(path, padding_side="left")


@pytest.fixture(scope="module")
def plain(path):
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def prompts(tokenizer):
    text = load_text("lincoln_1863")
    rows = [text[:600], "Fellow citizens,"]
    found = tokenizer(rows, return_tensors="pt", padding=True)
    return {name: found[name] for name in ("input_ids", "attention_mask")}


def test_pipeline_with_padding_and_stop_strings(plain, tokenizer):
    pipe = transformers.pipeline("text-generation", model=plain, tokenizer=tokenizer)
    texts = [load_text("lincoln_1863")[:700], "The capital of France is"]
    options = {**GREEDY, "batch_size": 2, "stop_strings": ["."], "tokenizer": tokenizer}
    assert pipe(texts, **options, **PAGES) == pipe(texts, **options)


def test_adapters_stores_and_saved_caches(plain, tokenizer, tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    options = {"target_modules": ["q_proj", "k_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(plain, peft.LoraConfig(r=8, **options), adapter_name="a")
    model.add_adapter("b", peft.LoraConfig(r=8, use_dora=True, **options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    model.eval()
    store, inputs = kv_hf.PrefixStore(), prompts(tokenizer)
    shared = {**PAGES, "cache_config": {"prefix_store": store}}
    texts = set()
    for hits, name in enumerate(("a", "b", "a", "b")):
        model.set_adapter(name)
        expected = model.generate(**inputs, **GREEDY)
        texts.add(tuple(expected.flatten().tolist()))
        assert torch.equal(model.generate(**inputs, **GREEDY, **shared), expected)
        assert store.stats().rows_hit == max(0, hits - 1)  # only the first row fills a page
    assert len(texts) == 2
    cache = kv_hf.PagedCache(model.config)
    model.generate(**inputs, **GREEDY, past_key_values=cache)
    cache.save(tmp_path / "cache", model)
    kv_hf.PagedCache.load(tmp_path / "cache", model).check_integrity()
    model.set_adapter("a")
    with pytest.raises(kv_hf.CacheFileError, match="'b' active .*'a' active"):
        kv_hf.PagedCache.load(tmp_path / "cache", model)
    merged = model.merge_and_unload()
    expected = merged.generate(**inputs, **GREEDY)
    before = store.stats().rows_hit
    assert torch.equal(merged.generate(**inputs, **GREEDY, **shared), expected)
    assert store.stats().rows_hit == before


def test_described_finds_rows_columns_and_heads_but_not_every_single_number(path):
    """What docs/serving.md promises, and what it does not."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    weights = model.model.layers[7]
    parts = [
        weights.self_attn.k_proj.weight.data[64:128],
        weights.mlp.down_proj.weight.data[100],
        weights.mlp.down_proj.weight.data[:, 1000],
        weights.mlp.up_proj.weight.data[:, 3],
        weights.input_layernorm.weight.data[17:18],
        model.get_input_embeddings().weight.data[12345],
    ]
    before = described(weights_of(model))
    for part in parts:
        kept = part.clone()
        part.mul_(1.5).add_(0.01)
        assert described(weights_of(model)) != before
        part.copy_(kept)
        assert described(weights_of(model)) == before
    weights.mlp.up_proj.weight.data[5, 5] += 1  # between the samples, and torch does not count it
    assert described(weights_of(model)) == before
    with torch.no_grad():
        weights.mlp.up_proj.weight[5, 5] += 1  # torch counts it
    assert described(weights_of(model)) != before
