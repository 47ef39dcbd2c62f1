"""Recommendations on tiny models: what is measured, what is chosen, and what goes wrong."""

import json
from types import SimpleNamespace

import pytest
import torch
from test_recommend_solve import gemma
from tiny_models import make_model, tokens

import kv_hf
from kv_hf.cache_names import parse_cache_name
from kv_hf.evaluation.accuracy import measure_accuracy
from kv_hf.evaluation.recommend import calibration, candidates, for_model
from kv_hf.evaluation.recommend.calibration import Calibration
from kv_hf.evaluation.recommend.divergence import divergence
from kv_hf.evaluation.recommend.sensitivity import Cell, measure_sensitivities
from kv_hf.evaluation.rows import read_rows

TEXTS = [tokens(1, 150, seed=seed)[0] for seed in range(2)]
OTHERS = [tokens(1, 150, seed=seed)[0] for seed in range(20, 24)]
PROMPT = 100


class Words:
    """A tokenizer that gives each word a number."""

    bos_token_id = None

    def __call__(self, text, **options):
        return SimpleNamespace(input_ids=[3 + len(word) for word in text.split()])


GIVEN = {"text": TEXTS, "held_out": OTHERS, "prompt": PROMPT}
SMALL = {"page_size": 16}
ALONE = {**SMALL, "variants": ()}


def model_of(layers=4, family="llama", dtype=torch.float32):
    model = make_model(family, dtype, num_hidden_layers=layers)
    model.set_attn_implementation("kv_hf")
    return model


KNOWN = ("exact", "int8", "int4", "int2")


