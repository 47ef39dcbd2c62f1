"""What generate() and the cache do with pages of latents: same tokens as transformers' own cache."""

import copy
import pickle
from typing import Any

import pytest
import rounding
import torch
from test_latent_families import LENGTHS, paged, read_pages
from tiny_latent import SPARSE, is_there, make_model, shared_model
from tiny_models import left_padded, tokens
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


ONE = {"input_ids": tokens(1, 40)}
PAGES = {"page_size": 16}


def generated(model: Any, inputs: dict[str, Any], name: str | None, **options: Any) -> Any:
    """Return what generate() makes, greedy unless told otherwise; `name` is a cache_implementation or None."""
    if name is not None:
        given = options.pop("cache_config", {})
        options |= {"cache_implementation": name, "cache_config": {**PAGES, **given}}
    options = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True} | options
    torch.manual_seed(7)
    return model.generate(**inputs, **options)


def check_same(
    family: str, inputs: dict[str, Any], config: dict[str, Any] | None = None, **options: Any
) -> Any:
    """Check that pages give the tokens of transformers' own cache; return the paged cache."""
    model = shared_model(family)
    stock = generated(model, inputs, None, **options)
    found = generated(model, inputs, "paged_exact", cache_config=config or {}, **options)
    assert torch.equal(found.sequences, stock.sequences)
    cache = found.past_key_values
    assert isinstance(cache, kv_hf.PagedCache)
    cache.check_integrity()
    return cache


@pytest.mark.parametrize("family", some(FAMILIES))
class TestGenerate:
    def test_beams(self, family):
        cache = check_same(family, left_padded(LENGTHS), num_beams=3)
        assert cache.memory().pages_held > 0

    def test_beams_return_several(self, family):
        check_same(family, ONE, num_beams=4, num_return_sequences=3)

    def test_sampling_several(self, family):
        options = {"do_sample": True, "num_return_sequences": 3, "top_k": 20}
        check_same(family, left_padded(LENGTHS), **options)

    def test_prompt_lookup(self, family):
        # of the other seeds one has a step whose best two tokens are a rounding apart
        repeated = {"input_ids": tokens(1, 13, seed=2).repeat(1, 4)}
        check_same(family, repeated, prompt_lookup_num_tokens=4, max_new_tokens=40)

    def test_assistant(self, family):
        assistant = make_model(family)
        with torch.no_grad():  # some of its tokens are accepted, some not
            for parameter in assistant.parameters():
                parameter.mul_(1 + 0.01 * torch.randn(parameter.shape))
        check_same(family, ONE, assistant_model=assistant, max_new_tokens=40)

    def test_chunks_of_the_prompt(self, family):
        check_same(family, {"input_ids": tokens(2, 70)}, prefill_chunk_size=24)

    def test_offload(self, family):
        cache = check_same(family, left_padded(LENGTHS), {"offload": "disk"}, num_beams=2)
        assert cache.memory().offloaded > 0

    def test_a_chat_goes_on(self, family):
        model = shared_model(family)
        texts = []
        for cache in (DynamicCache(config=model.config), paged(model)):
            ids = tokens(1, 40)
            for turn in range(3):
                ids = model.generate(ids, past_key_values=cache, max_new_tokens=10, do_sample=False)
                ids = torch.cat([ids, tokens(1, 21, seed=turn)], 1)
            texts.append(ids)
        assert torch.equal(*texts)


def filled(family: str, cache: Any, rows: int = 2) -> Any:
    """Return the cache behind a prompt of 40 tokens and 6 single ones."""
    model = shared_model(family)
    read_pages(model)
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


@pytest.mark.parametrize("family", some(FAMILIES))
def test_a_copy_goes_its_own_way(family):
    model = shared_model(family)
    caches = []
    for cache in (DynamicCache(config=model.config), paged(model)):
        filled(family, cache)
        caches.append((cache, copy.deepcopy(cache)))
    (stock, stock_copy), (cache, copied) = caches
    for seed in range(20):  # pages seal in one while the other waits
        for one in (stock, cache):
            with torch.no_grad():
                model(input_ids=tokens(2, 1, seed=seed), past_key_values=one, use_cache=True)
    for theirs, mine in ((stock_copy, copied), (stock, cache)):
        wanted = next_logits(family, theirs, 2)
        rounding.assert_close(next_logits(family, mine, 2), wanted)
        mine.check_integrity()


@pytest.mark.parametrize("name", ["exact", "int8", "int4", "fp8_ds_mla"])
@pytest.mark.parametrize("family", ["deepseek_v2", "minicpm3"])
def test_a_saved_cache_goes_on(family, name, tmp_path):
    model = shared_model(family)
    options = {"latent": name} | ({"k_rope": "int8"} if name == "int4" else {})
    if name == "fp8_ds_mla":
        model = make_model(family, kv_lora_rank=128)
        read_pages(model)
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


@pytest.mark.parametrize("latent", ["exact", "int4"])
@pytest.mark.parametrize("family", some([one for one in FAMILIES if one not in SPARSE]))
def test_prompts_share_their_prefix(family, latent):
    model = shared_model(family)
    store = kv_hf.PrefixStore()
    prefix = tokens(1, 50)
    for seed in range(3):
        ids = torch.cat([prefix, tokens(1, 9, seed=seed + 1)], 1)
        alone = generated(model, {"input_ids": ids}, f"paged_{latent}")
        found = generated(
            model, {"input_ids": ids}, f"paged_{latent}", cache_config={"prefix_store": store}
        )
        if latent == "exact":
            assert torch.equal(found.sequences, alone.sequences)
        assert found.past_key_values.report()[0].kind == "paged latents"
    assert store.stats().rows_hit == 2 and store.stats().tokens_computed < 120


@pytest.mark.parametrize("family", some(FAMILIES))
def test_a_model_and_a_cache_are_pickled(family):
    model = make_model(family)
    stock = generated(model, ONE, None).sequences
    cache = generated(model, ONE, "paged_exact").past_key_values
    copied = copy.deepcopy(model)
    assert torch.equal(generated(copied, ONE, "paged_exact").sequences, stock)
    model.set_attn_implementation("sdpa")
    written = pickle.dumps(model)
    assert b"kv_hf" not in written
    assert torch.equal(generated(pickle.loads(written), ONE, None).sequences, stock)
    read = pickle.loads(pickle.dumps(cache))
    read_pages(model)
    with torch.no_grad():
        logits = [model(tokens(1, 1), past_key_values=one).logits for one in (cache, read)]
    rounding.assert_close(*logits)
