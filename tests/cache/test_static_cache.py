"""A preallocated cache (max_length) run eagerly: the bytes, lengths and errors of one that grows; and its limits."""

import copy
import pickle
from dataclasses import replace

import pytest
import rounding
import tiny_vision
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import left_padded, make_config, make_model, shared_model, tokens
from transformers import DynamicCache

import kv_hf
from kv_hf.backends import registry
from kv_hf.backends.reference import attention as reference
from kv_hf.backends.registry import load, register_backend, unregister_backend, why_not
from kv_hf.cache.static_cache import StaticPagedCache, check_static_kernel
from kv_hf.formats import format_names, key_scheme, value_scheme
from kv_hf.pages.rows import Rows, RowSizes
from kv_hf.pages.static_table import StaticTable
from kv_hf.spec import PageSpec, predict_memory

LAYERS, HEADS, DIM, LENGTH = 2, 2, 16, 160
PLANNED = PageSpec.build(
    key_scheme("int4", None), value_scheme("int4", None), num_kv_heads=HEADS, key_dim=DIM, value_dim=DIM,
    page_size=16, dtype=torch.bfloat16,
)  # fmt: skip


def caches(keys="exact", **options):
    """A preallocated cache and one that grows, otherwise alike."""
    config = make_config("llama", head_dim=DIM)
    options = {"keys": keys, "page_size": 16, "sink_tokens": 2, **options}
    return kv_hf.PagedCache(config, max_length=LENGTH, **options), kv_hf.PagedCache(
        config, **options
    )


def states(rows, length, seed):
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, HEADS, length, DIM)
    return [[torch.randn(shape, generator=generator) for _ in range(2)] for _ in range(LAYERS)]


def append(cache, parts):
    return [cache.update(keys, values, layer) for layer, (keys, values) in enumerate(parts)]


def mask_of(padding, columns):
    return torch.tensor([[0] * p + [1] * (columns - p) for p in padding])


def filled(cache, lengths, padding=(0, 0, 0)):
    cache.learn_padding(mask_of(padding, sum(lengths)))
    for seed, length in enumerate(lengths):
        out = append(cache, states(len(padding), length, seed))
    return out


def assert_same_pages(static, grown):
    """Every sealed page has the bytes of the other cache's, and every row its lengths."""
    static.check_integrity()
    table, rows = static.table, grown.group.rows
    assert table.num_pages.tolist() == [len(row.pages) for row in rows]
    assert table.exact_lens.tolist() == [row.exact for row in rows]
    for mine, theirs in zip(static.layers, grown.layers, strict=True):
        sides = zip(mine.store.base.pages.sides, theirs.store.pages.sides, strict=True)
        for side, other in sides:
            for name, tensor in side.fields.items():
                for index, row in enumerate(rows):
                    own = table.block_table[index, : len(row.pages)].long()
                    got, wanted = tensor[own], other.fields[name][list(row.pages)]
                    assert got.numpy().tobytes() == wanted.numpy().tobytes(), name


SPLITS = {
    "steps": (40, *[1] * 37),
    "one-by-one": (1,) * 40,
    "chunks": (3, 20, 1, 33, 16, 1, 1, 50),
    "page-by-page": (18, 16, 16, 1, 15, 32),
}


