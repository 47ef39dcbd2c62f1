"""One scorer: its chunks give what token-by-token decoding gives, its figures are the definitions, with intervals."""

import copy
import json
from pathlib import Path

import pytest
import torch
from measure.models.packaged import resolve_model
from tiny_models import make_model, stressed, tokens, value_channel
from tiny_tokenizer import sentence
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import kv_hf
from kv_hf.evaluation import accuracy as scorer
from kv_hf.evaluation.accuracy import (
    ExactReference,
    Prefill,
    block_interval,
    decoded,
    last_logits,
    measure_accuracy,
    measure_held,
    next_chunk,
    score,
    summary,
)
from kv_hf.evaluation.caches import cache_kind, held_bytes, layer_shapes, why_not
from kv_hf.evaluation.models import LoadedModel, Measured, TextSettings, revision_of
from kv_hf.texts import load_text, token_windows

QUANTO = "quanto_int4:residual_length=20,q_group_size=16"


def kind_of(name):
    reason = why_not(name, torch.device("cpu"))
    if reason:
        pytest.skip(reason)
    return cache_kind(name)


def behind(model, ids, cache, prompt):
    last_logits(model, ids[None, :prompt], cache)
    return torch.cat([logits for _, logits in decoded(model, ids, cache, prompt)])


def test_where_pages_are_chosen_tokens_go_one_by_one(monkeypatch):
    """Each token has a choice of its own from so many tokens on; before that, chunks are as long as pages allow."""
    # fp32 noise alone can flip a rounded code
    model, ids, steps = make_model("llama", torch.float64), tokens(1, 120)[0], []
    kind = cache_kind("paged_int4:page_size=16,recent_tokens=0,read.from=60,read.tokens=36")

    def noted(cache, position):
        steps.append((position, next_chunk(cache, position)))
        return steps[-1][1]

    read = []
    for chunk in (noted, lambda cache, at: 1, lambda cache, at: 16 - (at - 4) % 16):
        monkeypatch.setattr(scorer, "next_chunk", chunk)
        read.append(behind(model, ids, kind.make(model.config, len(ids)), 21))
    found, single, by_pages = read
    torch.testing.assert_close(found, single, rtol=0, atol=1e-6)
    assert (by_pages - single).abs().max() > 1e-4
    assert steps[:4] == [(21, 15), (36, 16), (52, 7), (59, 1)]
    assert {size for position, size in steps if position >= 59} == {1}


@pytest.mark.parametrize("name", ["paged_int2:page_size=16,sink_tokens=0", "dynamic"])
def test_figures_are_those_of_an_independent_loop(name):
    """Every token by a forward of its own, figures by their definitions."""
    model = make_model("llama")
    ids, prompt = [tokens(1, 150, seed=seed)[0] for seed in range(2)], 60
    kls, losses, same = [], [], []
    for text in ids:
        probs = []
        for cache in (DynamicCache(config=model.config), cache_kind(name).make(model.config, 150)):
            with torch.no_grad():
                model(text[None, :prompt], past_key_values=cache)
                steps = [
                    model(text[None, at : at + 1], past_key_values=cache).logits[0, 0]
                    for at in range(prompt, 150)
                ]
            probs.append(torch.stack(steps).double().log_softmax(-1))
        kls.append((probs[0].exp() * (probs[0] - probs[1])).sum(-1))
        losses.append([-at[:-1].gather(1, text[prompt + 1 :, None])[:, 0] for at in probs])
        same.append(probs[0].argmax(-1) == probs[1].argmax(-1))
    kind = cache_kind(name)
    found = measure_accuracy(model, ids, {"it": lambda: kind.make(model.config, 150)}, prompt)["it"]
    # both are fp32 logits, computed in chunks of other lengths
    assert found["kl_mean"] == pytest.approx(torch.cat(kls).mean().item(), rel=1e-3, abs=1e-8)
    exact, subject = (torch.cat(side).mean().exp().item() for side in zip(*losses, strict=True))
    assert found["perplexity"] == pytest.approx(subject, rel=1e-5)
    assert found["perplexity_exact"] == pytest.approx(exact, rel=1e-5)
    assert found["perplexity_delta"] == pytest.approx(100 * (subject / exact - 1), abs=1e-3)
    assert found["top1"] == torch.cat(same).double().mean() and found["tokens"] == 180
    specs = [layer.spec for layer in getattr(cache, "paged_layers", ())]
    assert found["bits_per_element"] == (specs[0].bits_per_element if specs else None)
    # intervals come from differences: none is left where both sides are the same, however hard the text
    ends = [found[f"perplexity_delta{end}"] for end in ("_low", "_high")]
    if name == "dynamic":
        assert ends == [0, 0] and found["kl_low"] == found["kl_high"] == 0
    else:
        assert found["kl_low"] < found["kl_mean"] < found["kl_high"] and found["kl_mean"] > 1e-4
        assert ends[0] < found["perplexity_delta"] < ends[1]


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
    assert block_interval([text]) == block_interval([text])
    low, high = block_interval([torch.arange(60.0)])  # of few tokens it has a width too
    assert low < 29.5 < high


