"""Attention finds pages by the handle: plain models run as without kv_hf, paged ones read pages by the attention they have."""

import threading
from contextlib import nullcontext
from importlib import import_module

import pytest
import rounding
import tiny_latent
import torch
from tiny_models import left_padded, make_model, make_sliding, tokens
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, flash_attention_mask, sdpa_mask

import kv_hf
from kv_hf.bridge import handles
from kv_hf.bridge.handles import EAGER, reads_eagerly
from kv_hf.hf import latent
from kv_hf.hf.attention import kv_hf_attention
from kv_hf.hf.models import takes_handles, why_not_pages

ATTENTION = AttentionInterface._global_mapping
MASKS = AttentionMaskInterface._global_mapping
GREEDY = {"do_sample": False, "max_new_tokens": 12}
PAGED = {"cache_implementation": "paged_exact", "cache_config": {"page_size": 16}}


def plain(family):
    """Return a model that no test has given pages, of a class whose `expand_kv` is as transformers wrote it."""
    latent.restore_expansion()
    latent.watch_latents()
    return make_model("llama") if family == "llama" else tiny_latent.make_model(family)


@pytest.fixture
def kernels(monkeypatch):
    """Count the calls of attention over pages."""
    from kv_hf.hf import attention

    calls, original = [], attention.paged_attention
    monkeypatch.setattr(attention, "paged_attention", lambda *a: calls.append(1) or original(*a))
    return calls


# -- plain models ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_plain_models_compile_export_and_train_as_without_kv_hf(family):
    """The wrapper is a check of types: it takes no lock, patches nothing, and breaks no graph."""
    ids = tokens(2, 9)

    def results():
        torch._dynamo.reset()
        model = plain(family)
        compiled = torch.compile(model, fullgraph=True, backend="eager")(ids, use_cache=False)
        exported = torch.export.export(model, (ids,), {"use_cache": False}).module()
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return [compiled.logits, exported(ids, use_cache=False).logits, loss, *gradients]

    ours = results()
    assert not latent._originals
    kv_hf.uninstall()
    try:
        expected = results()
    finally:
        kv_hf.install()
        torch._dynamo.reset()
    assert len(ours) > 10
    for one, other in zip(ours, expected, strict=True):
        assert torch.equal(one, other)


def test_plain_models_compile_behind_paged_ones_of_their_class():
    torch._dynamo.reset()
    model = tiny_latent.make_model("deepseek_v3")
    model.generate(tokens(1, 9), **GREEDY, **PAGED)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    expected = model(tokens(2, 9), use_cache=False).logits
    assert torch.equal(compiled(tokens(2, 9), use_cache=False).logits, expected)


def test_a_traced_layer_of_one_thread_is_nothing_to_another():
    view = handles.TracedView(*torch.empty(2, 1, 2, 4, 8), attend=torch.add)
    handles.hand_over(view)
    found = []
    thread = threading.Thread(target=lambda: found.append(handles.taken(view.keys, view.values)))
    thread.start()
    thread.join()
    assert found == [None] and handles.taken(view.keys, view.values) is view


# -- what is registered ---------------------------------------------------------------------------------------------


def test_uninstall_restores_what_was_registered_unless_somebody_wrapped_it_since():
    kv_hf.install()  # a second time
    kv_hf.uninstall()
    try:
        assert ATTENTION["sdpa"] is sdpa_attention_forward
        assert (MASKS["sdpa"], MASKS["eager"]) == (sdpa_mask, eager_mask)
        assert MASKS["flash_attention_2"] is flash_attention_mask
        kv_hf.install()
        ours = ATTENTION["sdpa"]

        def wrapped(*args, **kwargs):
            return ours(*args, **kwargs)

        AttentionInterface.register("sdpa", wrapped)
        kv_hf.uninstall()
        assert ATTENTION["sdpa"] is wrapped and MASKS["sdpa"] is sdpa_mask
        model = make_model("llama")
        assert model.generate(tokens(1, 9), **GREEDY).shape == (1, 21)
    finally:
        AttentionInterface.register("sdpa", sdpa_attention_forward)
        kv_hf.install()
    assert takes_handles("sdpa", type(model)) and MASKS["sdpa"] is not sdpa_mask


