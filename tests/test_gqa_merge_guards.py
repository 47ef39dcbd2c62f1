"""Calibrated merges of models that could go wrong without a word: each is either right, or an error that names the reason."""

import resource
import shutil
from pathlib import Path

import pytest
import tiny_mha
import torch
from tiny_tokenizer import make_tokenizer
from transformers import AutoModelForCausalLM, GptOssConfig

import kv_hf
from kv_hf.errors import ConversionError

TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.3,
}  # fmt: skip


def ids(windows=8, tokens=48, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 64, (windows, tokens), generator=generator)


def tiny(name, edit=lambda model: None, **options):
    """Return a tiny random model of a class by the name of its config."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, name)(**TINY | options)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        edit(model)
    return model


def converted(model, folder, groups, method="svd", text=None):
    """Save a model, convert it and return (the original, the converted one), as transformers loads them."""
    for name in ("source", "new"):
        shutil.rmtree(folder / name, ignore_errors=True)
    model.save_pretrained(folder / "source")
    text = None if method == "mean" else ids() if text is None else text
    kv_hf.convert_to_gqa(folder / "source", folder / "new", groups, method=method, calibration=text)
    return [
        AutoModelForCausalLM.from_pretrained(folder / name, attn_implementation="eager").eval()
        for name in ("source", "new")
    ]


@torch.no_grad()
def divergence(one, other, text):
    """Return the mean KL divergence of two models' next tokens, but for the first position."""
    p, q = (model(text).logits[:, 1:].log_softmax(-1) for model in (one, other))
    return float((p.exp() * (p - q)).sum(-1).mean())


def equal_heads(model):
    for layer in model.model.layers:
        for part in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            part.weight.copy_(part.weight[:8].repeat(4, 1))


# attention that scales what it sums up


def test_contexts_that_are_scaled_behind_the_sum_are_seen():
    from kv_hf.gqa.taps import read_weights

    torch.manual_seed(0)
    weights, value = torch.randn(1, 4, 6, 6).softmax(-1), torch.randn(1, 2, 6, 8)
    plain = (weights @ value.repeat_interleave(2, 1)).transpose(1, 2)
    assert read_weights(weights, value, plain) is weights
    scale = torch.rand(1, 4, 6, 1)
    found = read_weights(weights, value, plain * scale.transpose(1, 2))
    torch.testing.assert_close(found, weights * scale)
    assert read_weights(weights, value, plain + 1e-2) is None
    assert read_weights(weights, value, plain.square()) is None
    assert read_weights(None, value, plain) is None
    assert read_weights(weights, value, torch.zeros_like(plain)).abs().max() == 0


@pytest.mark.parametrize("name", ["GraniteSWAConfig", "GraniteMoeSWAConfig"])
def test_equal_heads_behind_scaling_sinks_lose_nothing(name, tmp_path):
    import transformers

    if not hasattr(transformers, name):
        pytest.skip("this release has no such class")

    def edit(model):
        equal_heads(model)
        for layer in model.model.layers:
            layer.self_attn.sinks.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))

    more = {"num_local_experts": 2, "num_experts_per_tok": 1} if "Moe" in name else {}
    models = converted(tiny(name, edit, sliding_window=16, **more), tmp_path, 1)
    assert divergence(*models, ids(4, 48, 2)) < 1e-4


# heads that must not change places


def test_heads_with_sinks_stay_where_they_are_behind_a_large_channel(tmp_path):
    """The first token's hidden state has one channel of 1e4, as trained models have: every other token counts as much."""
    options = {"intermediate_size": 16, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = GptOssConfig(**TINY | options, layer_types=["full_attention"] * 2)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight[1, 3] = 1e4
        for layer in model.model.layers:
            attention = layer.self_attn
            for part in (attention.k_proj, attention.v_proj):
                head = part.weight[:8].clone()
                near = head + torch.randn(8, 32) * 0.01
                part.weight.copy_(torch.cat([head, near, head, near]))
                part.bias.copy_(part.bias[:8].repeat(4))
            attention.sinks.copy_(torch.tensor([-8.0, -8.0, 8.0, 8.0]))
    text, held = ids(16, 64), ids(4, 64, 2)
    text[:, 0] = held[:, 0] = 1
    models = converted(model, tmp_path, 2, text=text)
    assert divergence(*models, held) < 0.1
