"""A cache with max_length: the tokens of one that grows, in every kind of layer; all room at once, and no token beyond it."""

import pytest
import rounding
import tiny_latent
import torch
from test_cache_conformance import DIM, append, states
from tiny_models import make_config, shared_model, tokens
from transformers import DynamicCache

import kv_hf

LENGTH = 160


def fixed_cache(**options):
    options = {"page_size": 16, "sink_tokens": 2, **options}
    return kv_hf.PagedCache(make_config("llama", head_dim=DIM), max_length=LENGTH, **options)


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm5_next"])
def test_indexers_score_as_many_columns_as_masks_have(kind):
    """The second forward stopped: indexer keys of the text so far met a mask with room for all of it."""
    model, ids = tiny_latent.make_model(kind), tokens(2, 40)
    cache = kv_hf.PagedCache(model.config, page_size=16, max_length=60)
    dynamic = DynamicCache(config=model.config)
    with torch.no_grad():
        for part in (ids[:, :20], ids[:, 20:37], *ids[:, 37:].split(1, 1)):
            found, wanted = (model(part, past_key_values=c).logits for c in (cache, dynamic))
            rounding.assert_close(found, wanted)


def addresses(cache):
    stores = [layer.store for layer in cache.layers]
    return [
        one.data_ptr() for s in stores for side in s.pages.sides for one in side.fields.values()
    ]


def test_all_pages_are_made_at_the_first_forward_and_never_move():
    fixed = fixed_cache(keys="int4")
    assert (fixed.memory().total, fixed.memory().per_token) == (0, 0)
    append(fixed, states(3, 5, 0))
    places, before = addresses(fixed), fixed.memory()
    for seed in range(100):
        append(fixed, states(3, 1, seed))
    append(fixed, states(3, 20, 0))
    after = fixed.memory()
    assert (after.payload, after.scales, after.tail) == (before.payload, before.scales, before.tail)
    assert addresses(fixed) == places and after.pages_held > before.pages_held


def test_room_is_that_of_the_first_forward_beyond_256_pages_too():
    """Page ids are made in steps of 2 from 257 on: with room for 265 pages the last id was one of 266, and storage grew."""
    cache = kv_hf.PagedCache(make_config("llama"), page_size=16, sink_tokens=0, max_length=265 * 16)
    rooms = set()
    for columns in (263 * 16, 16, 16):
        for layer in range(2):
            cache.update(*torch.zeros(2, 1, 2, columns, 16), layer)
        rooms.add(cache.memory().pages_allocated)
    specs = [layer.spec for layer in cache.paged_layers]
    options = {"sink_tokens": 0, "recent_tokens": 0, "max_length": 265 * 16}
    assert rooms == {266} == {kv_hf.predict_memory(specs, [265 * 16], **options).pages_allocated}


def test_a_token_beyond_max_length_is_refused_and_changes_nothing():
    fixed = fixed_cache()
    append(fixed, states(3, 150, 0))
    before = [layer.keys for layer in fixed.layers]
    with pytest.raises(kv_hf.CacheMismatchError, match="max_length=160 is reached: 150 columns"):
        append(fixed, states(3, 11, 0))
    assert all(map(torch.equal, before, (layer.keys for layer in fixed.layers)))
    append(fixed, states(3, 10, 0))
    fixed.check_integrity()


COLUMNS = [({}, 60), ({"num_beams": 2}, 60), ({"prompt_lookup_num_tokens": 10}, 69)]


@pytest.mark.parametrize(("arguments", "columns"), COLUMNS, ids=str)
def test_generate_takes_a_text_that_fits_and_refuses_a_longer_one_before_its_first_forward(
    arguments, columns
):
    """The last token never enters; prompt lookup, which drafts beyond the end, was refused in the middle of a text."""
    model, given = shared_model("llama"), {"inputs": tokens(1, 10).repeat(1, 4), **arguments}
    given |= {"do_sample": False, "eos_token_id": None, "max_new_tokens": 21}
    wanted, name = model.generate(**given), {"cache_implementation": "paged_exact"}
    fits, short = ({**name, "cache_config": {"max_length": n}} for n in (columns, columns - 1))
    assert torch.equal(model.generate(**given, **fits), wanted)
    with pytest.raises(kv_hf.CacheOptionError, match=f"up to {columns} columns, and cache_config"):
        model.generate(**given, **short)