def test_own_function_under_the_name_sdpa_computes_with_dense_tensors(kernels):
    """It may compute something else: here it caps the scores."""

    def capped(module, query, key, value, mask, scaling=None, **kwargs):
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = torch.tanh(query @ key.transpose(2, 3) * scaling)
        if mask is None and query.shape[2] > 1:
            mask = torch.ones(scores.shape[-2:]).tril().bool()
        scores = scores if mask is None else scores.masked_fill(~mask, -1e9)
        return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None

    model, inputs = make_model("llama"), {"input_ids": tokens(2, 40)}
    ours = ATTENTION["sdpa"]
    AttentionInterface.register("sdpa", capped)
    try:
        expected = model.generate(**inputs, **GREEDY)
        with pytest.warns(kv_hf.KVCacheWarning, match="does not know kv_hf"):
            found = model.generate(**inputs, **GREEDY, **PAGED)
        assert why_not_pages(model) == "its attention is 'sdpa', which does not read pages"
    finally:
        AttentionInterface.register("sdpa", ours)
    assert torch.equal(found, expected) and not kernels
    assert not torch.equal(expected, model.generate(**inputs, **GREEDY))


# -- who reads pages ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_eager_families_read_pages_with_the_attention_that_they_have(family, kernels):
    model, inputs = make_sliding(family, 20), left_padded([60, 9])
    if model._supports_sdpa:
        pytest.skip("in this transformers the family has sdpa")
    expected = model.generate(**inputs, **GREEDY)
    assert torch.equal(model.generate(**inputs, **GREEDY, **PAGED), expected)
    assert model.config._attn_implementation == "eager" and len(kernels) == 44
    cache = kv_hf.PagedCache(model.config, page_size=16)
    with torch.no_grad():
        model(tokens(2, 40), past_key_values=cache)
        model(tokens(2, 1), past_key_values=cache)  # without generate()
    assert len(kernels) == 48
    kv_hf.uninstall()
    try:
        assert torch.equal(model.generate(**inputs, **GREEDY), expected)
    finally:
        kv_hf.install()


def test_table_of_eager_families_names_those_without_sdpa():
    for family in EAGER:
        try:
            module = import_module(f"transformers.models.{family}.modeling_{family}")
        except ModuleNotFoundError:  # an older transformers
            continue
        kinds = [one for one in vars(module).values() if isinstance(one, type)]
        (base,) = [
            one
            for one in kinds
            if PreTrainedModel in one.__bases__ and one.__module__ == module.__name__
        ]
        if not base._supports_sdpa:  # an older transformers had it
            assert reads_eagerly(module.eager_attention_forward)
            assert base._can_set_attn_implementation()


# -- flash attention ------------------------------------------------------------------------------------------------


@pytest.fixture
def flash():
    """Register a stand-in for flash attention: masks of two dimensions or None, causality at the last key, windows by keyword."""

    def attend(module, query, key, value, mask, scaling=None, sliding_window=None, **kwargs):
        assert mask is None or mask.ndim == 2
        q_len, kv_len = query.shape[2], key.shape[2]
        places = torch.arange(kv_len - q_len, kv_len)[:, None]
        visible = torch.arange(kv_len) <= places
        if sliding_window is not None:
            visible &= torch.arange(kv_len) > places - sliding_window
        visible = visible[None, None] if mask is None else visible & mask[:, None, None].bool()
        return sdpa_attention_forward(module, query, key, value, visible, scaling=scaling)

    AttentionInterface.register("flash_stand_in", attend)
    AttentionMaskInterface.register("flash_stand_in", flash_attention_mask)
    yield "flash_stand_in"
    kv_hf.uninstall()
    del ATTENTION["flash_stand_in"], MASKS["flash_stand_in"]
    kv_hf.install()


