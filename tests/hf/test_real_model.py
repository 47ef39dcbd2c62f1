"""SmolLM2-135M: the limits of accuracy on real text that the README promises, and what a store knows of its weights."""

import pytest
import torch
import transformers
from measure.models.packaged import resolve_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import kv_hf
from kv_hf.cache.identity import described, weights_of
from kv_hf.evaluation.accuracy import measure_accuracy
from kv_hf.texts import load_text, token_windows

pytestmark = pytest.mark.slow
LIMITS = {"paged_int8": 0.0005, "paged_fp8": 0.006, "paged_int4": 0.005, "paged_int2": 0.18}


def model_and_texts(length, count):
    """Return SmolLM2-135M and `count` windows of `length` tokens."""
    folder = resolve_model("smollm2-135m")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(folder)(load_text("lincoln_1862")).input_ids
    return model, [torch.tensor(window) for window in token_windows(ids, length, count)]


def test_mean_kl_on_real_text_stays_below_the_limits():
    model, texts = model_and_texts(1536, 4)
    found = measure_accuracy(
        model,
        texts,
        {
            name: lambda name=name: kv_hf.PagedCache.from_implementation(model.config, name)
            for name in LIMITS
        },
        512,
    )
    assert all(result["tokens"] == 4096 for result in found.values())
    assert found["paged_int4"]["bits_per_element"] <= 4.75
    over = {
        name: found[name]["kl_mean"]
        for name, limit in LIMITS.items()
        if found[name]["kl_mean"] > limit
    }
    assert not over


# -- what a store knows of real weights ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder():
    return resolve_model("smollm2-135m")


def test_described_finds_rows_columns_and_heads_but_not_every_single_number(folder):
    """What docs/serving.md promises, and what it does not."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
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