def test_bad_texts_and_logits_are_refused():
    model = make_model("llama")
    make = {"exact": lambda: kv_hf.PagedCache(model.config)}
    with pytest.raises(ValueError, match="got none"):
        measure_accuracy(model, [], make, 20)
    with pytest.raises(ValueError, match="1100 tokens is longer than the 1024 that the model"):
        measure_accuracy(model, [tokens(1, 1100)[0]], make, 20)
    with pytest.raises(ValueError, match="must leave at least two .* 30 tokens .* got 29"):
        measure_accuracy(model, [tokens(1, 30)[0]], make, 29)

    class Broken(DynamicCache):
        def update(self, key_states, value_states, layer_idx, *args, **kwargs):
            keys, values = super().update(key_states, value_states, layer_idx)
            return keys, values * float("nan") if keys.shape[2] > 30 else values

    broken = {"broken": lambda: Broken(config=model.config)}
    with pytest.raises(ValueError, match="broken gives logits that are not finite at token 30"):
        measure_accuracy(model, [tokens(1, 60)[0]], broken, 20)
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(ValueError, match="the model, with the exact cache, gives logits that are"):
        ExactReference(model, [tokens(1, 60)[0]], 20).log_probs(0)


TWINS = ("dynamic", "static", "paged_exact", "paged_int4:recent_tokens=16", "quantized_fp8")


@pytest.mark.parametrize("name", TWINS)
def test_bytes_of_the_twin_are_those_of_the_model_in_that_dtype(name):
    """The twin that no model ran through holds what a real run holds, decoded token by token."""
    model, kind, ids = make_model("llama", torch.bfloat16), kind_of(name), tokens(1, 150)[0]
    cache = kind.make(model.config, 150)
    behind(model, ids, cache, 70)
    held = measure_held(model.config, layer_shapes(model), kind, 150, 70)
    assert held["bytes"] == held_bytes(cache)
    # sides, layers, tokens, kv heads, head_dim, bytes
    assert held["bytes_exact"] == 2 * 2 * 150 * 2 * 16 * 2
    assert held["bytes_per_token"] == held["bytes"] / 150
    assert held["stored_bits"] == pytest.approx(16 * held["bytes"] / held["bytes_exact"])


def test_bytes_of_a_row_are_those_of_layers_that_were_widened():
    model = stressed(make_model("llama"), value_channel(300, layers=[1]))
    ids, name = tokens(1, 200), "paged_int4:recent_tokens=0"
    (row,) = kv_hf.evaluate(model, None, ids, [name], windows=1, window=200, prompt=150)
    cache = cache_kind(name).make(model.config, 200)
    behind(copy.deepcopy(model).bfloat16(), ids[0], cache, 150)
    assert cache.report()[1].reason is not None
    assert row["bytes"] == held_bytes(cache)


