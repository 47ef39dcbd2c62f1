"""Encoder-decoder models with a paged cache, each against the same call on transformers' own caches."""

import copy
import functools
import io
import pickle

import pytest
import rounding
import tiny_encoders as tiny
import torch
import transformers
from beside_stock import assert_same, pages
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
)

import kv_hf
from kv_hf.cache.model_shape import CHUNKS_BEHIND_A_CACHE

NEW = 28  # past the sinks and a page of 16 tokens; beams and drafts go past two
GREEDY = {
    "max_new_tokens": NEW,
    "do_sample": False,
    "no_repeat_ngram_size": 2,
    "return_dict_in_generate": True,
    "output_logits": True,
}
LENGTHS = [70, 33, 9]  # of the encoder's rows, padded on the right
MAKES_ITS_CROSS_CACHE = ("t5gemma",)


def paged(cross="exact", name="paged_exact", **options):
    return pages(name, cross_attention=cross, **options)


@functools.cache
def stock_greedy(family):
    """What a model with the weights that every model of the family has gives on transformers' own cache."""
    return tiny.make_model(family).generate(**tiny.sources(LENGTHS), **GREEDY)


# before 5.23 T5 and its kin compute attention by themselves: from dense tensors
OLD = CHUNKS_BEHIND_A_CACHE is False
DENSE = ("t5", "umt5") if OLD else ()


