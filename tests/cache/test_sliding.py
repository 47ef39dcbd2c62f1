"""Sliding-window and chunked layers in pages: the tokens of DynamicCache, and pages given back past the window."""

import pytest
import rounding
import torch
from beside_stock import compare
from tiny_hybrids import MODELS, make_sliding
from tiny_models import left_padded, tokens

import kv_hf
from kv_hf.cache.paged_cache import PagedCache

PAGE = 16


def sliding_group(cache):
    return next(group for group in cache.groups if group.window is not None)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("window", [5, 40, 71])
def test_generation_equals_dynamic_cache_and_pages_are_given_back(name, window):
    model = make_sliding(name, window)
    cache = compare(model, left_padded([130, 33, 90]), max_new_tokens=60)
    group = sliding_group(cache)
    # what a query sees lies in at most ceil(window / page) + 1 pages, the open one not counted
    assert all(len(row.pages) <= -(-window // PAGE) + 1 for row in group.rows)
    assert all(row.dropped > 0 for row in group.rows)
    held = max(layer.storage.keys.capacity for layer in cache.paged_layers if layer.group is group)
    assert held <= 3 * (-(-window // PAGE) + 2)


FEATURES = [
    {"num_beams": 3},
    {"num_beams": 2, "num_return_sequences": 2, "length_penalty": 0.5},
    {"prompt_lookup_num_tokens": 4},
    {"prefill_chunk_size": 7},
]


@pytest.mark.parametrize("options", FEATURES, ids=lambda value: "-".join(value))
@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt_oss"])
def test_features_of_generate_equal_dynamic_cache(name, options):
    single = "prompt_lookup_num_tokens" in options
    inputs = {"input_ids": tokens(1, 90).repeat(1, 2)} if single else left_padded([100, 61])
    compare(make_sliding(name, 24), inputs, **options)


def test_assisted_decoding_rolls_sliding_layers_back():
    model, draft = make_sliding("gemma3", 20), make_sliding("gemma3", 12)
    with torch.no_grad():  # a draft that is right now and then
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter) * 2e-3)
    compare(model, {"input_ids": tokens(1, 75)}, assistant_model=draft, max_new_tokens=60)


def test_forward_that_stops_between_the_groups_is_found():
    """All sliding layers have taken part, no full one has: lengths differ, which the next forward must notice."""
    model = make_sliding("qwen2", 24)  # layers 0 and 1 attend to everything, 2 and 3 slide
    cache = PagedCache(model.config, page_size=PAGE)
    with torch.no_grad():
        model(tokens(1, 50), past_key_values=cache)
        handle = model.model.layers[2].register_forward_pre_hook(
            lambda *_: (_ for _ in ()).throw(RuntimeError("stop"))
        )
        with pytest.raises(RuntimeError, match="stop"):
            model(tokens(1, 1), past_key_values=cache)
        handle.remove()
        with pytest.raises(kv_hf.InterruptedForwardError):
            model(tokens(1, 1), past_key_values=cache)
        cache.reset()
        model(tokens(1, 50), past_key_values=cache)
    cache.check_integrity()


def test_attention_weights_of_a_padded_sliding_model_equal_eager():
    """The dense route makes the mask that the kernels do not need."""
    model = make_sliding("gemma3", 24)
    inputs = left_padded([60, 33])
    model.set_attn_implementation("eager")
    compare(model, inputs, max_new_tokens=8, output_attentions=True)


def test_a_stage_of_full_layers_alone_knows_its_length():
    """A pipeline stage may run no layer of the kind that is asked for lengths: any layer with tokens answers."""
    model = make_sliding("gemma3", 24)
    kinds = model.config.layer_types
    cache = kv_hf.PagedCache(model.config)
    full = [index for index, kind in enumerate(kinds) if kind == "full_attention"][-1]
    heads, dim = model.config.num_key_value_heads, model.config.head_dim
    cache.update(*torch.randn(2, 1, heads, 50, dim), full)
    assert kinds[0] == "sliding_attention"
    assert cache.get_seq_length() == 50
    assert cache.get_seq_length(full) == 50


@pytest.mark.parametrize("sinks", [0, 4])
def test_decode_steps_find_recent_tokens_that_outlast_the_window(sinks):
    model, ids = make_sliding("mistral", 20), tokens(1, 90)
    options = {"page_size": PAGE, "recent_tokens": 33, "sink_tokens": sinks}
    prompt = {"attention_mask": torch.ones_like(ids[:, :40])}
    cache = kv_hf.PagedCache(model.config, **options)
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits[0, 40:]
        model(input_ids=ids[:, :40], past_key_values=cache, **prompt)
        found = [
            model(input_ids=ids[:, [column]], past_key_values=cache).logits[0, 0]
            for column in range(40, 90)
        ]
    rounding.assert_close(torch.stack(found), expected)
