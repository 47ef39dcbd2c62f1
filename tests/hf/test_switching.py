"""Models that attend by themselves, or keep keys and values in their own way."""

import pytest
import rounding
import torch
import transformers
from measure.family_models import build_model
from tiny_models import tokens
from transformers import DynamicCache

import kv_hf


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"n_embd": 32, "n_layer": 1, "n_head": 2}, "OpenAIGPTLMHeadModel"),
        ({"emb_dim": 32, "n_layers": 1, "n_heads": 2}, "FlaubertWithLMHeadModel"),
    ],
)
def test_model_without_an_argument_for_a_cache_is_refused(config, name):
    """Flaubert keeps its keys and values in a transformers Cache, but takes it under another name."""
    cls = getattr(transformers, name)
    model = cls(cls.config_class(vocab_size=97, **config)).eval()
    with pytest.raises(
        kv_hf.UnsupportedModelError, match=f"{name} does not keep .* as past_key_values"
    ):
        model.generate(tokens(1, 9), max_new_tokens=2, cache_implementation="paged_exact")


def test_model_whose_generate_makes_no_cache_by_name_is_refused_and_takes_one():
    """MusicGen ignored the name without a word."""
    few = {"num_layers": 1, "num_heads": 2, "d_model": 32, "d_kv": 16, "d_ff": 32}
    codec = {"num_filters": 2, "upsampling_ratios": [4, 2], "hidden_size": 16, "codebook_size": 32}
    decoder = {"hidden_size": 32, "ffn_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.MusicgenConfig(
        text_encoder={"model_type": "t5", "vocab_size": 97, **few},
        audio_encoder={"model_type": "encodec", "codebook_dim": 16, "sampling_rate": 640, **codec},
        decoder={"vocab_size": 32, "num_codebooks": 2, **decoder},
    )
    model = transformers.MusicgenForConditionalGeneration(config).eval()
    model.generation_config.update(decoder_start_token_id=32, pad_token_id=32)
    given = {"input_ids": tokens(1, 7), "max_new_tokens": 80, "do_sample": False}
    cache = kv_hf.PagedEncoderDecoderCache(config)
    with pytest.raises(kv_hf.UnsupportedModelError, match="pass past_key_values=kv_hf.PagedEnc"):
        model.generate(**given, cache_implementation="paged_exact")
    assert torch.equal(model.generate(**given, past_key_values=cache), model.generate(**given))
    assert cache.get_seq_length() == 81


def test_blt_which_keeps_a_second_cache_shares_no_prefix_and_gets_no_preallocated_pages():
    """Both ended in a RuntimeError about shapes, the store at the second prompt."""
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    part = {**layers, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 260}
    local = {**part, "hidden_size_global": 64, "cross_attn_k": 2}
    config = transformers.BltConfig(
        patcher_config=part,
        encoder_config=local,
        decoder_config=local,
        global_config={**part, "hidden_size": 64},
        encoder_hash_byte_group_vocab=500,
        encoder_hash_byte_group_size=[3, 4],
        num_hidden_layers=1,
        vocab_size=260,
        pad_token_id=0,
    )
    model, store = transformers.BltForCausalLM(config).eval(), kv_hf.PrefixStore()
    options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "paged_exact"}
    with pytest.raises(kv_hf.CacheOptionError, match="keeps a second cache .* Leave max_length"):
        model.generate(tokens(1, 90), **options, cache_config={"max_length": 256})
    options["cache_config"] = {"prefix_store": store}
    with pytest.warns(kv_hf.KVCacheWarning, match="prefix_store is not used: .* second cache"):
        model.generate(tokens(1, 90), **options)
    model.generate(tokens(1, 90), **options)
    assert store.stats().rows == 0


def test_masks_that_transformers_makes_without_a_window_are_refused_beside_preallocated_pages():
    """generate() makes the masks of such a cache itself; 5.23 gives Inkling's sliding layers those of full attention."""
    try:
        model, ids = build_model("inkling_text", "causal"), tokens(1, 60)
    except KeyError:
        pytest.skip("the installed transformers has no such family")
    given = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "paged_exact"}
    config = model.config.get_text_config()
    assert config.sliding_window < 60
    assert torch.equal(
        model.generate(ids, **given), model.generate(ids, max_new_tokens=4, do_sample=False)
    )
    with pytest.raises(kv_hf.CacheOptionError, match="masks without their window .*max_length out"):
        model.generate(ids, **given, cache_config={"max_length": 128})
    exact = model(ids).logits
    found = model(ids, past_key_values=kv_hf.PagedCache(config, max_length=128)).logits
    rounding.assert_close(found, exact)  # a forward makes its own


@pytest.mark.parametrize("family", ["gpt_neo", "bloom", "prophetnet"])
def test_models_that_attend_by_themselves_get_no_preallocated_pages(family):
    """GPT-Neo takes the number of keys for its place in the text: its local layers saw other tokens."""
    model, store = build_model(family, "causal"), kv_hf.PrefixStore()
    given = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "paged_exact"}
    ids, plain = tokens(1, 60), {"max_new_tokens": 4, "do_sample": False}
    with pytest.raises(kv_hf.CacheOptionError, match="cannot use it: .* Leave max_length out"):
        model.generate(ids, **given, cache_config={"max_length": 128})
    for _ in range(2):
        found = model.generate(ids, **given, cache_config={"prefix_store": store, "page_size": 16})
        assert torch.equal(found, model.generate(ids, **plain))
    assert store.stats().rows_hit == (0 if family == "prophetnet" else 1)


def test_model_that_puts_columns_in_front_goes_on_with_its_cache():
    """CPMAnt has 32 prompt columns in front of the text: its cache has seen more than the text is long."""
    model = build_model("cpmant", "causal")
    ids, more = tokens(1, 60), {"do_sample": False, "return_dict_in_generate": True}
    made = {}
    for kind, cache in (
        ("stock", DynamicCache(config=model.config)),
        ("paged", kv_hf.PagedCache(model.config, page_size=16)),
    ):
        first = model.generate(ids, **more, max_new_tokens=6, past_key_values=cache)
        text = torch.cat([first.sequences, tokens(1, 9, seed=3)], 1)
        made[kind] = model.generate(text, **more, max_new_tokens=6, past_key_values=cache)
    assert torch.equal(made["stock"].sequences, made["paged"].sequences)
