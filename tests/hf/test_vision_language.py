"""Vision-language models: their text model is paged, images in the prompt included."""

import warnings

import pytest
import torch
from beside_stock import assert_same, pages
from tiny_encoders import MODELS, make

import kv_hf

GREEDY = {
    "max_new_tokens": 40,
    "do_sample": False,
    "no_repeat_ngram_size": 2,
    "return_dict_in_generate": True,
    "output_logits": True,
}
PAGES = pages()


@pytest.mark.parametrize("beams", [1, 3], ids=["greedy", "beams"])
@pytest.mark.parametrize("name", MODELS)
def test_prompt_with_images_equals_dynamic_cache(name, beams, recwarn):
    model, inputs = make(name)
    options = {**GREEDY, "num_beams": beams}
    expected = model.generate(**inputs, **options)
    other = {**inputs, "pixel_values": inputs["pixel_values"] + 1}
    changed = model.generate(**other, **options).logits[0] - expected.logits[0]
    assert changed.abs().max() > 1e-3  # the images count
    warnings.simplefilter("always", kv_hf.KVCacheWarning)
    for _ in range(2):
        found = model.generate(**inputs, **options, **PAGES)
        assert_same(found, expected)
    texts = [str(w.message) for w in recwarn if issubclass(w.category, kv_hf.KVCacheWarning)]
    assert not [text for text in texts if "dense" in text]
    cache = found.past_key_values
    cache.check_integrity()
    assert cache.memory().pages_held > 0
    assert all(row.reason for row in cache.report() if not row.kind.startswith("paged"))


def test_image_layers_of_mllama_keep_transformers_layer_and_say_so():
    model, inputs = make("mllama")
    cache = model.generate(**inputs, **GREEDY, **PAGES).past_key_values
    rows = cache.report()
    assert [row.kind for row in rows] == ["paged", "DynamicLayer", "paged"]
    assert "images" in rows[1].reason
    assert (
        cache.memory().other == 2 * 2 * 2 * 10 * 16 * 4
    )  # sides, rows, heads, 2 tiles of 5, head_dim
    assert cache.memory().tokens == 2 * 99 - 2
    text_only = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    text_only["input_ids"] = text_only["input_ids"].clamp(max=90)
    expected = model.generate(**text_only, **GREEDY)
    found = model.generate(**text_only, **GREEDY, **PAGES)
    assert torch.equal(expected.sequences, found.sequences)
    assert found.past_key_values.memory().other == 0
