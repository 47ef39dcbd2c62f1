"""Held-out text decides between a recipe and the uniform caches: all of them, and on other tokens than were chosen on."""

import json

import pytest
import torch
from nf4_format import NF4
from test_recommend import (
    ALONE,
    GIVEN,
    KNOWN,
    OTHERS,
    PROMPT,
    SMALL,
    TEXTS,
    Words,
    model_of,
    planted,
)
from tiny_models import tokens

import kv_hf
from kv_hf.cache_names import parse_cache_name
from kv_hf.config import CacheConfig
from kv_hf.evaluation.accuracy import measure_accuracy
from kv_hf.evaluation.recommend import (
    candidates,
    check,
    check_recipe,
    for_model,
    search,
    study,
)
from kv_hf.evaluation.recommend.candidates import unbeaten
from kv_hf.evaluation.recommend.held_out import compare, measure
from kv_hf.evaluation.recommend.uniform import cache_of, fitting_uniforms
from kv_hf.evaluation.recommend.windows import Windows
from kv_hf.formats import format_names, is_shipped
from kv_hf.notices import forget

BYTES = {"context": 1000, "dtype": torch.float32}


@pytest.fixture(autouse=True)
def few_formats(monkeypatch):
    """Choose from four shipped formats and those that a test registers, to take less time."""

    def names(side):
        return [name for name in format_names(side) if name in KNOWN or not is_shipped(name)]

    monkeypatch.setattr(candidates, "format_names", names)


class NF4Keys(NF4):
    """For keys alone."""

    name = "nf4_keys"
    sides = ("keys",)
    group_options = {"keys": "key_group_size"}


class NF4Values(NF4):
    """For values alone."""

    name = "nf4_values"
    sides = ("values",)
    group_options = {"values": "value_group_size"}


@pytest.fixture
def one_sided():
    kv_hf.register_format(NF4Keys)
    kv_hf.register_format(NF4Values)
    yield
    kv_hf.unregister_format("nf4_keys")
    kv_hf.unregister_format("nf4_values")


def searching(model, **changes):
    return for_model.make_search(model, **{**GIVEN, **BYTES, **ALONE, **changes})


# -- the comparison ----------------------------------------------------------------------------------------


def test_measure_equals_the_accuracy_measurement():
    model = model_of()
    layers = {"1": {"keys": "int2"}, "2": {"values": "int4"}}
    windows = Windows(tuple(OTHERS), ("a", "a", "b", "b"), named=True)
    (found,) = measure(model, windows, PROMPT, [("paged_exact", {"layers": layers, **SMALL})])
    make = {"x": lambda: kv_hf.PagedCache(model.config, layers=layers, **SMALL)}
    expected = measure_accuracy(model, OTHERS, make, PROMPT)["x"]
    assert torch.cat(found).mean().item() == pytest.approx(expected.kl_mean, rel=1e-3)
    assert [len(kl) for kl in found] == [50] * 4


def test_compare_pairs_windows_so_that_hard_text_does_not_hide_a_gain():
    """Windows differ a hundredfold, the caches by 5 %: the interval of the differences is above zero."""
    torch.manual_seed(0)
    uniform = [size * torch.rand(64).double() for size in (0.001, 0.01, 0.1, 0.02)]
    recipe = [0.95 * kl for kl in uniform]
    found = compare(recipe, uniform, ("a", "a", "b", "b"))
    assert found.wins and 0 < found.low < found.gain < found.high
    assert found.gain == pytest.approx(found.uniform_kl - found.recipe_kl)
    assert found.texts["b"][0] == pytest.approx(torch.cat(recipe[2:]).mean().item())
    assert found.tokens == 256 and list(found.texts) == ["a", "b"]
    turned = compare(uniform, recipe, ("a", "a", "b", "b"))
    assert not turned.wins and turned.high < 0 and "more" in str(turned)


def test_a_gain_within_its_interval_is_no_win():
    torch.manual_seed(0)
    uniform = [torch.rand(200).double() for _ in range(4)]
    recipe = [kl + 0.2 * torch.randn(200) - 0.001 for kl in uniform]
    found = compare(recipe, uniform, "abcd")
    assert found.low < 0 < found.high and not found.wins
    assert "less" in str(found) and "more" in str(found)


