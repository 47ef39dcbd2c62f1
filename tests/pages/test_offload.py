"""Pages outside of the device: bit-equal results, a budget that holds, and failures that change nothing."""

import copy
import errno
import functools
import gc
import os
import pickle
import random
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from offloaded_pages import EagerCopies, FakeLayer, LateCopies, place_outside
from test_sliding import make as make_sliding
from tiny_models import left_padded, make_model, tokens

import kv_hf
from kv_hf.pages.cpu_memory import runs_of
from kv_hf.pages.offload import SEAL_PAGES, Demand, split_layers
from kv_hf.pages.staging import Copies, SlotPlan, Staging
from kv_hf.pages.step import TableView

PAGE = 16
LAYERS = 5
PAGE_BYTES = 2 * 2 * PAGE * 16 * 4  # both sides, kv heads, tokens, head_dim, fp32


@pytest.fixture(params=["disk", "eager", "late"])
def place(request, monkeypatch):
    """Options that put pages outside: into a file, or through two buffers as on a GPU (with host memory as both)."""
    return place_outside(request.param, monkeypatch)


@functools.cache
def five_layers():
    model = make_model("llama", num_hidden_layers=LAYERS)
    return model


def make_cache(model=None, **options):
    return kv_hf.PagedCache((model or five_layers()).config, page_size=PAGE, **options)


def forward(model, cache, ids):
    with torch.no_grad():
        return model(ids, past_key_values=cache).logits


def outside(cache):
    return [layer.layer_idx for layer in cache.paged_layers if layer.storage.offloaded_bytes]


def page_bytes_on_device(cache):
    found = cache.memory()
    return found.payload + found.scales + found.staging


def generate(model, inputs, keys, config=None, **options):
    return model.generate(
        **inputs,
        **{"max_new_tokens": 40, "do_sample": False, **options},
        cache_implementation=f"paged_{keys}",
        cache_config={"page_size": PAGE, **(config or {})},
        return_dict_in_generate=True,
        output_logits=True,
    )


def check_equal(found, expected):
    assert torch.equal(found.sequences, expected.sequences)
    for a, b in zip(found.logits, expected.logits, strict=True):
        assert torch.equal(a, b)
    cache, plain = found.past_key_values, expected.past_key_values
    cache.check_integrity()
    for ours, theirs in zip(cache.paged_layers, plain.paged_layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)


# -- the same results ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", ["exact", "int4"])
@pytest.mark.parametrize("budget", [False, True])
def test_ragged_batch_is_equal(place, keys, budget):
    inputs = left_padded([150, 4, 77])
    expected = generate(five_layers(), inputs, keys)
    budgets = {"exact": 348_160, "int4": 65_280}
    some = {"device_bytes": budgets[keys]} if budget else {}
    found = generate(five_layers(), inputs, keys, {**place, **some})
    check_equal(found, expected)
    left = outside(found.past_key_values)
    assert left == list(range(LAYERS)) if not budget else 0 < len(left) < LAYERS


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3, "num_return_sequences": 3},
        {"prompt_lookup_num_tokens": 4},
        {"prefill_chunk_size": 37},
    ],
    ids=str,
)
def test_beams_assisted_decoding_and_chunks_are_equal(place, options):
    rows = 1 if "prompt_lookup_num_tokens" in options else 2
    ids = tokens(rows, 20).repeat(1, 6)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    expected = generate(five_layers(), inputs, "int4", **options)
    check_equal(generate(five_layers(), inputs, "int4", place, **options), expected)


@pytest.mark.parametrize("name", ["gemma3", "mistral"])
def test_sliding_groups_are_equal(place, name):
    model = make_sliding(name, 40)
    inputs = left_padded([130, 33, 90])
    expected = generate(model, inputs, "int8", max_new_tokens=60)
    found = generate(model, inputs, "int8", place, max_new_tokens=60)
    check_equal(found, expected)
    assert outside(found.past_key_values) == [0, 1, 2, 3]


