"""Chunks of many queries on a filled cache read the pages in slices; the reference takes them whole."""

from types import SimpleNamespace

import pytest
import rounding
import torch
import transformers
from tiny_models import left_padded, make_model, tokens
from torch.utils.flop_counter import FlopCounterMode

import kv_hf
from kv_hf.hf import attention, dense
from kv_hf.hf import dispatch as wrappers

# -- chunks that are written out ------------------------------------------------------------------------------------


def pretend_fused(monkeypatch, flash=True):
    """Let the CPU pass for a GPU whose fused kernels begin causality at the last key; count what they are given."""
    taken = []
    attend = dense.scaled_dot_product_attention

    def noted(query, key, value, **options):
        taken.append((query.shape[1] // key.shape[1], options["enable_gqa"]))
        return attend(query, key, value, **options)

    monkeypatch.setattr(dense, "takes_bias", lambda *tensors: True)
    monkeypatch.setattr(dense, "can_use_flash_attention", lambda params: flash)
    monkeypatch.setattr(dense, "scaled_dot_product_attention", noted)
    return taken


def count_masks(monkeypatch):
    """Count the masks that are made."""
    made = []
    make = wrappers.sdpa_mask
    monkeypatch.setattr(wrappers, "sdpa_mask", lambda *a, **k: made.append(1) or make(*a, **k))
    return made


@pytest.mark.parametrize(("flash", "given"), [(True, (3, True)), (False, (1, False))])
def test_causal_attention_begins_at_the_last_key(monkeypatch, flash, given):
    taken = pretend_fused(monkeypatch, flash)
    query, key, value = torch.randn(2, 6, 50, 16), *torch.randn(2, 2, 2, 130, 16)
    out = dense.causal_attention(query, key, value, scaling=0.3)
    mask = torch.ones(50, 130, dtype=torch.bool).tril(80)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(out, expected.transpose(1, 2))
    assert out.is_contiguous()
    assert taken == [given]


def test_tensors_take_a_causal_bias_on_one_kind_of_device_and_outside_of_dispatch_modes():
    """torch cannot make its bias while a mode such as a counter of operations is active."""
    x = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)
    assert dense.takes_bias(x, x, x)
    assert not dense.takes_bias(*(SimpleNamespace(device=torch.device("cpu")),) * 3)
    with FlopCounterMode(display=False):
        assert not dense.takes_bias(x, x, x)


def two_turns(model, stock, first, later, kernel="reference"):
    """Logits of a long second turn, with pages and with DynamicCache."""
    cache = kv_hf.PagedCache(model.config, page_size=16, kernel=kernel)
    dynamic = transformers.DynamicCache(config=stock.config)
    with torch.no_grad():
        for inputs in (first, later):
            found = model(**inputs, past_key_values=cache).logits
            expected = stock(**inputs, past_key_values=dynamic).logits
    return found, expected


def turns(lengths, chunk=90):
    first = left_padded(lengths)
    ids = tokens(len(lengths), chunk, 7)
    mask = torch.cat([first["attention_mask"], torch.ones_like(ids)], 1)
    return first, {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("flash", [True, False])
def test_long_turns_need_no_mask_where_nothing_but_later_tokens_is_hidden(monkeypatch, flash):
    model, stock = make_model("llama"), make_model("llama")
    taken, made = pretend_fused(monkeypatch, flash), count_masks(monkeypatch)
    found, expected = two_turns(model, stock, *turns([150, 150]))
    rounding.assert_close(found, expected)
    assert len(taken) == model.config.num_hidden_layers
    assert not made


@pytest.mark.parametrize("lengths", [[150, 150], [150, 40]], ids=str)
def test_long_turns_make_their_mask_once(monkeypatch, lengths):
    """Without fused kernels, and where rows are padded, all layers share one mask."""
    model, stock = make_model("llama"), make_model("llama")
    if lengths[1] < 150:
        taken = pretend_fused(monkeypatch)
    made = count_masks(monkeypatch)
    first, later = turns(lengths)
    found, expected = two_turns(model, stock, first, later)
    rounding.assert_close(found, expected)
    assert len(made) == 1  # the second forward's
    assert lengths[1] == 150 or not taken


def test_long_turns_with_a_position_bias_keep_their_mask(monkeypatch):
    """What bends scores is no business of fused kernels."""
    taken, made = pretend_fused(monkeypatch), count_masks(monkeypatch)
    model = make_model("llama")
    cache = kv_hf.PagedCache(model.config, page_size=16, kernel="reference")
    cache.update(*torch.randn(2, 1, 2, 100, 16), 0)
    length, _ = cache.get_mask_sizes(70, 0)
    mask = transformers.AttentionMaskInterface()["sdpa"](
        batch_size=1, q_length=70, kv_length=length, q_offset=100, attention_mask=None
    )
    keys, values = cache.update(*torch.randn(2, 1, 2, 70, 16), 0)
    bias = torch.randn(1, 4, 70, 170)
    module = model.model.layers[0].self_attn
    query = torch.randn(1, 4, 70, 16)
    attention.kv_hf_attention(module, query, keys, values, mask, position_bias=bias)
    assert not taken and len(made) == 1
    attention.kv_hf_attention(module, query, keys, values, mask)
    assert len(taken) == 1
