"""Pages outside of the device: bit-equal results, a budget that holds, failures that change nothing, and forked children."""

import copy
import errno
import functools
import gc
import os
import re
import sys
import traceback
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from beside_stock import pages, run
from harness import at_once
from tiny_models import left_padded, make_model, make_sliding, tokens
from token_states import FULL, FakeLayer, LateCopies, dense, feed, offload_to, same, text

import kv_hf
from kv_hf.pages.staging import Copies, SlotPlan, Staging

PAGE = 16
LAYERS = 5
PAGE_BYTES = 2 * 2 * PAGE * 16 * 4  # both sides, kv heads, tokens, head_dim, fp32


@pytest.fixture(params=["disk", "eager", "late"])
def place(request, monkeypatch):
    """Options that offload pages: into a file, or through two buffers as on a GPU (with host memory as both)."""
    return offload_to(request.param, monkeypatch)


@functools.cache
def five_layers():
    return make_model("llama", num_hidden_layers=LAYERS)


def make_cache(model=None, **options):
    return kv_hf.PagedCache((model or five_layers()).config, page_size=PAGE, **options)


def forward(model, cache, ids):
    with torch.no_grad():
        return model(ids, past_key_values=cache).logits


def offloaded(cache):
    return [layer.layer_idx for layer in cache.paged_layers if layer.storage.offloaded_bytes]


def page_bytes_on_device(cache):
    found = cache.memory()
    return found.payload + found.scales + found.staging


def generate(model, inputs, keys, config=None, **options):
    held = pages(f"paged_{keys}", **(config or {}))
    return run(model, inputs, held, max_new_tokens=20, **options)


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


RAGGED = left_padded([150, 4, 77])
LOOKED_UP = {"input_ids": tokens(1, 20).repeat(1, 6)}
# model, layers offloaded at the end, inputs, format, options of the cache that offloads, and of generate()
CALLS = {
    "int4 in a budget": (five_layers, None, RAGGED, "int4", {"device_bytes": 28_000}, {}),
    "lookup": (five_layers, range(LAYERS), LOOKED_UP, "int4", {}, {"prompt_lookup_num_tokens": 4}),
    # heads of full attention are larger than those that the first layer lets expect
    "gemma4": (
        functools.partial(make_sliding, "gemma4_text", 40),
        range(4),
        RAGGED,
        "int8",
        {},
        {},
    ),
}


@functools.cache
def alone(name):
    """What a call gives whose pages are on the device, and its model."""
    make, _, inputs, keys, _, options = CALLS[name]
    model = make()
    return model, generate(model, inputs, keys, **options)


@pytest.mark.parametrize("name", CALLS)
def test_generate_is_equal(place, name):
    _, offloaded_at_last, inputs, keys, more, options = CALLS[name]
    model, expected = alone(name)
    found = generate(model, inputs, keys, {**more, **place}, **options)
    check_equal(found, expected)
    left = offloaded(found.past_key_values)
    assert 0 < len(left) < LAYERS if more else left == [*offloaded_at_last]


def test_copies_generate_at_once_in_threads(place):
    """They share the staging buffers: one must not overwrite what the kernel of another is reading."""
    model, prompt = five_layers(), tokens(1, 101)

    def filled(**options):
        cache = make_cache(keys="int8", **options)
        forward(model, cache, prompt[:, :100])
        return cache

    def answer(cache, seed):
        ids = torch.cat([prompt, tokens(1, 3, seed=seed)], -1)
        return model.generate(ids, past_key_values=cache, max_new_tokens=20, do_sample=False)

    expected = [answer(filled(), seed) for seed in range(3)]
    cache = filled(**place)
    copies = [copy.deepcopy(cache) for _ in range(3)]
    found = at_once(lambda seed: answer(copies[seed], seed), 3)
    assert all(map(torch.equal, found, expected))