@pytest.mark.parametrize("lengths", [[60, 60], [60, 9]], ids=["even", "padded"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_models_with_flash_attention_read_pages(family, lengths, flash, kernels):
    changes = {"sliding_window": 20} if family == "mistral" else {}
    model, inputs = make_model(family, **changes), left_padded(lengths)
    model.config._attn_implementation = flash
    expected = model.generate(**inputs, **GREEDY)
    assert torch.equal(model.generate(**inputs, **GREEDY, **PAGED), expected)
    assert len(kernels) == 11 * model.config.num_hidden_layers


@pytest.mark.parametrize("options", [{}, {"max_length": 48}], ids=str)
@pytest.mark.parametrize("new", [1, 5])
def test_masks_of_columns_that_reach_attention_hide_what_comes_later_too(new, options):
    """As models that make no mask of queries x keys pass them on with flash attention."""
    model, outs = make_model("llama"), []
    cache = kv_hf.PagedCache(model.config, page_size=16, **options)
    module, query = model.model.layers[0].self_attn, torch.randn(2, 4, new, 16)
    for index in (0, 1):
        cache.update(*torch.randn(2, 2, 2, 40, 16), index)
    keys, values = cache.update(*torch.randn(2, 2, 2, new, 16), 0)
    columns = torch.ones(2, 40 + new)
    columns[0, 7] = columns[1, 41:] = 0
    visible = columns[:, None, None].bool() & torch.ones(new, 40 + new).bool().tril(40)
    visible = torch.nn.functional.pad(visible, (0, keys.shape[2] - 40 - new))
    for mask in (columns, visible):
        outs.append(kv_hf_attention(module, query, keys, values, mask)[0])
    assert torch.equal(*outs)
    every = torch.arange(40 + new).expand(2, new, 40 + new)  # all columns are chosen
    chosen, plain = (
        kv_hf_attention(module, query, keys, values, None, indices=indices)[0]
        for indices in (every, None)
    )
    rounding.assert_close(chosen, plain)


# -- torch.compile --------------------------------------------------------------------------------------------------


def test_compiled_forward_of_a_model_that_attends_by_itself_is_refused():
    """Hollow keys stand for pages there: without the check every logit would be nan."""
    torch._dynamo.reset()
    model = make_model("falcon")
    cache = kv_hf.PagedCache(model.config, page_size=16, max_length=64)
    with torch.no_grad():
        model(tokens(1, 20), past_key_values=cache)
        step = torch.compile(model, backend="eager", fullgraph=True)
        with pytest.raises(Exception, match="computes attention by itself"):
            step(tokens(1, 1), past_key_values=cache)


@pytest.mark.parametrize(
    "asked",
    [{"dropout": 0.1}, {"output_attentions": True}, {"position_bias": torch.zeros(1)}],
    ids=str,
)
def test_compiled_forward_that_needs_weights_or_a_bias_is_refused(asked):
    """It would attend without them, and say nothing."""
    module, query = make_model("llama").model.layers[0].self_attn, torch.empty(1, 4, 1, 8)
    view = handles.TracedView(*torch.empty(2, 1, 2, 4, 8), attend=lambda *given: given[0])
    for how in ({}, asked):
        keys, values = handles.hand_over(view)
        refused = pytest.raises(kv_hf.UnsupportedModelError, match="Run it without torch.compile")
        with refused if how else nullcontext():
            kv_hf_attention(module, query, keys, values, None, **how)


# -- what stays as it was ------------------------------------------------------------------------------------


def test_generate_without_our_names_is_untouched():
    model = make_model("llama")
    out = model.generate(tokens(1, 8), max_new_tokens=2, return_dict_in_generate=True)
    assert type(out.past_key_values).__name__ == "DynamicCache"
    assert model.config._attn_implementation == "sdpa"
