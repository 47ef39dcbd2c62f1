"""What beam search asks of a cache: rows move as references, and the gate of its benchmark."""

import pytest
import torch
from measure.shapes import AttentionShape
from measure.steps import Beams, beam_verdicts

import kv_hf
from kv_hf.evaluation.caches import CacheKind, cache_kind, held_bytes

CPU = torch.device("cpu")
TINY = AttentionShape(4, 2, 32)
CACHES = ("dynamic", *kv_hf.IMPLEMENTATIONS)


def beams_of(name, context):
    return Beams(cache_kind(name), TINY, 2, 4, context, CPU)


def copied(beams):
    """Bytes that a new order of all rows writes: everything, or the windows of pages alone."""
    paged = isinstance(beams.cache, kv_hf.PagedCache)
    return beams.cache.memory().tail if paged else held_bytes(beams.cache)


@pytest.mark.parametrize("name", kv_hf.IMPLEMENTATIONS)
def test_what_a_reorder_copies_does_not_depend_on_the_context(name):
    short, long = beams_of(name, 200), beams_of(name, 2000)
    assert copied(short) == copied(long)
    assert long.cache.memory().payload > 3 * short.cache.memory().payload
    dynamic = [copied(beams_of("dynamic", context)) for context in (200, 2000)]
    assert dynamic[1] > 9 * dynamic[0]


@pytest.mark.parametrize("name", kv_hf.IMPLEMENTATIONS)
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


def test_reorder_that_moves_no_row_shares_and_frees_nothing():
    beams = beams_of("paged_exact", 300)
    pool = beams.cache.group.pool
    counts = list(pool._counts)
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [-4, 1, -2, 3]):
        beams.cache.reorder_cache(torch.tensor(order))
        assert pool._counts == counts
        beams.cache.check_integrity()


def test_all_caches_hold_the_right_numbers_after_many_steps():
    kinds = [cache_kind(name) for name in CACHES]
    found = list(beam_verdicts(kinds, TINY, 4, CPU))
    assert len(found) == len(CACHES) - 1 and all(one.ok for one in found)


def test_gate_finds_rows_that_were_not_moved():
    class Broken(kv_hf.PagedCache):
        def reorder_cache(self, beam_idx):
            super().reorder_cache(beam_idx.clone().fill_(0))

    kind = CacheKind("broken", "sdpa", lambda config, _: Broken(config))
    kinds = [cache_kind("dynamic"), kind, cache_kind("paged_exact")]
    broken, right = beam_verdicts(kinds, TINY, 4, CPU)
    assert (broken.name, broken.ok, right.ok) == ("broken", False, True)