@pytest.mark.parametrize("lengths", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("name", format_names("keys", "values"))
def test_sealed_pages_have_the_bytes_of_a_cache_that_grows(name, lengths):
    static, grown = caches(name)
    for cache in (static, grown):
        filled(cache, lengths, padding=(0, 7, 25))
    assert static.memory().pages_held >= 3
    assert_same_pages(static, grown)
    for mine, theirs in zip(static.layers, grown.layers, strict=True):
        assert torch.equal(mine.keys, theirs.keys)
        assert torch.equal(mine.values, theirs.values)


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=8),
    st.lists(st.integers(0, 60), min_size=1, max_size=3),
    st.integers(0, 5),
)
def test_lengths_are_those_of_a_page_group(lengths, padding, sinks):
    """Rows and what each forward reads, against the bookkeeping in Python that a growing cache uses."""
    rows, total = len(padding), sum(lengths)
    table, group = StaticTable(16, sinks, total), PageGroup(16, sinks, 0, None)
    table.allocate(rows, torch.device("cpu"))
    if any(padding):
        mask = mask_of([min(p, total) for p in padding], total)
        table.observe_padding(mask)
        group.observe_padding(mask)
    for epoch, length in enumerate(lengths):
        step = group.append(0, epoch, rows, length)
        group.tracker.done(0)
        table.begin(rows, length)
        mine = table.step
        assert mine.num_pages.tolist() == step.view.num_pages.tolist()
        assert mine.exact_lens.tolist() == step.view.exact_lens.tolist()
        assert mine.skips.tolist() == [row.skip for row in step.rows]
        wanted = [] if step.seal is None else step.seal.jobs[:, :2].tolist()
        jobs = mine.jobs[mine.jobs[:, 2] >= 0]
        assert jobs[:, :2].tolist() == wanted
        assert len(set(jobs[:, 2].tolist())) == len(jobs)
        table.finish()
        table.check_integrity()
        assert table.num_pages.tolist() == [len(row.pages) for row in group.rows]
        assert table.exact_lens.tolist() == [row.exact for row in group.rows]


def test_a_row_that_is_padding_longer_than_the_first_chunk_learns_it_from_the_next_mask():
    static, grown = caches()
    for cache in (static, grown):
        for seed, (length, columns) in enumerate([(8, 8), (12, 20), (1, 21)]):
            cache.learn_padding(mask_of((0, min(13, columns)), columns))
            append(cache, states(2, length, seed))
    assert static.table.padding.tolist() == [0, 13]
    assert_same_pages(static, grown)


def test_handles_are_dense_tensors_with_zeros_behind_the_last_token():
    static, grown = caches("int4")
    (keys, values), (other, others) = (filled(c, (30, 5, 1), (0, 3, 0))[1] for c in (static, grown))
    assert keys.shape == (3, HEADS, LENGTH, DIM)
    assert torch.equal((keys * 1)[:, :, :36], other * 1)
    assert torch.equal((values * 1)[:, :, :36], others * 1)
    assert not (keys * 1)[:, :, 36:].any()
    append(static, states(3, 1, 9))
    with pytest.raises(kv_hf.StaleHandleError):
        keys * 1


@pytest.mark.parametrize("name", ["reference", "c"])
def test_seal_skips_jobs_without_a_page(name):
    static, _ = caches("int4", kernel="reference")
    filled(static, (20,))
    store = static.layers[0].store.base
    if why_not(name, torch.device("cpu"), store.spec):
        pytest.skip("the C kernel is not there")
    jobs = torch.tensor([[0, 2, -1], [1, 2, 3], [2, 2, -1]], dtype=torch.int32)
    run = torch.randn(3, HEADS, 18, DIM)
    sides = store.pages.sides
    both = [{n: torch.full_like(t[:5], 1) for n, t in side.fields.items()} for side in sides]
    expected = [{n: t.clone() for n, t in given.items()} for given in both]
    damaged = torch.zeros((), dtype=torch.uint8)
    load(name).seal_pair((run, run), jobs, tuple(both), store.spec, damaged, {})
    for side, pages, wanted in zip(sides, both, expected, strict=True):
        reference.seal_pages(run, jobs[1:2], wanted, side.spec)
        for field, tensor in wanted.items():
            assert torch.equal(pages[field].view(torch.uint8), tensor.view(torch.uint8))
            assert not torch.equal(tensor[3], torch.ones_like(tensor[3]))
    load(name).seal_pair((run, run), jobs[:1], tuple(both), store.spec, damaged, {})
    for pages, wanted in zip(both, expected, strict=True):
        assert all(torch.equal(pages[n], t) for n, t in wanted.items())


# -- storage -------------------------------------------------------------------------------------------------------


