"""Encoded latents: a decode step equals the stock model on the same rounded latents; bytes; options."""

from typing import Any

import pytest
import rounding
import torch
from test_latent_families import (
    EXPANDING,
    expansions,
    largest_difference,
    latent_modules,
    paged,
    read_pages,
    stock_attention,
)
from tiny_latent import is_there, make_model, text_config
from tiny_models import make_config, tokens
from transformers import DynamicCache

import kv_hf

FAMILIES = [
    f for f in ("deepseek_v3", "deepseek_v32", "dots3_note", "mistral_large4") if f in EXPANDING
]
FORMATS = {
    "exact": {"latent": "exact", "k_rope": "int8"},
    "fp8": {"latent": "fp8"},
    "int8": {"latent": "int8", "k_rope": "int8"},
    "int4": {"latent": "int4", "k_rope": "int8"},
    "int8 in groups of 16": {"latent": "int8", "latent_group_size": 16},
    "int4 in groups of 8 tokens": {"latent": "int4", "key_group_size": 8},
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
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_equals_the_stock_model_on_the_same_latents(family, name):
    model = wide(family, name)
    cache = paged(model, **FORMATS[name])
    ids, mask = tokens(2, 60), torch.ones(2, 60, dtype=torch.long)
    mask[1, :17] = 0
    read_pages(model)
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
        read_pages(model)
        rounding.assert_close(found, wanted)
        if name != "exact":
            lost = largest_difference([found], [unrounded])
            assert lost > rounding.allowed(unrounded), "nothing was rounded"
    assert cache.memory().pages_held > 0


@pytest.mark.parametrize(
    ("name", "bits", "group", "scale_bytes"),
    [
        ("fp8", 8, 32, 2),
        ("int8", 8, 32, 2),
        ("int4", 4, 0.5, 4),  # by channel: 16 tokens share each of 32 scales
        ("int2", 2, 0.5, 4),
        ("exact", 32, 0, 0),
    ],
)
@pytest.mark.parametrize("k_rope", ["exact", "int8"])
def test_bytes_are_those_of_the_tensors(name, bits, group, scale_bytes, k_rope):
    """Per token and layer: r codes and their scales (and offsets), RoPE keys of dr numbers."""
    model = make_model("deepseek_v3")
    read_pages(model)
    cache = paged(model, latent=name, k_rope=k_rope)
    step(model, cache, tokens(2, 60), torch.ones(2, 60))
    memory = cache.memory()
    fields = [
        tensor
        for layer in cache.paged_layers
        for side in layer.storage.sides
        for tensor in side.fields.values()
    ]
    assert memory.payload + memory.scales == sum(tensor.nbytes for tensor in fields)
    tokens_stored = 2 * 16 * memory.pages_allocated  # two layers
    assert memory.pages_held == 6 <= memory.pages_allocated
    latent = 32 * bits // 8
    if group:
        latent += 32 / group * scale_bytes if group > 1 else 32 * scale_bytes / 16
    # int8 RoPE keys: per page of 16 tokens one scale, and an offset per channel
    rope = 8 * 4 if k_rope == "exact" else 8 + (2 + 8 * 2) / 16
    assert (memory.payload + memory.scales) / tokens_stored == latent + rope


# -- options ------------------------------------------------------------------------------------------------


def cache_of(family: str = "deepseek_v3", **options: Any) -> kv_hf.PagedCache:
    return paged(make_model(family), **options)


def test_different_formats_of_keys_and_values_are_an_error_that_latent_resolves():
    with pytest.raises(kv_hf.CacheOptionError, match="layer 0 stores one latent for both.*latent="):
        cache_of(keys="int8", values="int4")
    cache = cache_of(keys="int8", values="int4", latent="int2", k_rope="int8")
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
        cache_of(family, latent="int8", latent_group_size=24)
    with pytest.raises(kv_hf.CacheOptionError, match="group|128"):
        cache_of(family, latent="fp8_ds_mla")


@pytest.mark.parametrize(
    "options",
    [
        {"latent": "int8"},
        {"latent_group_size": 8, "keys": "int8"},
        {"k_rope": "int8"},
        {"mla": "absorb"},
        {"mla": "expand"},
    ],
)
def test_other_models_refuse_options_about_latents(options):
    name = next(iter(options))
    with pytest.raises(kv_hf.CacheOptionError, match=f"{name}=.*latent attention"):
        kv_hf.PagedCache(make_config("llama"), **options)


def test_ranks_of_single_layers_are_those_of_the_config():
    if not is_there("dots3_note"):
        pytest.skip("no such family in this transformers")
    cache = cache_of("dots3_note", latent="int4")
    assert [layer.formats.rank for layer in cache.layers] == [32, 48, 32]
    model = make_model("dots3_note")
    read_pages(model)
    with expansions(model) as lengths:
        for part in tokens(1, 42).split([40, 1, 1], 1):
            step(model, cache, part, torch.ones(1, cache.get_seq_length() + part.shape[1]))
    assert lengths == [40] * len(latent_modules(model))
    assert [layer.spec.keys.head_dim for layer in cache.layers] == [32, 48, 32]


@pytest.mark.parametrize(
    "other", [{"latent": "int8"}, {"latent": "int4", "k_rope": "exact"}, {"latent": "exact"}]
)
def test_a_prefix_store_holds_latents_of_one_format(other):
    """Pages of the first cache's format were read and written by caches of another."""
    store = kv_hf.PrefixStore()
    paged(make_model("deepseek_v3"), latent="int4", prefix_store=store)
    with pytest.raises(kv_hf.CacheOptionError, match="one store per model and format"):
        paged(make_model("deepseek_v3"), **other, prefix_store=store)


def test_group_sizes_of_values_are_an_error():
    with pytest.raises(kv_hf.CacheOptionError, match="value_group_size=8.*no values"):
        cache_of(keys="int4", values="int4", value_group_size=8)
    with pytest.raises(kv_hf.CacheOptionError, match="groups of 128 numbers .* kv_lora_rank 32"):
        cache_of(latent="fp8_ds_mla")
