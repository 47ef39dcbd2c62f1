"""The fast chunks of the evaluation give what token-by-token decoding gives, and quality holds up."""

import pytest
import torch
from tiny_models import make_model, tokens
from transformers import DynamicCache

import kv_hf
from kv_hf.evaluation.accuracy import measure_accuracy
from kv_hf.evaluation.cache_kinds import cache_kind, why_not
from kv_hf.evaluation.teacher_forcing import forced_logits, next_chunk
from kv_hf.texts import load_text, token_windows


@pytest.mark.parametrize("implementation", kv_hf.IMPLEMENTATIONS)
@pytest.mark.parametrize("options", [{}, {"sink_tokens": 0, "recent_tokens": 10}])
def test_chunks_equal_token_by_token(implementation, options):
    model = make_model("llama", dtype=torch.float64)  # fp32 noise alone can flip a rounded code
    model.set_attn_implementation("kv_hf")
    ids = tokens(1, 90)[0]
    results = []
    for chunk in (next_chunk, lambda cache, position: 1):
        cache = kv_hf.PagedCache.from_implementation(
            model.config, implementation, {"page_size": 16, **options}
        )
        results.append(torch.cat([out for _, out in forced_logits(model, ids, cache, 21, chunk)]))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-6)  # fp32 logits


PEERS = (
    "quanto_int4:residual_length=20,q_group_size=16",
    "quanto_int2:residual_length=20,q_group_size=16",
    "hqq_int8:residual_length=20,q_group_size=16",
    "hqq_int4:residual_length=20,q_group_size=16",
    "hqq_int2:residual_length=20,q_group_size=16",
    "quantized_fp8",
    "static",
)


@pytest.mark.parametrize("name", PEERS)
def test_chunks_of_peers_equal_token_by_token(name):
    """So that transformers' caches can be measured by the same code; a longer chunk would hide their errors."""
    reason = why_not(name, torch.device("cpu"))
    if reason:
        pytest.skip(reason)
    model = make_model("llama", dtype=torch.float64)
    ids = tokens(1, 90)[0]
    results = []
    for chunk in (next_chunk, lambda cache, position: 1, lambda cache, position: 68):
        cache = cache_kind(name).make(model.config, 90)
        # hqq packs four groups of 2 bits into a byte, so that it takes even lengths only here
        results.append(torch.cat([out for _, out in forced_logits(model, ids, cache, 22, chunk)]))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-6)  # fp32 logits
    if "residual" in name:
        assert (results[2] - results[1]).abs().max() > 1e-3


def test_chunk_that_crosses_a_page_is_not_the_same():
    """Why chunks end with pages: inside a longer chunk later tokens would still read earlier ones exactly."""
    model = make_model("llama")
    model.set_attn_implementation("kv_hf")
    ids = tokens(1, 90)[0]
    results = []
    for chunk in (next_chunk, lambda cache, position: 69):
        cache = kv_hf.PagedCache(model.config, keys="int2", page_size=16)
        results.append(torch.cat([out for _, out in forced_logits(model, ids, cache, 21, chunk)]))
    assert (results[0] - results[1]).abs().max() > 1e-3


@pytest.mark.parametrize("amount", ["read_tokens=36", "read_share=0.5", "read_top_p=0.6"])
def test_where_pages_are_chosen_tokens_go_one_by_one(amount):
    """Each token has a choice of its own from read_from on; before that, chunks are as long as pages allow."""
    model = make_model("llama", dtype=torch.float64)
    model.set_attn_implementation("kv_hf")
    ids = tokens(1, 120)[0]
    name = f"paged_int4:page_size=16,read_from=60,{amount}"
    results, steps = [], []

    def noted(cache, position):
        steps.append((position, next_chunk(cache, position)))
        return steps[-1][1]

    def by_pages(cache, position):
        return 16 - (position - 4) % 16

    for chunk in (noted, lambda cache, position: 1, by_pages):
        cache = cache_kind(name).make(model.config, 120)
        results.append(torch.cat([out for _, out in forced_logits(model, ids, cache, 21, chunk)]))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-6)  # fp32 logits
    assert (results[2] - results[1]).abs().max() > 1e-4
    assert steps[:4] == [(21, 15), (36, 16), (52, 7), (59, 1)]
    assert {size for position, size in steps if position >= 59} == {1}


def test_exact_pages_have_no_distance():
    model = make_model("llama")
    found = measure_accuracy(
        model,
        [tokens(1, 80)[0], tokens(1, 80, seed=1)[0]],
        {"exact": lambda: kv_hf.PagedCache(model.config)},
        20,
    )["exact"]
    assert found.tokens == 120
    assert found.kl_mean < 1e-8  # fp32 noise of log_softmax
    assert found.top1 == 1.0
    assert found.perplexity == pytest.approx(found.perplexity_exact, rel=1e-6)


def test_planted_key_bias_does_not_collapse_int4():
    """Models with a large common offset in some key channels (Qwen2.5: up to 354) break per-token int4 keys."""
    model = make_model("qwen2")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.zero_()
            # the slowest plane of the rotary embedding, where the offset stays an offset
            layer.self_attn.k_proj.bias[7::16] = 200.0
            layer.self_attn.k_proj.bias[15::16] = -200.0
    ids = [tokens(1, 160, seed=seed)[0] for seed in range(2)]

    def per_token_int4(keys):
        low, high = keys.amin(-1, keepdim=True), keys.amax(-1, keepdim=True)
        scale = (high - low) / 15
        return ((keys - low) / scale).round() * scale + low

    class PerToken(DynamicCache):
        """The usual scheme: one scale per token and head."""

        def update(self, key_states, value_states, layer_idx, *args, **kwargs):
            return super().update(per_token_int4(key_states), value_states, layer_idx)

    found = measure_accuracy(
        model,
        ids,
        {
            "int4": lambda: kv_hf.PagedCache(model.config, keys="int4", values="exact"),
            "per token": lambda: PerToken(config=model.config),
        },
        100,
    )
    assert found["int4"].kl_mean < 0.05 * found["per token"].kl_mean


def test_measure_accuracy_refuses_logits_that_are_not_finite():
    model = make_model("llama")
    cache = kv_hf.PagedCache(model.config)

    class Broken(DynamicCache):
        def update(self, key_states, value_states, layer_idx, *args, **kwargs):
            keys, values = super().update(key_states, value_states, layer_idx)
            return keys, values * float("nan") if keys.shape[2] > 30 else values

    with pytest.raises(ValueError, match="broken gives logits that are not finite"):
        measure_accuracy(
            model, [tokens(1, 60)[0]], {"broken": lambda: Broken(config=model.config)}, 20
        )
    assert cache.get_seq_length() == 0


def test_bundled_text_is_long_enough_and_bad_texts_are_refused(tmp_path):
    assert len(load_text("lincoln_1862").split()) > 8000
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    with pytest.raises(ValueError, match=r"empty\.txt.*is empty"):
        load_text(empty)
    with pytest.raises(ValueError, match="got 'nowhere'"):
        load_text("nowhere")
    with pytest.raises(ValueError, match="shorter than one window"):
        token_windows([1, 2, 3], 4, 1)
    assert token_windows(list(range(10)), 4, 9) == [[0, 1, 2, 3], [4, 5, 6, 7]]
