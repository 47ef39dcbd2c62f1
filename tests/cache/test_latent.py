"""What generate() and the cache do with pages of latents: same tokens as transformers' own cache."""

from typing import Any

import pytest
import rounding
import torch
from test_latent_families import (
    EXPANDING,
    largest_difference,
    paged,
    stock_attention,
)
from tiny_latent import SPARSE, is_there, make_model, shared_model, text_config
from tiny_models import make_config, tokens
from transformers import DynamicCache

import kv_hf

FAMILIES = [
    family
    for family in (
        "deepseek_v2",
        "deepseek_v3",
        "youtu",
        "minicpm3",
        "deepseek_v32",
        "mistral_large4",
        "dots3_note",
    )
    if is_there(family)
]
FAST = ("deepseek_v3", "mistral_large4", "dots3_note")


def some(families: list[str]) -> list[Any]:
    """Return parameters of which most are slow ones."""
    return [pytest.param(one, marks=() if one in FAST else pytest.mark.slow) for one in families]


def filled(family: str, cache: Any, rows: int = 2) -> Any:
    """Return the cache behind a prompt of 40 tokens and 6 single ones."""
    model = shared_model(family)
    ids = tokens(rows, 46)
    for part in (ids[:, :40], *ids[:, 40:].split(1, 1)):
        with torch.no_grad():
            model(input_ids=part, past_key_values=cache, use_cache=True)
    return cache


def next_logits(family: str, cache: Any, rows: int) -> torch.Tensor:
    model = shared_model(family)
    with torch.no_grad():
        for seed in (1, 2):
            out = model(input_ids=tokens(rows, 1, seed=seed), past_key_values=cache, use_cache=True)
    return out.logits


CHANGES = {
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([1, 1])), 2),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), 4),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([1])), 1),
    "crop a little": (lambda cache: cache.crop(-3), 2),
    "crop into pages": (lambda cache: cache.crop(-29), 2),
    "crop all": (lambda cache: cache.crop(-46), 2),
    "reset": (lambda cache: cache.reset(), 3),
    "reset and fill": (lambda cache: (cache.reset(), cache), 2),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("family", some(FAMILIES))
def test_a_changed_cache_goes_on_as_that_of_transformers(family, change):
    if family == "dots3_note" and change.startswith("crop"):
        pytest.skip("a sliding window keeps too little to go back; see test_prompt_lookup")
    do, rows = CHANGES[change]
    found = []
    for cache in (DynamicCache(config=shared_model(family).config), paged(shared_model(family))):
        do(filled(family, cache))
        if change.startswith("reset") and not isinstance(cache, kv_hf.PagedCache):
            cache = DynamicCache(config=shared_model(family).config)  # 5.17 zeroes the old one
        if change == "reset and fill":
            filled(family, cache)
        found.append(next_logits(family, cache, rows))
    rounding.assert_close(found[1], found[0])


@pytest.mark.parametrize("name", ["exact", "int8", "int4", "fp8_ds_mla"])
@pytest.mark.parametrize("family", ["deepseek_v2", "minicpm3"])
def test_a_saved_cache_goes_on(family, name, tmp_path):
    model = shared_model(family)
    options = {"latent": {"format": name, "k_rope": "int8"} if name == "int4" else name}
    if name == "fp8_ds_mla":
        model = make_model(family, kv_lora_rank=128)
    cache = paged(model, **options)
    ids = tokens(2, 46)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache.save(tmp_path / "cache", model)
        loaded = kv_hf.PagedCache.load(tmp_path / "cache", model)
        assert [row.kind for row in loaded.report()] == ["paged latents"] * 2
        logits = [
            model(input_ids=tokens(2, 1), past_key_values=one, use_cache=True).logits
            for one in (cache, loaded)
        ]
    assert torch.equal(*logits)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family in SPARSE])
def test_indexer_keys_are_neither_saved_nor_shared(family, tmp_path):
    model = shared_model(family)
    with pytest.raises(kv_hf.KVCacheError, match="indexer keys"):
        filled(family, paged(model)).save(tmp_path / "cache", model)
    assert not (tmp_path / "cache").exists()
    with pytest.raises(kv_hf.CacheOptionError, match="indexer"):
        paged(model, prefix_store=kv_hf.PrefixStore())


# -- encoded latents -------------------------------------------------------------------------------------------

EXPANDED = [
    f for f in ("deepseek_v3", "deepseek_v32", "dots3_note", "mistral_large4") if f in EXPANDING
]
FORMATS = {
    "exact": {"latent": {"format": "exact", "k_rope": "int8"}},
    "fp8": {"latent": "fp8"},
    "int8": {"latent": {"format": "int8", "k_rope": "int8"}},
    "int4": {"latent": {"format": "int4", "k_rope": "int8"}},
    "int8 in groups of 16": {"latent": "int8", "group_size": 16},
    "int4 in groups of 8 tokens": {"latent": "int4", "group_size": {"latent": 8}},
    "int2": {"latent": "int2"},
    "fp8_ds_mla": {"latent": "fp8_ds_mla"},
    "keys and values": {"keys": "int4", "values": "int4"},
}


