"""Bad input: an error that names the argument, its value and what was expected; nothing is broken after it."""

import pytest
import torch
import transformers
from tiny_models import make_config, shared_model, tokens

import kv_hf


@pytest.fixture(scope="module")
def model():
    return shared_model("llama")


def still_works(model, cache=None):
    given = {"cache_implementation": "paged_int4"} if cache is None else {"past_key_values": cache}
    assert model.generate(tokens(1, 20), max_new_tokens=2, **given).shape[1] == 22


def test_model_without_attention_is_refused():
    config = transformers.MambaConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=8, pad_token_id=0
    )
    model = transformers.MambaForCausalLM(config)
    with pytest.raises(kv_hf.UnsupportedModelError, match="MambaForCausalLM"):
        model.generate(tokens(1, 8), max_new_tokens=2, cache_implementation="paged_int4")


def test_something_that_is_no_config_is_refused():
    with pytest.raises(kv_hf.UnsupportedModelError, match=r"model\.config.*got dict"):
        kv_hf.PagedCache({"hidden_size": 64})


def test_cache_reused_with_another_batch_size_is_refused_and_unharmed(model):
    cache = kv_hf.PagedCache(model.config, keys="int4", page_size=16)
    ids = tokens(2, 40)
    model.generate(ids, past_key_values=cache, max_new_tokens=3)
    before = cache.memory()
    with (
        torch.no_grad(),
        pytest.raises(kv_hf.CacheMismatchError, match="batch of 2 rows.*got keys for 3"),
    ):
        model(tokens(3, 1), past_key_values=cache)
    assert cache.memory() == before
    cache.check_integrity()
    with torch.no_grad():
        model(tokens(2, 1), past_key_values=cache)


def test_keys_of_another_shape_or_dtype_are_refused(model):
    cache = kv_hf.PagedCache(model.config)
    good = torch.randn(2, 1, 2, 8, 16)
    cache.update(*good, 0)
    cache.update(*good, 1)
    for bad in (torch.randn(2, 1, 3, 1, 16), torch.randn(2, 1, 2, 1, 8), good[..., :1, :].double()):
        with pytest.raises(
            kv_hf.CacheMismatchError, match="layer 0 of this cache holds 2 kv heads of 16"
        ):
            cache.update(*bad, 0)
    cache.update(*torch.randn(2, 1, 2, 1, 16), 0)
    assert cache.get_seq_length() == 9


def test_pool_limit_in_mid_generation_leaves_cache_and_model_usable(model):
    cache = kv_hf.PagedCache(model.config, keys="int4", page_size=16, max_pages=4)
    with pytest.raises(kv_hf.PagePoolExhaustedError, match="max_pages=4 is reached.*unchanged"):
        model.generate(tokens(1, 40), past_key_values=cache, max_new_tokens=100)
    cache.check_integrity()
    held = cache.get_seq_length()
    assert held == 4 + 16 * 5 - 1
    cache.crop(-30)
    with torch.no_grad():
        model(tokens(1, 5), past_key_values=cache)
    assert cache.get_seq_length() == held - 25
    still_works(model)


def test_forward_that_stops_half_way_marks_the_cache(model):
    cache = kv_hf.PagedCache(model.config)
    states = torch.randn(2, 1, 2, 20, 16)
    for layer in (0, 1):
        cache.update(*states, layer)
    cache.update(*states, 0)  # layer 1 never follows
    with pytest.raises(kv_hf.InterruptedForwardError, match=r"stopped half-way.*call reset\(\)"):
        cache.update(*states, 0)
    cache.reset()
    for layer in (0, 1):
        cache.update(*states, layer)
    cache.check_integrity()


def test_first_forward_that_stops_between_layers_is_tried_again_once(model):
    """How many layers take part is known from the second forward on, so that its first layer has appended."""
    cache = kv_hf.PagedCache(model.config)
    states = torch.randn(2, 1, 2, 20, 16)
    cache.update(*states, 0)  # layer 1 never follows
    cache.update(*states, 0)
    with pytest.raises(kv_hf.InterruptedForwardError, match=r"layer 1 cannot append.*reset\(\)"):
        cache.update(*states, 1)
    for layer in (0, 1, 0):
        with pytest.raises(kv_hf.InterruptedForwardError, match=r"reset\(\)"):
            cache.update(*states, layer)
    assert cache.get_seq_length() == 40
    cache.reset()
    for layer in (0, 1):
        cache.update(*states, layer)
    cache.check_integrity()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("keys", ["fp8", "int8", "int4", "int2"])
def test_numbers_that_are_not_finite_are_reported_and_stay_in_their_page(model, keys, bad):
    cache = kv_hf.PagedCache(model.config, keys=keys, page_size=16)
    clean = kv_hf.PagedCache(model.config, keys=keys, page_size=16)
    good = torch.randn(2, 1, 2, 80, 16)
    spoilt = good.clone()
    spoilt[:, 0, 1, 30, 3] = bad  # page 1 holds tokens 20 to 35
    for layer in (0, 1):
        clean.update(*good, layer)
        if layer == 0:
            with pytest.warns(kv_hf.KVCacheWarning, match="inf, nan or numbers beyond"):
                cache.update(*spoilt, layer)
        else:
            cache.update(*good, layer)
    for side in ("keys", "values"):
        found, expected = (getattr(c.layers[0], side) for c in (cache, clean))
        assert torch.isfinite(found).all()
        outside = torch.ones(80, dtype=torch.bool)
        outside[20:36] = False
        assert torch.equal(found[:, :, outside], expected[:, :, outside])
        assert torch.equal(found[:, 0], expected[:, 0])


def test_empty_batches_and_empty_caches(model):
    cache = kv_hf.PagedCache(model.config)
    cache.batch_select_indices(torch.tensor([0]))
    with pytest.raises(kv_hf.CacheMismatchError, match="batch of 0"):
        cache.update(*torch.randn(2, 0, 2, 5, 16), 0)
    for layer in (0, 1):
        cache.update(*torch.randn(2, 1, 2, 5, 16), layer)
    with pytest.raises(kv_hf.CacheMismatchError, match="at least one row"):
        cache.batch_select_indices(torch.tensor([], dtype=torch.long))


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        ([[1, 1]], "must be a tensor .*got list"),
        (torch.ones(5), r"got \[5\]"),
        (torch.tensor([[0.0, -1e9]]), "must hold 0 and 1"),
        (torch.ones(2, 1, 3, 3), r"got \[2, 1, 3, 3\]"),
    ],
)
def test_observe_padding_refuses_what_is_no_mask(mask, says):
    cache = kv_hf.PagedCache(make_config("llama"))
    with pytest.raises(kv_hf.CacheMismatchError, match=says):
        cache.observe_padding(mask)
    cache.observe_padding(None)
    cache.update(*torch.randn(2, 2, 2, 5, 16), 0)
    cache.update(*torch.randn(2, 2, 2, 5, 16), 1)
    with pytest.raises(kv_hf.CacheMismatchError, match="comes too late"):
        cache.observe_padding(torch.ones(2, 5))