@pytest.fixture(scope="module", autouse=True)
def few_formats():
    """Choose from four formats: what is found then hangs on no other that is shipped, and takes less time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "format_names", lambda side: KNOWN)
        yield


def both(*names):
    return {"keys": names, "values": names}


def planted(bad=2):
    """A model one of whose layers has keys that are hard to store: attention there hangs on small differences."""
    model = model_of()
    with torch.no_grad():
        model.model.layers[bad].self_attn.k_proj.weight.mul_(6.0)
    return model


# -- divergence --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-4, 1e-6])
def test_divergence_equals_float64_however_small(size):
    torch.manual_seed(0)
    exact = 5 * torch.randn(70, 1000)
    # exactly what float32 holds, so that both sides see the same numbers
    subject = exact + 3.0 + size * torch.randn(70, 1000)
    p, q = exact.double().log_softmax(-1), subject.double().log_softmax(-1)
    expected = (p.exp() * (p - q)).sum(-1)
    found = divergence(exact, subject)
    assert found.dtype == torch.float64 and (found >= 0).all()
    # float64 itself has lost digits of the smallest
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-13)


def test_divergence_of_equal_logits_is_zero():
    exact = torch.randn(3, 50)
    assert torch.equal(divergence(exact, exact), torch.zeros(3, dtype=torch.float64))


# -- sensitivities -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", ["llama", "gemma3", "qwen2", "gpt_neox", "gpt2"])
def test_rerunning_the_upper_layers_equals_running_all(make):
    """In float64, where noise flips no code: the same numbers, also with windows that have moved on."""
    if make == "gemma3":
        model = gemma(40).double()
        model.set_attn_implementation("kv_hf")
    else:
        model = model_of(4, make, torch.float64)
    study = Calibration(model, TEXTS, PROMPT, SMALL)
    layers = study.layers
    for layer in range(4):
        for side in ("keys", "values"):
            cell = Cell((layer,), side, "int2")
            fast = study.kl(cell.overrides, layer)
            whole = study.kl(cell.overrides, layer, whole=True)
            assert fast == pytest.approx(whole, rel=1e-6)
            assert whole > 1e-9
    assert study.layers is layers is not None  # it was the fast way
    assert not any("forward" in vars(layer) for layer in layers)


def test_kl_equals_that_of_the_accuracy_measurement():
    model = model_of()
    overrides = {"1": {"keys": "int2"}, "2": {"values": "int4"}}
    found = Calibration(model, TEXTS, PROMPT, SMALL).kl(overrides, 1)
    expected = measure_accuracy(
        model,
        TEXTS,
        {"x": lambda: kv_hf.PagedCache(model.config, layers=overrides, **SMALL)},
        PROMPT,
    )["x"]
    assert found == pytest.approx(expected.kl_mean, rel=1e-3)


def test_a_model_whose_layers_cannot_be_skipped_is_run_whole(monkeypatch, caplog):
    model = model_of()

    # every layer adds what the first one gave: the replay cannot know
    kept = {}
    first, last = model.model.layers[0], model.model.layers[-1]
    first.register_forward_hook(lambda m, a, out: kept.update(first=out))
    last.register_forward_hook(lambda m, a, out: out + kept["first"] * 3)
    study = Calibration(model, TEXTS, PROMPT, SMALL)
    cell = Cell((2,), "keys", "int2")
    study.kl(cell.overrides, 2)
    # a layer that was skipped calls its hooks too, with another output
    study.check_replay(cell.overrides, 2)
    assert study.layers is None
    assert "is measured in whole runs" in caplog.text
    again = Calibration(model, TEXTS, PROMPT, SMALL, fast=False)
    assert study.kl(cell.overrides, 2) == again.kl(cell.overrides, 2)


def test_layers_kept_by_transformers_mean_whole_runs():
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        layer_types=["linear_attention", "full_attention"] * 2,
    )
    torch.manual_seed(0)
    model = Qwen3NextForCausalLM(config).eval()
    found = kv_hf.recommend(model, 5.0, **GIVEN, context=1000, dtype=torch.float32, **ALONE)
    assert [name is None for name in found.recipe.keys] == [True, False, True, False]
    assert {one.layer for one in found.sensitivities} == {1, 3}
    cache = kv_hf.PagedCache(model.config, recipe=found.recipe)
    assert len(cache.paged_layers) == 2


def test_a_killed_run_goes_on_where_it_stopped(tmp_path, monkeypatch):
    model = model_of()
    path = tmp_path / "cells.jsonl"
    asked = []
    original = Calibration.kl

    def counted(self, layers, lowest=0, **options):
        if not options:
            asked.append(json.dumps(layers))
            if len(asked) == 7:
                raise KeyboardInterrupt
        return original(self, layers, lowest, **options)

    def run(**changes):
        return measure_sensitivities(
            Calibration(model, TEXTS, PROMPT, {**SMALL, **changes}),
            range(4),
            both("int4", "int2"),
            both("int8"),
            cells=path,
            facts={"model": "tiny"},
        )

    monkeypatch.setattr(Calibration, "kl", counted)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert len(read_rows(path)) == 6
    found = run()
    assert len(asked) == len(set(asked)) + 1 == 4 * 2 * 2 + 2 + 1  # the seventh, twice
    row = read_rows(path)[0]
    assert {"layer", "side", "format", "kl_mean", "protocol", "versions", "tokens"} <= set(row)
    assert row["kind"] == "sensitivity" and row["model"] == "tiny"
    monkeypatch.setattr(Calibration, "recordings", None)  # nothing is run any more
    assert run() == found
    asked.clear()
    with pytest.raises(TypeError):
        run(sink_tokens=2)  # other options, other cells
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    with pytest.raises(TypeError):
        run()  # another model


def test_eight_bits_are_measured_together_and_shared_out():
    model = planted()
    study = Calibration(model, TEXTS, PROMPT, SMALL)
    found = measure_sensitivities(study, range(4), both("int4"), both("int8"))
    for side in ("keys", "values"):
        alone = {
            one.layer: one.kl_mean for one in found if (one.side, one.format) == (side, "int4")
        }
        parts = {one.layer: one for one in found if (one.side, one.format) == (side, "int8")}
        assert all(one.estimated for one in parts.values())
        whole = study.kl({"0-3": {side: "int8"}})
        assert sum(one.kl_mean for one in parts.values()) == pytest.approx(whole)
        for layer, one in parts.items():
            assert one.kl_mean / whole == pytest.approx(alone[layer] / sum(alone.values()))
            # the law behind it: the squared step, which is 15 / 254 of the other, more or less
            assert one.kl_mean == pytest.approx(
                study.kl({str(layer): {side: "int8"}}, layer), rel=3
            )


# -- the recipe --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recommend")
    model = planted()
    made = kv_hf.recommend(
        model,
        "paged_int4",
        **GIVEN,
        out=folder / "recipe.json",
        cells=folder / "cells.jsonl",
        context=1000,
        dtype=torch.float32,
        **ALONE,
    )
    return made, model, folder


def test_the_recipe_protects_the_layer_that_needs_it(found):
    made, _, _ = found
    bits = {"exact": 16, "int8": 8, "int4": 4, "int2": 2}
    keys = [bits[name] for name in made.recipe.keys]
    assert keys[2] == max(keys) > min(keys)
    assert not made.is_uniform and made.uniform == "paged_int4:page_size=16"
    assert made.measured_kl < 0.7 * made.uniform_kl


def test_the_prediction_holds_and_the_frontier_is_one(found):
    made, _, _ = found
    assert made.predicted_kl == pytest.approx(made.measured_kl, rel=0.5)
    assert made.uniform_predicted_kl == pytest.approx(made.uniform_kl, rel=0.5)
    bits, losses = zip(*made.frontier, strict=True)
    assert list(bits) == sorted(bits) and list(losses) == sorted(losses, reverse=True)
    assert losses[-1] == 0 and bits[-1] == 32  # all exact, in float32
    assert (made.bits_per_element, made.predicted_kl) in made.frontier


def test_the_file_is_what_a_cache_takes_and_its_bytes_are_those_promised(found):
    made, model, folder = found
    cache = kv_hf.PagedCache(model.config, recipe=folder / "recipe.json")
    with torch.no_grad():
        model(tokens(1, 1000), past_key_values=cache)
    assert cache.memory().per_token == pytest.approx(made.bytes_per_token)
    assert cache.bits_per_element == pytest.approx(made.bits_per_element)
    uniform = kv_hf.PagedCache(model.config, keys="int4", **SMALL)
    with torch.no_grad():
        model(tokens(1, 1000), past_key_values=uniform)
    assert cache.memory().total <= uniform.memory().total
    written = json.loads((folder / "recipe.json").read_text())
    assert written["budget"] == "paged_int4" and written["page_size"] == 16
    assert written["model"]["model_type"] == "llama" and written["calibration"]["tokens"] == 100
    assert written["measured_kl"] == made.measured_kl


def test_it_is_better_on_text_that_nobody_has_seen(found):
    made, model, _ = found
    texts = [tokens(1, 150, seed=seed)[0] for seed in range(7, 11)]
    results = measure_accuracy(
        model,
        texts,
        {
            "recipe": lambda: kv_hf.PagedCache(model.config, recipe=made.recipe),
            "uniform": lambda: kv_hf.PagedCache(model.config, keys="int4", **SMALL),
        },
        PROMPT,
    )
    assert results["recipe"].kl_mean < results["uniform"].kl_mean


def test_another_budget_costs_no_measurement_of_layers(found, monkeypatch):
    _, model, folder = found
    asked = []
    original = Calibration.kl
    monkeypatch.setattr(
        Calibration, "kl", lambda self, *a, **k: asked.append(a) or original(self, *a, **k)
    )
    options = {**GIVEN, "context": 1000, "dtype": torch.float32, **ALONE}
    made = kv_hf.recommend(model, 6.0, cells=folder / "cells.jsonl", **options)
    assert len(asked) == 2  # the recipe and the uniform cache
    assert made.bits_per_element <= 6.005


def test_what_measures_worse_than_the_uniform_format_is_never_returned(monkeypatch, caplog):
    """Sensitivities can be wrong; here they are the wrong way round."""
    from kv_hf.evaluation.recommend import study  # where it is looked up

    original = study.measure_sensitivities

    def reversed_layers(calibration, layers, *args, **kwargs):
        found = original(calibration, layers, *args, **kwargs)
        from dataclasses import replace

        last = max(layers)
        return [replace(one, layer=last - one.layer) for one in found]

    monkeypatch.setattr(study, "measure_sensitivities", reversed_layers)
    made = kv_hf.recommend(planted(0), "paged_int4", **GIVEN, context=1000, **ALONE)
    assert made.is_uniform and set(made.recipe.keys) == set(made.recipe.values) == {"int4"}
    assert made.measured_kl == made.uniform_kl
    says = "at paged_int4 no recipe beats paged_int4:page_size=16 on the held-out texts"
    assert says in caplog.text and says in made.verdict
    assert made.recipe.facts["verdict"] == made.verdict and made.recipe.facts["is_uniform"]
    assert not made.held_out.wins and made.held_out.gain < made.held_out.high < 0
    assert len(set(made.rejected.keys)) > 1 and made.rejected.facts["verdict"] == made.verdict


def test_other_options_get_the_same_bytes_exact_tokens_included(tmp_path):
    """A longer page stores fewer scales of keys, and more tokens exactly."""
    model = planted()
    cells = tmp_path / "cells.jsonl"
    options = {
        **GIVEN,
        "context": 4000,
        "dtype": torch.float32,
        "cells": cells,
    }
    plain = kv_hf.recommend(model, 6.0, **options, **ALONE)
    before = len(read_rows(cells))
    tried = kv_hf.recommend(
        model, 6.0, **options, **SMALL, variants=[{"page_size": 32}, {"sink_tokens": 60}]
    )
    assert tried.measured_kl <= plain.measured_kl
    # all layers together, once per side and format, with the new options: those with the old ones are known
    assert len(read_rows(cells)) - before == 2 * 6
    assert tried.recipe.options == {"page_size": 32}
    sizes = []
    for one in (plain, tried):
        cache = kv_hf.PagedCache(model.config, recipe=one.recipe)
        with torch.no_grad():
            for part in tokens(1, 4000).split(1000, 1):
                model(part, past_key_values=cache)
        sizes.append(cache.memory())
        assert sizes[-1].per_token == pytest.approx(one.bytes_per_token)
    assert sizes[1].tail > sizes[0].tail
    budget = 6.005 / 8 * 4000 * 4 * 2 * 2 * 16 + sizes[0].tail + sizes[0].tables
    assert max(one.total for one in sizes) <= budget


def test_standard_variants_leave_alone_what_was_asked_for():
    model = model_of()

    def tried(**options):
        search = for_model.make_search(model, **GIVEN, context=1000, **options)
        given = search.study.calibration.options
        return [
            {k: v for k, v in one.calibration.options.items() if given.get(k) != v}
            for one in search.variants
        ]

    whole = {"key_group_size": 64, "value_group_size": 16}
    assert tried() == [{"recent_tokens": 32}, {"recent_tokens": 32, **whole}]
    assert tried(recent_tokens=0) == [whole]
    assert tried(value_group_size=8) == tried(formats=("int4",)) == [{"recent_tokens": 32}]
    assert tried(variants=()) == []


def test_group_sizes_go_along_where_they_are_read():
    model = model_of()
    options = {**GIVEN, "context": 1000, "together": (), "variants": ()}
    sizes = {"page_size": 32, "key_group_size": 16, "value_group_size": 8}
    made = kv_hf.recommend(model, 7.2, formats=("int4",), **options, **sizes)
    assert made.recipe.options == sizes
    assert parse_cache_name(made.uniform)[1] | sizes == parse_cache_name(made.uniform)[1]
    made = kv_hf.recommend(model, 16, formats=("int4",), **options, **sizes)
    assert made.recipe.options == {"page_size": 32}
    assert made.measured_kl == 0.0 and set(made.recipe.keys) == {"exact"}


# -- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"budget": "lots"}, "budget must be"),
        ({"budget": 2.0}, "budget bits=2 is too small: .* need is [0-9.]+ bits"),
        ({"budget": "bytes=10"}, "budget bytes=10 is too small"),
        ({"formats": ("int3",)}, "formats must be some of .*'int3'"),
        ({"formats": ("exact",)}, "formats must be some of .*'exact'"),
        ({"formats": ()}, "formats must name"),
        ({"prompt": 150}, "prompt must be between 1 and 149"),
        ({"prompt": 0}, "prompt must be between"),
        ({"text": []}, "text must hold at least one"),
        ({"held_out": []}, "held_out must hold at least one"),
        ({"held_out": TEXTS[1:]}, "held_out must be other text .* a window of token ids in both"),
        ({"held_out": ["nowhere"]}, "tokenizer must be given.* or give held_out as token ids"),
        ({"held_out": [TEXTS[0][:90]]}, "prompt must be .* for a held_out of 90"),
        ({"held_out": ["novel", [1, 2]], "tokenizer": Words()}, "all names .* or all token ids"),
        (
            {"text": ["novel", "code"], "held_out": ["code"], "tokenizer": Words()},
            "held_out must be other text than text, got code in both",
        ),
        ({"held_out_windows": 0}, "held_out_windows must be an integer"),
        ({"formats": {"keys": ("int4",)}}, "formats must name at least one format of values"),
        ({"formats": {"key": ("int4",)}}, "formats must name sides of keys, values, got 'key'"),
        ({"together": {"keys": ("fp8_ds_mla",)}}, "together of keys must be some of"),
        ({"value_group_size": 5}, "value_group_size must divide head_dim 16, got 5"),
        ({"text": "nowhere"}, "tokenizer must be given"),
        ({"text": "nowhere", "tokenizer": print}, "text must be a file"),
        ({"context": 15}, "context must be longer"),
        ({"context": 0}, "context must be an integer"),
        ({"batch": True}, "batch must be an integer"),
        ({"page_sise": 16}, "page_sise"),
        ({"keys": "int8"}, "got keys='int8'"),
        ({"out": "."}, "out must be a file"),
        ({"variants": [{"kernel": "c"}]}, "got kernel='c'"),
        ({"variants": [{"page_size": 5}]}, "page_size must be"),
        ({"page_size": 24}, "page_size must be a power of two"),
        ({"window": 5000, "text": "lincoln_1863", "tokenizer": print}, "window must be at most"),
    ],
)
def test_bad_arguments_are_named_before_anything_is_measured(changes, says, monkeypatch):
    monkeypatch.setattr(calibration, "record", lambda *a: pytest.fail("it began"))
    arguments = {"budget": 4.5, **GIVEN, **SMALL, **changes}
    with pytest.raises(ValueError, match=says):
        kv_hf.recommend(model_of(), **arguments)


def test_a_model_that_gives_nan_or_is_training_gives_no_rows(tmp_path):
    model = model_of()
    path = tmp_path / "cells.jsonl"
    with pytest.raises(ValueError, match="training mode"):
        kv_hf.recommend(model.train(), 4.5, **GIVEN, cells=path)
    with torch.no_grad():
        model.eval().lm_head.weight[5] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        kv_hf.recommend(model, 4.5, **GIVEN, cells=path)
    assert not path.exists()


def test_the_models_attention_comes_back():
    model = make_model("llama")
    assert model.config._attn_implementation == "sdpa"
    with for_model.paged_attention(model):
        assert model.config._attn_implementation == "kv_hf"
    assert model.config._attn_implementation == "sdpa"


def test_a_misspelt_name_of_the_package_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'recommed'"):
        _ = kv_hf.recommed