@pytest.mark.parametrize("name", [*TWINS, "paged_int2", QUANTO])
def test_a_recorded_prefill_changes_nothing(name):
    model, kind, ids = make_model("llama"), kind_of(name), tokens(1, 150)[0]
    prefill = Prefill(model, ids[None, :80])
    assert prefill.calls
    own, cache = behind(model, ids, kind.make(model.config, 150), 80), kind.make(model.config, 150)
    torch.testing.assert_close(prefill.fill(cache), model(ids[None, :80]).logits[:, -1])
    given = torch.cat([part for _, part in decoded(model, ids, cache, 80)])
    assert torch.equal(own, given)


def test_a_row_holds_each_text_and_all_pooled(folder, monkeypatch):
    """Each text as if it had been measured alone."""
    both = {"one": sentence(450, 1), "two": sentence(450, 2)}
    monkeypatch.setattr("kv_hf.texts.load_text", lambda name: both[name])
    monkeypatch.setitem(kv_hf.texts.SETS, "pair", tuple(both))
    loaded, name = LoadedModel(str(folder)), "paged_int2:page_size=16"
    row = loaded.accuracy(name, TextSettings("pair", 2, 190, 60))
    assert (row["windows"], row["tokens"], list(row["texts"])) == (4, 4 * 130, list(both))
    _, reference = loaded.reference(TextSettings("pair", 2, 190, 60))
    scored = score(reference, lambda: cache_kind(name).make(loaded.model.config, 190))
    assert row["kl_mean"] == summary(scored)["kl_mean"]
    for number, text in enumerate(both):
        part = scored[2 * number : 2 * number + 2]
        assert row["texts"][text]["kl_high"] == summary(part)["kl_high"]
        kl = torch.cat([one.kl for one in part]).mean().item()
        assert row["texts"][text]["kl_mean"] == kl
    means = {text: one["kl_mean"] for text, one in row["texts"].items()}
    assert row["worst_text"] == max(means, key=means.get)
    assert (
        row["text_digest"] != loaded.accuracy(name, TextSettings("one", 2, 190, 60))["text_digest"]
    )
    assert row["stored_bits"] < 32 and row["kv_heads"] == 2
    assert row["model"] == str(folder) and row["model_revision"] == revision_of(str(folder))
    with pytest.raises(ValueError, match="'offloaded' cannot run here"):
        loaded.accuracy("offloaded", TextSettings("pair", 2, 190, 60))


def test_revision_follows_the_weights(folder, tmp_path):
    before = revision_of(str(folder))
    assert before == revision_of(str(folder)) and len(before) == 12
    model = make_model("llama")
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    model.save_pretrained(tmp_path)
    for path in folder.iterdir():
        if not (tmp_path / path.name).exists():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    assert revision_of(str(tmp_path)) != before


def test_recommend_returns_the_best_that_was_measured_within_the_budget(folder):
    loaded = LoadedModel(str(folder))
    loaded.model.set_attn_implementation("sdpa")
    asked = {"text": str(folder / "text.txt"), "windows": 1, "window": 300, "prompt": 100}
    names = ["paged_exact", "paged_int4", "paged_int2", "paged_int8:page_size=32"]
    found = kv_hf.recommend(loaded.model, 14, caches=names, tokenizer=loaded.tokenizer, **asked)
    assert loaded.model.config._attn_implementation == "sdpa"
    within = [row for row in found.rows if row["stored_bits"] <= 14]
    assert [row["cache"] for row in found.rows] == names and 0 < len(within) < 4
    assert found.cache == min(within, key=lambda row: row["kl_mean"])["cache"]
    assert found.kl_low <= found.kl <= found.kl_high and found.bits <= 14
    assert (found.cache_implementation, found.cache_config) == ("paged_int8", {"page_size": 32})
    peer = kv_hf.recommend(
        loaded.model, 16, caches=["quantized_fp8"], tokenizer=loaded.tokenizer, **asked
    )
    assert peer.cache_implementation == "quantized"
    how = {"cache_implementation": found.cache_implementation, "cache_config": found.cache_config}
    loaded.model.generate(tokens(1, 8), max_new_tokens=2, **how)
    alone = Measured(loaded.model, loaded.tokenizer).accuracy("paged_int2", TextSettings(**asked))
    assert alone["kl_mean"] == pytest.approx(found.rows[2]["kl_mean"], rel=1e-3)
    with pytest.raises(ValueError, match="no cache holds at most 1 bits .* paged_int2, holds"):
        kv_hf.recommend(loaded.model, 1, caches=["paged_int2"], tokenizer=loaded.tokenizer, **asked)


