"""Room for pages: memory that ends while storage grows, and page ids that no storage has room for."""

import copy

import pytest
import torch
from test_interrupted import dense, feed, same, text
from test_operations import FULL, HYBRID, PAGE

import kv_hf
from kv_hf.backends.base import AttentionCall
from kv_hf.backends.cpu import library
from kv_hf.backends.dispatch import paged_attention
from kv_hf.pages.cpu_memory import HostMemory
from kv_hf.pages.storage import SideStorage

compiled = pytest.mark.skipif(library.missing() is not None, reason="needs the C kernel")
ROWS = [text(1, 400)]


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


def test_integrity_compares_all_fields_of_both_sides():
    cache = kv_hf.PagedCache(FULL, page_size=PAGE, keys="int4")
    feed(cache, ROWS, 0, 100)
    for index, name in ((0, "codes"), (0, "scale"), (1, "offset"), (1, "codes")):
        fields = cache.layers[1].storage.sides[index].fields
        whole = fields[name]
        fields[name] = whole[:-1]
        assert cache.layers[1].storage.capacity == len(whole) - 1
        with pytest.raises(ValueError, match="have room for"):
            cache.check_integrity()
        fields[name] = whole
    cache.check_integrity()
    side = cache.layers[1].storage.values
    side.fields = side.grown(side.capacity + 1)
    with pytest.raises(ValueError, match="keys have room for 6 pages, values for 7"):
        cache.check_integrity()


def test_growth_of_a_side_leaves_the_old_fields_alone():
    cache = kv_hf.PagedCache(FULL, page_size=PAGE, keys="int4")
    feed(cache, ROWS, 0, 100)
    side: SideStorage = cache.layers[0].storage.keys
    old, tensors = side.fields, dict(side.fields)
    new = side.grown(20)
    assert (old.room, new.room) == (6, 20)
    assert all(old[name] is tensors[name] for name in tensors)
    assert all(torch.equal(new[name][:6], old[name]) for name in old)


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


def view_of(keys="int4"):
    cache = kv_hf.PagedCache(FULL, page_size=PAGE, keys=keys, kernel="c")
    feed(cache, ROWS, 0, 100)
    return cache, cache.layers[0].current_kv()


@compiled
@pytest.mark.parametrize("page", [6, 2**31 - 1, -1])
def test_kernel_refuses_a_table_that_names_a_page_without_room(page):
    from dataclasses import replace

    _, kv = view_of()
    table = kv.block_table.clone()
    table[0, 3] = page
    query = torch.randn(1, 2, 1, 32)
    with pytest.raises(kv_hf.CacheMismatchError, match="block_table must name pages.*0 to 5"):
        paged_attention(AttentionCall(query, replace(kv, block_table=table), 1.0), kernel="c")
    few = torch.tensor([3], dtype=torch.int32)  # behind the row's last page anything may stand
    paged_attention(
        AttentionCall(query, replace(kv, block_table=table, num_pages=few), 1.0), kernel="c"
    )


@compiled
@pytest.mark.parametrize("name", ["codes", "scale", "offset"])
def test_kernel_looks_at_the_least_field_of_both_sides(name):
    _, kv = view_of()
    query = torch.randn(1, 2, 1, 32)
    paged_attention(AttentionCall(query, kv, 1.0), kernel="c")
    whole = kv.value_pages[name]
    kv.value_pages[name] = whole[:-1]
    with pytest.raises(kv_hf.CacheMismatchError, match="must name pages.*0 to 4"):
        paged_attention(AttentionCall(query, kv, 1.0), kernel="c")


@compiled
@pytest.mark.parametrize("count", [1, 12])
def test_sealing_refuses_a_page_without_room_and_writes_nothing(count):
    cache, _ = view_of()
    store = cache.layers[0].store
    both = store.pages.keys.fields, store.pages.values.fields
    before = [{name: tensor.clone() for name, tensor in fields.items()} for fields in both]
    tokens = torch.randn(1, 2, 4 + count * PAGE, 32)
    pages = [*range(count - 1), 6] if count > 1 else [6]
    jobs = torch.tensor([(0, 4 + i * PAGE, p) for i, p in enumerate(pages)], dtype=torch.int32)
    jobs[:-1, 2].clamp_(max=5)
    with pytest.raises(kv_hf.CacheMismatchError, match="jobs must name pages.*0 to 5"):
        store.kernel.seal_pair((tokens, tokens), jobs, both, store.spec, store.damaged, {})
    for fields, kept in zip(both, before, strict=True):
        assert all(torch.equal(fields[name], tensor) for name, tensor in kept.items())