# -- the uniform caches ------------------------------------------------------------------------------------


def test_every_pair_of_formats_that_fits_competes(one_sided):
    made = searching(model_of())
    total = made.study.side_total("keys", "int8") + made.study.side_total("values", "int8")
    found = fitting_uniforms([made.study], total + made.study.outside_bytes)
    pairs = {(one.keys, one.values) for one in found}
    assert {("nf4_keys", "nf4_values"), ("nf4_keys", "int2"), ("int8", "nf4_values")} <= pairs
    assert ("exact", "int8") not in pairs and len(pairs) == len(found)
    assert all(one.total_bytes <= total + made.study.outside_bytes for one in found)
    assert [one.predicted for one in found] == sorted(one.predicted for one in found)


def test_predicted_bytes_of_a_uniform_cache_are_those_that_it_takes():
    model = model_of()
    made = searching(model)
    for one in fitting_uniforms([made.study], 1 << 40)[::7]:
        base, options = parse_cache_name(one.name)
        cache = kv_hf.PagedCache.from_implementation(model.config, base, options)
        with torch.no_grad():
            model(tokens(1, 1000), past_key_values=cache)
        assert cache.memory().total == one.total_bytes, one.name


def test_a_registered_name_with_options_of_its_own_competes():
    """Its options come on top of those of all caches; names with formats of single layers are not uniform."""
    kv_hf.register_cache("paged_int4_sunk", keys="int4", values="int4", sink_tokens=90)
    kv_hf.register_cache("paged_int4_layered", keys="int4", layers={"0": "int8"})
    try:
        made = searching(model_of())
        names = {one.name for one in fitting_uniforms([made.study], 1 << 40)}
        assert "paged_int4:page_size=16,sink_tokens=90" in names
        assert not any("layered" in name for name in names)
        found = kv_hf.recommend(
            model_of(), "bytes=300000", formats=("int4",), together=(), **GIVEN, **BYTES, **ALONE
        )
        assert any("sink_tokens=90" in name for name in found.opponents)
    finally:
        kv_hf.unregister_cache("paged_int4_sunk")
        kv_hf.unregister_cache("paged_int4_layered")


@pytest.mark.parametrize(
    ("keys", "values", "options"),
    [
        ("int4", "int4", {}),
        ("int8", "int4", {}),
        ("int4", "exact", {"page_size": 32}),
        ("int8", "int8", {"recent_tokens": 7, "sink_tokens": 0}),
    ],
)
def test_the_name_of_a_uniform_cache_says_it_all(keys, values, options):
    base, given = parse_cache_name(cache_of(keys, values, options))
    made = CacheConfig.from_options(base, given)
    assert made == CacheConfig(keys=keys, values=values, **options)


def test_names_that_say_it_all_are_preferred():
    assert cache_of("int8", "int4", {}) == "paged_k8v4"
    kv_hf.register_cache("paged_short", keys="int8", values="int4", page_size=16, sink_tokens=4)
    try:
        assert cache_of("int8", "int4", {"page_size": 16}) == "paged_short"
    finally:
        kv_hf.unregister_cache("paged_short")


# -- formats -----------------------------------------------------------------------------------------------


def test_unbeaten_keeps_what_is_smaller_or_better():
    sizes = {"a": 8, "b": 6, "c": 5, "d": 5, "e": 3}
    losses = {"a": 0.1, "b": 0.3, "c": 0.2, "d": 0.25, "e": 0.9}
    assert unbeaten(list(sizes), sizes, losses) == ["a", "c", "e"]


def test_registered_formats_of_one_side_are_chosen_from_without_a_list(one_sided):
    """NF4 takes fewer bytes than int4, which has offsets: where it loses less too, int4 is not measured by layers."""
    model = planted()
    found = kv_hf.recommend(model, 5.0, **GIVEN, **BYTES, **ALONE)
    measured = {(one.side, one.format) for one in found.sensitivities}
    assert ("values", "nf4_values") in measured and ("keys", "nf4_values") not in measured
    assert not {name for side, name in measured if side == "keys"} & {"exact", "fp8_ds_mla"}
    cache = kv_hf.PagedCache(model.config, recipe=found.recipe)
    assert {layer.formats.names[0] for layer in cache.paged_layers} == set(found.recipe.keys)


