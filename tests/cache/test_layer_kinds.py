"""Layers with windows, chunks and states beside full attention: the tokens of DynamicCache, and pages given back past the window."""

from functools import cache

import pytest
import rounding
import torch
from beside_stock import assert_same, compare, pages, run
from harness import interrupt
from measure.family_models import build_model, families
from tiny_models import WINDOWS, left_padded, make_sliding, tokens
from transformers import DynamicCache, MistralConfig

import kv_hf

PAGE = 16


def sliding_group(cache):
    return next(group for group in cache.groups if group.window is not None)


@pytest.mark.parametrize(
    ("name", "window"), [*((name, 40) for name in WINDOWS), ("gemma3_text", 5), ("mistral", 71)]
)
def test_generation_equals_dynamic_cache_and_pages_are_given_back(name, window):
    model = make_sliding(name, window)
    cache = compare(model, left_padded([130, 33, 90]), max_new_tokens=60)
    group = sliding_group(cache)
    # what a query sees lies in at most ceil(window / page) + 1 pages, the open one not counted
    assert all(len(row.pages) <= -(-window // PAGE) + 1 for row in group.rows)
    assert all(row.dropped > 0 for row in group.rows)
    held = max(layer.storage.keys.capacity for layer in cache.paged_layers if layer.group is group)
    assert held <= 3 * (-(-window // PAGE) + 2)


def test_attention_weights_of_a_padded_sliding_model_equal_eager():
    """The dense route makes the mask that the kernels do not need."""
    model = make_sliding("gemma3_text", 24)
    inputs = left_padded([60, 33])
    model.set_attn_implementation("eager")
    compare(model, inputs, max_new_tokens=8, output_attentions=True)


def test_a_stage_of_full_layers_alone_knows_its_length():
    """A pipeline stage may run no layer of the kind that is asked for lengths: any layer with tokens answers."""
    model = make_sliding("gemma3_text", 24)
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


@pytest.mark.parametrize("recent", [0, 24])
@pytest.mark.parametrize("window", [None, 5, 21, 40, 41, 100])
def test_pages_of_a_row_have_one_order_of_channels_however_its_tokens_came(window, recent):
    """A kernel brings the queries into it once, from any page of the row that is left."""
    config = MistralConfig(num_hidden_layers=1, sliding_window=window)
    shape = (2, 2, 1, 230, 64)  # keys and values of two rows
    sizes = torch.rand(230 // PAGE + 1, 64).repeat_interleave(PAGE, 0)[:230]  # else of each page
    keys, values = torch.randn(shape) * sizes
    found = []
    for chunks in ([230], [1] * 230, [37, *[1] * 43, 90, 60]):
        cache = kv_hf.PagedCache(config, keys="int4", page_size=PAGE, recent_tokens=recent)
        for part in zip(keys.split(chunks, 2), values.split(chunks, 2), strict=True):
            cache.update(*part, 0)
        [layer], [group] = cache.paged_layers, cache.groups
        held = layer.storage.keys.fields
        for number, row in enumerate(group.rows):
            at = [*row.pages]
            assert at and all(torch.equal(held["order"][page], held["order"][at[0]]) for page in at)
            last = {name: field[at[-1]] for name, field in held.items()}
            found.append((number, row.dropped + len(at), last))
    for (_, count, one), (_, other_count, other) in zip(found, found[2:], strict=False):
        assert count == other_count
        assert all(torch.equal(one[name], other[name]) for name in one)


# -- attention and linear attention together ----------------------------------------------------------------

FAMILIES = [name for name in ("falcon_h1", "zamba2", "inkling_text") if name in families("causal")]
model_of = cache(build_model)


def paged(model, **options):
    return kv_hf.PagedCache(model.config, page_size=16, **options)


@pytest.mark.parametrize("options", [{}, {"max_length": 200}], ids=["growing", "max_length"])
def test_layers_that_ask_for_mask_sizes_within_a_forward_equal_dynamic_cache(options):
    """Inkling makes its position bias from the sizes of each sliding layer, when others have been updated already.

    With max_length its prompt stopped at another size, and causality of a chunk began at the last column there is room for.
    """
    if "inkling_text" not in FAMILIES:
        pytest.skip("the installed transformers has no such family")
    model = model_of("inkling_text")
    ours, stock, ids = paged(model, **options), DynamicCache(config=model.config), tokens(2, 170)
    with torch.no_grad():
        for part in (ids[:, :90], ids[:, 90:150], *ids[:, 150:].split(1, 1)):
            expected = model(part, past_key_values=stock).logits
            found = model(part, past_key_values=ours).logits
            rounding.assert_close(found, expected)
    assert ours.layers[0].window < 90


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
    """transformers' own layer kept a state of the rows before: another batch did not fit. One of inference mode could not be zeroed."""
    model = model_of("zamba2")
    cache, ids = paged(model), tokens(3, 20)
    with torch.inference_mode():
        model(ids[:2], past_key_values=cache)
    cache.reset()
    with torch.no_grad():
        assert cache.memory().total == 0
        found = model(ids, past_key_values=cache).logits
        assert torch.equal(found, model(ids, past_key_values=paged(model)).logits)


def test_what_a_state_does_not_allow_is_refused_with_the_reason(tmp_path):
    model = model_of("falcon_h1")
    with pytest.raises(ValueError, match="stateful"):
        run(model, {"input_ids": tokens(1, 30)}, pages(), prompt_lookup_num_tokens=3)
    cache = paged(model)
    with torch.no_grad():
        model(tokens(1, 30), past_key_values=cache)
    cache.save(tmp_path / "cache", model)
    for one in (cache, kv_hf.PagedCache.load(tmp_path / "cache", model)):
        with pytest.raises(RuntimeError, match="crop"):
            one.crop(-1)
        one.check_integrity()
        assert one.get_seq_length() == 30 and one.memory().other == cache.memory().other > 0


@pytest.mark.parametrize("family", ["falcon_h1", "lfm2", "inkling_text"])
def test_a_crop_beyond_recorded_states_is_refused_and_an_edit_begins_anew(family):
    """transformers' layers kept what there was: behind drafts a convolution had lost its context, and a crop said nothing."""
    if family not in families("causal"):
        pytest.skip("the installed transformers has no such family")
    model, ids, drafts = model_of(family), tokens(1, 60), {"prompt_lookup_num_tokens": 3}
    cache = paged(model, on_edit="crop")
    cache.activate_past_recording()
    cache.reset()  # which leaves it on
    given = {} if family == "falcon_h1" else drafts  # whose state cannot go back at all
    text = run(model, {"input_ids": ids}, cache, **given).sequences
    with pytest.raises(kv_hf.CacheMismatchError, match="needs states that are gone"):
        cache.crop(-3 if given else -1)
    cache.check_integrity()
    assert cache.get_seq_length() == text.shape[1] - 1
    edited = {"input_ids": torch.cat([text[:, :-4], ids[:, :9]], 1)}
    assert_same(run(model, edited, cache), run(model, edited))


def test_a_call_that_stops_behind_a_state_ends_the_cache_and_a_refused_one_does_not(monkeypatch):
    """States move before the pages: nothing else tells that the layers hold different texts."""
    model = model_of("qwen3_next")
    cache = paged(model)
    text = run(model, {"input_ids": tokens(1, 30)}, cache).sequences
    more = {"input_ids": torch.cat([text, tokens(1, 5)], 1)}
    with pytest.raises(ValueError, match="max_new_tokens"):
        model.generate(**more, past_key_values=cache, max_new_tokens=0)
    cache.check_integrity()
    full = model.config.layer_types.index("full_attention")
    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[full], "forward", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(model, more, cache)
    with pytest.raises(kv_hf.InterruptedForwardError, match="reset"):
        run(model, more, cache)
    cache.reset()
    assert_same(run(model, more, cache), run(model, more))
