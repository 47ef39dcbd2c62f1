"""What beam search asks of a cache: rows move as references, whatever the length of their history."""

import random

import pytest
import torch
from tiny_models import ONE_FORMAT, make_model

import kv_hf
from kv_hf.evaluation.caches import cache_kind, held_bytes

CONFIG = make_model("llama").config  # of two layers
BEAMS, HEADS, HEAD_DIM = 4, CONFIG.num_key_value_heads, CONFIG.head_dim


class Beams:
    """A cache of beams with one history, and no model. The same steps for every cache."""

    def __init__(self, kind, context):
        self.kind, self.cache = kind, kind.make(CONFIG, context + 200)
        self.numbers, self.choices = torch.Generator().manual_seed(0), random.Random(0)
        for layer in range(2):
            self.cache.update(*self.states(1, context), layer)
        self.cache.batch_repeat_interleave(BEAMS)
        self.step()  # rows get copies of what is not shared, and storage room for what follows

    def states(self, rows, tokens):
        size = (2, rows, HEADS, tokens, HEAD_DIM)
        return torch.randn(size, generator=self.numbers).to(torch.bfloat16)

    def step(self):
        """Let each row continue any row, some twice and some not at all, and append a token."""
        self.cache.reorder_cache(torch.tensor(self.choices.choices(range(BEAMS), k=BEAMS)))
        for layer in range(2):
            self.cache.update(*self.states(BEAMS, 1), layer)


def beams_of(name, context):
    return Beams(cache_kind(name), context)


def copied(beams):
    """Bytes that a new order of all rows writes: everything, or the windows of pages alone."""
    paged = isinstance(beams.cache, kv_hf.PagedCache)
    return beams.cache.memory().tail if paged else held_bytes(beams.cache)


@pytest.mark.parametrize("name", ONE_FORMAT)
def test_what_a_reorder_copies_does_not_depend_on_the_context(name):
    short, long = beams_of(name, 200), beams_of(name, 2000)
    assert copied(short) == copied(long)
    assert long.cache.memory().payload > 3 * short.cache.memory().payload
    dynamic = [copied(beams_of("dynamic", context)) for context in (200, 2000)]
    assert dynamic[1] > 9 * dynamic[0]


@pytest.mark.parametrize("name", ONE_FORMAT)
def test_reorder_writes_no_sealed_page_and_only_the_rows_that_change(name):
    beams = beams_of(name, 300)
    layers = beams.cache.paged_layers
    sides = [side for layer in layers for side in layer.storage.sides]
    before = [{field: t.clone() for field, t in side.fields.items()} for side in sides]
    where = [t.data_ptr() for side in sides for t in side.fields.values()]
    windows = [w for layer in layers for w in layer.residuals]
    rows = [w.tokens.clone() for w in windows]
    places = [w.tokens.data_ptr() for w in windows]
    beams.cache.reorder_cache(torch.tensor([0, 0, 2, 1]))
    for side, old in zip(sides, before, strict=True):
        assert all(torch.equal(side.fields[field], t) for field, t in old.items())
    assert where == [t.data_ptr() for side in sides for t in side.fields.values()]
    assert places == [w.tokens.data_ptr() for w in windows]
    for window, old in zip(windows, rows, strict=True):
        assert torch.equal(window.tokens, old[[0, 0, 2, 1]])