def test_inference_mode_and_gradients_may_take_turns(place):
    """Tensors made in inference mode cannot be written to outside of it: the buffers were, by way of their views."""
    model, both = five_layers(), [make_cache(keys="int4", **options) for options in ({}, place)]
    inference = torch.inference_mode
    modes = [inference, torch.no_grad, inference, torch.enable_grad, inference]
    for length, mode in zip((100, 40, 3, 20, 3), modes, strict=True):
        with mode():
            ids = tokens(2, length, seed=length)
            logits = [model(ids, past_key_values=cache).logits for cache in both]
        assert torch.equal(*logits)
        for cache in both:
            cache.crop(-2)


# -- the budget ----------------------------------------------------------------------------------------------


def test_budget_holds_at_every_step_and_layers_leave_one_by_one(place):
    model, budget = five_layers(), 70 * PAGE_BYTES
    cache = make_cache(**place, device_bytes=budget)
    numbers = []
    for seed in range(20):
        forward(model, cache, tokens(1, 16, seed=seed))
        assert page_bytes_on_device(cache) <= budget
        numbers.append(len(offloaded(cache)))
        assert cache.memory().offloaded == sum(x.storage.offloaded_bytes for x in cache.layers)
    assert numbers == sorted(numbers)
    assert numbers[0] == 0
    assert len(set(numbers)) > 2
    assert cache.memory().total == page_bytes_on_device(cache) + cache.memory().tail + (
        cache.memory().tables
    )


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


def test_budget_counts_the_index_that_steps_choose_by():
    model = make_model("llama", num_hidden_layers=12, max_position_embeddings=2048)
    budget, ids = 289_000, tokens(1, 1090)
    cache = make_cache(
        model, keys="int8", offload="disk", device_bytes=budget, read={"tokens": 64, "from": 64}
    )
    for part in ids.split([1024, *[1] * 66], 1):
        forward(model, cache, part)
        assert page_bytes_on_device(cache) <= budget
    with pytest.raises(kv_hf.DeviceBudgetError, match="index that steps choose pages by"):
        forward(model, cache, tokens(1, 900))
    assert cache.get_seq_length() == 1090
    cache.check_integrity()


def test_a_first_forward_over_layers_of_other_heads_is_refused_before_it_or_not_at_all():
    model = make_sliding("gemma4_text", 20)
    refused = pytest.raises(kv_hf.DeviceBudgetError, match="is too small")
    with refused as caught:
        forward(model, make_cache(model, offload="disk", device_bytes=1), tokens(3, 300))
    needed = int(re.search(r"needs device_bytes=(\d+)", str(caught.value))[1])
    cache = make_cache(model, offload="disk", device_bytes=needed)
    forward(model, cache, tokens(3, 300))
    with pytest.raises(kv_hf.DeviceBudgetError):
        forward(model, cache, tokens(3, 1))
    cache.check_integrity()


def test_reset_gives_everything_back(tmp_path):
    model = five_layers()
    cache = make_cache(offload=str(tmp_path))
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
    assert offloaded(cache) == list(range(LAYERS))


# -- fetching ------------------------------------------------------------------------------------------------


PLAN = SlotPlan.of(torch.tensor([[0, 1]]).int(), torch.tensor([2]), torch.device("cpu"))


def make_spec():
    cache = make_cache()
    forward(five_layers(), cache, tokens(1, 2))
    return cache.layers[0].spec


def test_failed_fetch_is_tried_again():
    spec = make_spec()
    staging, layer = Staging(Copies(torch.device("cpu"))), FakeLayer(3, spec)
    staging.resize(8 * spec.page_bytes)
    layer.fetch = Mock(side_effect=[RuntimeError("bad copy"), None])
    with pytest.raises(RuntimeError, match="bad copy"), staging.reading(layer, PLAN):
        pass
    with staging.reading(layer, PLAN):
        assert layer.fetch.call_count == 2


def test_every_buffer_is_kept_until_copies_into_it_are_done():
    """The last step of a generation fetches a layer that nobody reads: the cache may go before the copy is done."""
    spec, copies = make_spec(), LateCopies()
    staging, layers = Staging(copies), [FakeLayer(i, spec) for i in range(3)]
    for size in (8, 9):
        staging.resize(size * spec.page_bytes)
        copies.kept.clear()
        for layer in (*layers, *layers):
            with staging.reading(layer, PLAN):
                pass
        assert copies.waiting
        assert copies.kept == [buffer.raw.data_ptr() for buffer in staging._buffers]
        assert len(copies.kept) == 2


