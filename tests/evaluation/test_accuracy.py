"""Distances and their intervals, the bytes of a twin cache, first divergence, and texts that are refused."""

import json

import pytest
import torch
from tiny_models import make_model, tokens
from transformers import DynamicCache

import kv_hf
from kv_hf.evaluation.accuracy import measure_accuracy, percent
from kv_hf.evaluation.cache_bytes import layer_shapes, measure_held
from kv_hf.evaluation.cache_kinds import cache_kind, held_bytes, why_not
from kv_hf.evaluation.distances import Tally, block_interval
from kv_hf.evaluation.divergence import greedy, leading_equal, measure_divergence
from kv_hf.evaluation.prefill import Prefill
from kv_hf.evaluation.reference import ExactReference
from kv_hf.evaluation.teacher_forcing import forced_logits, next_chunk
from kv_hf.texts import load_text


def test_tally_equals_the_definitions():
    generator = torch.Generator().manual_seed(0)
    exact, subject = (
        torch.log_softmax(torch.randn(7, 11, generator=generator, dtype=torch.float64), -1)
        for _ in range(2)
    )
    targets = torch.randint(11, (6,), generator=generator)
    tally = Tally()
    tally.add(exact[:4], subject[:4], targets[:4])
    tally.add(exact[4:], subject[4:], targets[4:])
    tally.end_text()
    wanted = torch.nn.functional.kl_div(subject, exact, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(tally.kl[0], wanted)
    torch.testing.assert_close(
        tally.loss[0], torch.nn.functional.nll_loss(subject[:6], targets, reduction="none")
    )
    torch.testing.assert_close(
        tally.loss_exact[0], torch.nn.functional.nll_loss(exact[:6], targets, reduction="none")
    )
    assert tally.same[0].tolist() == (exact.argmax(-1) == subject.argmax(-1)).tolist()


def test_interval_covers_the_mean_as_often_as_it_says():
    """200 draws of correlated figures: the interval holds the true mean in about 95 % of them."""
    generator = torch.Generator().manual_seed(1)
    inside = 0
    for number in range(200):
        hard = torch.randn(40, 1, generator=generator, dtype=torch.float64)
        text = (hard + torch.randn(40, 64, generator=generator, dtype=torch.float64)).flatten()
        low, high = block_interval([text], resamples=400, seed=number)
        inside += low <= 0 <= high
    assert 180 <= inside <= 198
    independent = block_interval([text], block=1)
    assert high - low > 3 * (independent[1] - independent[0])  # single tokens would be far too sure


def test_interval_is_the_same_at_every_call():
    text = [torch.arange(300.0), torch.arange(100.0)]
    assert block_interval(text) == block_interval(text)


def test_interval_of_few_tokens_has_a_width():
    low, high = block_interval([torch.arange(60.0)])
    assert low < 29.5 < high


def test_percent_of_a_loss():
    assert percent(0.0) == 0.0
    assert percent(0.01) == pytest.approx(1.005, abs=1e-3)


def test_perplexity_delta_is_paired():
    """Its interval comes from differences: the same text at both sides leaves it at nothing, however hard the text."""
    model = make_model("llama")
    found = measure_accuracy(
        model,
        [tokens(1, 200)[0]],
        {"dynamic": lambda: DynamicCache(config=model.config)},
        20,
    )["dynamic"]
    assert found.perplexity_delta == found.perplexity_delta_low == found.perplexity_delta_high == 0
    assert found.kl_mean == found.kl_high == 0
    assert found.perplexity == found.perplexity_exact > 50


def test_measure_accuracy_names_bad_texts():
    model = make_model("llama")
    make = {"exact": lambda: kv_hf.PagedCache(model.config)}
    with pytest.raises(ValueError, match="got none"):
        measure_accuracy(model, [], make, 20)
    with pytest.raises(
        ValueError, match="1100 tokens is longer than the 1024 that the model reads"
    ):
        measure_accuracy(model, [tokens(1, 1100)[0]], make, 20)
    with pytest.raises(
        ValueError, match="prompt_tokens must leave at least two .* 30 tokens .* got 29"
    ):
        measure_accuracy(model, [tokens(1, 30)[0]], make, 29)


def test_reference_refuses_a_model_that_emits_nan():
    model = make_model("llama")
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    try:
        with pytest.raises(ValueError, match="the model gives logits that are not finite"):
            ExactReference(model, [tokens(1, 60)[0]], 20).log_probs(0)
    finally:
        with torch.no_grad():
            model.model.norm.weight[0] = 1.0


def test_reference_without_room_gives_the_same():
    model = make_model("llama")
    texts = [tokens(1, 60)[0], tokens(1, 60, seed=1)[0]]
    kept, computed = ExactReference(model, texts, 20), ExactReference(model, texts, 20, 0)
    assert torch.equal(kept.log_probs(1), computed.log_probs(1))
    assert kept.log_probs(1) is kept.log_probs(1)
    assert computed.log_probs(1) is not computed.log_probs(1)


CACHES = (
    "dynamic",
    "static",
    "paged_exact",
    "paged_int8",
    "paged_int4:recent_tokens=16",
    "quantized_fp8",
)


@pytest.mark.parametrize("name", CACHES)
def test_bytes_of_the_twin_are_those_of_the_model_in_that_dtype(name):
    """The twin that no model ran through holds what a real run holds."""
    model = make_model("llama", dtype=torch.bfloat16)
    model.set_attn_implementation("kv_hf")
    kind = cache_kind(name)
    ids = tokens(1, 150)
    cache = kind.make(model.config, 150)
    position = 0
    with torch.no_grad():
        while position < 150:
            end = min(150, position + (70 if position == 0 else next_chunk(cache, position)))
            model(ids[:, position:end], past_key_values=cache)
            position = end
    held = measure_held(model.config, layer_shapes(model), kind, 150, 70)
    assert held.bytes == held_bytes(cache)
    assert (
        held.bytes_exact == 2 * 2 * 150 * 2 * 16 * 2
    )  # sides, layers, tokens, kv heads, head_dim, bytes
    assert held.bytes_per_token == held.bytes / 150
    assert held.stored_bits == pytest.approx(16 * held.bytes / held.bytes_exact)


def test_bytes_of_sliding_layers_are_those_of_their_window():
    model = make_model("mistral", sliding_window=32)
    short, long = (
        measure_held(model.config, layer_shapes(model), cache_kind("paged_int8"), tokens, 32)
        for tokens in (64, 512)
    )
    assert long.bytes < 4 * short.bytes
    kept = 2 * 2 * 31 * 2 * 16 * 2  # what transformers keeps of a window of 32
    assert kept <= long.bytes_exact < kept + 64  # a count per layer


@pytest.mark.parametrize("name", [*CACHES, "paged_int2", "quanto_int4:q_group_size=16"])
def test_a_recorded_prefill_changes_nothing(name):
    reason = why_not(name, torch.device("cpu"))
    if reason:
        pytest.skip(reason)
    model = make_model("llama")
    model.set_attn_implementation("kv_hf")
    ids = tokens(1, 150)[0]
    prefill = Prefill(model, ids[None, :80])
    own, given = (
        torch.cat(
            [
                logits
                for _, logits in forced_logits(
                    model, ids, cache_kind(name).make(model.config, 150), 80, prefill=one
                )
            ]
        )
        for one in (None, prefill)
    )
    assert torch.equal(own, given)
    cache = cache_kind(name).make(model.config, 150)
    torch.testing.assert_close(prefill.fill(cache), model(ids[None, :80]).logits[:, -1])


def test_greedy_is_generate():
    model = make_model("llama")
    ids = tokens(2, 40)
    wanted = model.generate(
        ids, max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    found = greedy(Prefill(model, ids), DynamicCache(config=model.config), 12)
    assert torch.equal(found, wanted[:, 40:])


def test_divergence_counts_the_tokens_before_the_first_difference():
    exact = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    other = torch.tensor([[1, 2, 3, 4], [1, 9, 3, 4], [9, 2, 3, 4]])
    assert leading_equal(exact, other) == [4, 1, 0]
    model = make_model("llama")
    prefills = [Prefill(model, tokens(1, 40, seed=seed)) for seed in range(2)]
    wanted = torch.cat([greedy(one, DynamicCache(config=model.config), 8) for one in prefills])
    same = measure_divergence(prefills, lambda: kv_hf.PagedCache(model.config), 8, wanted)
    assert (same.mean, same.median, same.tokens) == (8.0, 8.0, 8)


def test_text_of_a_dataset(tmp_path):
    pytest.importorskip("datasets")
    records = [{"text": "First."}, {"text": " "}, {"text": "Second, longer."}, {"text": "Third."}]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "test.jsonl").write_text("\n".join(map(json.dumps, records)))
    folder = str(tmp_path / "data")
    assert load_text(f"dataset:{folder}") == "First.\n\nSecond, longer.\n\nThird."
    assert load_text(f"dataset:{folder},,test,text", characters=12) == "First.\n\nSeco"
    with pytest.raises(ValueError, match="has no split 'dev', only test"):
        load_text(f"dataset:{folder},,dev")
    with pytest.raises(ValueError, match="has no column of text 'words': its columns are text"):
        load_text(f"dataset:{folder},,test,words")
    with pytest.raises(ValueError, match="cannot be read"):
        load_text(f"dataset:{tmp_path / 'nothing'}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "test.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(ValueError, match="is empty"):
        load_text(f"dataset:{tmp_path / 'empty'}")


def test_text_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes("Größe".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.txt' is not UTF-8"):
        load_text(path)
