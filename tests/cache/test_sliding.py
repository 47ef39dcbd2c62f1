"""Sliding-window and chunked layers in pages: the tokens of DynamicCache, and pages given back past the window."""

import copy
import functools

import pytest
import rounding
import torch
import transformers
from tiny_models import COMMON, left_padded, tokens
from transformers import AttentionMaskInterface

import kv_hf
from kv_hf.backends.cpu import library
from kv_hf.bridge.masks import LazyMask
from kv_hf.cache import build
from kv_hf.cache.paged_cache import PagedCache
from kv_hf.pages.rows import Rows, RowSizes

ALTERNATING = ["sliding_attention", "full_attention"] * 2
MODELS = {
    "mistral": ("MistralConfig", {}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, "max_window_layers": 2}),
    "gemma2": ("Gemma2Config", {"head_dim": 16}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16, "layer_types": ALTERNATING}),
    "gpt_oss": (
        "GptOssConfig",
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "cohere2": ("Cohere2Config", {}),
    "starcoder2": ("Starcoder2Config", {}),
}
PAGE = 16


def make(name, window):
    kind, options = MODELS[name]
    torch.manual_seed(0)
    options = {**COMMON, "num_hidden_layers": 4, "sliding_window": window, **options}
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, kind)(**options)
    ).eval()
    model.generation_config.eos_token_id = None
    return model


def run(model, inputs, implementation=None, config=None, **options):
    """Greedy tokens and logits, with a stock cache or ours."""
    ours = {
        "cache_implementation": implementation,
        "cache_config": {"page_size": PAGE, **(config or {})},
    }
    return model.generate(
        **inputs,
        **{"max_new_tokens": 60, "do_sample": False, **options},
        **(ours if implementation else {}),
        return_dict_in_generate=True,
        output_logits=True,
    )


def check_same(found, expected):
    assert torch.equal(found.sequences, expected.sequences)
    for a, b in zip(found.logits, expected.logits, strict=True):
        rounding.assert_close(a, b)


def sliding_group(cache):
    return next(group for group in cache.groups if group.window is not None)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("window", [5, 40, 71])
def test_generation_equals_dynamic_cache_and_pages_are_given_back(name, window):
    model = make(name, window)
    inputs = left_padded([130, 33, 90])
    expected = run(model, inputs)
    found = run(model, inputs, "paged_exact")
    check_same(found, expected)
    cache = found.past_key_values
    cache.check_integrity()
    group = sliding_group(cache)
    # what a query sees lies in at most ceil(window / page) + 1 pages, the open one not counted
    assert all(len(row.pages) <= -(-window // PAGE) + 1 for row in group.rows)
    assert all(row.dropped > 0 for row in group.rows)
    held = max(layer.storage.keys.capacity for layer in cache.paged_layers if layer.group is group)
    assert held <= 3 * (-(-window // PAGE) + 2)


@pytest.mark.parametrize("kernel", ["c", "reference"])
@pytest.mark.parametrize("keys", ["exact", "int8", "int4"])
def test_giving_pages_back_changes_no_bit_of_a_step(kernel, keys, monkeypatch):
    """Against the same cache that keeps every page and lets the kernel's sliding window hide them."""
    if kernel == "c" and library.missing():
        pytest.skip(library.missing())
    model = make("mistral", 24)
    options = {"keys": keys, "values": keys, "page_size": PAGE, "kernel": kernel}

    def logits():
        cache = PagedCache(model.config, **options)
        inputs = left_padded([70, 9])
        out = run(model, inputs, past_key_values=cache, max_new_tokens=50)
        return out, cache

    found, giving = logits()
    monkeypatch.setattr(
        build,
        "_rows",
        lambda window, options, arena, budget: Rows(RowSizes(PAGE, 4, 0), arena.pool(window)),
    )
    expected, keeping = logits()
    assert sliding_group(giving).rows[0].dropped == 5 and not keeping.group.rows[0].dropped
    for a, b in zip(found.logits, expected.logits, strict=True):
        # the order of the sums may differ where a kernel splits the pages among its threads
        rounding.assert_close(a, b)
    dense = keeping.layers[0].keys[:, :, -23:]
    assert torch.equal(giving.layers[0].keys, dense)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2, "length_penalty": 0.5},
        {"prompt_lookup_num_tokens": 4},
        {"prefill_chunk_size": 20},
        {"prefill_chunk_size": 7},
    ],
    ids=lambda value: "-".join(value),
)
@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt_oss"])
def test_features_of_generate_equal_dynamic_cache(name, options):
    model = make(name, 24)
    single = "prompt_lookup_num_tokens" in options
    inputs = {"input_ids": tokens(1, 90).repeat(1, 2)} if single else left_padded([100, 61])
    kept = {"max_new_tokens": 40, "do_sample": False, **options}
    expected = model.generate(**inputs, **kept)
    found = model.generate(
        **inputs, **kept, cache_implementation="paged_exact", cache_config={"page_size": PAGE}
    )
    assert torch.equal(found, expected)


def test_assisted_decoding_rolls_sliding_layers_back():
    model, draft = make("gemma3", 20), make("gemma3", 12)
    with torch.no_grad():  # a draft that is right now and then
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter) * 2e-3)
    inputs = {"input_ids": tokens(1, 75)}
    options = {"assistant_model": draft, "max_new_tokens": 60, "do_sample": False}
    expected = model.generate(**inputs, **options)
    found = model.generate(
        **inputs,
        **options,
        cache_implementation="paged_exact",
        cache_config={"page_size": PAGE},
        return_dict_in_generate=True,
    )
    assert torch.equal(found.sequences, expected)
    found.past_key_values.check_integrity()


