"""Recipes: what a file says is what a cache does, and nothing is guessed."""

import copy
import dataclasses
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from tiny_models import make_config, make_model, shared_model, tokens

import kv_hf
from kv_hf.config import CacheConfig
from kv_hf.recipe import Recipe

KEYS = ["int8", "int8", "int4", "exact"]
VALUES = ["int4", "int4", "int2", "int4"]
FOUND = {"format": "kv_hf recipe", "version": 1, "keys": KEYS, "values": VALUES}


def write(path, **changes):
    found = {**FOUND, **changes}
    path.write_text(json.dumps({name: value for name, value in found.items() if value is not None}))
    return path


def formats(cache):
    return [layer.formats.names for layer in cache.paged_layers]


def config(**changes):
    return make_config("llama", num_hidden_layers=4, **changes)


def test_a_recipe_decides_the_formats_of_every_layer(tmp_path):
    path = write(tmp_path / "r.json", page_size=32, sink_tokens=0, note="for people")
    for cache in (
        kv_hf.PagedCache(config(), recipe=path),
        kv_hf.PagedCache(config(), recipe=json.loads(path.read_text())),
        kv_hf.PagedCache.from_implementation(config(), "paged_int2", {"recipe": str(path)}),
        kv_hf.PagedCache.from_options(config(), CacheConfig(recipe=path)),
        kv_hf.PagedCache(config(), recipe=path, max_length=64),
        kv_hf.PagedCache(config(), recipe=path, page_size=32, kernel="sdpa").fresh(),
    ):
        layers = [layer.formats.names for layer in cache.layers]
        assert layers == list(zip(KEYS, VALUES, strict=True))
        assert (cache.options.page_size, cache.options.sink_tokens) == (32, 0)
    assert kv_hf.PagedCache(config(), recipe=path, kernel="sdpa").options.kernel == "sdpa"


def test_a_recipe_replaces_all_formats_of_the_name_beside_it():
    """Those of latents too, which a model without latent attention refuses."""
    kv_hf.register_cache("paged_with_latents", keys="int4", values="int2", latent="int4")
    try:
        made = CacheConfig.from_options("paged_with_latents", {"recipe": FOUND})
    finally:
        kv_hf.unregister_cache("paged_with_latents")
    assert (made.keys, made.values, made.latent) == ("int8", "int4", None)


def test_layers_are_written_as_few_ranges():
    options = Recipe.parse(FOUND, "here").as_options()
    assert options == {
        "keys": "int8",
        "values": "int4",
        "layers": {"2": {"keys": "int4", "values": "int2"}, "3": {"keys": "exact"}},
    }
    uniform = {**FOUND, "keys": ["int4"] * 3, "values": ["int4"] * 3}
    assert Recipe.parse(uniform, "here").as_options()["layers"] is None
    runs = {**FOUND, "keys": ["int4"] * 4 + ["int8"] * 3, "values": ["int4"] * 7}
    assert Recipe.parse(runs, "here").as_options()["layers"] == {"4-6": {"keys": "int8"}}


def test_what_is_saved_is_read_again_and_the_old_file_stays_when_writing_fails(
    tmp_path, monkeypatch
):
    recipe = Recipe.parse({**FOUND, "model": {"model_type": "llama"}, "page_size": 32, "x": 1}, "a")
    path = tmp_path / "folder" / "r.json"
    recipe.save(path)
    again = Recipe.read(path)
    assert again.to_json() == recipe.to_json()
    assert (again.keys, again.values, again.options) == (
        tuple(KEYS),
        tuple(VALUES),
        {"page_size": 32},
    )
    before = path.read_bytes()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space"):
        Recipe.parse(FOUND, "b").save(path)
    assert path.read_bytes() == before
    assert [one.name for one in path.parent.iterdir()] == ["r.json"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format": "other"}, "is none"),
        ({"version": 2}, "version 2"),
        ({"keys": ["int8", "int3", "int4", "exact"]}, "keys of layer 1 .*'int3'"),
        ({"keys": KEYS[:3]}, "3 and 4 entries"),
        ({"keys": ["int8", None, "int4", "exact"]}, "same layers"),
        ({"keys": "int8"}, "must be a list"),
        ({"values": []}, "must be a list"),
        ({"keys": [None] * 4, "values": [None] * 4}, "no format at all"),
        ({"values": [["int8"], "int8", "int8", "int8"]}, "values of layer 0"),
        ({"page_size": 24}, "r.json.*page_size must be a power of two"),
        ({"key_group_size": 7}, "r.json.*key_group_size must divide"),
        ({"model": 7}, "model must be an object"),
        ({"keys": [*KEYS, "int4"], "values": [*VALUES, "int4"]}, "for 5 layers, the model has 4"),
        ({"keys": KEYS[:3], "values": VALUES[:3]}, "for 3 layers, the model has 4"),
        ({"model": {"model_type": "qwen2"}}, "model_type='qwen2', this one has model_type='llama'"),
        ({"model": {"num_key_value_heads": 9}}, "num_key_value_heads=9.*makes one for this model"),
        ({"model": {"head_dim": 128}}, "head_dim=128, this one has head_dim=16"),
        ({"model": {"hidden_size": 1}}, "hidden_size=1, this one has hidden_size=64"),
        ({"model": {"num_attention_heads": 3}}, "num_attention_heads=3"),
        (
            {"keys": [None, *KEYS[1:]], "values": [None, *VALUES[1:]]},
            "no format for layer 0, which is in pages",
        ),
    ],
)
def test_bad_recipes_are_refused_by_name(tmp_path, changes, says):
    path = write(tmp_path / "r.json", **changes)
    for options in ({}, {"max_length": 64}):
        with pytest.raises(kv_hf.CacheOptionError, match=says) as error:
            kv_hf.PagedCache(config(), recipe=path, **options)
        assert "r.json" in str(error.value)


