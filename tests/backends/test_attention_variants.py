"""What models ask of attention beside plain causal softmax, over pages and on dense tensors, against float64."""

import itertools

import pytest
import rounding
import torch
from paged_inputs import assert_within, needs_library
from rounding import Rounding, Tokens, attend_exactly
from tiny_models import make_config

import kv_hf
from kv_hf.cache.paged_cache import CrossCache
from kv_hf.hf.attention import kv_hf_attention

HEADS, KV_HEADS, DIM, ROWS, LENGTH, SCALE = 4, 2, 16, 2, 53, 0.3
FP32 = Rounding.of("c", torch.float32)
KERNELS = [
    pytest.param("c", marks=needs_library),
    "reference",
]


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def module(causal=True):
    made = torch.nn.Module()
    made.is_causal, made.num_key_value_groups, made.training = causal, HEADS // KV_HEADS, False
    return made


def filled(q_len, kernel="reference", keys="exact", length=LENGTH):
    """Return handles over `length` + q_len tokens, and the same tokens dense (as the pages hold them)."""
    config = make_config("llama", num_hidden_layers=1)
    cache = kv_hf.PagedCache(config, keys=keys, page_size=16, kernel=kernel)
    cache.update(*numbers(2, ROWS, KV_HEADS, length, DIM), 0)
    handles = cache.update(*numbers(2, ROWS, KV_HEADS, q_len, DIM, seed=1), 0)
    return handles, [handle.dense() for handle in handles], cache


def exact_attention(query, keys, values, mask, causal, *, bias=None, softcap=None, sinks=None):
    """Return the definition's result in fp64 and what rounding in fp32 may change in it; a query that sees nothing gives 0."""
    q_len, kv_len = query.shape[2], keys.shape[2]
    added = torch.zeros(ROWS, HEADS, q_len, kv_len, dtype=torch.float64)
    added = added if bias is None else added + bias
    if mask is None and causal:
        mask = torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len)
    if mask is not None:
        hides = mask.dtype == torch.bool
        added = added.masked_fill(~mask, -torch.inf) if hides else added + mask
    rows = []
    for row in range(ROWS):
        sides = (Tokens(side[row], side[row]) for side in (keys, values))
        options = {"bias": added[row], "softcap": softcap, "sink_logits": sinks}
        rows.append(attend_exactly(query[row], *sides, SCALE, FP32, **options))
    return tuple(torch.stack(part).transpose(1, 2) for part in zip(*rows, strict=True))


def masks(q_len, kv_len):
    """Return masks of the kinds that models make; every query sees some token."""
    generator = torch.Generator().manual_seed(3)
    visible = torch.rand(ROWS, 1, q_len, kv_len, generator=generator) < 0.7
    visible[..., 20] = True
    per_head = torch.rand(ROWS, HEADS, q_len, kv_len, generator=generator) < 0.7
    per_head[..., 20] = True
    lowest = torch.finfo(torch.float32).min
    return {
        "none": None,
        "bool": visible,
        "additive": torch.zeros(visible.shape).masked_fill(~visible, lowest),
        "bool-per-head": per_head,
        "additive-per-head": numbers(ROWS, HEADS, q_len, kv_len, seed=4),
        "additive-one-row": numbers(1, HEADS, q_len, kv_len, seed=4),
    }


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("mask_kind", masks(1, 30))
@pytest.mark.parametrize("q_len", [1, 5])
def test_paged_attention_honours_what_models_pass(q_len, mask_kind, kernel, recwarn):
    """Position bias, softcap and sinks, alone and together, with every kind of mask, causal or not; no dense route."""
    (keys, values), exact, _ = filled(q_len, kernel)
    kv_len = LENGTH + q_len
    mask = masks(q_len, kv_len)[mask_kind]
    query = numbers(ROWS, HEADS, q_len, DIM, seed=2) * 2
    biases = (None, numbers(1, HEADS, q_len, kv_len, seed=5))
    sinks = (None, numbers(HEADS, seed=6))
    for causal, bias, softcap, sink in itertools.product((True, False), biases, (None, 1.5), sinks):
        found, weights = kv_hf_attention(
            module(causal), query, keys, values, mask,
            scaling=SCALE, position_bias=bias, softcap=softcap, s_aux=sink,
        )  # fmt: skip
        assert weights is None
        options = {"bias": bias, "softcap": softcap, "sinks": sink}
        assert_within(found, *exact_attention(query, *exact, mask, causal, **options))
    texts = [str(w.message) for w in recwarn if issubclass(w.category, kv_hf.KVCacheWarning)]
    assert not [text for text in texts if "dense" in text]


@pytest.mark.parametrize("kernel", KERNELS)
def test_position_bias_in_half_precision_keeps_hidden_tokens_hidden(kernel):
    """A bias in the model's dtype with a bool mask: a lowest number plus a bias must not overflow to nan."""
    (keys, values), exact, _ = filled(1, kernel)
    mask = masks(1, LENGTH + 1)["bool"]
    bias = (numbers(1, HEADS, 1, LENGTH + 1, seed=5) - 40).bfloat16()
    query = numbers(ROWS, HEADS, 1, DIM, seed=2)
    found = kv_hf_attention(module(), query, keys, values, mask, scaling=SCALE, position_bias=bias)
    assert_within(found[0], *exact_attention(query, *exact, mask, True, bias=bias))


def test_handles_of_a_cross_layer_are_one_pair_until_the_layer_changes():
    cache = CrossCache(make_config("llama", num_hidden_layers=1), page_size=16)
    layer = cache.layers[0]
    assert layer.keys is None and layer.values is None
    cache.update(*numbers(2, ROWS, KV_HEADS, LENGTH, DIM), 0)
    keys, values = layer.keys, layer.values
    assert keys.view_of_pages is values.view_of_pages is layer.keys.view_of_pages
    cache.reorder_cache(torch.tensor([1, 1]))
    with pytest.raises(kv_hf.StaleHandleError):
        keys.clone()
    assert torch.equal(layer.keys[0], layer.keys[1])
    with pytest.raises(AttributeError, match="read-only"):
        layer.keys = torch.zeros(1)
    more = numbers(2, ROWS, KV_HEADS, 3, DIM, seed=1)
    assert cache.update(*more, 0)[0].shape[2] == LENGTH + 3  # another image, say
    cache.reset()
    assert layer.keys is None


def test_call_overrules_the_module_about_causality():
    (keys, values), exact, _ = filled(5)
    query = numbers(ROWS, HEADS, 5, DIM, seed=2)
    outs = [
        kv_hf_attention(module(of_module), query, keys, values, None, scaling=SCALE, **given)[0]
        for of_module, given in ((True, {"is_causal": False}), (False, {}), (True, {}))
    ]
    assert torch.equal(outs[0], outs[1])
    assert not torch.allclose(outs[0][:, 0], outs[2][:, 0], atol=1e-3)
    rounding.assert_close(outs[0][:, -1], outs[2][:, -1])