def test_evaluate_takes_sources_texts_and_ids(folder):
    """The same tokens give the same figures, however they are handed over; a word is a source, with the nearest that there is."""
    loaded = LoadedModel(str(folder))
    path = folder / "text.txt"
    ids = loaded.tokenizer(path.read_text("utf-8")).input_ids
    sizes = {"windows": 1, "window": 200, "prompt": 100}

    def losses(text, **changes):
        rows = kv_hf.evaluate(
            loaded.model, loaded.tokenizer, text, ["paged_int4"], **sizes | changes
        )
        return [(row["kl_mean"], row["windows"]) for row in rows]

    expected = losses(str(path))
    assert losses(path) == losses(path.read_text("utf-8")) == losses(ids) == expected
    assert losses(torch.tensor(ids[:200])) == expected
    assert losses([ids[:200], ids[200:400]])[0][1] == 2
    wrong = "text must be a file, a bundled text, a dataset, a text itself, or token ids"
    short = "shorter than one window of 200"
    refused = [
        ("lincoln_1863x", "did you mean 'lincoln_1863'"),
        ("my own text.txt", "text must be a file"),
        (Path("two words"), "text must be a file"),
        *((text, short) for text in ("two words", ids[:50])),
        ([5, 99999], "the token ids 5 to 99999, and the model knows 0 to"),
    ]
    others = (None, [0.5], [[1, 2], [3]], ["a", "b"], torch.zeros(2, 0))
    for text, said in (*refused, *((text, wrong) for text in others)):
        with pytest.raises(ValueError, match=said):
            losses(text)
    for caches in ([], "paged_int4", [5]):
        with pytest.raises(ValueError, match="caches must be a list of names of caches"):
            kv_hf.evaluate(loaded.model, loaded.tokenizer, ids, caches)
    with pytest.raises(ValueError, match="a text is given as text="):
        kv_hf.evaluate(loaded.model, "my.txt")
    with pytest.raises(
        ValueError, match="model must be a loaded model in eval mode, got 'org/name'"
    ):
        kv_hf.evaluate("org/name", loaded.tokenizer)
    with pytest.raises(ValueError, match="tokenizer must be given: none lies beside model ''"):
        kv_hf.evaluate(make_model("llama"), text="novel")
    begun = loaded.tokenizer.backend_tokenizer  # by a token ahead of every text
    begun.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    assert losses(path.read_text("utf-8"), windows=2) == losses(path, windows=2) != expected


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


# what the README promises of SmolLM2-135M
LIMITS = {"paged_int8": 0.0005, "paged_fp8": 0.006, "paged_int4": 0.005, "paged_int2": 0.18}


@pytest.mark.slow
def test_mean_kl_on_real_text_stays_below_the_limits():
    folder = resolve_model("smollm2-135m")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(folder)(load_text("lincoln_1862")).input_ids
    texts = [torch.tensor(window) for window in token_windows(ids, 1536, 4)]
    caches = {
        name: lambda name=name: kv_hf.PagedCache.from_implementation(model.config, name)
        for name in LIMITS
    }
    found = measure_accuracy(model, texts, caches, 512)
    assert all(result["tokens"] == 4096 for result in found.values())
    assert found["paged_int4"]["bits_per_element"] <= 4.75
    assert not [name for name, limit in LIMITS.items() if found[name]["kl_mean"] > limit]