def wide(family: str, name: str) -> Any:
    """Return a model whose ranks the format divides."""
    rank = 128 if name == "fp8_ds_mla" else 32
    ranks = {"kv_lora_rank": rank} | ({"swa_kv_lora_rank": rank} if family == "dots3_note" else {})
    return make_model(family, **ranks)


def step(model: Any, cache: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    with torch.no_grad():
        return model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        ).logits


def dense_copy(model: Any, cache: Any) -> DynamicCache:
    """Return transformers' cache of the rounded latents that `cache` holds."""
    copied = DynamicCache(config=model.config)
    for mine, theirs in zip(cache.layers, copied.layers, strict=True):
        if getattr(mine, "keys", None) is not None:
            theirs.update(mine.keys.clone(), mine.values.clone())
        if getattr(theirs, "is_sliding", False):  # it holds the last tokens of as many as were seen
            theirs.cumulative_length = cache.get_seq_length()
        if getattr(mine, "indexer_keys", None) is not None:
            theirs.update_indexer(mine.indexer_keys.clone())
    return copied


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", EXPANDED)
def test_a_step_equals_the_stock_model_on_the_same_latents(family, name):
    model = wide(family, name)
    cache = paged(model, **FORMATS[name])
    ids, mask = tokens(2, 60), torch.ones(2, 60, dtype=torch.long)
    mask[1, :17] = 0
    exact = paged(model)
    for one in (cache, exact):
        step(model, one, ids[:, :57], mask[:, :57])
    for chunk in (1, 2):
        end = 57 + chunk if chunk == 1 else 60
        part, seen = ids[:, end - chunk : end], mask[:, :end]
        oracle = dense_copy(model, cache)
        found, unrounded = (step(model, one, part, seen) for one in (cache, exact))
        text = text_config(model)
        inner = [key for key in model.config.sub_configs if getattr(model.config, key) is text]
        stock = stock_attention(family)
        model.set_attn_implementation({inner[0]: stock} if inner else stock)
        wanted = step(model, oracle, part, seen)
        rounding.assert_close(found, wanted)
        if name != "exact":
            lost = largest_difference([found], [unrounded])
            assert lost > rounding.allowed(unrounded), "nothing was rounded"
    assert cache.memory().pages_held > 0


# -- options ------------------------------------------------------------------------------------------------


def cache_of(family: str = "deepseek_v3", **options: Any) -> kv_hf.PagedCache:
    return paged(make_model(family), **options)


def test_different_formats_of_keys_and_values_are_an_error_that_latent_resolves():
    with pytest.raises(kv_hf.CacheOptionError, match="layer 0 stores one latent for both.*latent="):
        cache_of(keys="int8", values="int4")
    cache = cache_of(keys="int8", values="int4", latent={"format": "int2", "k_rope": "int8"})
    assert [(row.keys, row.values) for row in cache.report()] == [("int2", "int8")] * 2


def test_layers_override_the_latent_of_single_layers():
    cache = cache_of(latent="int4", layers={"1": "int8"})
    assert [row.keys for row in cache.report()] == ["int4", "int8"]
    cache = cache_of(keys="int4", values="int4", layers={"0": {"keys": "exact", "values": "exact"}})
    assert [row.keys for row in cache.report()] == ["exact", "int4"]
    for options in ({"latent": "int4"}, {"keys": "int4", "values": "int4"}):
        with pytest.raises(kv_hf.CacheOptionError, match="layer 1 stores one latent for both"):
            cache_of(**options, layers={"1": {"keys": "int8"}})


@pytest.mark.parametrize("family", [f for f in ("deepseek_v3", "dots3_note") if f in EXPANDING])
def test_groups_that_do_not_divide_the_rank_are_an_error(family):
    with pytest.raises(kv_hf.CacheOptionError, match="group"):
        cache_of(family, latent="int8", group_size=24)
    with pytest.raises(kv_hf.CacheOptionError, match="group|128"):
        cache_of(family, latent="fp8_ds_mla")


@pytest.mark.parametrize(
    "options",
    [
        {"latent": "int8"},
        {"latent": {"k_rope": "int8"}},
        {"latent": {"decode": "absorb"}},
        {"latent": {"decode": "expand"}},
    ],
)
def test_other_models_refuse_options_about_latents(options):
    name = next(iter(options))
    with pytest.raises(kv_hf.CacheOptionError, match=f"{name}=.*latent attention"):
        kv_hf.PagedCache(make_config("llama"), **options)


@pytest.mark.parametrize(
    "other",
    [{"latent": "int8"}, {"latent": {"format": "int4", "k_rope": "exact"}}, {"latent": "exact"}],
)
def test_a_prefix_store_holds_latents_of_one_format(other):
    """Pages of the first cache's format were read and written by caches of another."""
    store = kv_hf.PrefixStore()
    paged(make_model("deepseek_v3"), latent="int4", prefix_store=store)
    with pytest.raises(kv_hf.CacheOptionError, match="one store per model and format"):
        paged(make_model("deepseek_v3"), **other, prefix_store=store)
