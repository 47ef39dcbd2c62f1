"""Calibrated merges of models that could go wrong without a word: each is either right, or an error that names the reason."""

import resource
import shutil

import pytest
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
    options = {
        "intermediate_size": 16,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
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


# numbers that are not finite, and layers that do nothing


def zero(path):
    return lambda model: model.get_parameter(path).zero_()


def huge_activations(model):
    for part in (model.model.layers[0].mlp.down_proj, model.model.layers[0].mlp.up_proj):
        part.weight.mul_(1e22)


def huge_values(model):
    model.model.layers[0].self_attn.v_proj.weight.mul_(1e20)


def not_a_number(model):
    model.model.layers[1].self_attn.o_proj.weight[0, 0] = float("nan")


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (huge_activations, r"'model.layers.0' cannot be merged: hidden states .* are not finite"),
        (huge_values, r"'model.layers.0' cannot be merged: .* not finite"),
        (not_a_number, r"'model.layers.1' cannot be merged: .* not finite"),
        (zero("model.embed_tokens.weight"), "embeddings of all calibration tokens of .* are zero"),
    ],
)
@pytest.mark.parametrize("groups", [1, 2])
def test_numbers_that_are_not_finite_are_an_error_that_names_the_layer(
    edit, says, groups, tmp_path
):
    with pytest.raises(ConversionError, match=says):
        converted(tiny("LlamaConfig", edit), tmp_path, groups)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("method", ["align", "svd"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("part", ["o_proj", "v_proj", "q_proj", "k_proj"])
def test_a_dead_layer_stays_dead_and_can_learn(part, groups, method, tmp_path):
    """As in the blocks that LLaMA-Pro adds: the values that nobody reads, or that are zero, become their means."""
    path = f"model.layers.1.self_attn.{part}.weight"
    model = tiny("LlamaConfig", zero(path))
    one, other = converted(model, tmp_path, groups, method)
    for name, parameter in other.named_parameters():
        assert parameter.isfinite().all(), name
    if part in ("o_proj", "v_proj"):
        own, new = (m.model.layers[1].self_attn for m in (one, other))
        assert torch.equal(own.o_proj.weight, new.o_proj.weight)
        mean = own.v_proj.weight.reshape(groups, -1, 8, 32).mean(1).flatten(0, 1)
        if groups == 1:  # with two, heads may have found other places
            torch.testing.assert_close(new.v_proj.weight, mean)
        assert bool(new.v_proj.weight.any()) == (part == "o_proj")


@pytest.mark.parametrize("method", ["align", "svd"])
def test_heads_that_nobody_reads_keep_values(method, tmp_path):
    """Values of zero behind outputs of zero would never learn again."""

    def edit(model):
        model.model.layers[0].self_attn.o_proj.weight[:, 16:] = 0

    found = converted(tiny("LlamaConfig", edit), tmp_path, 2, method)[1]
    value = found.model.layers[0].self_attn.v_proj.weight
    assert value[:8].any() and value[8:].any()


def test_a_cast_that_loses_numbers_is_seen_beside_infinities():
    from kv_hf.gqa.merge_plan import cast

    with pytest.raises(ConversionError, match=r"'w' holds 1e\+30, which float16 cannot hold"):
        cast("w", torch.tensor([float("inf"), 1e30]), torch.float16)
    kept = cast("w", torch.tensor([float("inf"), 1.0]), torch.float16)
    assert kept.tolist() == [float("inf"), 1.0]


# calibration text that does not fit, and layers that text does not reach


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (torch.tensor([[3, 64] * 20]), "holds token 64, and the model's vocabulary has 64 tokens"),
        (torch.tensor([[3, -1] * 20]), "holds token -1, and"),
        (torch.tensor([[3]]), "1 windows of 1 tokens: too few"),
        (torch.full((30, 1), 3), "30 windows of 1 tokens: too few"),
    ],
)
@pytest.mark.parametrize("dry_run", [False, True])
def test_calibration_ids_that_do_not_fit_are_refused(text, says, dry_run, tmp_path):
    tiny("LlamaConfig").save_pretrained(tmp_path / "source")
    with pytest.raises(ConversionError, match=says):
        kv_hf.convert_to_gqa(
            tmp_path / "source",
            tmp_path / "new",
            2,
            method="svd",
            calibration=text,
            dry_run=dry_run,
        )