def test_a_side_may_have_formats_of_its_own(one_sided):
    formats = {"keys": ("nf4_keys",), "values": ("int4", "int2")}
    found = kv_hf.recommend(
        model_of(), 5.0, formats=formats, together=(), **GIVEN, **BYTES, **ALONE
    )
    assert {one.format for one in found.sensitivities if one.side == "keys"} == {"nf4_keys"}
    assert {one.format for one in found.sensitivities if one.side == "values"} == {"int4", "int2"}


def test_all_registered_formats_that_fit_are_candidates(monkeypatch):
    monkeypatch.setattr(candidates, "format_names", format_names)
    made = searching(model_of())
    for side in ("keys", "values"):
        assert set(made.study.candidates[side]) == set(format_names(side)) - {"exact"}
        sizes = [made.study.side_total(side, name) for name in made.study.candidates[side]]
        assert sizes == sorted(sizes, reverse=True)


def test_a_format_that_the_model_cannot_have_is_left_out():
    """int2 packs four channels into a byte: heads of 6 channels have none."""
    made = searching(model_of_dim(6))
    assert "int2" not in made.study.candidates["keys"]
    assert {"int4", "int8"} <= set(made.study.candidates["keys"])


def model_of_dim(dim):
    from tiny_models import make_model

    model = make_model("llama", torch.float32, head_dim=dim)
    model.set_attn_implementation("kv_hf")
    return model


# -- the decision ------------------------------------------------------------------------------------------


def test_a_recipe_that_wins_on_the_held_out_text_is_returned_with_its_figures(tmp_path):
    model = planted()
    found = kv_hf.recommend(model, "paged_int4", out=tmp_path / "r.json", **GIVEN, **BYTES, **ALONE)
    assert not found.is_uniform and found.rejected is None
    assert found.held_out.wins and found.held_out.tokens == 200
    assert found.held_out.uniform_kl == pytest.approx(min(found.opponents.values()))
    assert found.uniform in found.opponents and len(found.opponents) == search.OPPONENTS
    expected = measure_accuracy(
        model,
        OTHERS,
        {"x": lambda: kv_hf.PagedCache(model.config, recipe=found.recipe)},
        PROMPT,
    )["x"]
    assert found.held_out.recipe_kl == pytest.approx(expected.kl_mean, rel=1e-3)
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["verdict"] == found.verdict and "beats" in found.verdict
    assert written["held_out"]["comparison"]["recipe_wins"] is True
    assert written["uniform_bytes_per_token"] >= 0.9 * written["bytes_per_token"]


def test_what_wins_where_it_was_chosen_and_loses_elsewhere_is_not_returned(
    monkeypatch, caplog, tmp_path
):
    """The recipe is better on the calibration texts; on the held-out ones each of its tokens is made worse."""
    forget()
    original = search.measure

    def worse(model, windows, prompt, contestants):
        mixed, *uniforms = original(model, windows, prompt, contestants)
        return [[10 * kl for kl in mixed], *uniforms]

    monkeypatch.setattr(search, "measure", worse)
    found = kv_hf.recommend(
        planted(), "paged_int4", out=tmp_path / "r.json", **GIVEN, **BYTES, **ALONE
    )
    assert found.is_uniform and not found.held_out.wins
    assert found.measured_kl == found.uniform_kl
    assert len(set(found.recipe.keys)) == len(set(found.recipe.values)) == 1
    assert found.uniform == cache_of(found.recipe.keys[0], found.recipe.values[0], SMALL)
    assert f"no recipe beats {found.uniform}" in caplog.text
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["is_uniform"] and "no recipe beats" in written["verdict"]
    assert found.rejected.keys != found.recipe.keys or found.rejected.values != found.recipe.values