# -- failures ------------------------------------------------------------------------------------------------


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


def test_system_that_cannot_reserve_is_written_to(monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate")
    logits = [
        forward(five_layers(), make_cache(**options), tokens(1, 200))
        for options in ({}, {"offload": "disk"})
    ]
    assert torch.equal(*logits)


def fill_disk(folder, patch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    patch.setattr(os, "posix_fallocate", full)


def take_folder(folder, patch):
    folder.rmdir()  # empty: files have no name


@pytest.mark.parametrize(
    ("fail", "says"),
    [
        (fill_disk, "No space left.*the cache is unchanged"),
        (take_folder, "no file can be made in .*pages"),
    ],
)
def test_disk_that_fails_while_the_text_grows_changes_nothing(fail, says, tmp_path, monkeypatch):
    model, folder = five_layers(), tmp_path / "pages"
    folder.mkdir()
    gone, cache, plain = (make_cache(**given) for given in (*[{"offload": folder}] * 2, {}))
    for one in (cache, plain):
        forward(model, one, tokens(1, 100))
    with monkeypatch.context() as patch:
        fail(folder, patch)
        for one, seen in ((gone, 0), (cache, 100)):
            with pytest.raises(kv_hf.OffloadError, match=says):
                forward(model, one, tokens(1, 900, seed=3))
            assert one.get_seq_length() == seen
            one.check_integrity()
    folder.mkdir(exist_ok=True)
    logits = [forward(model, one, tokens(1, 900, seed=3)) for one in (cache, plain)]
    assert torch.equal(*logits)


def open_files(folder):
    """Return the open and mapped files of this process that lie in `folder`."""
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    found = [os.readlink(x) for x in links if x.is_symlink()]
    found += Path("/proc/self/maps").read_text().splitlines()
    return [one for one in found if str(folder) in one]


# -- a forked child and its parent --------------------------------------------------------------------------

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
ROWS = [text(1, 400)]


def in_child(work):
    """Run `work` in a forked child; return whether it ended without an exception, its exit handlers included."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            gc.collect()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def filled(**options):
    cache = kv_hf.PagedCache(FULL, page_size=PAGE, keys="int4", **options)
    feed(cache, ROWS, 0, 200)
    feed(cache, ROWS, 200, 201)
    return cache


@needs_fork
def test_child_is_refused_before_it_reads_or_writes_and_the_parent_goes_on():
    cache, plain = filled(offload="disk"), filled()
    assert cache.memory().offloaded
    before = dense(plain)
    staging = cache.page_memory.staging(torch.device("cpu"))
    for size in (0, staging.size):  # nothing is left in buffers of the child's own
        staging.resize(size)

    def append():
        """The 30 tokens fill a page: the child would have sealed it into its parent's file."""
        with pytest.raises(kv_hf.OffloadError, match="forked from it.*Nothing was touched"):
            feed(cache, ROWS, 201, 231)
        assert cache.get_seq_length() == 201
        with pytest.raises(kv_hf.OffloadError, match="forked from it"):
            feed(cache, ROWS, 201, 202)
        with pytest.raises(kv_hf.OffloadError, match="forked from it"):
            _ = cache.layers[0].keys

    assert in_child(append)
    assert same(dense(cache), before)
    for one in (cache, plain):
        feed(one, ROWS, 201, 300)
    assert same(dense(cache), dense(plain))


@needs_fork
def test_child_that_resets_or_drops_the_cache_leaves_the_parent_its_file(tmp_path):
    cache, plain = filled(offload=tmp_path), filled()

    def begin_anew():
        cache.reset()
        feed(cache, ROWS, 0, 200)
        feed(cache, ROWS, 200, 201)
        assert same(dense(cache), dense(plain))

    def drop():
        nonlocal cache
        del cache
        gc.collect()

    for work in (begin_anew, drop):
        assert in_child(work)
        assert same(dense(cache), dense(plain))
