"""Caches that share sealed pages: copies are independent, pages are counted, and freed when the last lets go."""

import copy
import gc
import pickle
import threading

import pytest
import torch
from tiny_models import left_padded, shared_model, tokens

import kv_hf

PAGE = 16


def filled(length=150, **options):
    model = shared_model("llama")
    cache = kv_hf.PagedCache(model.config, page_size=PAGE, **options)
    with torch.no_grad():
        model(tokens(1, length), past_key_values=cache)
    return model, cache


def step(model, cache, seed, count=1):
    with torch.no_grad():
        return model(tokens(1, count, seed=seed), past_key_values=cache).logits


def test_copy_shares_sealed_pages_and_counts_them():
    _, cache = filled()
    copied = copy.deepcopy(cache)
    assert copied.layers[0].storage is cache.layers[0].storage
    assert copied.layers[0].residuals[0].tokens is not cache.layers[0].residuals[0].tokens
    pages = cache.group.rows[0].pages
    assert copied.group.rows[0].pages == pages and len(pages) == 9
    assert {cache.group.pool.count(page) for page in pages} == {2}
    for one in (cache, copied):
        one.check_integrity()


@pytest.mark.parametrize("keys", ["exact", "int4"])
def test_copies_go_on_independently(keys):
    """Pages that one seals, frees or crops away must not show in the other."""
    model, cache = filled(keys=keys)
    alone = [filled(keys=keys)[1] for _ in range(2)]
    both = [cache, copy.deepcopy(cache)]
    cache.crop(-60)
    alone[0].crop(-60)
    for seed in range(3):
        for index in (0, 1):
            found = step(model, both[index], 10 * index + seed, 37)
            assert torch.equal(found, step(model, alone[index], 10 * index + seed, 37))
            both[index].check_integrity()
    assert not set(both[0].group.rows[0].pages[6:]) & set(both[1].group.rows[0].pages)


def test_pages_of_a_dropped_copy_are_free_again():
    model, cache = filled()
    held = cache.group.pool.num_held
    copied = copy.deepcopy(cache)
    step(model, copied, 1, 100)
    assert cache.group.pool.num_held > held
    del copied
    gc.collect()
    assert cache.group.pool.num_held == held
    cache.check_integrity()


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


def test_pickle_of_a_copy_leaves_foreign_pages_free():
    model, cache = filled()
    copied = copy.deepcopy(cache)
    step(model, copied, 1, 64)
    read = pickle.loads(pickle.dumps(cache))
    read.check_integrity()
    assert read.group.pool.num_held == 9
    assert torch.equal(step(model, read, 5), step(model, cache, 5))


def test_copy_of_a_copy_of_a_batch_with_sliding_layers():
    from test_sliding import make

    model = make("gemma3", 24)
    cache = kv_hf.PagedCache(model.config, page_size=PAGE)
    with torch.no_grad():
        model(**left_padded([90, 50]), past_key_values=cache)
    third = copy.deepcopy(copy.deepcopy(cache))
    gc.collect()
    for one in (cache, third):
        one.check_integrity()
    mask = torch.ones(2, 91, dtype=torch.long)
    mask[1, :40] = 0
    logits = []
    for one in (cache, third):
        with torch.no_grad():
            out = model(tokens(2, 1), attention_mask=mask, past_key_values=one)
        logits.append(out.logits)
    assert torch.equal(*logits)


def test_max_pages_bounds_a_cache_and_its_copies_together():
    model, cache = filled(max_pages=12)
    copied = copy.deepcopy(cache)
    step(model, copied, 1, 48)
    with pytest.raises(kv_hf.PagePoolExhaustedError):
        step(model, cache, 1, 16)
    cache.check_integrity()


def test_copies_generate_at_once_in_threads():
    """They grow one storage: a tensor that one replaces may be read by another just then."""
    model, cache = filled(100, keys="int8")
    prompt = tokens(1, 101)
    lone = [
        model.generate(
            torch.cat([prompt, tokens(1, 3, seed=seed)], -1),
            past_key_values=filled(100, keys="int8")[1],
            max_new_tokens=80,
            do_sample=False,
            eos_token_id=None,
        )
        for seed in range(3)
    ]
    found = {}

    def work(seed):
        found[seed] = model.generate(
            torch.cat([prompt, tokens(1, 3, seed=seed)], -1),
            past_key_values=copies[seed],
            max_new_tokens=80,
            do_sample=False,
            eos_token_id=None,
        )

    for _ in range(3):
        copies = [copy.deepcopy(cache) for _ in range(3)]
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for seed in range(3):
            assert torch.equal(found[seed], lone[seed])
        cache.check_integrity()
