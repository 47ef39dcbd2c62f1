"""GPT-NeoX as Phi and GPT-2 as GPTBigCode: equal logits before merging, and refusals where they would not be."""

import json

import pytest
import tiny_mha
import torch
import transformers
from safetensors.torch import save_file
from tiny_tokenizer import make_tokenizer

import kv_hf


def neox(**changes):
    return tiny_mha.make("gpt_neox", **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_bias": False},
        {"hidden_act": "relu", "layer_norm_eps": 1e-3},
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 500.0,
                "partial_rotary_factor": 1.0,
            }
        },
        {
            "rope_parameters": {
                "rope_type": "linear",
                "factor": 2.0,
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            }
        },
    ],
    ids=["pythia", "no-bias", "relu", "rotary-1.0", "linear-rope"],
)
def test_neox_as_phi_computes_the_same(changes, tmp_path):
    model = neox(**changes)
    source = tiny_mha.save(model, tmp_path / "source")
    report = kv_hf.convert_to_gqa(source, tmp_path / "phi", 4)
    new = tiny_mha.load(tmp_path / "phi")
    assert type(new) is transformers.PhiForCausalLM
    assert (report.method, report.new_class) == ("exact", "PhiForCausalLM")
    old = tiny_mha.logits(model)
    assert (tiny_mha.logits(new) - old).abs().max() <= 4e-6 * old.abs().max()


def test_neox_as_phi_merges_equal_heads_exactly(tmp_path):
    model = neox()
    for layer in model.gpt_neox.layers:
        for tensor in (
            layer.attention.query_key_value.weight,
            layer.attention.query_key_value.bias,
        ):
            heads = tensor.data.unflatten(0, (4, 3, 8))
            heads[:, 1:] = heads[::2, 1:].repeat_interleave(2, 0)
    source = tiny_mha.save(model, tmp_path / "source")
    old = tiny_mha.logits(model)
    kv_hf.convert_to_gqa(source, tmp_path / "two", 2)
    new = tiny_mha.load(tmp_path / "two")
    assert new.config.num_key_value_heads == 2
    assert (tiny_mha.logits(new) - old).abs().max() <= 4e-6 * old.abs().max()
    kv_hf.convert_to_gqa(source, tmp_path / "one", 1, method="first")
    assert (tiny_mha.logits(tiny_mha.load(tmp_path / "one")) - old).abs().max() > 1e-2


def test_neox_as_phi_and_then_merged_is_the_same_as_at_once(tmp_path):
    source = tiny_mha.save(neox(), tmp_path / "source")
    kv_hf.convert_to_gqa(source, tmp_path / "phi", 4)
    kv_hf.convert_to_gqa(tmp_path / "phi", tmp_path / "steps", 2)
    kv_hf.convert_to_gqa(source, tmp_path / "once", 2)
    steps, once = tiny_mha.stored(tmp_path / "steps"), tiny_mha.stored(tmp_path / "once")
    assert steps.keys() == once.keys()
    for name in steps:
        torch.testing.assert_close(steps[name], once[name], atol=1e-6, rtol=1e-5)


def test_neox_masks_of_old_checkpoints_are_left_out(tmp_path):
    source = tiny_mha.save(neox(), tmp_path / "source", "1GB")
    tensors = tiny_mha.stored(source)
    for i in range(2):
        at = f"gpt_neox.layers.{i}.attention."
        tensors[f"{at}bias"] = torch.ones(1, 1, 8, 8, dtype=torch.uint8)
        tensors[f"{at}masked_bias"] = torch.tensor(-1e9)
        tensors[f"{at}rotary_emb.inv_freq"] = torch.ones(2)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    kv_hf.convert_to_gqa(source, tmp_path / "phi", 2)
    tiny_mha.load(tmp_path / "phi")
    assert not any("masked" in name for name in tiny_mha.stored(tmp_path / "phi"))
    tensors["gpt_neox.extra.weight"] = torch.ones(3)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        kv_hf.ConversionError, match="holds 'gpt_neox.extra.weight', which would be lost"
    ):
        kv_hf.convert_to_gqa(source, tmp_path / "more", 2)


def test_cross_class_keeps_the_tokenizer_and_says_what_it_did(tmp_path):
    source = tiny_mha.save(neox(), tmp_path / "source")
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(source)
    kv_hf.convert_to_gqa(source, tmp_path / "phi", 2)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "phi")
    text = "the cat and the hat"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    record = json.loads((tmp_path / "phi" / "config.json").read_text())["kv_hf_conversion"]
    assert record["class"] == ["gpt_neox", "PhiForCausalLM"]
    assert "`PhiForCausalLM`" in (tmp_path / "phi" / "README.md").read_text()


