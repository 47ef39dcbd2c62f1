"""Growth of storage on a GPU: what torch's caching allocator keeps, by the project's own decisions on meta tensors."""

import copy
import gc
import pickle

import pytest
import torch
from allocations import CachingAllocator, Watched
from tiny_models import left_padded, make_config, make_model, shared_model, tokens
from token_states import FULL, HYBRID, PAGE, dense, feed, same, text

import kv_hf
from kv_hf.cache.report import measure_memory
from kv_hf.cache.store import LayerStore
from kv_hf.hf import generation
from kv_hf.pages import storage as blocks
from kv_hf.pages.cpu_memory import HostMemory
from kv_hf.pages.rows import Expected

META = torch.device("meta")
LAYERS = 32
BLOCK_PAGE = 64


class Text:
    """A cache of an 8B model's sizes whose text grows: bookkeeping and storage are real, numbers are not.

    Kernels need numbers, so the steps of the group are followed by what layers do for room, and by that alone.
    """

    def __init__(self, allocator, *, rows, keys="int4", layers=LAYERS):
        config = make_config(
            "llama", num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=8,
            hidden_size=4096, head_dim=128,
        )  # fmt: skip
        self.allocator = allocator
        self.cache = kv_hf.PagedCache(config, keys=keys, kernel="reference")
        self.rows = rows
        self.worst = 0.0
        self.watched = Watched(allocator, META)

    def grow(self, columns):
        """Append `columns` columns."""
        with self.watched:
            for layer in self.cache.layers:
                if layer.store is None:
                    self._begin(layer)
                step = layer.forward.join(layer, self.rows, columns)
                layer.store.make_room(step.capacity, step.ahead)
                layer.take_part(step)
        self.worst = max(self.worst, self.allocator.reserved / self.allocator.allocated)

    def _begin(self, layer):
        spec = layer.formats.spec(num_kv_heads=8, key_dim=128, value_dim=128, dtype=torch.bfloat16)
        pages = self.cache.arena.storage(layer.layer_idx, spec, META, layer.group)
        store = LayerStore(layer.layer_idx, pages, layer.group.sink_tokens, "reference")
        store.damaged = torch.zeros((), dtype=torch.uint8)  # nothing is sealed here
        for window in store.residuals:
            shape = (self.rows, 8, layer.group.slots, 128)
            window.tokens = torch.zeros(shape, dtype=torch.bfloat16, device=META)
        layer._take(store)

    @property
    def stored(self):
        """Bytes that memory() reports on the device."""
        report = measure_memory(self.cache.layers, self.cache.groups)
        return report.total - report.tables


@pytest.fixture
def allocator(monkeypatch):
    made = CachingAllocator()
    monkeypatch.setattr(blocks, "give_back", lambda device: made.empty_cache())
    yield made
    gc.collect()


LENGTHS = [(2048, 4096), (32768, 1024), (8192, 8192)]


