"""Adapters, pipelines and changed weights of a real model (SmolLM2-135M), whose matrices are sampled, not read whole."""

import pytest
import torch
import transformers
from measure.models.packaged import resolve_model

from kv_hf.cache.identity import described, weights_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def path():
    return resolve_model("smollm2-135m")


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
