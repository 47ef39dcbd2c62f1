"""What models ask of attention beside plain causal softmax, over pages and on dense tensors, against float64."""

import itertools

import pytest
import rounding
import torch
from paged_inputs import assert_within, exact_attention, needs_library
from rounding import Rounding
from tiny_models import make_config

import kv_hf
from kv_hf.hf.attention import kv_hf_attention

HEADS, KV_HEADS, DIM, ROWS, LENGTH, SCALE = 4, 2, 16, 2, 53, 0.3
FP32 = Rounding.of("c", torch.float32)
KERNELS = [pytest.param("c", marks=needs_library), "reference"]


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def module(causal=True):
    made = torch.nn.Module()
    made.is_causal, made.num_key_value_groups, made.training = causal, HEADS // KV_HEADS, False
    return made


def filled(q_len, kernel="reference"):
    """Return handles over LENGTH + q_len tokens."""
    config = make_config("llama", num_hidden_layers=1)
    cache = kv_hf.PagedCache(config, keys="exact", page_size=16, kernel=kernel)
    cache.update(*numbers(2, ROWS, KV_HEADS, LENGTH, DIM), 0)
    return cache.update(*numbers(2, ROWS, KV_HEADS, q_len, DIM, seed=1), 0)


def check(found, query, handles, mask, causal, bias=None, **options):
    """Compare with the definition over the tokens of the pages."""
    kv = handles[0].view_of_pages.kv
    if mask is None:
        mask = torch.ones(query.shape[2], kv.seen, dtype=torch.bool)
        mask = mask.tril(kv.seen - query.shape[2]) if causal else mask
        mask = mask[None, None]
    if bias is not None:
        hidden = mask.dtype == torch.bool
        mask = bias.float().masked_fill(~mask, -torch.inf) if hidden else mask + bias
    expected = exact_attention(query, kv, SCALE, FP32, mask=mask, **options)
    assert_within(found, *(one.transpose(1, 2) for one in expected))


def masks(q_len, kv_len):
    """Return masks of the kinds that models make; every query sees some token."""
    chosen = torch.rand(ROWS, HEADS, q_len, kv_len, generator=torch.Generator().manual_seed(3))
    per_head = chosen < 0.7
    per_head[..., 20] = True
    visible = per_head[:, :1]
    lowest = torch.finfo(torch.float32).min
    return {
        "none": None,
        "bool": visible,
        "additive": torch.zeros(visible.shape).masked_fill(~visible, lowest),
        "bool-per-head": per_head,
        "additive-one-row": numbers(1, HEADS, q_len, kv_len, seed=4),
    }


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("mask_kind", masks(1, 30))
@pytest.mark.parametrize("q_len", [1, 5])
def test_paged_attention_honours_what_models_pass(q_len, mask_kind, kernel, said):
    """Position bias, softcap and sinks, alone and together, with every kind of mask, causal or not; no dense route."""
    handles = filled(q_len, kernel)
    kv_len = LENGTH + q_len
    mask = masks(q_len, kv_len)[mask_kind]
    query = numbers(ROWS, HEADS, q_len, DIM, seed=2) * 2
    biases = (None, numbers(1, HEADS, q_len, kv_len, seed=5))
    sinks = (None, numbers(HEADS, seed=6))
    for causal, bias, softcap, sink in itertools.product((True, False), biases, (None, 1.5), sinks):
        given = {"position_bias": bias, "softcap": softcap, "s_aux": sink}
        found, weights = kv_hf_attention(
            module(causal), query, *handles, mask, scaling=SCALE, **given
        )
        assert weights is None
        check(found, query, handles, mask, causal, bias, softcap=softcap, sink_logits=sink)
    assert not said("dense")


@pytest.mark.parametrize("kernel", KERNELS)
def test_position_bias_in_half_precision_keeps_hidden_tokens_hidden(kernel):
    """A bias in the model's dtype with a bool mask: a lowest number plus a bias must not overflow to nan."""
    handles = filled(1, kernel)
    mask = masks(1, LENGTH + 1)["bool"]
    bias = (numbers(1, HEADS, 1, LENGTH + 1, seed=5) - 40).bfloat16()
    query = numbers(ROWS, HEADS, 1, DIM, seed=2)
    found, _ = kv_hf_attention(module(), query, *handles, mask, scaling=SCALE, position_bias=bias)
    check(found, query, handles, mask, True, bias)


def test_call_overrules_the_module_about_causality():
    keys, values = filled(5)
    query = numbers(ROWS, HEADS, 5, DIM, seed=2)
    outs = [
        kv_hf_attention(module(of_module), query, keys, values, None, scaling=SCALE, **given)[0]
        for of_module, given in ((True, {"is_causal": False}), (False, {}), (True, {}))
    ]
    assert torch.equal(outs[0], outs[1])
    assert not torch.allclose(outs[0][:, 0], outs[2][:, 0], atol=1e-3)
    rounding.assert_close(outs[0][:, -1], outs[2][:, -1])