def test_all_storage_is_made_at_the_first_forward_and_never_moves():
    static, _ = caches("int4")
    assert static.memory().total == 0
    filled(static, (5,))
    places = [t.data_ptr() for layer in static.layers for t in layer.store.tensors]
    places += [t.data_ptr() for t in static.table.tensors]
    before = static.memory()
    for seed in range(100):
        append(static, states(3, 1, seed))
    append(static, states(3, 20, 0))
    after = static.memory()
    assert after.total == before.total
    assert after.pages_held > before.pages_held
    static.reset()
    filled(static, (5,))
    now = [t.data_ptr() for layer in static.layers for t in layer.store.tensors]
    assert now + [t.data_ptr() for t in static.table.tensors] == places


def test_memory_is_what_predict_memory_says():
    static, _ = caches("int4")
    filled(static, (40, 1, 1), (0, 7, 25))
    specs = [layer.spec for layer in static.layers]
    rows = [42, 35, 17]
    told = predict_memory(specs, rows, sink_tokens=2, recent_tokens=0, reserve_tokens=LENGTH)
    got = static.memory()
    for name in ("payload", "scales", "tail", "pages_held", "pages_allocated", "tokens"):
        assert getattr(got, name) == getattr(told, name), name
    assert got.pages_allocated == 3 * ((LENGTH - 2) // 16)


def test_reset_takes_another_batch():
    static, grown = caches("int8")
    filled(static, (40, 1), (0, 7, 25))
    static.reset()
    assert static.get_seq_length() == 0
    assert static.layers[0].keys is None
    for cache in (static, grown):
        filled(cache, (30, 1, 20), (4, 0))
    assert_same_pages(static, grown)


def test_rows_are_reordered_by_copying():
    static, grown = caches("int4")
    for cache in (static, grown):
        filled(cache, (40, 1, 1), (0, 7, 25))
        cache.reorder_cache(torch.tensor([2, 0, 2]))
        append(cache, states(3, 7, 5))
    assert_same_pages(static, grown)


def test_copies_and_pickles_go_their_own_way():
    static, grown = caches("int4")
    for cache in (static, grown):
        filled(cache, (40,), (0, 7, 25))
    before = static.layers[1].keys
    for other in (copy.deepcopy(static), pickle.loads(pickle.dumps(static))):
        assert isinstance(other, StaticPagedCache)
        append(other, states(3, 20, 7))
        assert torch.equal(static.layers[1].keys, before)
    append(grown, states(3, 20, 7))
    assert_same_pages(other, grown)


def test_other_attention_implementations_read_it_densely():
    model = make_model("llama")
    ids = tokens(2, 30)
    caches = (
        DynamicCache(config=model.config),
        kv_hf.PagedCache(model.config, max_length=64, page_size=16),
    )
    with torch.no_grad():
        for length in ((0, 20), (20, 25), (25, 26)):
            part = ids[:, slice(*length)]
            wanted, got = (model(part, past_key_values=cache).logits for cache in caches)
            rounding.assert_close(got, wanted)


# -- what is refused -----------------------------------------------------------------------------------------------


def test_past_the_end_is_an_error_and_changes_nothing():
    static, _ = caches("int4")
    filled(static, (150, 1))
    before = static.layers[1].keys
    with pytest.raises(kv_hf.CacheMismatchError, match="max_length=160 is reached: 151 .* 10 more"):
        append(static, states(3, 10, 0))
    with pytest.raises(kv_hf.CacheMismatchError, match="batch of 3 rows, got keys for 2"):
        append(static, states(2, 1, 0))
    static.check_integrity()
    assert torch.equal(static.layers[1].keys, before)
    append(static, states(3, 9, 0))
    assert int(static.get_seq_length()) == 160
    fresh, _ = caches()
    with pytest.raises(kv_hf.CacheMismatchError, match="0 columns are held and 161 more"):
        append(fresh, states(1, 161, 0))


def test_a_plan_past_the_end_names_no_page_of_another_row():
    """Compiled code checks the length on the device, after the plan: nothing may be written elsewhere meanwhile."""
    table = StaticTable(16, 2, 50)
    table.allocate(2, torch.device("cpu"))
    table.num_pages.fill_(table.pages_per_row)
    table.exact_lens.fill_(17)
    table.seen.fill_(50)
    step = table._plan(2, 1)
    assert step.full.tolist() == [1, 1]
    assert step.jobs[:, 2].tolist() == [-1, -1]
    assert table.num_pages.tolist() == [table.pages_per_row] * 2


def test_an_interrupted_forward_is_found():
    static, _ = caches()
    filled(static, (20,))
    keys, values = states(3, 1, 0)[0]
    static.update(keys, values, 0)
    with pytest.raises(kv_hf.InterruptedForwardError, match="reset"):
        static.update(keys, values, 0)
    static.reset()
    filled(static, (20, 1))
    with pytest.raises(kv_hf.InterruptedForwardError):
        static.update(keys, values, 1)


REFUSED_OPTIONS = {
    "recent_tokens": ({"recent_tokens": 16}, "recent_tokens=16 does not go with max_length=64"),
    "reserve_tokens": ({"reserve_tokens": 16}, "reserve_tokens=16 does not go with max_length=64"),
    "max_pages": ({"max_pages": 16}, "max_pages=16 does not go with max_length=64"),
    "zero": ({"max_length": 0}, "max_length must be an integer of at least 1, got 0"),
    "text": ({"max_length": "64 lots"}, "max_length must be a number of tokens .* got '64 lots'"),
}


@pytest.mark.parametrize(("options", "says"), REFUSED_OPTIONS.values(), ids=REFUSED_OPTIONS)
def test_bad_options_are_refused(options, says):
    config = make_config("llama")
    with pytest.raises(kv_hf.CacheOptionError, match=says):
        kv_hf.PagedCache(config, **{"max_length": 64, **options})
    with pytest.raises(kv_hf.CacheOptionError, match=says):
        make_model("llama").generate(
            tokens(1, 4),
            max_new_tokens=4,
            cache_implementation="paged_int4",
            cache_config={"max_length": 64, **options},
        )


@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_kernels_that_wait_for_a_gpu_are_refused(kernel):
    static, grown = caches("int4", kernel=kernel)
    grown.check_kernel(torch.device("cuda"), torch.bfloat16)
    if why_not("triton", torch.device("cuda"), PLANNED) is None and kernel == "auto":
        pytest.skip("a GPU is here")
    with pytest.raises(kv_hf.CacheOptionError, match="never wait for the device, and kernel 'ref"):
        static.check_kernel(torch.device("cuda"), torch.bfloat16)


def test_check_static_kernel_names_the_backends_that_cannot_run_and_why(monkeypatch):
    entry = replace(registry._entries["triton"], why_not=lambda device, spec: "triton is too old")
    monkeypatch.setitem(registry._entries, "triton", entry)
    with pytest.raises(
        kv_hf.CacheOptionError,
        match="'triton' cannot run: triton is too old. Leave max_length out$",
    ):
        check_static_kernel(load("reference"), torch.device("cuda"), PLANNED)


def test_check_static_kernel_names_the_backends_that_do_not_wait():
    register_backend("quick", lambda: replace(load("reference"), name="quick", waits=False))
    try:
        check_static_kernel(load("quick"), torch.device("xpu"), PLANNED)
        with pytest.raises(kv_hf.CacheOptionError, match="take .*kernel='quick', which"):
            check_static_kernel(load("reference"), torch.device("xpu"), PLANNED)
    finally:
        unregister_backend("quick")
    check_static_kernel(load("reference"), torch.device("cpu"), PLANNED)


def test_models_with_other_layers_are_refused():
    config = make_config("mistral", sliding_window=8)
    with pytest.raises(kv_hf.UnsupportedModelError, match="'mistral' has layers"):
        kv_hf.PagedCache(config, max_length=64)
    made, inputs = tiny_vision.make("mllama")
    with pytest.raises(kv_hf.UnsupportedModelError, match="cross-attention to images"):
        made.generate(
            **inputs,
            max_new_tokens=4,
            cache_implementation="paged_exact",
            cache_config={"max_length": 140},
        )


CHANGES = {
    "crop": lambda cache: cache.crop(-1),
    "record": lambda cache: cache.activate_past_recording(),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([0])),
    "offload": lambda cache: cache.layers[0].offload(),
    "prefetch": lambda cache: cache.layers[0].prefetch(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_that_need_a_growing_cache_are_refused(change):
    static, _ = caches()
    filled(static, (20, 1))
    before = static.layers[0].keys
    with pytest.raises(kv_hf.CacheOptionError, match="a cache with max_length cannot"):
        change(static)
    assert torch.equal(static.layers[0].keys, before)
    static.crop(0)


GENERATIONS = {
    "too-long": ({"max_new_tokens": 45}, "up to 65 long, and cache_config max_length is 64"),
    "lookup": ({"max_new_tokens": 5, "prompt_lookup_num_tokens": 2}, "assisted decoding"),
}


@pytest.mark.parametrize(("options", "says"), GENERATIONS.values(), ids=GENERATIONS)
def test_generate_refuses_before_its_first_forward(options, says, monkeypatch):
    model = make_model("llama")
    monkeypatch.setattr(model, "forward", lambda *a, **k: pytest.fail("a forward ran"))
    extra = options.get("cache_config", {})
    options = {**options, "cache_config": {"max_length": 64, **extra}}
    with pytest.raises(kv_hf.CacheOptionError, match=says):
        model.generate(tokens(1, 20), do_sample=False, cache_implementation="paged_int4", **options)


@pytest.mark.parametrize("family", ["bloom", "gptj"])
def test_generate_refuses_models_that_cannot_read_pages(family):
    with pytest.raises(kv_hf.CacheOptionError, match="does not take its attention"):
        make_model(family).generate(
            tokens(1, 4),
            max_new_tokens=4,
            cache_implementation="paged_int4",
            cache_config={"max_length": 64},
        )


def test_generate_fills_the_cache_to_the_last_column():
    model = make_model("llama")
    for name in ("paged_exact", "paged_int4"):
        options = {"max_new_tokens": 31, "do_sample": False, "cache_implementation": name}
        given = left_padded([20, 33])
        wanted = model.generate(**given, **options, cache_config={"page_size": 16})
        got = model.generate(**given, **options, cache_config={"page_size": 16, "max_length": 64})
        assert torch.equal(got, wanted)


def test_empty_preallocated_cache_is_not_saved(tmp_path):
    model = shared_model("llama")
    cache = kv_hf.PagedCache(model.config, max_length=64)
    with pytest.raises(kv_hf.CacheMismatchError, match="empty"):
        cache.save(tmp_path / "cache.safetensors", model)


def test_public_class_makes_the_sibling_that_its_options_ask_for():
    config = make_config("llama")
    grows, fixed = kv_hf.PagedCache(config), kv_hf.PagedCache(config, max_length=64)
    named = kv_hf.PagedCache.from_implementation(config, "paged_int4", {"max_length": 64})
    assert (type(grows), type(fixed), type(named)) == (
        kv_hf.PagedCache,
        StaticPagedCache,
        StaticPagedCache,
    )
    assert not isinstance(fixed, type(grows).__mro__[1])  # siblings: neither is made of the other
    for cache in (grows, fixed, named, kv_hf.CrossCache(config)):
        assert isinstance(cache, kv_hf.PagedCache) and isinstance(cache, DynamicCache)
    assert not isinstance(DynamicCache(config=config), kv_hf.PagedCache)


def test_subclass_of_the_public_class_grows():
    class Own(kv_hf.PagedCache):
        pass

    config = make_config("llama")
    assert type(Own(config)) is type(Own.from_implementation(config, "paged_int4")) is Own
    with pytest.raises(kv_hf.CacheOptionError, match="Own grows"):
        Own(config, max_length=64)