def test_formats_that_differ_by_layer_share_the_buffers(place):
    layers = {"layers": {"0": "exact", "3": "int2"}}
    inputs = left_padded([90, 60])
    expected = generate(five_layers(), inputs, "int4", layers)
    check_equal(generate(five_layers(), inputs, "int4", {**layers, **place}), expected)


@pytest.mark.parametrize("seed", range(4))
def test_any_sequence_of_operations_is_equal(place, seed):
    """Freed ids come back with other bytes while buffers still hold the old ones."""
    model, chance = five_layers(), random.Random(seed)
    budget = {"device_bytes": 104_040} if seed % 2 else {}
    both = [make_cache(keys="int8", **options) for options in ({}, {**place, **budget})]
    for _ in range(24):
        rows = len(both[0].group.rows) or 2
        what = chance.choice(["append"] * 4 + ["crop", "reorder", "select", "copy", "reset"])
        if both[0].get_seq_length() == 0 or what == "append":
            ids = tokens(rows, chance.choice([1, 3, 20, 50]), seed=chance.randrange(99))
            logits = [forward(model, cache, ids) for cache in both]
            assert torch.equal(*logits)
        elif what == "crop":
            count = min(chance.choice([1, 5, 40]), both[0].get_seq_length())
            for cache in both:
                cache.crop(-count)
        elif what in ("reorder", "select"):
            index = [chance.randrange(rows) for _ in range(rows if what == "reorder" else 2)]
            for cache in both:
                cache.batch_select_indices(torch.tensor(index))
        elif what == "copy":
            kept = both
            both = [copy.deepcopy(cache) for cache in both]
            if chance.random() < 0.5:
                for cache in kept:
                    forward(model, cache, tokens(rows, 20, seed=7))
            del kept
        elif chance.random() < 0.3:
            for cache in both:
                cache.reset()
            continue
        both[1].check_integrity()
        for layer in chance.sample(range(LAYERS), 2):
            plain, ours = (cache.layers[layer].keys for cache in both)
            assert plain is ours is None or torch.equal(plain, ours)


def test_handles_read_after_other_layers_are_right(place):
    """All layers share the buffers: a handle must fetch when it is read, not when it is made."""
    states = torch.randn(2, 1, 2, 200, 16)
    both = [make_cache(**options) for options in ({}, place)]
    handles = []
    for cache in both:
        for first, last in ((0, 190), (190, 200)):
            part = states[:, :, :, first:last]
            made = [cache.update(part[0] + i, part[1] - i, i) for i in range(LAYERS)]
        handles.append(made)
    for plain, ours in zip(*handles, strict=True):
        for a, b in zip(plain, ours, strict=True):
            assert torch.equal(a.dense(), b.dense())


def test_pickle_is_equal_and_offloads_again(place):
    model = five_layers()
    cache, plain = make_cache(**place), make_cache()
    for one in (cache, plain):
        forward(model, one, tokens(1, 150))
    read = pickle.loads(pickle.dumps(cache))
    assert outside(cache) == list(range(LAYERS))
    logits = [forward(model, one, tokens(1, 1)) for one in (read, plain, cache)]
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[2], logits[1])
    assert outside(read) == outside(cache)  # before it seals a page of its own
    for seed in range(3):
        logits = [forward(model, one, tokens(1, 9, seed=seed)) for one in (read, plain, cache)]
        assert torch.equal(logits[0], logits[1])
        assert torch.equal(logits[2], logits[1])
    read.check_integrity()
    assert outside(read) == list(range(LAYERS))


def test_copies_generate_at_once_in_threads(place):
    """They share the staging buffers: one must not overwrite what the kernel of another is reading."""
    model, prompt = five_layers(), tokens(1, 101)

    def filled(**options):
        cache = make_cache(keys="int8", **options)
        forward(model, cache, prompt[:, :100])
        return cache

    def answer(cache, seed):
        ids = torch.cat([prompt, tokens(1, 3, seed=seed)], -1)
        return model.generate(ids, past_key_values=cache, max_new_tokens=50, do_sample=False)

    alone = [answer(filled(), seed) for seed in range(3)]
    cache, found = filled(**place), {}
    copies = [copy.deepcopy(cache) for _ in range(3)]

    def work(seed):
        found[seed] = answer(copies[seed], seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[seed], alone[seed]) for seed in range(3))