@pytest.mark.parametrize("told", [True, False], ids=["length told", "no length told"])
@pytest.mark.parametrize(("prompt", "new"), LENGTHS, ids=str)
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_growth_leaves_little_beside_the_pages(allocator, rows, prompt, new, told):
    text = Text(allocator, rows=rows)
    if told:
        text.cache.expect_length(prompt + new, prompt)
    text.grow(prompt)
    calls = allocator.calls
    for _ in range((new if told else min(new, 1024)) // BLOCK_PAGE):
        text.grow(BLOCK_PAGE)
    assert text.worst <= 1.2  # before layers have grown together for the first time
    assert text.stored <= allocator.allocated <= 1.05 * text.stored
    one_block = max(blocks.BLOCK_BYTES, allocator.allocated // blocks.PARTS)
    assert allocator.most_reserved <= 1.1 * allocator.allocated + 2 * one_block
    if told:
        assert allocator.calls - calls <= 3 * LAYERS  # one regrowth, of blocks


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Let tensors on the CPU grow as those on a GPU do; return the devices whose memory was given back."""
    given = []
    monkeypatch.setattr(blocks, "in_blocks", lambda device: True)
    monkeypatch.setattr(blocks, "give_back", given.append)
    monkeypatch.setattr(generation, "growth_is_dear", lambda model: True)
    return given


ROWS = [text(1, 400)]


@pytest.mark.parametrize("config", [FULL, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("keys", ["exact", "int4"])
def test_pages_in_blocks_hold_the_same_bytes(on_a_gpu, monkeypatch, keys, config):
    cache = kv_hf.PagedCache(config, page_size=16, keys=keys)
    for first, last in ((0, 60), (60, 61), (61, 300), (300, 400)):
        feed(cache, ROWS, first, last)
        cache.check_integrity()
    assert on_a_gpu
    read = pickle.loads(pickle.dumps(cache))
    copied = copy.deepcopy(cache)
    monkeypatch.setattr(blocks, "in_blocks", lambda device: False)
    plain = kv_hf.PagedCache(config, page_size=16, keys=keys)
    for first, last in ((0, 60), (60, 61), (61, 300), (300, 400)):
        feed(plain, ROWS, first, last)
    assert same(dense(cache), dense(plain))
    assert same(dense(read), dense(plain)) and same(dense(copied), dense(plain))
    assert cache.memory() == plain.memory()


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError, KeyboardInterrupt])
def test_block_that_cannot_be_made_changes_nothing(on_a_gpu, monkeypatch, error):
    cache, plain = (kv_hf.PagedCache(FULL, page_size=16, keys="int4") for _ in range(2))
    for one in (cache, plain):
        feed(one, ROWS, 0, 60)
    before, capacity = dense(cache), cache.layers[0].storage.capacity

    def short(*args, **kwargs):
        raise error("no memory for a block")

    with monkeypatch.context() as patched:
        patched.setattr(blocks, "carve", short)
        with pytest.raises(error):
            feed(cache, ROWS, 60, 200)
    cache.check_integrity()
    assert [layer.storage.capacity for layer in cache.layers] == [capacity] * 2
    assert same(dense(cache), before)
    for one in (cache, plain):
        feed(one, ROWS, 60, 200)
    assert same(dense(cache), dense(plain))


SLIDING = {"sliding_window": 24}
MIXED = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("family", "changes"), [("llama", {}), ("mistral", SLIDING), ("qwen2", MIXED)]
)
@pytest.mark.parametrize("options", [{}, {"page_size": 16}, {"max_pages": 40, "page_size": 16}])
def test_generation_that_runs_to_its_end_holds_what_is_predicted(
    on_a_gpu, family, changes, options
):
    model = make_model(family, **changes)
    for inputs in ({"input_ids": tokens(2, 3)}, left_padded([150, 4])):
        out = model.generate(
            **inputs, max_new_tokens=50, min_new_tokens=50, cache_implementation="paged_int4",
            cache_config=options, return_dict_in_generate=True,
        )  # fmt: skip
        cache = out.past_key_values
        cache.check_integrity()
        columns = inputs["input_ids"].shape[1]
        assert cache.groups[0].expected == Expected(columns, columns + 49)
        for group in cache.groups:
            layers = [layer for layer in cache.layers if layer.group is group]
            told = kv_hf.predict_memory(
                [layer.spec for layer in layers], list(map(group.tokens, group.rows)),
                sink_tokens=4, recent_tokens=0, window=group.window, prompt=columns,
            )  # fmt: skip
            assert layers[0].storage.capacity == told.pages_allocated


def test_beams_make_no_room_that_they_do_not_use(on_a_gpu):
    """Beams share the prompt's pages behind the first step: what is free is used before storage grows."""
    model = shared_model("llama")
    out = model.generate(
        tokens(1, 100), num_beams=4, max_new_tokens=30, min_new_tokens=30, return_dict_in_generate=True,
        cache_implementation="paged_int8", cache_config={"page_size": 16},
    )  # fmt: skip
    cache = out.past_key_values
    assert cache.layers[0].storage.capacity <= 4 * ((100 + 30) // 16)
    cache.check_integrity()


def test_memory_that_ends_ahead_of_need_is_said_once(on_a_gpu, monkeypatch, caplog):
    cache = kv_hf.PagedCache(FULL, page_size=16)
    cache.expect_length(2000)
    grow, tried = blocks.LayerBlocks.grow, []

    def short(self, layer, capacity):
        tried.append(capacity)
        if capacity > 20:
            raise torch.OutOfMemoryError("no memory ahead")
        grow(self, layer, capacity)

    monkeypatch.setattr(blocks.LayerBlocks, "grow", short)
    with pytest.warns(UserWarning, match="no memory for the 67 pages") as said:
        feed(cache, ROWS, 0, 60)
    feed(cache, ROWS, 60, 100)
    assert sum("no memory for" in str(one.message) for one in said) == 1
    assert tried == [67, 3, 67, 3, 6]
    cache.check_integrity()


@pytest.mark.parametrize("given", [(-1, 0), (10, -3), (2.5, 0), (True, 0)])
def test_expect_length_refuses_what_is_no_length(given):
    with pytest.raises(kv_hf.CacheOptionError, match="must be an integer of at least 0"):
        kv_hf.PagedCache(FULL).expect_length(*given)


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