@pytest.mark.parametrize("family", ["qwen2", "llama", "gpt_neox"])
def test_a_recipe_of_another_head_size_is_refused_where_the_config_states_none(family):
    """Configs of Qwen2 have no head_dim: a recipe for heads of another size passed."""
    with pytest.raises(kv_hf.CacheOptionError, match="head_dim=32, this one has head_dim=16"):
        kv_hf.PagedCache(
            make_config(family, num_hidden_layers=4), recipe={**FOUND, "model": {"head_dim": 32}}
        )


def test_generate_refuses_a_recipe_of_another_model_before_a_token():
    model = shared_model("llama")
    recipe = {**FOUND, "keys": ["int8", "int4"], "values": ["int2", "int8"]}
    recipe["model"] = {"model_type": "llama", "num_hidden_layers": 2, "head_dim": 64}
    with pytest.raises(kv_hf.CacheOptionError, match="was made for a model of head_dim=64"):
        model.generate(
            tokens(1, 20),
            max_new_tokens=1,
            cache_implementation="paged_int4",
            cache_config={"recipe": recipe},
        )


def test_a_plan_refuses_a_recipe_of_another_model():
    recipe = kv_hf.CacheConfig(recipe={**FOUND, "model": {"head_dim": 5}})
    with pytest.raises(kv_hf.CacheOptionError, match="head_dim=5, this one has head_dim=16"):
        kv_hf.plan(config(), context=256, caches=[recipe])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a POSIX system")
def test_recipes_without_an_end_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((Path("/dev/zero"), "a device"), (tmp_path / "pipe", "a pipe")):
        with pytest.raises(
            kv_hf.CacheOptionError, match=f"recipe '{path}' must be a regular file, got {kind}"
        ):
            Recipe.read(path)


def test_files_that_cannot_be_recipes(tmp_path):
    broken, large, folder = tmp_path / "b.json", tmp_path / "l.json", tmp_path
    broken.write_text("{")
    large.write_text(" " * (1 << 20) + "{}")
    deep = tmp_path / "d.json"
    deep.write_text("[" * 100_000)
    for path, says in (
        (tmp_path / "none.json", "cannot be read"),
        (folder, "must be a regular file, got a folder"),
        (broken, "is no JSON"),
        (deep, "is no JSON"),
        (large, "too large"),
    ):
        with pytest.raises(kv_hf.CacheOptionError, match=says) as error:
            CacheConfig.from_options("paged_int4", {"recipe": path})
        assert path.name in str(error.value)
    with pytest.raises(kv_hf.CacheOptionError, match="recipe must be the path.*int"):
        CacheConfig(recipe=4)


@pytest.mark.parametrize(
    "options",
    [
        {"keys": "int8"},
        {"values": "exact"},
        {"layers": {"1": "int8"}},
        {"page_size": 64},
        {"sink_tokens": 8},
    ],
    ids=str,
)
def test_options_that_contradict_a_recipe_name_both(options):
    given = {"recipe": {**FOUND, "page_size": 32, "sink_tokens": 2}, **options}
    (name,) = options
    for make in (
        lambda: kv_hf.PagedCache(config(), **given),
        lambda: CacheConfig.from_options("paged_int4", given),
    ):
        with pytest.raises(
            kv_hf.CacheOptionError, match=f"{name}=.*does not go with recipe a dict"
        ):
            make()


