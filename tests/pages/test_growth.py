"""Growth of storage: in all layers or in none, whatever ends it."""

import copy

import pytest
import torch
from token_states import FULL, HYBRID, PAGE, dense, feed, same, text

import kv_hf
from kv_hf.pages.cpu_memory import HostMemory

ROWS = [text(1, 400)]


@pytest.mark.parametrize("config", [FULL, HYBRID], ids=["full", "hybrid"])
def test_memory_that_growth_has_freed_is_given_back_once_all_layers_have_grown(monkeypatch, config):
    given = []
    cache = kv_hf.PagedCache(config, page_size=PAGE, keys="int4")

    def note():
        given.append([layer.storage.capacity for layer in cache.layers])

    monkeypatch.setattr("kv_hf.pages.rows.give_back_replaced", note)
    feed(cache, ROWS, 0, 60)
    assert not given  # nothing was there that a larger tensor replaced
    feed(cache, ROWS, 60, 61)
    assert not given
    feed(cache, ROWS, 61, 300)
    assert given[-1] == [layer.storage.capacity for layer in cache.layers]
    assert len(given) == len(cache.groups)


# -- memory that ends while storage grows ----------------------------------------------------------------------


def failing_at(monkeypatch, number):
    """Let the `number`th field that is to grow find no memory."""
    left, new_empty = [number], torch.Tensor.new_empty
    monkeypatch.setattr("kv_hf.pages.storage.mapped_zeros", lambda field, pages: None)

    def short(tensor, size, *args, **kwargs):
        if len(size) == 4 and size[0] > tensor.shape[0]:
            left[0] -= 1
            if left[0] == 0:
                raise MemoryError("no memory for a field")
        return new_empty(tensor, size, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "new_empty", short)


def rooms(cache):
    return [
        t.shape[0] for x in cache.layers for side in x.storage.sides for t in side.fields.values()
    ]


@pytest.mark.parametrize("config", [FULL, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("keys", ["exact", "int4"])
def test_out_of_memory_while_storage_grows_changes_nothing(monkeypatch, keys, config):
    """Keys had grown and values had not: whoever took their capacity for the storage's wrote behind the values."""
    plain = kv_hf.PagedCache(config, page_size=PAGE, keys=keys)
    feed(plain, ROWS, 0, 60)
    fields = len(rooms(plain))
    feed(plain, ROWS, 60, 200)
    for number in range(1, fields + 1):
        cache = kv_hf.PagedCache(config, page_size=PAGE, keys=keys)
        feed(cache, ROWS, 0, 60)
        before = dense(cache)
        with monkeypatch.context() as patched:
            failing_at(patched, number)
            with pytest.raises(MemoryError):
                feed(cache, ROWS, 60, 200)
        cache.check_integrity()  # layers that had grown stay so, each as a whole
        assert same(dense(cache), before)
        feed(cache, ROWS, 60, 200)
        assert same(dense(cache), dense(plain))


@pytest.mark.parametrize("kind", ["copy", "store"])
def test_next_cache_on_a_storage_that_failed_to_grow_has_room(monkeypatch, kind):
    """The first forward of another cache must not take the room of the keys for that of the values."""
    store = kv_hf.PrefixStore() if kind == "store" else None
    cache = kv_hf.PagedCache(FULL, page_size=PAGE, keys="int4", prefix_store=store)
    feed(cache, ROWS, 0, 60)
    if store is not None:
        store.add(cache, [ROWS[0][:60]])
        other = cache.fresh()
        assert store.attach(other, (), [ROWS[0][:61]], [0]) == 4 + 3 * PAGE
    else:
        other = copy.deepcopy(cache)
    with monkeypatch.context() as patched:
        failing_at(patched, 4)
        with pytest.raises(MemoryError):
            feed(cache, ROWS, 60, 200)
    seen = other.get_seq_length()
    feed(other, ROWS, seen, 200)
    other.check_integrity()
    cache.check_integrity()  # room is made before a forward begins: it never did
    plain = kv_hf.PagedCache(FULL, page_size=PAGE, keys="int4")
    for first, last in ((0, seen), (seen, 200)):
        feed(plain, ROWS, first, last)
    assert same(dense(other), dense(plain))


def test_layer_that_failed_to_leave_the_device_keeps_its_pages(monkeypatch):
    """Its room was that of a place in host memory which the arena did not know of."""
    caches = [
        kv_hf.PagedCache(FULL, page_size=PAGE, **options)
        for options in ({}, {"offload": "disk", "device_bytes": 491_520})
    ]
    for cache in caches:
        feed(cache, ROWS, 0, 250)
    plain, cache = caches
    assert not cache.memory().offloaded
    store = HostMemory.store
    calls = []

    def failing(home, *args):
        calls.append(args)
        if len(calls) == 4:  # the second side of the second layer
            raise MemoryError("no memory for a copy")
        store(home, *args)

    with monkeypatch.context() as patched:
        patched.setattr(HostMemory, "store", failing)
        with pytest.raises(MemoryError):
            feed(cache, ROWS, 250, 390)
    cache.check_integrity()
    assert same(dense(cache), dense(plain))
    for one in caches:
        feed(one, ROWS, 250, 390)
    assert same(dense(cache), dense(plain)) and cache.memory().offloaded


# -- the C kernel's own last look ------------------------------------------------------------------------------
