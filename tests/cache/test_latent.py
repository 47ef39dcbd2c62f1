"""Every family with latent attention on pages of latents, against transformers' own cache and attention, and what a cache does with them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Any
from unittest.mock import patch

import pytest
import rounding
import torch
import transformers
from harness import slow_but
from measure.family_models import ROLES, families
from packaging.version import Version
from tiny_latent import (
    FAMILIES,
    SPARSE,
    families_of_transformers,
    is_there,
    latent_modules,
    make_model,
    shared_model,
    text_config,
)
from tiny_models import left_padded, tokens
from transformers import DynamicCache
from transformers.models.auto.configuration_auto import model_type_to_module_name

import kv_hf

LENGTHS = [40, 23]
HERE = [family for family in FAMILIES if is_there(family)]
# 5.17 expands before the cache where attention is sparse: such models cache keys and values of all heads
EXPANDING = families_of_transformers(cached="k(v)?_(nope|pass)")
PINNED = "5.23"


@contextmanager
def expansions(model: Any) -> Iterator[list[int]]:
    """Note how many tokens each product with a kv_b_proj of `model` expands."""
    lengths: list[int] = []
    weights = {id(module.kv_b_proj.weight) for module in latent_modules(model)}
    linear = torch.nn.functional.linear

    def noted(given: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        if id(weight) in weights:
            lengths.append(given.shape[2])
        return linear(given, weight, bias)

    with patch("torch.nn.functional.linear", noted):
        yield lengths


def forwards(model: Any, cache: Any, modes: Sequence[Any] = (torch.no_grad,)) -> list[torch.Tensor]:
    """Return the logits of a padded prefill, a chunk of 3, 8 single tokens, a chunk of 40 and 3 more tokens, in `modes` by turns."""
    batch = left_padded(LENGTHS)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    more = tokens(2, 54, seed=1)
    mask = torch.cat([mask, torch.ones_like(more)], 1)
    whole = torch.cat([ids, more], 1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    found, at = [], 0
    for count, mode in zip((40, 3, *[1] * 8, 40, *[1] * 3), cycle(modes), strict=False):
        with mode():
            out = model(
                input_ids=whole[:, at : at + count],
                attention_mask=mask[:, : at + count],
                position_ids=positions[:, at : at + count],
                past_key_values=cache,
                use_cache=True,
            )
        found.append(out.logits[mask[:, at : at + count].bool()])
        at += count
    return found


def largest_difference(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    return max(
        (a.double() - b.double()).abs().max().item() for a, b in zip(first, second, strict=True)
    )


def assert_all_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        rounding.assert_close(mine, theirs)


def paged(model: Any, **options: Any) -> kv_hf.PagedCache:
    return kv_hf.PagedCache(model.config, **{"page_size": 16, **options})


def stock_attention(family: str) -> str:
    return "eager" if family == "hy_v4" else "sdpa"


@pytest.mark.skipif(
    Version(transformers.__version__).release[:2] != Version(PINNED).release,
    reason=f"the list of families is that of transformers {PINNED}",
)
def test_every_family_of_transformers_has_a_tiny_model():
    """One of each kind is here; the walk over all families of transformers compares the others."""
    walked = {model_type_to_module_name(name) for role in ROLES for name in families(role)}
    assert set(FAMILIES) <= families_of_transformers() <= walked
    assert {f for f in FAMILIES if hasattr(text_config(shared_model(f)), "index_topk")} == set(
        SPARSE
    )


@pytest.mark.parametrize("family", HERE)
def test_logits_are_those_of_the_stock_model(family):
    """Padded prefill, chunks and single tokens; the same in float64, where hardly any rounding hides a difference."""
    model, exact = make_model(family), make_model(family).double()
    exact.set_experts_implementation("eager")  # grouped products know no float64
    stock = forwards(model, DynamicCache(config=model.config))
    truth = forwards(exact, DynamicCache(config=model.config))
    cache = paged(model)
    with expansions(model) as lengths:
        found = forwards(model, cache)
    assert_all_close(found, stock)
    # norms and rotations stay in fp32: what differs by less than an ulp may be rounded to its neighbour, here and there
    scale = max(1.0, *(logits.abs().max().item() for logits in stock))
    ulp = torch.finfo(torch.float32).eps
    assert largest_difference(forwards(exact, paged(exact)), truth) < 8 * ulp * scale
    cache.check_integrity()
    assert cache.memory().pages_held > 0
    if family in EXPANDING:
        # the history is expanded for the prompt and for the chunk of 40 only (a window has fewer tokens)
        count = len(latent_modules(model))
        assert lengths[:count] == [40] * count and len(lengths) == 2 * count
        assert set(lengths[count:]) <= {91, 75} and 91 in lengths


@pytest.mark.parametrize("family", [family for family in SPARSE if is_there(family)])
def test_a_choice_of_few_tokens_is_that_of_the_stock_model(family):
    """An index that chooses 8 tokens: the same choices (many heads, so that no scores tie), honoured by all forwards."""
    changes = {"index_topk": 8, "index_n_heads": 16}
    model = make_model(family, **changes)
    stock_cache = DynamicCache(config=model.config)
    stock = forwards(model, stock_cache)
    everything = forwards(
        make_model(family, **{**changes, "index_topk": 512}), DynamicCache(config=model.config)
    )
    assert largest_difference(stock, everything) > 1e-3, "the choice changes nothing"
    cache = paged(model)
    # states of linear attention are transformers', and take no turns
    modes = [torch.no_grad] if family == "glm5_next" else [torch.no_grad, torch.inference_mode]
    found = forwards(model, cache, modes)
    assert_all_close(found, stock)
    compared = 0
    for mine, theirs in zip(cache.layers, stock_cache.layers, strict=True):
        if getattr(theirs, "indexer_keys", None) is not None:
            rounding.assert_close(mine.indexer_keys, theirs.indexer_keys)
            compared += 1
    assert compared
    if family in ("dots3_note", "glm5_next"):
        return  # a window or a recurrent state cannot go back
    cache.crop(-60)
    stock_cache.crop(-60)
    ids = tokens(2, 4, seed=5)
    mask = torch.ones(2, 38)
    mask[1, :17] = 0
    model.set_attn_implementation(stock_attention(family))
    logits = []
    for one in (stock_cache, cache):
        with torch.no_grad():
            out = model(ids, attention_mask=mask, past_key_values=one, use_cache=True)
        logits.append(out.logits)
    rounding.assert_close(logits[1], logits[0])


# -- what the cache does with pages of latents ------------------------------------------------------------------

CHANGED = [family for family in HERE if family not in ("glm5_next", "hy_v4")]
FAST = ("deepseek_v3", "mistral_large4", "dots3_note")


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
@pytest.mark.parametrize("family", slow_but(FAST, CHANGED))
def test_a_changed_cache_goes_on_as_that_of_transformers(family, change):
    if family == "dots3_note" and change.startswith("crop"):
        pytest.skip(
            "a sliding window keeps too little to go back; see the operations of scripts/measure"
        )
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


@pytest.mark.parametrize("family", [family for family in CHANGED if family in SPARSE])
def test_indexer_keys_are_saved_and_not_shared(family, tmp_path):
    """Layers that attend to the latents of others hold indexer keys alone, or nothing (mistral_large4)."""
    model = shared_model(family)
    cache = filled(family, paged(model))
    cache.save(tmp_path / "cache", model)
    loaded = kv_hf.PagedCache.load(tmp_path / "cache", model)
    more = tokens(len(cache._group), 1)
    assert torch.equal(*(model(more, past_key_values=one).logits for one in (loaded, cache)))
    assert [layer.seen for layer in loaded.paged_layers] == [
        layer.seen for layer in cache.paged_layers
    ]
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


@pytest.mark.parametrize(
    "other",
    [{"latent": "int8"}, {"latent": {"format": "int4", "k_rope": "exact"}}],
)
def test_a_prefix_store_holds_latents_of_one_format(other):
    """Pages of the first cache's format were read and written by caches of another."""
    store = kv_hf.PrefixStore()
    paged(make_model("deepseek_v3"), latent="int4", prefix_store=store)
    with pytest.raises(kv_hf.CacheOptionError, match="one store per model and format"):
        paged(make_model("deepseek_v3"), **other, prefix_store=store)