def mllama():
    from transformers import MllamaForCausalLM
    from transformers.models.mllama.configuration_mllama import MllamaTextConfig

    torch.manual_seed(0)
    options = {**TINY, "num_hidden_layers": 3, "cross_attention_layers": [1]}
    return MllamaForCausalLM(MllamaTextConfig(**options))


@pytest.mark.parametrize("method", ["align", "svd"])
def test_layers_that_text_does_not_reach_are_refused(method, tmp_path):
    with pytest.raises(ConversionError, match="leaves layer 1 out when it reads text alone"):
        converted(mllama(), tmp_path, 2, method)


def test_norms_of_single_heads_leave_values_free(tmp_path):
    """Cohere's query and key norms have weights of their own for every head."""

    def edit(model):
        for layer in model.model.layers:
            for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
                norm.weight.copy_(torch.rand(norm.weight.shape) + 0.5)

    model = tiny("CohereConfig", edit, use_qk_norm=True)
    pooled = divergence(*converted(model, tmp_path, 2, "mean"), ids(4, 48, 2))
    assert divergence(*converted(model, tmp_path, 2), ids(4, 48, 2)) < 0.7 * pooled


def test_a_layer_with_nothing_to_fit_is_refused(tmp_path):
    model = tiny(
        "Qwen3NextConfig", head_dim=8, layer_types=["full_attention"] * 2, num_experts=2, num_experts_per_tok=1,
        moe_intermediate_size=16, shared_expert_intermediate_size=16,
    )  # fmt: skip
    with pytest.raises(ConversionError, match="a calibrated merge would be the mean"):
        converted(model, tmp_path, 2)


# disk


def test_a_disk_that_is_full_while_layers_are_merged_is_an_error(tmp_path):
    tiny("LlamaConfig").save_pretrained(tmp_path / "source")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, hard))
    try:
        with pytest.raises(ConversionError, match="cannot be written: File too large"):
            kv_hf.convert_to_gqa(
                tmp_path / "source", tmp_path / "new", 2, method="svd", calibration=ids()
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


# dry runs


def with_tokenizer(folder, **options):
    model = tiny("LlamaConfig", vocab_size=300, **options)
    model.save_pretrained(folder)
    make_tokenizer(300).save_pretrained(folder)


def everything_under(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_dry_run_reads_the_text(tmp_path):
    with_tokenizer(tmp_path / "source")
    with pytest.raises(ConversionError, match=r"calibration: text must be .* got 'nothing.txt'"):
        kv_hf.convert_to_gqa(
            tmp_path / "source",
            tmp_path / "new",
            2,
            method="svd",
            calibration="nothing.txt",
            dry_run=True,
        )


@pytest.mark.parametrize("calibration", ["samples", "lincoln_1862"])
def test_a_dry_run_writes_nothing_and_tells_the_memory(calibration, tmp_path, monkeypatch):
    from kv_hf.gqa import calibration_text

    monkeypatch.setattr(
        calibration_text, "sample_rows", None
    )  # a dry run has the model write nothing
    with_tokenizer(tmp_path / "source")
    before = everything_under(tmp_path)
    report = kv_hf.convert_to_gqa(
        tmp_path / "source",
        tmp_path / "new",
        2,
        method="svd",
        calibration=calibration,
        dry_run=True,
    )
    assert report.memory > 1e6
    assert everything_under(tmp_path) == before


@pytest.mark.parametrize("dry_run", [False, True])
def test_models_that_cannot_be_calibrated_are_refused_before_anything_is_merged(
    dry_run, tmp_path, monkeypatch
):
    from kv_hf.gqa.merge_layer import LayerMerge

    monkeypatch.setattr(LayerMerge, "run", None)
    mllama().save_pretrained(tmp_path / "source")
    with pytest.raises(ConversionError, match="leaves layer 1 out"):
        kv_hf.convert_to_gqa(
            tmp_path / "source",
            tmp_path / "new",
            2,
            method="svd",
            calibration=ids(),
            dry_run=dry_run,
        )
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
