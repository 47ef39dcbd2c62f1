"""A cache with max_length: the tokens of one that grows, in every kind of layer; all room at once, and no token beyond it."""

import pytest
import rounding
import tiny_latent
import torch
from test_cache_conformance import DIM, append, states
from tiny_models import make_config, shared_model, tokens
from transformers import DynamicCache

import kv_hf
from kv_hf.formats import format_names

LENGTH = 160


def caches(keys="exact", **options):
    """A cache with max_length and one that grows, otherwise alike."""
    config = make_config("llama", head_dim=DIM)
    options = {"keys": keys, "page_size": 16, "sink_tokens": 2, **options}
    fixed = kv_hf.PagedCache(config, max_length=LENGTH, **options)
    return fixed, kv_hf.PagedCache(config, **options)


def filled(cache, lengths, padding=(0, 0, 0)):
    total = sum(lengths)
    for group in cache.groups:
        group.observe_padding(torch.tensor([[0] * p + [1] * (total - p) for p in padding]))
    whole, seen = states(len(padding), total, 0), 0
    for length in lengths:
        append(cache, [[side[:, :, seen : seen + length] for side in layer] for layer in whole])
        seen += length


def same_bytes(one, other):
    """Whether both hold the same pages and exact tokens."""
    one.check_integrity()
    assert [row.exact for row in one._group.rows] == [row.exact for row in other._group.rows]
    for mine, theirs in zip(one.layers, other.layers, strict=True):
        assert torch.equal(mine.keys, theirs.keys) and torch.equal(mine.values, theirs.values)
        for side, like in zip(mine.storage.sides, theirs.storage.sides, strict=True):
            for a, b in zip(one._group.rows, other._group.rows, strict=True):
                got, wanted = side.take(a.pages), like.take(b.pages)
                for name, field in got.items():
                    assert field.numpy().tobytes() == wanted[name].numpy().tobytes()


@pytest.mark.parametrize("recent", [0, 20])
@pytest.mark.parametrize("name", format_names("keys", "values"))
def test_pages_have_the_bytes_of_a_cache_that_grows_whatever_the_updates(name, recent):
    for lengths in ((40, *[1] * 37), (3, 20, 1, 33, 16, 1, 1, 50)):
        fixed, grown = caches(name, recent_tokens=recent)
        filled(fixed, lengths, (0, 7, 25))
        filled(grown, (sum(lengths),), (0, 7, 25))
        same_bytes(fixed, grown)


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
    fixed, _ = caches("int4")
    assert fixed.memory().total == 0
    filled(fixed, (5,))
    places, before = addresses(fixed), fixed.memory()
    for seed in range(100):
        append(fixed, states(3, 1, seed))
    append(fixed, states(3, 20, 0))
    after = fixed.memory()
    assert (after.payload, after.scales, after.tail) == (before.payload, before.scales, before.tail)
    assert addresses(fixed) == places and after.pages_held > before.pages_held


def test_a_token_beyond_max_length_is_refused_and_changes_nothing():
    fixed, _ = caches()
    filled(fixed, (150,))
    before = [layer.keys for layer in fixed.layers]
    with pytest.raises(kv_hf.CacheMismatchError, match="max_length=160 is reached: 150 columns"):
        append(fixed, states(3, 11, 0))
    assert all(map(torch.equal, before, (layer.keys for layer in fixed.layers)))
    append(fixed, states(3, 10, 0))
    fixed.check_integrity()


def test_generate_refuses_a_longer_text_before_its_first_forward():
    model = shared_model("llama")
    with pytest.raises(kv_hf.CacheOptionError, match="up to 100 long, and cache_config max_length"):
        model.generate(
            tokens(1, 40),
            max_new_tokens=60,
            cache_implementation="paged_int8",
            cache_config={"max_length": 99},
        )
