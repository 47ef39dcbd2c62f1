"""Layers of attention and linear attention together: pages hold the keys and values, transformers the state."""

from functools import cache

import pytest
import rounding
import torch
from tiny_hybrids import is_there, make_config
from tiny_models import tokens
from transformers import AutoModelForCausalLM, DynamicCache

import kv_hf

FAMILIES = [name for name in ("falcon_h1", "zamba2", "inkling_text") if is_there(name)]
GREEDY = {
    "max_new_tokens": 40,
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_logits": True,
}


@cache
def model_of(family):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config(family)).eval()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


def paged(model, **options):
    return kv_hf.PagedCache(model.config, page_size=16, **options)


@pytest.mark.parametrize("options", [{}, {"max_length": 200}], ids=["growing", "max_length"])
def test_layers_that_ask_for_mask_sizes_within_a_forward_equal_dynamic_cache(options):
    """Inkling makes its position bias from the sizes of each sliding layer, when others have been updated already.

    With max_length its prompt stopped at another size, and causality of a chunk began at the last column there is room for.
    """
    if "inkling_text" not in FAMILIES:
        pytest.skip("the installed transformers has no such family")
    torch.manual_seed(0)
    config = make_config("inkling_text", sliding_window_size=24)
    model = AutoModelForCausalLM.from_config(config).eval()
    ours, stock, ids = paged(model, **options), DynamicCache(config=config), tokens(2, 170)
    with torch.no_grad():
        for part in (ids[:, :90], ids[:, 90:150], *ids[:, 150:].split(1, 1)):
            expected = model(part, past_key_values=stock).logits
            found = model(part, past_key_values=ours).logits
            rounding.assert_close(found, expected)
    assert ours.layers[0].window == 24


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_repeat_and_select_with_their_states(family):
    """transformers' own hybrid layer repeats keys and values only; a batch of copies is the oracle."""
    model, ids = model_of(family), tokens(2, 50)
    ours, wide = paged(model), DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=ours)
        model(ids[[1, 1, 0]], past_key_values=wide)
        ours.batch_repeat_interleave(2)
        ours.batch_select_indices(torch.tensor([2, 3, 0]))
        step = tokens(3, 1, seed=4)
        expected = model(step, past_key_values=wide).logits
        found = model(step, past_key_values=ours).logits
    rounding.assert_close(found, expected)


def test_reset_gives_states_of_layers_without_attention_back():
    """transformers' own layer kept a state of the rows before: another batch did not fit."""
    if not is_there("zamba2"):
        pytest.skip("the installed transformers has no such family")
    model = model_of("zamba2")
    cache, ids = paged(model), tokens(3, 20)
    with torch.no_grad():
        model(ids[:2], past_key_values=cache)
        cache.reset()
        assert cache.memory().total == 0
        found = model(ids, past_key_values=cache).logits
        assert torch.equal(found, model(ids, past_key_values=paged(model)).logits)


def test_memory_and_report_tell_the_state_apart():
    model = model_of("falcon_h1")
    cache = paged(model, keys="int4", values="int4")
    with torch.no_grad():
        model(tokens(2, 80), past_key_values=cache)
    states = sum(
        state.nbytes
        for layer in cache.layers
        for states in (layer.conv_states, layer.recurrent_states)
        for state in states.values()
    )
    assert cache.memory().other == states > 0
    assert cache.report()[0].kind == "paged, linear-attention state beside them"
    assert cache.report()[0].keys == "int4"


def test_what_a_state_does_not_allow_is_refused_with_the_reason(tmp_path):
    model = model_of("falcon_h1")
    with pytest.raises(ValueError, match="stateful"):
        model.generate(
            tokens(1, 30),
            prompt_lookup_num_tokens=3,
            max_new_tokens=4,
            cache_implementation="paged_exact",
        )
    with pytest.raises(kv_hf.errors.CacheOptionError, match="state belongs to the whole text"):
        paged(model, prefix_store=kv_hf.PrefixStore())
    cache = paged(model)
    with torch.no_grad():
        model(tokens(1, 30), past_key_values=cache)
    with pytest.raises(kv_hf.errors.UnsupportedModelError, match="hold states beside their pages"):
        cache.save(tmp_path / "cache", model)
    with pytest.raises(RuntimeError, match="crop"):
        cache.crop(-1)
    cache.check_integrity()
    assert cache.get_seq_length() == 30
