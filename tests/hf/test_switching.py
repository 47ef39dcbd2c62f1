"""Models that look at their masks or their attention's name, and that attend by themselves."""

import warnings

import pytest
import rounding
import torch
import transformers
from tiny_models import COMMON, shared_model, tokens
from transformers import DynamicCache

import kv_hf

GREEDY = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
GEMMA4 = {
    **COMMON,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 16,
    "head_dim": 16,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 97,
}
MINIMAX_M3 = {
    **COMMON,
    "head_dim": 16,
    "rotary_dim": 8,
    "layer_types": ["minimax_m3_sparse"] * 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_layer_types": ["dense"] * 2,
    "dense_intermediate_size": 96,
    "index_block_size": 8,
    "index_topk_blocks": 2,
    "index_n_heads": 2,
    "index_head_dim": 16,
}


def make(config, options):
    if not hasattr(transformers, config):
        pytest.skip("the installed transformers has no such family")
    torch.manual_seed(0)
    made = getattr(transformers, config)(**options)
    model = transformers.AutoModelForCausalLM.from_config(made).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.08)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


def said(recwarn):
    return [str(w.message) for w in recwarn if issubclass(w.category, kv_hf.KVCacheWarning)]


# -- models that ask for the attention's name -----------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"prompt_lookup_num_tokens": 3}], ids=["greedy", "lookup"])
@pytest.mark.parametrize("seed", [0, 1])
def test_gemma4_with_shared_layers_equals_dynamic_cache(seed, more):
    """Its shared layers keep the last queries only; a mask of None then meant another thing than before."""
    model = make("Gemma4TextConfig", GEMMA4)
    ids = tokens(1, 20, seed).repeat(1, 3)  # repeats, so that there is something to look up
    expected = model.generate(ids, **GREEDY, **more, max_new_tokens=24)
    cache = kv_hf.PagedCache(model.config, page_size=16)
    found = model.generate(ids, **GREEDY, **more, max_new_tokens=24, past_key_values=cache)
    assert torch.equal(expected.sequences, found.sequences)


@pytest.mark.parametrize("cached", ["none", "dynamic", "paged"])
@pytest.mark.parametrize("keep", [1, 2, 7])
def test_gemma4_keeps_the_last_logits_whatever_the_cache(keep, cached):
    stock, model = make("Gemma4TextConfig", GEMMA4), make("Gemma4TextConfig", GEMMA4)
    ids = tokens(2, 60)

    def run(which, cache):
        if cache is not None:
            which(ids[:, :40], past_key_values=cache)
        given = ids if cache is None else ids[:, 40:]
        return which(given, past_key_values=cache, logits_to_keep=keep).logits

    caches = {
        "none": lambda config: None,
        "dynamic": lambda config: DynamicCache(config=config),
        "paged": lambda config: kv_hf.PagedCache(config, page_size=16),
    }
    with torch.no_grad():
        expected = run(stock, DynamicCache(config=stock.config) if cached != "none" else None)
        found = run(model, caches[cached](model.config))
    rounding.assert_close(found, expected)


def test_minimax_m3_keeps_its_block_sparse_mask():
    """It makes a mask of blocks where its attention's name is sdpa or eager."""
    ids = tokens(2, 90)
    # a full layer, so that there is something to page
    model = make(
        "MiniMaxM3VLTextConfig",
        {**MINIMAX_M3, "layer_types": ["full_attention", "minimax_m3_sparse"]},
    )
    expected = model.generate(ids, **GREEDY, max_new_tokens=12)
    found = model.generate(ids, **GREEDY, max_new_tokens=12, cache_implementation="paged_exact")
    for a, b in zip(expected.logits, found.logits, strict=True):
        rounding.assert_close(b, a)


# -- models that do not read the interface ---------------------------------------------------------------------


def test_git_whose_vision_alone_reads_the_interface_gets_dense_tensors(recwarn):
    warnings.simplefilter("always", kv_hf.KVCacheWarning)
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    model = make("GitConfig", {**COMMON, "vision_config": vision})
    ids = tokens(2, 50)
    expected = model.generate(ids, **GREEDY, max_new_tokens=12)
    found = model.generate(ids, **GREEDY, max_new_tokens=12, cache_implementation="paged_exact")
    for a, b in zip(expected.logits, found.logits, strict=True):
        rounding.assert_close(b, a)
    assert [message for message in said(recwarn) if "does not know kv_hf" in message]


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
    with pytest.raises(kv_hf.UnsupportedModelError, match=f"no forward of {name} takes past_key"):
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


def test_model_that_puts_columns_in_front_goes_on_with_its_cache():
    """CPMAnt has 32 prompt columns in front of the text: its cache has seen more than the text is long."""
    model = make(
        "CpmAntConfig",
        {
            **{"vocab_size": 97, "hidden_size": 32, "num_attention_heads": 2, "dim_head": 16},
            **{"dim_ff": 48, "num_hidden_layers": 1},
        },
    )
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


# -- arguments -----------------------------------------------------------------------------------------------


def test_tokenizer_for_stop_strings_does_not_cost_the_fast_path(recwarn):
    from tiny_tokenizer import make_tokenizer

    warnings.simplefilter("always", kv_hf.KVCacheWarning)
    model, tokenizer = shared_model("llama"), make_tokenizer()
    options = {"max_new_tokens": 8, "stop_strings": ["never there"], "tokenizer": tokenizer}
    expected = model.generate(tokens(1, 40), **options)
    found = model.generate(tokens(1, 40), **options, cache_implementation="paged_exact")
    assert torch.equal(expected, found)
    assert not [message for message in said(recwarn) if "densely" in message]
