"""Models that look at their masks or their attention's name, that attend by themselves, and what masks and padding mean to pages."""

import warnings

import pytest
import rounding
import torch
import transformers
from tiny_models import COMMON, left_padded, make_model, shared_model, tokens
from transformers import DynamicCache

import kv_hf
from kv_hf.pages import moved

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


# -- padding ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_columns_put_in_front_are_no_padding(attention):
    """Virtual tokens and images: generate() knows the mask of the text only, the model passes a longer one."""
    model, inputs = make_model("llama"), left_padded([60, 9, 33])
    model.set_attn_implementation(attention)
    front = torch.randn(1, 20, 64, generator=torch.Generator().manual_seed(5)) * 0.3
    original = model.prepare_inputs_for_generation

    def prepare(*args, **kwargs):
        made = original(*args, **kwargs)
        rows = made["input_ids"].shape[0]
        made["attention_mask"] = torch.cat(
            [torch.ones(rows, 20, dtype=torch.long), made["attention_mask"]], 1
        )
        made.pop("position_ids", None)
        if made["past_key_values"].get_seq_length() == 0:
            text = model.get_input_embeddings()(made.pop("input_ids"))
            made["inputs_embeds"] = torch.cat([front.expand(rows, -1, -1), text], 1)
        return made

    model.prepare_inputs_for_generation = prepare
    expected = model.generate(**inputs, **GREEDY, max_new_tokens=10)
    found = model.generate(
        **inputs,
        **GREEDY,
        max_new_tokens=10,
        cache_implementation="paged_exact",
        cache_config={"page_size": 16},
    )
    assert torch.equal(expected.sequences, found.sequences)
    for a, b in zip(expected.logits, found.logits, strict=True):
        rounding.assert_close(b, a)
    assert [row.padding for row in found.past_key_values.group.rows] == [0, 0, 0]


def test_mask_that_shows_what_was_left_out_as_padding_is_refused():
    model, inputs = make_model("llama"), left_padded([60, 9])
    cache = kv_hf.PagedCache(model.config, page_size=16)
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
        before = cache.layers[0].keys
        with pytest.raises(kv_hf.CacheMismatchError, match="shows column 0 of row 1.*51 columns"):
            model(tokens(2, 1), attention_mask=torch.ones(2, 61).long(), past_key_values=cache)
        assert torch.equal(cache.layers[0].keys, before)
        whole = torch.cat([inputs["attention_mask"], torch.ones(2, 1).long()], 1)
        model(tokens(2, 1), attention_mask=whole, past_key_values=cache)
    cache.check_integrity()


SHOWN = {
    "none": None,
    "bool": torch.ones(2, 1, 1, 61, dtype=torch.bool),
    "float": torch.zeros(2, 1, 1, 61),
    "one row": torch.zeros(1, 4, 1, 61),
    "chunk": torch.ones(2, 1, 5, 65, dtype=torch.bool).tril(60),
}


def padded_cache(model, **options):
    cache, inputs = kv_hf.PagedCache(model.config, page_size=16, **options), left_padded([60, 9])
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
    return cache, inputs["attention_mask"]


@pytest.mark.parametrize("options", [{}, {"max_length": 80}], ids=str)
@pytest.mark.parametrize("shown", SHOWN)
def test_other_masks_that_show_what_was_left_out_as_padding_are_refused(shown, options):
    """With DynamicCache they attend to the padding, which pages do not have: logits differed without a word."""
    model = make_model("llama")
    cache, known = padded_cache(model, **options)
    mask = SHOWN[shown]
    new = tokens(2, 5 if shown == "chunk" else 1)
    if options and mask is not None:
        mask = torch.nn.functional.pad(
            mask, (0, 80 - mask.shape[-1]), value=0 if mask.dtype == torch.bool else -1e4
        )
    with torch.no_grad(), pytest.raises(kv_hf.CacheMismatchError, match="51.*reset"):
        model(
            new,
            attention_mask=mask,
            past_key_values=cache,
            position_ids=torch.arange(60, 60 + new.shape[1])[None],
        )


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("new", [1, 5])
def test_4d_masks_that_hide_padding_equal_the_2d_mask(new, dtype):
    model = make_model("llama")
    (first, known), (second, _) = padded_cache(model), padded_cache(model)
    whole = torch.cat([known, torch.ones(2, new).long()], 1)
    mask = whole[:, None, None].bool() & torch.ones(new, 60 + new).bool().tril(60)
    if dtype != torch.bool:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(dtype).min)
    with torch.no_grad():
        expected = model(tokens(2, new), attention_mask=whole, past_key_values=first).logits
        found = model(tokens(2, new), attention_mask=mask, past_key_values=second).logits
    rounding.assert_close(found, expected)


def test_4d_masks_of_single_tokens_are_compared_one_forward_late_on_a_device(monkeypatch):
    model = make_model("llama")
    cache, known = padded_cache(model)
    monkeypatch.setattr(moved, "is_host", lambda device: False)
    for step, hidden in enumerate((51, 51, 0)):
        mask = torch.ones(2, 1, 1, 61 + step, dtype=torch.bool)
        mask[1, ..., :hidden] = False
        with torch.no_grad():
            model(tokens(2, 1), attention_mask=mask, past_key_values=cache)
    with torch.no_grad(), pytest.raises(kv_hf.CacheMismatchError, match="one forward late"):
        model(tokens(2, 1), attention_mask=mask[..., :1].expand(2, 1, 1, 64), past_key_values=cache)


def test_attention_that_drops_the_mask_of_a_padded_text_is_refused():
    model = make_model("llama")
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {**kwargs, "attention_mask": None}),
            with_kwargs=True,
        )
    options = {"max_new_tokens": 4, "cache_implementation": "paged_exact"}
    with pytest.raises(kv_hf.CacheMismatchError, match="no attention_mask reached the attention"):
        model.generate(**left_padded([60, 9]), **options)
    model.generate(tokens(2, 60), **options)


def _ignore(original):
    return lambda *args, attention_mask=None, **kwargs: original(*args, **kwargs)


def _show(original):
    def forward(*args, attention_mask=None, **kwargs):
        return original(*args, attention_mask=torch.ones_like(attention_mask), **kwargs)

    return forward


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("edit", [_ignore, _show])
def test_padding_is_what_the_mask_of_the_model_hides_not_that_of_generate(edit, attention):
    """Code around a model may change the mask: with the mask of generate() 29 of 60 tokens were others."""
    model, inputs = make_model("llama"), left_padded([60, 9, 33])
    model.set_attn_implementation(attention)
    options = {**GREEDY, "max_new_tokens": 8}
    paged = {"cache_implementation": "paged_exact", "cache_config": {"page_size": 16}}
    found = model.generate(**inputs, **options, **paged)
    assert [row.padding for row in found.past_key_values.group.rows] == [0, 51, 27]
    model.forward = edit(model.forward)
    expected = model.generate(**inputs, **options)
    found = model.generate(**inputs, **options, **paged)
    assert torch.equal(expected.sequences, found.sequences)
    assert [row.padding for row in found.past_key_values.group.rows] == [0, 0, 0]
