"""Page ids and their counts, and caches that share pages (test_rows.py and test_operations.py do both at random)."""

import copy

import pytest
import torch
from tiny_models import shared_model, tokens

import kv_hf
from kv_hf.errors import PagePoolExhaustedError
from kv_hf.pages.pool import PagePool


def test_allocate_reuses_freed_ids_the_last_freed_first():
    pool = PagePool()
    pool.allocate(5)
    pool.release([1, 3])
    assert (pool.num_ids, pool.num_held) == (5, 3)
    assert pool.allocate(3) == [3, 1, 5]
    assert (pool.num_ids, pool.num_held) == (6, 6)


def test_allocate_past_max_pages_raises_and_changes_nothing():
    pool = PagePool(max_pages=4)
    pool.allocate(3)
    pool.release([1])
    held = [pool.count(page) for page in range(3)]
    with pytest.raises(PagePoolExhaustedError, match=r"max_pages=4 is reached: 2 pages .* 3 more"):
        pool.allocate(3)
    assert [pool.count(page) for page in range(pool.num_ids)] == held == [1, 0, 1]
    assert len(pool.allocate(2)) == 2
    with pytest.raises(PagePoolExhaustedError):
        pool.allocate(1)


@pytest.mark.parametrize("verb", ["share", "release"])
def test_a_free_page_cannot_be_held_again(verb):
    pool = PagePool()
    pool.allocate(2)
    pool.release([1])
    with pytest.raises(ValueError, match=f"page 1 is free and cannot be {verb}d"):
        getattr(pool, verb)([1])
    pool.check_integrity([[0]])


@pytest.mark.parametrize(
    "holders",
    [[[0, 1]], [[0, 1], [0], [0]], [[0, 1], [0], [2]], [[1], [0]], []],
    ids=["too-few", "too-many", "free-page-held", "shared-once", "nobody"],
)
def test_check_integrity_finds_wrong_counts(holders):
    pool = PagePool()
    pool.allocate(3)
    pool.share([0])
    pool.release([2])
    pool.check_integrity([[0, 1], [0]])
    with pytest.raises(ValueError, match="has count"):
        pool.check_integrity(holders)


@pytest.mark.parametrize("free", [[], [2, 2], [2, 0]], ids=["lost", "twice", "held"])
def test_check_integrity_finds_a_wrong_list_of_free_pages(free):
    pool = PagePool()
    pool.allocate(3)
    pool.release([2])
    pool._free[:] = free
    with pytest.raises(ValueError, match="list of free pages"):
        pool.check_integrity([[0, 1]])


class Holder:
    """Whoever holds pages."""

    def __init__(self, *pages):
        self.pages = pages

    def held_pages(self):
        return self.pages


def test_recount_sets_counts_to_what_holders_hold():
    pool, holder = PagePool(), Holder((0, 2), (2,))
    pool.register(holder)
    pool.allocate(4)
    pool.recount()
    assert [pool.count(page) for page in range(4)] == [1, 0, 2, 0]
    pool.check_integrity()
    assert sorted(pool.allocate(3)) == [1, 3, 4]
    del holder  # what a holder held that is gone is counted no longer
    assert pool.num_held == 0


# -- caches that share pages -----------------------------------------------------------------------------------


def filled(length=150, **options):
    model = shared_model("llama")
    cache = kv_hf.PagedCache(model.config, page_size=16, **options)
    with torch.no_grad():
        model(tokens(1, length), past_key_values=cache)
    return model, cache


def step(model, cache, seed, count=1):
    with torch.no_grad():
        return model(tokens(1, count, seed=seed), past_key_values=cache).logits


def test_reset_of_one_copy_leaves_the_other():
    model, cache = filled()
    copied = copy.deepcopy(cache)
    cache.reset()
    cache.check_integrity()
    expected = filled()[1]
    assert torch.equal(step(model, copied, 3), step(model, expected, 3))
    copied.reset()
    assert cache.group.pool.num_ids == 0 and not cache.arena.storages
    assert cache.memory().total == copied.memory().total == 0


def test_max_pages_bounds_a_cache_and_its_copies_together():
    model, cache = filled(max_pages=12)
    copied = copy.deepcopy(cache)
    step(model, copied, 1, 48)
    with pytest.raises(kv_hf.PagePoolExhaustedError):
        step(model, cache, 1, 16)
    cache.check_integrity()
