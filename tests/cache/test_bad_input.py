"""Bad input: an error that names the argument, its value and what was expected; nothing is broken after it."""

import pytest
import rounding
import torch
import transformers
from tiny_models import make_config, make_model, shared_model, tokens

import kv_hf


@pytest.fixture(scope="module")
def model():
    return shared_model("llama")


def still_works(model, cache=None):
    given = {"cache_implementation": "paged_int4"} if cache is None else {"past_key_values": cache}
    assert model.generate(tokens(1, 20), max_new_tokens=2, **given).shape[1] == 22


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"page_sise": 64}, "page_sise.*did you mean 'page_size'"),
        (
            {"keys": "int5"},
            "keys must be one of exact, fp8, int8, int4, int2, int4_mixed, int2_mixed, got 'int5'",
        ),
        ({"page_size": 24}, "page_size must be a power of two of at least 16, got 24"),
        ({"key_group_size": 24}, "key_group_size must divide page_size 64, got 24"),
        ({"value_group_size": 24}, "value_group_size must divide head_dim 16, got 24"),
        ({"max_pages": 0}, "max_pages must be an integer of at least 1, got 0"),
        ({"layers": {"0-9": "int8"}}, "0-9 goes past the last layer 1"),
        ([1], "cache_config must be a kv_hf.CacheConfig or a dict"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_bad_cache_config_is_refused_before_generation(model, config, words):
    ran = []
    hook = model.register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.raises(kv_hf.CacheOptionError, match=words):
        model.generate(
            tokens(1, 8), max_new_tokens=2, cache_implementation="paged_int4", cache_config=config
        )
    hook.remove()
    assert not ran
    still_works(model)


@pytest.mark.parametrize("number", [2**70, 10**5000], ids=["2**70", "10**5000"])
@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("page_size", {}),
        ("key_group_size", {"keys": "int4"}),
        ("value_group_size", {"values": "int4"}),
        ("sink_tokens", {}),
        ("recent_tokens", {}),
        ("reserve_tokens", {}),
        ("max_pages", {}),
        ("max_length", {}),
        ("device_bytes", {"offload": "cpu"}),
        ("latent_group_size", {"latent": "int8"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_numbers_beyond_any_memory_are_refused(name, others, number):
    with pytest.raises(
        kv_hf.CacheOptionError, match=f"{name} must be an integer of at most [0-9]+, got"
    ):
        kv_hf.CacheConfig(**others, **{name: number})


def test_unknown_cache_implementation_lists_ours(model):
    with pytest.raises(ValueError, match="paged_int4.*got 'paged_int5'"):
        model.generate(tokens(1, 8), max_new_tokens=2, cache_implementation="paged_int5")


def test_unknown_option_of_the_cache_is_refused(model):
    with pytest.raises(kv_hf.CacheOptionError, match="sink_token.*did you mean 'sink_tokens'"):
        kv_hf.PagedCache(model.config, keys="int4", sink_token=3)


@pytest.mark.parametrize("implementation", ["paged_int4", "paged_int2"])
def test_head_dim_that_cannot_be_packed_is_refused_before_generation(implementation):
    head_dim = {"paged_int4": 7, "paged_int2": 10}[implementation]
    config = make_config("gpt2", n_embd=4 * head_dim)
    with pytest.raises(kv_hf.CacheOptionError, match="head_dim must be a multiple of"):
        kv_hf.PagedCache.from_implementation(config, implementation)
    kv_hf.PagedCache(config, keys="int8")


def test_both_cache_implementation_and_cache_are_refused(model):
    cache = kv_hf.PagedCache(model.config)
    with pytest.raises(ValueError, match="Passing both"):
        model.generate(
            tokens(1, 8), max_new_tokens=2, past_key_values=cache, cache_implementation="paged_int4"
        )
    still_works(model, cache)


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


def test_cache_of_another_model_is_refused_and_unharmed(model):
    cache = kv_hf.PagedCache(model.config)
    other = make_model("llama", num_key_value_heads=4)
    with pytest.raises(
        kv_hf.CacheMismatchError, match="num_key_value_heads=2.*num_key_value_heads=4"
    ):
        other.generate(tokens(1, 8), past_key_values=cache, max_new_tokens=2)
    still_works(model, cache)


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


def mixed_model():
    config = make_config("llama")
    config = transformers.Gemma3TextConfig(
        **{
            **{
                k: v
                for k, v in config.to_dict().items()
                if k in ("vocab_size", "hidden_size", "intermediate_size")
            },
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "pad_token_id": 0,
        }
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    return model


def test_pool_limit_is_found_before_a_layer_of_another_kind_is_changed():
    model = mixed_model()
    cache = kv_hf.PagedCache(model.config, max_pages=1)
    dynamic = transformers.DynamicCache(config=model.config)
    ids = tokens(1, 70)
    with torch.no_grad():
        for made in (cache, dynamic):
            model(ids[:, :67], past_key_values=made)
        with pytest.raises(kv_hf.PagePoolExhaustedError):
            model(tokens(1, 70, seed=5), past_key_values=cache)
        assert [layer.get_seq_length() for layer in cache.layers] == [67, 67]
        found, expected = (
            model(ids[:, 67:], past_key_values=made).logits for made in (cache, dynamic)
        )
    rounding.assert_close(found, expected)


def test_layer_override_of_a_layer_that_is_not_paged_is_refused():
    config = transformers.LlamaConfig(
        num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]
    )
    with pytest.raises(
        kv_hf.CacheOptionError, match="0-0 holds no paged layer.*LinearAttentionLayer"
    ):
        kv_hf.PagedCache(config, keys="int4", layers={"0": "int8"})
    kv_hf.PagedCache(config, keys="int4", layers={"0-1": "int8"})


def test_failure_inside_a_layer_is_not_taken_up_again(model, monkeypatch):
    """An out-of-memory error while sealing must not let a retry of the same call read half-written tokens."""
    cache = kv_hf.PagedCache(model.config, page_size=16)
    for layer in (0, 1):
        cache.update(*torch.randn(2, 1, 2, 30, 16), layer)
    states = torch.randn(2, 1, 2, 20, 16)

    def fail(*_):
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr("kv_hf.cache.store.LayerStore._seal", fail)
        with pytest.raises(torch.OutOfMemoryError):
            cache.update(*states, 0)
    with pytest.raises(kv_hf.InterruptedForwardError, match=r"stopped half-way.*call reset\(\)"):
        cache.update(*states, 0)
    cache.reset()
    cache.update(*states, 0)


def test_empty_batches_and_empty_caches(model):
    cache = kv_hf.PagedCache(model.config)
    cache.batch_select_indices(torch.tensor([0]))
    with pytest.raises(kv_hf.CacheMismatchError, match="batch of 0"):
        cache.update(*torch.randn(2, 0, 2, 5, 16), 0)
    for layer in (0, 1):
        cache.update(*torch.randn(2, 1, 2, 5, 16), layer)
    with pytest.raises(kv_hf.CacheMismatchError, match="at least one row"):
        cache.batch_select_indices(torch.tensor([], dtype=torch.long))


def test_reset_of_a_model_with_other_layers_takes_another_batch_size():
    model = mixed_model()
    cache, fresh = kv_hf.PagedCache(model.config), kv_hf.PagedCache(model.config)
    with torch.no_grad():
        model(tokens(2, 30), past_key_values=cache)
        cache.reset()
        found = model(tokens(3, 20), past_key_values=cache).logits
        assert torch.equal(found, model(tokens(3, 20), past_key_values=fresh).logits)
    assert cache.memory() == fresh.memory()


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


@pytest.mark.parametrize("argument", ["key_group_size", "value_group_size"])
def test_group_size_that_no_format_reads_is_refused(argument):
    config = make_config("llama")
    with pytest.raises(kv_hf.CacheOptionError, match=f"{argument}=16 is read by the formats int4"):
        kv_hf.PagedCache(config, keys="int8", **{argument: 16})
    kv_hf.PagedCache(config, keys="int8", layers={"0": "int4"}, **{argument: 16})
