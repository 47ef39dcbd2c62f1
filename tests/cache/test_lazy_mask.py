"""Masks that are left out come back where a model computes with its keys, or with the mask, before attention."""

import pytest
import rounding
import torch
import transformers
from test_sliding import make as make_sliding
from tiny_models import COMMON, left_padded, make_model, shared_model, tokens

import kv_hf
from kv_hf.bridge.lazy_mask import LazyMask

LATENT = {
    "num_key_value_heads": 4,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
}
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
# these repeat or join the cached keys before they call the attention function, or hand latents over
MODELS = {
    "DeepseekV3Config": {**LATENT, **EXPERTS},
    "MiniCPM3Config": LATENT,
    "JetMoeConfig": {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 16},
    "DiffLlamaConfig": {},
}


def make(name):
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**COMMON, **MODELS[name]})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.filterwarnings("ignore::kv_hf.KVCacheWarning")
@pytest.mark.parametrize("lengths", [[50, 50], [50, 33]], ids=str)
@pytest.mark.parametrize("name", [name for name in MODELS if hasattr(transformers, name)])
def test_models_that_change_cached_keys_equal_dynamic_cache(name, lengths):
    stock, ours = make(name), make(name)
    first, later = left_padded(lengths), left_padded(lengths)
    for key, more in (
        ("input_ids", tokens(2, 20, 5)),
        ("attention_mask", torch.ones(2, 20).long()),
    ):
        later[key] = torch.cat([later[key], more], 1)
    kept = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    dynamic = transformers.DynamicCache(config=stock.config)
    paged = kv_hf.PagedCache(ours.config, page_size=16)
    for inputs, new in ((first, 1), (later, 8)):
        options = {**inputs, **kept, "max_new_tokens": new}
        expected = stock.generate(**options, past_key_values=dynamic)
        found = ours.generate(**options, past_key_values=paged)
    for a, b in zip(found.logits, expected.logits, strict=True):
        rounding.assert_close(a, b)
    options = {**later, **kept, "max_new_tokens": 8, "prefill_chunk_size": 16}
    expected = stock.generate(**options)
    found = ours.generate(**options, cache_implementation="paged_exact")
    for a, b in zip(found.logits, expected.logits, strict=True):
        rounding.assert_close(a, b)


def test_lazy_mask_is_the_mask_when_somebody_computes_with_it():
    made = torch.rand(2, 1, 3, 7) > 0.5
    mask = LazyMask((2, 1, 3, 7), made.device, lambda: made)
    assert (mask.shape, mask.dtype, mask.device) == (made.shape, torch.bool, made.device)
    assert torch.equal(mask[..., :5], made[..., :5]) and torch.equal(~mask, ~made)
    assert torch.equal(
        torch.zeros(2, 4, 3, 7).masked_fill(mask, 1.0), made.float().expand(2, 4, 3, 7)
    )


def test_lazy_mask_is_made_once():
    calls = []
    mask = LazyMask(
        (1, 1, 4, 9), torch.device("cpu"), lambda: calls.append(1) or torch.ones(1, 1, 4, 9).bool()
    )
    assert mask.dense() is mask.dense()
    assert mask[:, :, 2:].dense().shape == (1, 1, 2, 9)
    assert len(calls) == 1


def test_mask_of_columns_that_a_sliding_layer_gave_back_is_refused():
    model = make_sliding("mistral", 20)
    cache = kv_hf.PagedCache(model.config, page_size=16)
    with torch.no_grad():
        model(tokens(1, 100), past_key_values=cache)
        with pytest.raises(kv_hf.CacheMismatchError, match="attention_mask has 101 columns"):
            model(
                tokens(1, 1),
                attention_mask=torch.ones(1, 1, 1, 101, dtype=torch.bool),
                past_key_values=cache,
            )


def test_padding_of_a_forward_that_was_refused_is_forgotten():
    model = shared_model("llama")
    cache = kv_hf.PagedCache(model.config, page_size=16, max_pages=2)
    inputs = left_padded([80, 40])
    with pytest.raises(kv_hf.PagePoolExhaustedError):
        model.generate(**inputs, past_key_values=cache, max_new_tokens=2)
    cache.update(*torch.randn(2, 2, 2, 9, 16), 0)
    assert [row.padding for row in cache.group.rows] == [0, 0]


WRITES = {
    "slice": lambda mask: mask.__setitem__((..., slice(3, None, 7)), False),
    "masked_fill_": lambda mask: mask.masked_fill_(torch.arange(mask.shape[-1]) % 7 == 3, False),
    "view": lambda mask: mask[:, :, :].transpose(2, 3)[:, :, 3::7].zero_(),
    "and": lambda mask: mask.__iand__(torch.arange(mask.shape[-1]) % 7 != 3),
    "out": lambda mask: torch.mul(mask.clone(), torch.arange(mask.shape[-1]) % 7 != 3, out=mask),
    "queries": lambda mask: mask[:, :, 0:].masked_fill_(
        torch.arange(mask.shape[-1]) % 7 == 3, False
    ),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("write", WRITES)
def test_lazy_mask_keeps_what_is_written_to_it(write, mode):
    made = torch.ones(1, 1, 4, 9).bool().tril(5).expand(2, 1, 4, 9)
    expected = made & (torch.arange(9) % 7 != 3)
    with mode():
        mask = LazyMask(tuple(made.shape), made.device, lambda: made)
        last, moved = mask[:, :, 2:], mask.moved(made.device)
        assert torch.equal(last.dense(), made[:, :, 2:]) and not mask.changed
        WRITES[write](mask)
        assert mask.changed and last.changed and not moved.changed
        assert torch.equal(mask.dense(), expected) and torch.equal(mask & True, expected)
        assert torch.equal(last.dense(), expected[:, :, 2:]) and torch.equal(moved.dense(), made)


def test_lazy_mask_refuses_another_shape_in_place():
    mask = LazyMask((1, 1, 2, 3), torch.device("cpu"), lambda: torch.ones(1, 1, 2, 3).bool())
    with pytest.raises(kv_hf.UnsupportedModelError, match="shape of an attention_mask in place"):
        mask.squeeze_(0)
    assert mask.masked_fill_(mask, False) is mask


@pytest.mark.parametrize("write", WRITES)
def test_models_that_write_to_their_mask_equal_dynamic_cache(write):
    """Such writes went to a temporary mask, and attention left out the mask that it was given."""

    def hide(module, args, kwargs):
        if kwargs["attention_mask"] is not None:
            WRITES[write](kwargs["attention_mask"])

    stock, ours = shared_model("llama"), make_model("llama")
    caches = [
        transformers.DynamicCache(config=stock.config),
        kv_hf.PagedCache(ours.config, page_size=16),
    ]
    inputs = left_padded([60, 40])
    found = []
    for model, cache in zip((stock, ours), caches, strict=True):
        hooks = [
            layer.self_attn.register_forward_pre_hook(hide, with_kwargs=True)
            for layer in model.model.layers
        ]
        seen = 0
        for columns in (48, 58, 59):
            ids, mask = inputs["input_ids"][:, seen:columns], inputs["attention_mask"][:, :columns]
            with torch.no_grad():
                logits = model(ids, attention_mask=mask, past_key_values=cache).logits
            found.append(logits if seen else logits[:, -1:])
            seen = columns
        for hook in hooks:
            hook.remove()
    for a, b in zip(found[:3], found[3:], strict=True):
        rounding.assert_close(b, a)