def test_the_dataclass_itself_cannot_tell_a_default_from_nothing():
    recipe = {**FOUND, "page_size": 32}
    made = CacheConfig(recipe=recipe, page_size=64, keys="exact")
    assert (made.page_size, made.keys) == (32, "int8")
    assert dataclasses.replace(made, kernel="sdpa").layers == made.layers
    with pytest.raises(kv_hf.CacheOptionError, match="page_size=128 does not go with recipe"):
        dataclasses.replace(made, page_size=128)


def test_generate_takes_a_recipe(tmp_path):
    model = shared_model("llama")
    recipe = {**FOUND, "keys": ["int8", "int4"], "values": ["int2", "int8"]}
    path = tmp_path / "r.json"
    path.write_text(json.dumps(recipe))
    ids = {"input_ids": tokens(1, 90)}
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    found = model.generate(
        **ids, **options, cache_implementation="paged_int4", cache_config={"recipe": str(path)}
    )
    assert formats(found.past_key_values) == [("int8", "int2"), ("int4", "int8")]
    for given in (recipe, Recipe.parse(recipe, "here")):
        again = model.generate(
            **ids, **options, cache_implementation="paged_exact", cache_config={"recipe": given}
        )
        assert torch.equal(again.sequences, found.sequences)
    layers = {"0": {"keys": "int8", "values": "int2"}, "1": {"values": "int8"}}
    same = model.generate(
        **ids, **options, cache_implementation="paged_int4", cache_config={"layers": layers}
    )
    assert torch.equal(found.sequences, same.sequences)


def test_a_recipe_goes_with_copies_pickles_stores_and_files(tmp_path):
    model = make_model("llama")
    path = tmp_path / "r.json"
    path.write_text(json.dumps({**FOUND, "keys": ["int8", "int4"], "values": ["int4", "int8"]}))
    store = kv_hf.PrefixStore()
    kv_hf.PagedCache(model.config, recipe=path, prefix_store=store)
    cache = kv_hf.PagedCache(model.config, recipe=path)
    with torch.no_grad():
        model(tokens(1, 150), past_key_values=cache)
    cache.save(tmp_path / "c.safetensors", model)
    path.unlink()  # nobody reads it again
    for other in (
        kv_hf.PagedCache.load(tmp_path / "c.safetensors", model),
        copy.deepcopy(cache),
        pickle.loads(pickle.dumps(cache)),
        cache.fresh(),
    ):
        assert formats(other) == formats(cache) == [("int8", "int4"), ("int4", "int8")]


def test_a_saved_cache_that_claims_a_recipe_is_refused(tmp_path, monkeypatch):
    """So that no file makes us open another one."""
    from kv_hf.cache.saved import save

    model = make_model("llama")
    cache = kv_hf.PagedCache(model.config, keys="int8")
    with torch.no_grad():
        model(tokens(1, 20), past_key_values=cache)
    original = save._options
    monkeypatch.setattr(
        save, "_options", lambda cache: {**original(cache), "recipe": "/etc/hostname"}
    )
    cache.save(tmp_path / "c.safetensors", model)
    with pytest.raises(kv_hf.CacheFileError, match="claims options of caches that are never saved"):
        kv_hf.PagedCache.load(tmp_path / "c.safetensors", model)


def test_layers_that_transformers_keeps_have_no_format():
    from transformers import Qwen3NextConfig

    sizes = {
        "vocab_size": 97,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    }
    hybrid = Qwen3NextConfig(**sizes)
    recipe = {**FOUND, "keys": [None, "int8", None, "int4"], "values": [None, "int4", None, "int4"]}
    cache = kv_hf.PagedCache(hybrid, recipe=recipe)
    assert formats(cache) == [("int8", "int4"), ("int4", "int4")]
    with pytest.raises(kv_hf.CacheOptionError, match="a format for layer 0, which is not in pages"):
        kv_hf.PagedCache(hybrid, recipe=FOUND)


def test_evaluation_names_take_a_recipe(tmp_path):
    from kv_hf.evaluation.cache_kinds import cache_kind

    path = write(tmp_path / "r.json")
    cache = cache_kind(f"paged_int4:recipe={path}").make(config(), 100)
    assert formats(cache) == list(zip(KEYS, VALUES, strict=True))