def test_inference_mode_and_gradients_may_take_turns(place):
    """Tensors made in inference mode cannot be written to outside of it: the buffers were, by way of their views."""
    model, both = five_layers(), [make_cache(**options) for options in ({}, place)]
    modes = [torch.no_grad, torch.inference_mode, torch.enable_grad, torch.inference_mode]
    for length, mode in zip((100, 40, 3, 20), modes, strict=True):
        with mode():
            ids = tokens(2, length, seed=length)
            logits = [model(ids, past_key_values=cache).logits for cache in both]
        assert torch.equal(*logits)


def test_transformers_own_offload_and_prefetch_leave_the_pages_alone(place):
    model, cache, plain = five_layers(), make_cache(**place), make_cache()
    for one in (cache, plain):
        forward(model, one, tokens(1, 100))
    for layer in cache.paged_layers:
        layer.offload()
        layer.prefetch()
    assert torch.equal(*(forward(model, one, tokens(1, 1)) for one in (cache, plain)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("offloaded", ["cpu", "disk"])
@pytest.mark.parametrize("keys", ["exact", "int4"])
def test_gpu_is_equal(offloaded, keys):
    model = make_model("llama", num_hidden_layers=LAYERS, head_dim=64).cuda()
    inputs = {name: x.cuda() for name, x in left_padded([700, 300]).items()}
    expected = generate(model, inputs, keys, max_new_tokens=100)
    for budget in ({}, {"device_bytes": 600_000}):
        config = {"offload": offloaded, **budget}
        check_equal(generate(model, inputs, keys, config, max_new_tokens=100), expected)


# -- the budget ----------------------------------------------------------------------------------------------


def test_budget_holds_at_every_step_and_layers_leave_one_by_one(place):
    model, budget = five_layers(), 70 * PAGE_BYTES
    cache = make_cache(**place, device_bytes=budget)
    numbers = []
    for seed in range(20):
        forward(model, cache, tokens(1, 16, seed=seed))
        assert page_bytes_on_device(cache) <= budget
        numbers.append(len(outside(cache)))
        assert cache.memory().offloaded == sum(x.storage.offloaded_bytes for x in cache.layers)
    assert numbers == sorted(numbers)
    assert numbers[0] == 0
    assert len(set(numbers)) > 2
    assert cache.memory().total == page_bytes_on_device(cache) + cache.memory().tail + (
        cache.memory().tables
    )


def test_without_a_budget_only_the_buffers_are_on_the_device(place):
    cache = make_cache(**place)
    forward(five_layers(), cache, tokens(1, 180))
    forward(five_layers(), cache, tokens(1, 1))
    memory = cache.memory()
    buffers = 1 if place["offload"] == "disk" else 2
    assert (memory.payload, memory.scales) == (0, 0)
    assert memory.staging == buffers * 11 * PAGE_BYTES
    assert memory.offloaded >= LAYERS * 11 * PAGE_BYTES
    assert f"offloaded={memory.offloaded}" in repr(cache)
    assert {row.kind for row in cache.report()} == {"paged, offloaded"}


def test_smaller_than_the_least_is_refused_with_both_figures_and_nothing_changes(place):
    model = five_layers()
    least = re.compile(r"reading one layer at a time needs device_bytes=(\d+)")
    cache = make_cache(**place, device_bytes=30 * PAGE_BYTES)
    refused = f"device_bytes={30 * PAGE_BYTES} is too small"
    with pytest.raises(kv_hf.DeviceBudgetError, match=refused) as caught:
        forward(model, cache, tokens(2, 300))
    assert (cache.get_seq_length(), cache.memory().total) == (0, 0)
    needed = int(least.search(str(caught.value))[1])
    enough = make_cache(**place, device_bytes=needed)
    logits = forward(model, enough, tokens(2, 300))
    assert torch.equal(logits, forward(model, make_cache(), tokens(2, 300)))
    with pytest.raises(kv_hf.DeviceBudgetError):
        forward(model, make_cache(**place, device_bytes=needed - 1), tokens(2, 300))


def test_budget_that_ends_while_the_text_grows_leaves_the_cache_usable(place):
    model = five_layers()
    cache, plain = make_cache(**place, device_bytes=40 * PAGE_BYTES), make_cache()
    refused = False
    for seed in range(40):
        ids = tokens(1, 16, seed=seed)
        before = cache.memory(), cache.group.rows
        try:
            found = forward(model, cache, ids)
        except kv_hf.DeviceBudgetError:
            assert (cache.memory(), cache.group.rows) == before
            refused = True
            break
        assert torch.equal(found, forward(model, plain, ids))
    assert refused
    cache.check_integrity()
    for one in (cache, plain):
        one.crop(-20)
    assert torch.equal(*(forward(model, one, tokens(1, 3)) for one in (cache, plain)))


def test_layers_that_leave_lie_far_apart():
    spec = make_spec()
    demands = {layer: Demand(spec, torch.device("cpu"), 100, 100) for layer in range(8)}
    some = split_layers(demands, 7 * 100 * spec.page_bytes, 1)
    assert some.offloaded == {0, 4, 2}
    # one that has left already is not taken back
    more = split_layers(demands, 7 * 100 * spec.page_bytes, 1, already={7})
    assert some.offloaded != more.offloaded
    assert 7 in more.offloaded
    # five layers, one of them twice while it grows, and two buffers for the three that have left
    assert len(split_layers(demands, (5 + 1 + 2) * 100 * spec.page_bytes, 2).offloaded) == 3
    demands[6] = Demand(spec, torch.device("cpu"), 1000, 10)
    assert min(split_layers(demands, 9 * 100 * spec.page_bytes, 1).offloaded) == 6


def test_saved_pages_are_those_outside_and_placement_stays_behind(place, tmp_path):
    model = five_layers()
    cache = make_cache(model, keys="int4", **place)
    forward(model, cache, tokens(1, 150))
    assert outside(cache)
    cache.save(tmp_path / "cache.safetensors", model)
    read = kv_hf.PagedCache.load(tmp_path / "cache.safetensors", model)
    assert read.options.offload is None and read.memory().offloaded == 0
    assert torch.equal(forward(model, read, tokens(1, 3)), forward(model, cache, tokens(1, 3)))


def test_what_offload_does_not_go_with_is_refused():
    for other in ({"max_length": 64}, {"prefix_store": kv_hf.PrefixStore()}):
        with pytest.raises(kv_hf.CacheOptionError, match="does not go with"):
            kv_hf.PagedCache(five_layers().config, offload="disk", **other)


def test_reset_gives_everything_back(tmp_path):
    model = five_layers()
    cache = make_cache(offload="disk", offload_dir=str(tmp_path))
    forward(model, cache, tokens(2, 200))
    forward(model, cache, tokens(2, 1))
    gc.collect()
    before = open_files(tmp_path)
    assert before
    cache.reset()
    gc.collect()
    assert open_files(tmp_path) == []
    assert (cache.memory().total, cache.memory().offloaded) == (0, 0)
    forward(model, cache, tokens(1, 50))
    assert outside(cache) == list(range(LAYERS))


# -- fetching ------------------------------------------------------------------------------------------------


def make_spec():
    cache = make_cache()
    forward(five_layers(), cache, tokens(1, 2))
    return cache.layers[0].spec


def view_of(*rows):
    width = max(map(len, rows))
    table = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.int32)
    counts = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    return TableView(table, counts, counts, counts)


def plan_of(*rows):
    return SlotPlan.build(view_of(*rows), torch.device("cpu"))


def check_slots(fields, layer, plan):
    for side in fields:
        found = side["codes"].flatten(1)[:, 0].tolist()
        assert found == [1000 * layer.layer_idx + page for page in plan.ids]


def test_slots_renumber_the_table():
    plan = plan_of([9, 2, 5], [2, 11])
    assert plan.ids == [2, 5, 9, 11]
    assert plan.runs == [(0, 2, 1), (1, 5, 1), (2, 9, 1), (3, 11, 1)]
    assert plan.table.tolist() == [[2, 0, 1], [0, 3, 0]]
    assert plan.table.dtype == torch.int32
    assert runs_of(enumerate([3, 4, 5, 9, 10, 2])) == [(0, 3, 3), (3, 9, 2), (5, 2, 1)]
    assert runs_of(((0, page) for page in (3, 5, 9)), gap=1) == [(0, 3, 3), (0, 9, 1)]
    assert plan_of([], []).table.shape == (2, 0)


def test_next_layer_is_fetched_while_this_one_is_read():
    spec, copies = make_spec(), LateCopies()
    staging, layers = Staging(copies), [FakeLayer(i, spec) for i in range(3)]
    staging.resize(8 * spec.page_bytes)
    plan = plan_of([0, 1, 2, 7])
    for step in range(3):
        for layer in layers:
            copies.log.clear()
            with staging.reading(layer, plan) as found:
                asked = [what for what, _ in copies.log]
                check_slots(found, layer, plan)
            # once the order is known nothing is fetched when it is read, and one layer behind it
            fetched = [what for what, _ in copies.log][len(asked) :].count("run")
            if step == 2:
                assert (asked.count("run"), fetched) == (0, 1)


def test_new_table_is_fetched_late_for_its_first_layer_only():
    spec, copies = make_spec(), EagerCopies()
    staging, layers = Staging(copies), [FakeLayer(i, spec) for i in range(4)]
    staging.resize(8 * spec.page_bytes)
    for plan in (plan_of([0, 1]), plan_of([0, 1]), plan_of([0, 1, 2])):
        late = []
        for layer in layers:
            copies.log.clear()
            with staging.reading(layer, plan):
                late.append([what for what, _ in copies.log].count("run"))
    assert late == [1, 0, 0, 0]


def test_every_buffer_is_kept_until_copies_into_it_are_done():
    """The last step of a generation fetches a layer that nobody reads: the cache may go before the copy is done."""
    spec, copies = make_spec(), LateCopies()
    staging, layers = Staging(copies), [FakeLayer(i, spec) for i in range(3)]
    for size in (8, 9):
        staging.resize(size * spec.page_bytes)
        copies.kept.clear()
        for layer in (*layers, *layers):
            with staging.reading(layer, plan_of([0, 1])):
                pass
        assert copies.waiting
        assert copies.kept == [buffer.raw.data_ptr() for buffer in staging._buffers]
        assert len(copies.kept) == 2


def test_fetch_waits_for_the_last_reader_of_its_buffer_and_for_writes():
    spec, copies = make_spec(), EagerCopies()
    staging, layers = Staging(copies), [FakeLayer(i, spec) for i in range(3)]
    staging.resize(8 * spec.page_bytes)
    plan = plan_of([0, 1, 2, 7])
    for _ in range(2):
        for layer in layers:
            with staging.reading(layer, plan):
                pass
    copies.log.clear()
    layers[1].written = "sealed"
    with staging.reading(
        layers[0], plan
    ):  # has been fetched; 1 goes into the buffer that 2 was read from
        used = copies.marks
    assert [entry for entry in copies.log if entry[0] == "run"] == [("run", (used, "sealed"))]


def test_pages_written_since_are_fetched_again_and_only_those():
    spec, copies = make_spec(), LateCopies()
    staging, layer = Staging(copies), FakeLayer(0, spec)
    staging.resize(8 * spec.page_bytes)
    plan = plan_of([0, 1, 2, 7])
    with staging.reading(layer, plan):
        pass
    with staging.reading(layer, plan):
        assert layer.fetched == [(0, 3), (7, 1)]
    for fields in layer.sides:
        fields["codes"][2] = 77
    staging.outdate(layer, [2, 11])
    with staging.reading(layer, plan) as fields:
        assert fields[0]["codes"][2].unique().tolist() == [77]
    assert layer.fetched == [(0, 3), (7, 1), (2, 1)]


def test_failed_fetch_is_tried_again():
    spec = make_spec()
    staging, layer = Staging(Copies(torch.device("cpu"))), FakeLayer(3, spec)
    staging.resize(8 * spec.page_bytes)
    plan, fetch = plan_of([4, 5]), layer.fetch

    def fail(*args):
        raise RuntimeError("bad copy")

    layer.fetch = fail
    with pytest.raises(RuntimeError, match="bad copy"), staging.reading(layer, plan):
        pass
    layer.fetch = fetch
    with staging.reading(layer, plan) as fields:
        check_slots(fields, layer, plan)


def test_encoded_pages_are_taken_and_put(place):
    model = five_layers()
    caches = [make_cache(keys="int4", **options) for options in ({}, place, place)]
    for cache in caches[:2]:
        forward(model, cache, tokens(1, 300))
    forward(model, caches[2], tokens(1, 300, seed=5))
    pages = [3, 4, 9, 2]
    for sides in zip(*(cache.layers[1].storage.sides for cache in caches), strict=True):
        plain, ours, other = (side.take(pages) for side in sides)
        for name, field in plain.items():
            assert torch.equal(ours[name], field)
            assert not torch.equal(other[name], field)
            sides[2].put(7, name, field)
        found = sides[2].take(range(7, 11))
        assert all(torch.equal(found[name], field) for name, field in plain.items())


# -- failures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload": "dsk"}, "offload must be one of cpu, disk, got 'dsk'.*did you mean 'disk'"),
        ({"device_bytes": 4}, "device_bytes=4 needs offload='cpu' or 'disk'"),
        ({"offload": "disk", "device_bytes": 0}, "device_bytes must be an integer of at least 1"),
        ({"offload": "cpu", "offload_dir": "/tmp"}, "offload_dir is read with offload='disk'"),
        ({"offload": "disk", "offload_dir": "/no/such"}, "offload_dir must be a folder that exist"),
    ],
    ids=str,
)
def test_bad_options(options, message):
    with pytest.raises(kv_hf.CacheOptionError, match=message):
        make_cache(**options)