def test_a_best_selection_that_is_uniform_is_returned_as_what_it_is():
    found = kv_hf.recommend(
        model_of(), 32, formats=("int4",), together=(), **GIVEN, **BYTES, **ALONE
    )
    assert found.is_uniform and found.held_out is None and found.rejected is None
    assert found.uniform == "paged_exact:page_size=16"
    assert "the best selection is the uniform cache paged_exact:page_size=16" in found.verdict


def test_another_opponent_that_is_better_there_is_recommended(monkeypatch):
    """The second of the predicted order is the best on the held-out text."""
    original = search.measure

    def turned(model, windows, prompt, contestants):
        found = original(model, windows, prompt, contestants)
        return [*found[:2], [kl / 1000 for kl in found[2]], *found[3:]]

    monkeypatch.setattr(search, "measure", turned)
    found = kv_hf.recommend(planted(), "paged_int4", **GIVEN, **BYTES, **ALONE)
    assert found.is_uniform and found.uniform == list(found.opponents)[1]


# -- texts -------------------------------------------------------------------------------------------------


def test_several_texts_are_cut_into_windows_of_each():
    model = model_of()
    made = for_model.make_search(
        model,
        tokenizer=Words(),
        text=["lincoln_1863", "moby_dick"],
        held_out=("novel", "code", "tables"),
        windows=2,
        held_out_windows=1,
        window=150,
        prompt=PROMPT,
        **BYTES,
        **ALONE,
    )
    assert len(made.study.calibration.texts) == 4
    assert made.study.facts["text"] == "lincoln_1863, moby_dick"
    assert made.held_out.texts == ("novel", "code", "tables")
    assert {len(ids) for ids in made.held_out.ids} == {150}


def test_calibration_and_held_out_texts_of_the_defaults_share_nothing():
    assert not set(for_model.CALIBRATION) & set(for_model.HELD_OUT)
    assert len(for_model.CALIBRATION) > 1 and len(for_model.HELD_OUT) > 1


def test_nothing_of_the_held_out_text_is_used_to_choose(monkeypatch):
    """Every run before the last comparison is over the calibration texts."""
    seen = []
    original = study.Study.measured

    def kept(self, chosen):
        seen.append([ids.tolist() for ids in self.calibration.texts])
        return original(self, chosen)

    monkeypatch.setattr(study.Study, "measured", kept)
    kv_hf.recommend(planted(), "paged_int4", **GIVEN, **BYTES, **ALONE)
    assert seen and all(texts == [ids.tolist() for ids in TEXTS] for texts in seen)


# -- recipes of others -------------------------------------------------------------------------------------


def test_check_recipe_compares_a_file_with_any_caches(tmp_path):
    model = planted()
    found = kv_hf.recommend(model, "paged_int4", out=tmp_path / "r.json", **GIVEN, **BYTES, **ALONE)
    against = [found.uniform, "paged_int2:page_size=16"]
    checked = check_recipe(model, tmp_path / "r.json", against, held_out=OTHERS, prompt=PROMPT)
    assert list(checked) == against
    first = checked[found.uniform]
    assert first.gain == pytest.approx(found.held_out.gain) and first.low > 0
    assert checked[against[1]].gain > first.gain
    assert model.config._attn_implementation == "kv_hf"


def test_check_recipe_refuses_recipes_of_other_models_and_unknown_caches(monkeypatch):
    recipe = {"format": "kv_hf recipe", "version": 1, "keys": ["int4"] * 4, "values": ["int4"] * 4}
    other = {**recipe, "model": {"head_dim": 128}}
    given = {"held_out": OTHERS, "prompt": PROMPT}
    monkeypatch.setattr(check, "measure", lambda *a: pytest.fail("it began"))
    with pytest.raises(kv_hf.CacheOptionError, match="head_dim=128, this one has head_dim=16"):
        check_recipe(model_of(), other, ["paged_int4"], **given)
    with pytest.raises(ValueError, match="cache must be one of"):
        check_recipe(model_of(), recipe, ["paged_int5"], **given)
    with pytest.raises(ValueError, match="against must name at least one cache"):
        check_recipe(model_of(), recipe, [], **given)
    with pytest.raises(ValueError, match="against must be paged caches, got 'dynamic'"):
        check_recipe(model_of(), recipe, ["dynamic"], **given)