def test_crop_past_the_window_is_refused_before_anything_changes():
    model = make("gemma3", 24)
    cache = PagedCache(model.config, page_size=PAGE)
    with torch.no_grad():
        model(tokens(1, 100), past_key_values=cache)
    before = copy.deepcopy(cache)
    with pytest.raises(kv_hf.CacheMismatchError, match="sliding window of 24"):
        cache.crop(-40)
    assert [group.seen for group in cache.groups] == [100, 100]
    with torch.no_grad():
        a = model(tokens(1, 1), past_key_values=cache).logits
        b = model(tokens(1, 1), past_key_values=before).logits
    assert torch.equal(a, b)


def test_chat_over_several_turns_with_sliding_layers():
    model = make("cohere2", 24)
    ours = PagedCache(model.config, page_size=PAGE)
    theirs = transformers.DynamicCache(config=model.config)
    text = tokens(1, 40)
    for turn in range(4):
        outs = [
            model.generate(text, past_key_values=cache, max_new_tokens=25, do_sample=False)
            for cache in (ours, theirs)
        ]
        assert torch.equal(*outs), turn
        text = torch.cat([outs[0], tokens(1, 7 + 20 * turn, seed=turn)], -1)
    ours.check_integrity()


def test_forward_that_stops_between_the_groups_is_found():
    """All sliding layers have taken part, no full one has: lengths differ, which the next forward must notice."""
    model = make("qwen2", 24)  # layers 0 and 1 attend to everything, 2 and 3 slide
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


def test_llama4_attends_in_chunks():
    config = transformers.Llama4TextConfig(
        **{**COMMON, "num_hidden_layers": 4},
        head_dim=16,
        intermediate_size_mlp=96,
        attention_chunk_size=24,
        num_local_experts=2,
        interleave_moe_layer_step=2,
        no_rope_layers=[1, 1, 1, 0],
    )
    torch.manual_seed(0)
    model = transformers.Llama4ForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    inputs = left_padded([70, 31])
    found = run(model, inputs, "paged_exact")
    check_same(found, run(model, inputs))
    assert sliding_group(found.past_key_values).window == 24


def test_queries_get_no_mask_where_the_kernels_hide_by_themselves(monkeypatch):
    registered, masks = AttentionMaskInterface._global_mapping, []
    ours = registered["sdpa"]

    @functools.wraps(ours)
    def noted(*args, **kwargs):
        masks.append((kwargs["q_length"], ours(*args, **kwargs)))
        return masks[-1][1]

    def queries_of_masks():
        """Return the queries of each mask that was made."""
        made = [(q, mask) for q, mask in masks if mask is not None]
        lengths = [
            q for q, mask in made if not isinstance(mask, LazyMask) or mask._made is not None
        ]
        masks.clear()
        return lengths

    monkeypatch.setitem(registered, "sdpa", noted)
    model = make("gemma3", 24)
    inputs = left_padded([60, 33])
    run(model, inputs, "paged_exact", max_new_tokens=20)
    assert queries_of_masks() == [60, 60]
    run(model, inputs, "paged_exact", max_new_tokens=5, prefill_chunk_size=30)
    # the first chunk, whose keys are plain tensors; a kernel that leaves chunks to SDPA asks for the others
    made = queries_of_masks()
    assert made[:2] == [30, 30] and (library.missing() or len(made) == 2)


def test_attention_weights_of_a_padded_sliding_model_equal_eager():
    """The dense route makes the mask that the kernels do not need."""
    model = make("gemma3", 24)
    inputs = left_padded([60, 33])
    model.set_attn_implementation("eager")
    expected = run(model, inputs, max_new_tokens=8, output_attentions=True)
    found = run(model, inputs, "paged_exact", max_new_tokens=8, output_attentions=True)
    assert torch.equal(found.sequences, expected.sequences)
    for a, b in zip(found.logits, expected.logits, strict=True):
        rounding.assert_close(a, b)


def test_a_stage_of_full_layers_alone_knows_its_length():
    """A pipeline stage may run no layer of the kind that is asked for lengths: any layer with tokens answers."""
    model = make("gemma3", 24)
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
    model, ids = make("mistral", 20), tokens(1, 90)
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