@pytest.mark.parametrize("cross", ["exact", "same"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_generate_equals_dynamic_cache_and_reads_pages(family, cross, said):
    if cross == "same" and family in MAKES_ITS_CROSS_CACHE:
        pytest.skip("refused, see below")
    model, inputs, expected = tiny.make_model(family), tiny.sources(LENGTHS), stock_greedy(family)
    found = model.generate(**inputs, **GREEDY, **paged(cross))
    assert_same(expected, found)
    assert family in DENSE or not said("dense")
    cache = found.past_key_values
    assert isinstance(cache, kv_hf.PagedEncoderDecoderCache)
    cache.check_integrity()
    kinds = {row.kind for row in cache.report()}
    assert (
        "paged" in kinds and ("cross paged" if cross == "same" else "cross DynamicLayer") in kinds
    )
    assert cache.self_attention_cache.memory().pages_held > 0
    if cross == "same":
        assert cache.cross_attention_cache.memory().pages_held >= 3 * 2


@pytest.mark.parametrize("cross", ["exact", "same"])
@pytest.mark.parametrize("name", tiny.OTHERS)
def test_audio_vision_and_composed_models_equal_dynamic_cache(name, cross):
    model, inputs = tiny.make_other(name)
    expected = model.generate(**inputs, **GREEDY)
    cache = kv_hf.PagedEncoderDecoderCache(model.config, page_size=16, cross_attention=cross)
    found = model.generate(**inputs, **GREEDY, past_key_values=cache)
    assert_same(expected, found)
    cache.check_integrity()
    held = cache.memory().pages_held
    assert held > 0 and (cross == "exact" or cache.cross_attention_cache.memory().pages_held > 0)


@pytest.mark.parametrize("family", tiny.OWN_MASKS)
def test_encoder_with_attention_of_its_own_keeps_the_masks_that_it_wants(family, said):
    """Such an encoder adds the mask to the scores by itself, and shares its config with the decoder."""
    model, inputs = tiny.make_model(family), tiny.sources(LENGTHS)
    expected = model.generate(**inputs, **GREEDY)
    assert_same(expected, model.generate(**inputs, **GREEDY, **paged("exact")))
    assert_same(expected, model.generate(**inputs, **GREEDY, **paged("same")))
    assert model.config._attn_implementation == "eager"
    # whose decoder has no eager function to wrap
    assert bool(said("dense")) == (family == "longt5")


@pytest.mark.parametrize("family", [family for family in ("t5", "bart") if family not in DENSE])
def test_prompts_of_the_decoder_may_be_padded_on_the_left(family):
    """Padding of the decoder is not stored: a row's tokens are those of the row alone."""
    model, inputs = tiny.shared_model(family), tiny.sources([30, 30])
    prompt = torch.randint(4, 97, (2, 30), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(prompt)
    # where a row begins with its start token, generate() adds none
    prompt[0, 0] = prompt[1, 20] = model.generation_config.decoder_start_token_id
    prompt[1, :20], mask[1, :20] = 0, 0
    given = {"decoder_input_ids": prompt, "decoder_attention_mask": mask}
    expected = model.generate(**inputs, **given, **GREEDY)
    found = model.generate(**inputs, **given, **GREEDY, **paged("same"))
    assert_same(expected, found)
    own = found.past_key_values.self_attention_cache
    assert own._group.lengths().tolist() == [29 + NEW, 9 + NEW]
    cache = kv_hf.PagedEncoderDecoderCache(model.config, page_size=16)
    with torch.no_grad():  # without generate() the mask function tells the cache
        model(**inputs, **given, past_key_values=cache)
    own = cache.self_attention_cache
    assert own._group.lengths().tolist() == [30, 10]


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_caches_made_by_the_user_equal_dynamic_cache(family):
    model, inputs = tiny.shared_model(family), tiny.sources(LENGTHS)
    expected = model.generate(**inputs, **GREEDY)
    config = model.config
    for own, cross in (
        (kv_hf.PagedCache(config, page_size=16), DynamicCache(config=config)),
        (kv_hf.PagedCache(config, page_size=16), kv_hf.CrossCache(config, page_size=16)),
        (DynamicCache(config=config), kv_hf.CrossCache(config, page_size=16)),
    ):
        cache = EncoderDecoderCache(own, cross)
        assert_same(expected, model.generate(**inputs, **GREEDY, past_key_values=cache))
        assert own.get_seq_length() == NEW and cross.get_seq_length() == 70
    cache = kv_hf.PagedEncoderDecoderCache(config, page_size=16, cross_attention="same")
    for lengths in (LENGTHS, [12, 50]):  # reset() makes room for other rows and another encoder
        inputs = tiny.sources(lengths)
        found = model.generate(**inputs, **GREEDY, past_key_values=cache)
        assert_same(model.generate(**inputs, **GREEDY), found)
        cache.reset()
        assert cache.memory().tokens == 0 == cache.memory().pages_held
        assert not any(cache.is_updated.values())


@pytest.mark.parametrize("cross", ["exact", "same"])
@pytest.mark.parametrize("copied", ["deepcopy", "pickle"])
def test_copy_goes_on_as_the_cache_would(cross, copied):
    model = tiny.shared_model("bart")
    inputs = tiny.sources([40, 21])
    cache = kv_hf.PagedEncoderDecoderCache(
        model.config, keys="int8", page_size=16, cross_attention=cross
    )
    encoded = model.get_encoder()(**inputs)
    step = {"encoder_outputs": encoded, "attention_mask": inputs["attention_mask"]}
    prompt = torch.randint(4, 97, (2, 30), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for part in (prompt[:, :28], prompt[:, 28:29]):
            model(**step, decoder_input_ids=part, past_key_values=cache)
        if copied == "deepcopy":
            other = copy.deepcopy(cache)
        else:
            other = pickle.load(io.BytesIO(pickle.dumps(cache)))
        logits = [
            model(**step, decoder_input_ids=prompt[:, 29:], past_key_values=each).logits
            for each in (cache, other)
        ]
    assert torch.equal(*logits)
    if cross == "same":
        assert {row.keys for row in cache.report()} == {"int8"}
    other.reset()
    assert cache.get_seq_length() == 30
    cache.check_integrity()


def test_beams_share_the_encoders_pages():
    """All beams of a text come from one row of the encoder: after the first selection they hold the same pages."""
    model = tiny.shared_model("bart")
    inputs = tiny.sources([70, 70])
    out = model.generate(
        **inputs, max_new_tokens=6, num_beams=4, return_dict_in_generate=True, **paged("same")
    )
    cross = out.past_key_values.cross_attention_cache
    pages = [row.pages for row in cross._group.rows]
    assert len(pages) == 8 and len(set(pages)) == 2
    assert cross.memory().pages_held == 2 * len(pages[0]) == 8


def test_bad_caches_and_options_are_refused():
    model, inputs = tiny.shared_model("bart"), tiny.sources([20])
    config = model.config
    with pytest.raises(kv_hf.CacheMismatchError, match="wants two caches"):
        model.generate(**inputs, past_key_values=kv_hf.PagedCache(config), max_new_tokens=2)
    with pytest.raises(kv_hf.CacheOptionError, match="cross_attention must be one of exact, same"):
        model.generate(**inputs, **paged("int4"), max_new_tokens=2)
    with pytest.raises(kv_hf.CacheOptionError, match="is for encoder-decoder models"):
        kv_hf.PagedCache(transformers.LlamaConfig(), cross_attention="same")
    with pytest.raises(
        kv_hf.UnsupportedModelError, match="'llama' is not an encoder-decoder model"
    ):
        kv_hf.PagedEncoderDecoderCache(transformers.LlamaConfig())
    with pytest.raises(kv_hf.UnsupportedModelError, match="makes its cross-attention cache itself"):
        tiny.shared_model("t5gemma").generate(**inputs, **paged("same"), max_new_tokens=2)
    other = kv_hf.PagedEncoderDecoderCache(tiny.shared_model("t5").config)
    with pytest.raises(kv_hf.CacheMismatchError, match="model_type='t5'"):
        model.generate(**inputs, past_key_values=other, max_new_tokens=2)
    with pytest.raises(kv_hf.PagePoolExhaustedError):
        model.generate(**tiny.sources([90]), **paged("same", max_pages=2), max_new_tokens=2)
    assert model.generate(**inputs, **paged("same"), max_new_tokens=3).shape == (1, 4)


def test_cross_attention_of_a_sliding_decoder_sees_the_whole_encoder():
    """A step looks at all of the encoder, however short the window over the decoder's own tokens is."""
    model, inputs = tiny.make_model("t5gemma"), tiny.sources(LENGTHS)
    prompt = torch.randint(4, 97, (3, 30), generator=torch.Generator().manual_seed(1))
    cross = kv_hf.CrossCache(model.config, page_size=16)
    assert {row.kind for row in cross.report()} == {"paged"}
    pair = EncoderDecoderCache(kv_hf.PagedCache(model.config, page_size=16), cross)
    with torch.no_grad():
        whole = model(**inputs, decoder_input_ids=prompt, use_cache=False).logits
        for part in prompt.split([20, 1, 1, 3, 5], -1):
            last = model(**inputs, decoder_input_ids=part, past_key_values=pair).logits[:, -1]
    rounding.assert_close(last, whole[:, -1])
    with pytest.raises(kv_hf.UnsupportedModelError, match="makes its cross-attention cache itself"):
        model.generate(**inputs, past_key_values=pair, max_new_tokens=2)