def test_cpu_on_a_cpu_is_refused():
    model = five_layers()
    with pytest.raises(kv_hf.CacheOptionError, match="already in host memory. Use offload='disk'"):
        generate(model, {"input_ids": tokens(1, 9)}, "exact", {"offload": "cpu"})
    cache = make_cache(offload="cpu")
    with pytest.raises(kv_hf.CacheOptionError, match="already in host memory"):
        forward(model, cache, tokens(1, 9))
    assert cache.get_seq_length() == 0


def test_full_disk_is_found_before_the_first_forward(monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10_000}))
    cache = make_cache(offload="disk")
    with pytest.raises(kv_hf.OffloadError, match=r"do not fit into .*10,000 bytes are free"):
        forward(five_layers(), cache, tokens(1, 400))
    assert cache.get_seq_length() == 0
    cache.check_integrity()
    monkeypatch.undo()
    expected = forward(five_layers(), make_cache(), tokens(1, 400))
    assert torch.equal(forward(five_layers(), cache, tokens(1, 400)), expected)


def test_disk_that_fills_up_while_the_text_grows_changes_nothing(monkeypatch):
    model = make_model("llama", num_hidden_layers=2, max_position_embeddings=4096)
    cache, plain = make_cache(model, offload="disk"), make_cache(model)
    for one in (cache, plain):
        forward(model, one, tokens(1, 1000))

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(kv_hf.OffloadError, match="No space left.*the cache is unchanged"):
        forward(model, cache, tokens(1, 1500, seed=2))
    assert cache.get_seq_length() == 1000
    cache.check_integrity()
    monkeypatch.undo()
    logits = [forward(model, one, tokens(1, 1500, seed=2)) for one in (cache, plain)]
    assert torch.equal(*logits)


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL])
def test_filesystem_that_cannot_reserve_is_written_to(monkeypatch, code):
    def cannot(*args):
        raise OSError(code, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", cannot)
    logits = [
        forward(five_layers(), make_cache(**options), tokens(1, 200))
        for options in ({}, {"offload": "disk"})
    ]
    assert torch.equal(*logits)


def test_folder_that_is_gone_is_an_error_and_changes_nothing(tmp_path):
    model, folder = five_layers(), tmp_path / "pages"
    folder.mkdir()
    gone, cache = (make_cache(offload="disk", offload_dir=folder) for _ in range(2))
    plain = make_cache()
    for one in (cache, plain):
        forward(model, one, tokens(1, 100))
    folder.rmdir()  # empty: files have no name
    for one, seen in ((gone, 0), (cache, 100)):
        with pytest.raises(kv_hf.OffloadError, match="no file can be made in .*pages"):
            forward(model, one, tokens(1, 900, seed=3))
        assert one.get_seq_length() == seen
    folder.mkdir()
    logits = [forward(model, one, tokens(1, 900, seed=3)) for one in (cache, plain)]
    assert torch.equal(*logits)


def open_files(folder):
    """Return the open and mapped files of this process that lie in `folder`."""
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    found = [os.readlink(x) for x in links if x.is_symlink()]
    found += Path("/proc/self/maps").read_text().splitlines()
    return [one for one in found if str(folder) in one]


MEASURED = """
import ctypes, json, os, sys, torch, kv_hf
from transformers import LlamaConfig
from kv_hf.backends.base import AttentionCall
ctypes.CDLL(None).mallopt(-3, 1 << 18)  # M_MMAP_THRESHOLD: freed tensors go back to the system
LAYERS, TOKENS = 8, 16384
config = LlamaConfig(num_hidden_layers=LAYERS, num_key_value_heads=2, num_attention_heads=4, hidden_size=256)
def resident():
    lines = open("/proc/self/status").read().splitlines()
    return {x.split(":")[0]: 1024 * int(x.split()[1]) for x in lines if x.startswith(("VmRSS", "VmHWM"))}
def steps(cache, first, count):
    for i in range(LAYERS):
        cache.update(*torch.zeros(2, 1, 2, first, 64, dtype=torch.bfloat16), i)
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
    for _ in range(count):
        for i in range(LAYERS):
            handles = cache.update(*torch.zeros(2, 1, 2, 1, 64, dtype=torch.bfloat16), i)
            view = handles[0].view_of_pages
            kv_hf.backends.dispatch.paged_attention(AttentionCall(torch.zeros(1, 4, 1, 64, dtype=torch.bfloat16), view.kv, 1.0))
torch.set_num_threads(1)
steps(kv_hf.PagedCache(config, offload="disk", offload_dir=sys.argv[1]), 500, 3)
before = resident()["VmRSS"]
cache = kv_hf.PagedCache(config, **json.loads(sys.argv[2]))
steps(cache, TOKENS, 70)
found = resident()
memory = cache.memory()
print(json.dumps({"grown": found["VmRSS"] - before, "peak": found["VmHWM"] - before, "total": memory.total,
                  "pages": memory.payload + memory.scales + memory.staging, "offloaded": memory.offloaded}), flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("budget", [None, 12 << 20, 30 << 20])
def test_resident_memory_stays_under_the_budget_and_a_kill_leaves_no_file(tmp_path, budget):
    """8 layers of 8 MiB: what the process takes more is what the cache says it has."""
    options = {"offload": "disk", "offload_dir": str(tmp_path)}
    if budget:
        options["device_bytes"] = budget
    import json

    process = subprocess.Popen(
        [sys.executable, "-c", MEASURED, str(tmp_path), json.dumps(options)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        found = json.loads(process.stdout.readline())
        assert os.listdir(tmp_path) == []
    finally:
        process.kill()
        process.wait()
    assert os.listdir(tmp_path) == []
    slack = 4 << 20  # a mapped piece, the page that is sealed, Python's own objects
    assert found["pages"] <= (budget or 10 << 20)
    assert found["grown"] <= found["total"] + slack
    assert found["peak"] <= (budget or found["total"]) + (found["total"] - found["pages"]) + slack
    assert found["offloaded"] >= (64 << 20) - (budget or 0)
    assert SEAL_PAGES < 64