def test_neox_as_phi_rounds_once_in_the_dtype_of_the_weights(tmp_path):
    model = neox().bfloat16()
    source = tiny_mha.save(model, tmp_path / "source")
    kv_hf.convert_to_gqa(source, tmp_path / "phi", 4)
    kv_hf.convert_to_gqa(source, tmp_path / "exact", 4, dtype="float32")
    old = tiny_mha.logits(model.float())
    assert (
        tiny_mha.logits(tiny_mha.load(tmp_path / "exact").float()) - old
    ).abs().max() < 4e-6 * old.abs().max()
    folded = tiny_mha.stored(tmp_path / "phi")["model.layers.0.mlp.fc1.weight"]
    exact = tiny_mha.stored(tmp_path / "exact")["model.layers.0.mlp.fc1.weight"]
    assert torch.equal(folded, exact.bfloat16())


@pytest.mark.parametrize("tied", [True, False])
def test_gpt2_as_gpt_bigcode_computes_the_same(tied, tmp_path):
    model = tiny_mha.make("gpt2", tie_word_embeddings=tied)
    source = tiny_mha.save(model, tmp_path / "source")
    kv_hf.convert_to_gqa(source, tmp_path / "all", 4)
    new = tiny_mha.load(tmp_path / "all")
    assert type(new) is transformers.GPTBigCodeForCausalLM and not new.config.multi_query
    torch.testing.assert_close(tiny_mha.logits(new), tiny_mha.logits(model), atol=1e-6, rtol=1e-6)
    for layer in model.transformer.h:
        for tensor in (layer.attn.c_attn.weight, layer.attn.c_attn.bias):
            heads = tensor.data.unflatten(-1, (3, 4, 8))
            heads[..., 1:, :, :] = heads[..., 1:, :1, :]
    source = tiny_mha.save(model, tmp_path / "equal")
    report = kv_hf.convert_to_gqa(source, tmp_path / "one", 1)
    one = tiny_mha.load(tmp_path / "one")
    assert one.config.multi_query and report.new_kv_bytes_per_token * 4 == report.kv_bytes_per_token
    torch.testing.assert_close(tiny_mha.logits(one), tiny_mha.logits(model), atol=1e-6, rtol=1e-6)
    out = one.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, return_dict_in_generate=True)
    assert out.past_key_values.layers[0].keys.shape[1] == 1


def test_gpt2_files_without_the_prefix_and_with_masks_are_read(tmp_path):
    model = tiny_mha.make("gpt2")
    source = tiny_mha.save(model, tmp_path / "source", "1GB")
    tensors = {
        name.removeprefix("transformer."): tensor
        for name, tensor in tiny_mha.stored(source).items()
    }
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    kv_hf.convert_to_gqa(source, tmp_path / "all", 4)
    new = tiny_mha.load(tmp_path / "all")
    torch.testing.assert_close(tiny_mha.logits(new), tiny_mha.logits(model), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("family", "changes", "kv_heads", "says"),
    [
        ("gpt_neox", {"use_parallel_residual": False}, 2, "use_parallel_residual=False"),
        ("gpt_neox", {"tie_word_embeddings": True}, 2, "tie_word_embeddings=True"),
        ("gpt_neox", {}, 3, "it can be 1 or 2 or 4 .*, got 3"),
        ("gpt_neox", {}, 8, "it can be 1 or 2 or 4 .*, got 8"),
        (
            "gpt2",
            {"scale_attn_by_inverse_layer_idx": True},
            1,
            "scale_attn_by_inverse_layer_idx=True",
        ),
        ("gpt2", {"add_cross_attention": True}, 1, "add_cross_attention=True"),
        ("gpt2", {}, 2, "it can be 1 or 4 .*, got 2"),
    ],
)
def test_cross_class_refuses_what_would_not_be_the_same(family, changes, kv_heads, says, tmp_path):
    source = tiny_mha.save(tiny_mha.make(family, **changes), tmp_path / "source")
    with pytest.raises(kv_hf.ConversionError, match=says):
        kv_hf.convert_to_gqa(source, tmp_path / "new", kv_heads)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_cross_class_refuses_other_heads_of_the_family_and_calibrated_merging(tmp_path):
    config = transformers.GPTNeoXConfig(**tiny_mha.COMMON, num_labels=2)
    model = transformers.GPTNeoXForSequenceClassification(config)
    source = tiny_mha.save(model, tmp_path / "classes")
    with pytest.raises(
        kv_hf.ConversionError, match="GPTNeoXForSequenceClassification has no grouped kv heads"
    ):
        kv_hf.convert_to_gqa(source, tmp_path / "new", 2)
    source = tiny_mha.save(neox(), tmp_path / "source")
    with pytest.raises(
        kv_hf.ConversionError, match="num_kv_heads=4 first, which is exact, and that to 2"
    ):
        kv_hf.convert_to_gqa(source, tmp_path / "new", 2, method="svd", calibration="text")


def test_only_an_exact_conversion_claims_to_compute_the_same(tmp_path):
    source = tiny_mha.save(neox(), tmp_path / "source")
    exact, merged = (
        kv_hf.convert_to_gqa(source, tmp_path / "new", n, dry_run=True) for n in (4, 2)
    )
    assert "computes the same as GPTNeoXForCausalLM" in exact.notes[0]
    assert "the same" not in merged.notes[0] and "PhiForCausalLM" in merged.notes[0]
