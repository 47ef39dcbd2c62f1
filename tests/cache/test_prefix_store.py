"""Shared prefixes: the tokens of a run without sharing, pages stored once, counted and bounded, and what a model is known by."""

import contextlib
import copy
import errno
import functools
import gc
import os
import subprocess
import sys
import threading
import time
from itertools import pairwise, product
from pathlib import Path

import beside_stock
import pytest
import rounding
import tiny_latent
import torch
from beside_stock import assert_same, pages
from harness import at_once
from measure.family_models import build_model, families
from safetensors.torch import save
from tiny_models import make_model, make_sliding, shared_model, tokens
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

import kv_hf
from kv_hf.cache import prefix_folder
from kv_hf.cache.identity import (
    WHOLE,
    Weight,
    described,
    drops_numbers,
    sample,
    space_of,
)
from kv_hf.cache.model_shape import CHUNKS_BEHIND_A_CACHE
from kv_hf.cache.report import tensor_bytes
from kv_hf.cache.states import states_of
from kv_hf.hf import prefill
from kv_hf.pages.pool import PagePool
from kv_hf.pages.prefix_tree import PrefixTree
from kv_hf.pages.rows import Rows, RowSizes
from kv_hf.pages.step import Row

PAGE = 16
GREEDY = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}


def words(length, seed):
    return tokens(1, length, seed=seed)[0].tolist()


def batch(rows):
    lists = [torch.tensor(row) for row in rows]
    ids = pad_sequence(lists, batch_first=True, padding_side="left")
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def stock(model, rows):
    return beside_stock.run(model, batch(rows), max_new_tokens=24)


def run(model, rows, store, implementation="paged_exact", config=None, **options):
    held = pages(implementation, prefix_store=store, **(config or {}))
    return beside_stock.run(model, batch(rows), held, **{"max_new_tokens": 24, **options})


SYSTEM = words(200, 1)
CHUNKS = [7, 40] if CHUNKS_BEHIND_A_CACHE else []
BATCHES = {
    "one row": [SYSTEM + words(9, 2)],
    "ragged": [SYSTEM + words(n, n) for n in (5, 17, 40, 33, 1)],
    "equal": [SYSTEM + words(8, 3)] * 3,
    "one stranger": [SYSTEM + words(7, 4), words(30, 5), SYSTEM[:100] + words(90, 6)],
    "short rows": [words(3, 7), words(1, 8)],
    "a row that is a prefix": [SYSTEM, SYSTEM + words(64, 9)],
    "nothing in common": [words(50, 10), words(80, 11)],
}


@pytest.mark.parametrize(
    ("name", "chunk"),
    [*((name, None) for name in BATCHES), *product(["ragged", "one stranger"], CHUNKS)],
)
def test_tokens_are_those_of_a_run_without_sharing(name, chunk):
    model, rows = shared_model("llama"), BATCHES[name]
    expected = stock(model, rows)
    store = kv_hf.PrefixStore()
    options = {} if chunk is None else {"prefill_chunk_size": chunk}
    for _ in range(2):
        found = run(model, rows, store, **options)
        assert_same(found, expected)
        found.past_key_values.check_integrity()
    del found
    gc.collect()
    assert store.page_memory.num_held == store.stats().pages


@pytest.mark.parametrize("name", ["one row", "ragged", "a row that is a prefix"])
def test_recent_tokens_of_a_shared_prompt_are_exact_as_without_sharing(name):
    """The store knows these tokens too, in pages: whoever asks for exact ones computes them."""
    model, rows, config = shared_model("llama"), BATCHES[name], {"recent_tokens": 40}
    store = kv_hf.PrefixStore()
    run(model, rows, store, "paged_int8")  # its pages go to the end of the prompts
    found = run(model, rows, store, "paged_int8", config).past_key_values
    alone = run(model, rows, None, "paged_int8", config).past_key_values
    exact = [[row.exact for row in cache.groups[0].rows] for cache in (found, alone)]
    assert exact[0] == exact[1]
    assert store.stats().rows_hit >= len(rows)


@pytest.mark.parametrize("name", ["mistral", "gemma3_text"])
def test_sliding_layers_keep_their_pages_and_share_them(name):
    model, store = make_sliding(name, 24), kv_hf.PrefixStore()
    for rows in ([SYSTEM + words(30, 2)], [SYSTEM[:120] + words(12, 3), SYSTEM + words(3, 4)]):
        found = run(model, rows, store)
        assert_same(found, stock(model, rows))
    assert store.stats().rows_hit == 2
    assert {row.kind for row in found.past_key_values.report()} <= {
        "paged", "paged, sliding window of 24",
    }  # fmt: skip


@pytest.mark.parametrize("place", ["in front of the layers", "behind attach"])
def test_a_first_forward_that_no_layer_ran_leaves_no_prefix_in_the_cache(place, monkeypatch):
    """Its beginning would stand in front of whatever text comes next."""
    model, store = shared_model("llama"), kv_hf.PrefixStore()
    run(model, [SYSTEM], store)
    cache = kv_hf.PagedCache(model.config, page_size=PAGE, prefix_store=store)

    attach = prefill.attach_prefix

    def stop(*args):
        if place == "behind attach":
            assert attach(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:  # a hook of the model would have prefixes of its own
        behind = place == "behind attach"
        patch.setattr(*(prefill, "attach_prefix") if behind else (nn.Embedding, "forward"), stop)
        with pytest.raises(KeyboardInterrupt):
            model.generate(**batch([SYSTEM + words(9, 2)]), past_key_values=cache, **GREEDY)
    assert cache.get_seq_length() == 0
    other = batch([words(len(SYSTEM) + 9, 8)])
    found = model.generate(**other, past_key_values=cache, **GREEDY)
    assert torch.equal(found, model.generate(**other, **GREEDY))


def interrupt(ids, *scores):
    if ids.shape[1] == 73:
        raise KeyboardInterrupt
    return ids[:, 0] < 0


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 2}, {"stopping_criteria": [interrupt]}],
    ids=["beams", "a call that is stopped"],
)
def test_answer_that_is_not_known_is_not_kept(options):
    model, store = shared_model("llama"), kv_hf.PrefixStore(keep_answers=True)
    stops = (
        pytest.raises(KeyboardInterrupt)
        if "stopping_criteria" in options
        else contextlib.nullcontext()
    )
    with stops:
        run(model, [SYSTEM[:70]], store, **options)
    assert store.stats().pages == (70 - 4) // PAGE
    gc.collect()
    assert store.page_memory.num_held == store.stats().pages


def test_tenants_share_no_prefix_but_one_bound():
    model, store = shared_model("llama"), kv_hf.PrefixStore(keep_answers=True)
    tenants = {"": store, "a": store.for_tenant("a"), "b": store.for_tenant("b")}
    expected = run(model, [SYSTEM], None)
    for number, tenant in enumerate(tenants.values(), 1):
        for turn in (0, 1):
            before = tenant.stats()
            assert_same(run(model, [SYSTEM], tenant), expected)
            assert store.stats().rows_hit - before.rows_hit == turn
        assert store.stats().rows == 2 * number
    assert store.stats().pages == 3 * ((len(SYSTEM) + 23 - 4) // PAGE)
    assert store.for_tenant("") is store
    # another handle of the same tenant finds the same pages
    before = store.stats().rows_hit
    run(model, [SYSTEM + words(5, 3)], store.for_tenant("a"))
    assert store.stats().rows_hit == before + 1
    store.for_tenant("b").clear()
    assert store.stats().pages == 0


def test_full_store_gives_up_the_least_recently_used():
    model = shared_model("llama")
    page_bytes = 2 * 2 * 2 * PAGE * 16 * 4  # layers, sides, heads, tokens, channels, bytes
    store = kv_hf.PrefixStore(max_bytes=20 * page_bytes)
    texts = [words(4 + 6 * PAGE + 1, seed) for seed in range(20, 25)]
    for one in texts[:3]:
        run(model, [one], store)
    space = store.bind_model(model)
    assert [store.find(space, [*text, 0]).tokens for text in texts[:3]] == [100] * 3
    assert store.find(space, [*texts[0], 0]).tokens == 100  # used: now texts[1] is the oldest
    run(model, [texts[3]], store)
    gc.collect()
    run(model, [texts[4]], store)
    known = [store.find(space, [*text, 0]).tokens for text in texts]
    assert known[0] == known[4] == 100 and known[1] == 0
    stats = store.stats()
    assert stats.pages <= 20 and stats.evictions > 0
    assert stats.bytes <= store.max_bytes
    store.page_memory.pool(None).check_integrity()


def test_first_tokens_of_a_store_stay_where_rows_of_their_cache_move():
    model, store, rows = shared_model("llama"), kv_hf.PrefixStore(), [SYSTEM[:60], SYSTEM[1:61]]
    run(model, rows, store, max_new_tokens=1).past_key_values.reorder_cache(torch.tensor([1, 0]))
    assert_same(run(model, rows, store), stock(model, rows))
    assert store.stats().rows_hit == 2


def test_tree_gives_up_ends_before_what_leads_to_them():
    pool = PagePool()
    tree = PrefixTree(pool, 2, 0)
    rows = Rows(RowSizes(2, 0, 0, None), pool)  # somebody who reads pages
    pages = pool.allocate(3)
    tree.add((), [1, 2, 3, 4], pages[:2], lambda: None)
    tree.add((), [1, 2, 5, 6], [pages[0], pages[2]], lambda: None)
    assert tree.evict(1) == 1
    assert [len(tree.find((), text)) for text in ([1, 2, 3, 4], [1, 2, 5, 6])] == [2, 3]
    rows.adopt([Row(0, (pages[2],), 0)], 2)
    assert tree.evict(5) == 0 and tree.num_evictable == 1
    rows.reset()
    assert tree.evict(5) == 2 and tree.counts() == (0, 0, 0) and not pool.num_held


def test_store_of_another_model_or_format_is_refused():
    model, store = shared_model("llama"), kv_hf.PrefixStore()
    run(model, [SYSTEM], store)
    with pytest.raises(kv_hf.CacheOptionError, match="keys='exact', this cache has keys='int4'"):
        run(model, [SYSTEM], store, "paged_int4")
    with pytest.raises(kv_hf.CacheOptionError, match="page_size=16, this cache has page_size=32"):
        run(model, [SYSTEM], store, config={"page_size": 32})
    with pytest.raises(kv_hf.CacheOptionError, match="model_type='llama'.*model_type='qwen2'"):
        run(shared_model("qwen2"), [SYSTEM], store)
    with pytest.raises(kv_hf.CacheMismatchError, match="another LlamaForCausalLM"):
        run(make_model("llama"), [SYSTEM], store)
    with pytest.raises(kv_hf.CacheOptionError, match="must be a kv_hf.PrefixStore, got dict"):
        run(model, [SYSTEM], {})
    with pytest.raises(kv_hf.CacheOptionError, match="max_pages=7 does not go with prefix_store"):
        run(model, [SYSTEM], store, config={"max_pages": 7})
    assert copy.deepcopy(store) is store


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda: kv_hf.PrefixStore(max_bytes=0.5), "max_bytes must be a size"),
        (lambda: kv_hf.PrefixStore(keep_answers=1), "keep_answers must be True or False, got 1"),
        (lambda: kv_hf.PrefixStore().for_tenant(3), "salt must be a string, got 3"),
        (lambda: kv_hf.PrefixStore().find((), [1]), "not used by any cache yet"),
    ],
)
def test_store_names_the_rule_that_an_argument_breaks(ask, says):
    with pytest.raises(kv_hf.CacheOptionError, match=says):
        ask()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda i: i["attention_mask"].__setitem__((0, 100), 0), "more than left padding"),
        (lambda i: i.update(position_ids=torch.arange(220)[None] + 1), "position_ids do not count"),
        (lambda i: i.update(inputs_embeds=torch.randn(1, 220, 64)), "holds inputs_embeds"),
    ],
)
def test_prompts_that_tokens_do_not_describe_are_not_shared_and_say_so(change, reason):
    model, store = shared_model("llama"), kv_hf.PrefixStore()
    run(model, [SYSTEM + words(20, 2)], store)
    before = store.stats()
    inputs = batch([SYSTEM + words(20, 2)])
    change(inputs)
    expected = beside_stock.run(model, inputs)
    with pytest.warns(kv_hf.KVCacheWarning, match=reason):
        found = beside_stock.run(model, inputs, pages(prefix_store=store))
    assert_same(found, expected)
    assert store.stats() == before


def test_cache_of_a_store_is_saved_with_the_pages_that_it_shares(tmp_path):
    model, store = shared_model("llama"), kv_hf.PrefixStore()
    run(model, [SYSTEM], store)
    cache = run(model, [SYSTEM + words(9, 2)], store).past_key_values
    cache.save(tmp_path / "cache.safetensors", model)
    read = kv_hf.PagedCache.load(tmp_path / "cache.safetensors", model)
    assert read.options.prefix_store is None
    sliding = make_sliding("gemma3_text", 24)
    cache = run(sliding, [SYSTEM], kv_hf.PrefixStore()).past_key_values
    with pytest.raises(kv_hf.UnsupportedModelError, match="sliding layers for its prefix_store"):
        cache.save(tmp_path / "other.safetensors", sliding)


@pytest.mark.skipif(CHUNKS_BEHIND_A_CACHE, reason="this transformers can")
def test_chunked_prefill_of_an_old_transformers_is_not_shared_and_says_so():
    model, store, rows = shared_model("llama"), kv_hf.PrefixStore(), [SYSTEM]
    run(model, rows, store)
    with pytest.warns(kv_hf.KVCacheWarning, match="chunks only without a past"):
        found = run(model, rows, store, prefill_chunk_size=50)
    assert_same(found, stock(model, rows))
    assert store.stats().rows == 1


def test_add_refuses_what_the_cache_does_not_hold():
    model, store = shared_model("llama"), kv_hf.PrefixStore()
    cache = run(model, [SYSTEM, SYSTEM[:90]], store, max_new_tokens=2).past_key_values
    for rows in ([SYSTEM], [SYSTEM, 7], [SYSTEM, SYSTEM], SYSTEM):
        with pytest.raises(kv_hf.CacheMismatchError, match="rows must be a list of token ids"):
            store.add(cache, rows)
    with pytest.raises(kv_hf.CacheMismatchError, match="made with this prefix_store"):
        kv_hf.PrefixStore().add(cache, [SYSTEM, SYSTEM[:90]])


def test_two_first_users_get_one_storage(monkeypatch):
    """Both find none: the second must not put its own in the place of the first one's."""
    from kv_hf.pages import storage

    model, store = shared_model("llama"), kv_hf.PrefixStore()
    made = storage.PageStorage
    barrier = threading.Barrier(2)

    def slow(*args):
        with contextlib.suppress(threading.BrokenBarrierError):
            barrier.wait(0.3)
        return made(*args)

    monkeypatch.setattr(storage, "PageStorage", slow)
    caches = [kv_hf.PagedCache(model.config, page_size=PAGE, prefix_store=store) for _ in range(2)]

    def work(index):
        for layer in range(2):
            caches[index].update(*torch.randn(2, 1, 2, 40, 16), layer)

    assert at_once(work, 2) == [None] * 2
    assert caches[0].layers[0].storage is caches[1].layers[0].storage


LONG = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 96}


@pytest.mark.parametrize(("kind", "more"), [("dynamic", {}), ("longrope", LONG)])
def test_keys_that_depend_on_the_length_of_the_text_are_not_shared(kind, more):
    rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 10000.0, **more}
    rows = [SYSTEM[:80] + words(60, seed) for seed in (1, 2)]
    store, logits = kv_hf.PrefixStore(), []
    for shared in (None, store):  # dynamic NTK changes a model for good when a text is long
        model = make_model("llama", max_position_embeddings=96, rope_scaling=rope)
        logits.append(run(model, rows, shared, max_new_tokens=4).logits)
    for a, b in zip(*logits, strict=True):
        rounding.assert_close(a, b)
    assert store.stats().rows == 0


@pytest.mark.parametrize("drafts", ["lookup", "model"])
@pytest.mark.parametrize("made_by", ["generate", "user"])
def test_assisted_decoding_says_that_it_does_not_share(made_by, drafts):
    """The options of the target reach the model that drafts, whose pages no store of the target can hold."""
    model, store = shared_model("llama"), kv_hf.PrefixStore()
    drafted = {"prompt_lookup_num_tokens": 2}
    if drafts == "model":
        drafted = {"assistant_model": make_model("llama", num_hidden_layers=1)}
    options = {"cache_implementation": "paged_exact", "cache_config": {"prefix_store": store}}
    if made_by == "user":
        options = {"past_key_values": kv_hf.PagedCache(model.config, prefix_store=store)}
    with pytest.warns(kv_hf.KVCacheWarning, match="assisted decoding has no prefill"):
        model.generate(**batch([SYSTEM]), **GREEDY, **drafted, **options)


# -- what a store and a saved cache know a model by ---------------------------------------------------------

ROWS = [SYSTEM + words(9, 2)]


def matrix(rows, columns, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, columns, generator=generator).to(dtype)


SHAPES = [(1536, 576), (576, 1536), (130, 127), (1, 20001), (20001, 1)]


# -- samples -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sample_reads_a_number_of_every_row_and_every_column(shape):
    places = torch.arange(shape[0] * shape[1], dtype=torch.int32).reshape(shape)
    found = sample(places).long()
    rows, columns = found // shape[1], found % shape[1]
    assert len(rows.unique()) == shape[0]
    assert len(columns.unique()) == shape[1] or shape[0] == 1
    assert len(found) <= max(WHOLE, 3 * max(shape) + 3)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64],
    ids=str,
)  # fmt: skip
def test_described_reads_numbers_of_every_dtype(dtype):
    tensor = matrix(200, 100).to(dtype)
    before = described([Weight("any", tensor)])
    assert not before["any"].endswith("-")
    tensor.view(torch.uint8)[3].bitwise_xor_(1)
    assert described([Weight("any", tensor)]) != before


def test_described_reads_a_part_of_the_numbers_and_finds_every_counted_write():
    """What docs/serving.md promises of single numbers, and what it does not."""
    tensor = matrix(576, 576)

    def told():
        return [described([Weight("any", tensor)], places) for places in (False, True)]

    before = told()
    tensor.data[0, 1] += 1  # between the samples, and torch does not count it
    assert told() == before
    tensor[0, 1] += 1
    assert told()[0] == before[0] and told()[1] != before[1]


# -- the store ---------------------------------------------------------------------------------------------------


def through_data(model):
    model.model.layers[0].self_attn.k_proj.weight.data.mul_(1.5)


def assigned(model):
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data * 1.5


def in_inference_mode(model):
    with torch.inference_mode():
        model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)


CHANGES = {
    "in inference mode": in_inference_mode,
    "through .data": through_data,
    "assigned": assigned,
    "in place": lambda model: model.model.layers[0].self_attn.k_proj.weight.mul_(1.5),
    "buffer": lambda model: model.model.rotary_emb.inv_freq.data.mul_(0.5),
    "module": lambda model: setattr(model.model.layers[0].mlp, "up_proj", nn.Linear(64, 96, False)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_pages_of_weights_that_changed_unseen_by_torch_are_not_found(change):
    store = kv_hf.PrefixStore()
    with torch.inference_mode(change is in_inference_mode):
        model = make_model("llama")
    for hits in (0, 1):
        run(model, ROWS, store)
        assert store.stats().rows_hit == hits
    with torch.no_grad():
        change(model)
    found = run(model, ROWS, store)
    assert_same(found, stock(model, ROWS))
    assert store.stats().rows_hit == 1
    run(model, ROWS, store)
    assert store.stats().rows_hit == 2


def test_a_cache_that_went_on_with_other_weights_is_not_kept():
    model, store = make_model("llama"), kv_hf.PrefixStore()
    out = run(model, ROWS, store)
    through_data(model)
    text = torch.cat([out.sequences, tokens(1, 5)], 1)
    out = beside_stock.run(model, {"input_ids": text}, out.past_key_values)
    with pytest.raises(kv_hf.CacheMismatchError, match="more than one state of the model"):
        store.add(out.past_key_values, [out.sequences[0, :-1].tolist()])


def test_a_hook_has_prefixes_of_its_own():
    """A steering vector changes keys and values, and goes again."""
    model, store = make_model("llama"), kv_hf.PrefixStore()
    run(model, ROWS, store)
    handle = model.model.layers[0].register_forward_hook(lambda module, given, out: out + 0.5)
    steered = run(model, ROWS, store)
    assert_same(steered, stock(model, ROWS))
    assert store.stats().rows_hit == 0
    run(model, ROWS, store)
    handle.remove()
    assert_same(run(model, ROWS, store), stock(model, ROWS))
    assert store.stats().rows_hit == 2


def test_autocast_has_prefixes_of_its_own():
    """Where it changes the dtype of values too, the store is refused until it is cleared."""
    model, store = make_model("llama"), kv_hf.PrefixStore()
    with torch.autocast("cpu", torch.bfloat16):
        cast = store.bind_model(model)
        run(model, ROWS, store)
    assert store.bind_model(model) != cast
    held, needed = (rf"values in exact \({dtype}, 2 heads" for dtype in ("bfloat16", "float32"))
    with pytest.raises(
        kv_hf.CacheMismatchError, match=f"holds .*{held}.*needs .*{needed}.*autocast"
    ):
        run(model, ROWS, store)
    gc.collect()
    store.clear()
    assert_same(run(model, ROWS, store), stock(model, ROWS))
    assert store.stats().rows_hit == 0


def test_dropout_that_is_a_number_is_not_shared_in_training():
    """Llama's attention_dropout is no module: pages filled under it were found again in eval mode."""
    model, store = make_model("llama", attention_dropout=0.5).train(), kv_hf.PrefixStore()
    training = space_of(model)
    with pytest.warns(kv_hf.KVCacheWarning, match="drops numbers at random"):
        run(model, ROWS, store)
    model.eval()
    assert space_of(model) != training
    assert_same(run(model, ROWS, store), stock(model, ROWS))
    assert store.stats().rows_hit == 0
    model.model.layers[0].self_attn.train()
    assert drops_numbers(model) and not drops_numbers(make_model("llama").train())


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_offloaded_weights_are_not_told_and_change_nothing(place, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model, store = make_model("llama"), kv_hf.PrefixStore()
    expected = stock(model, ROWS)
    if place == "cpu":
        accelerate.cpu_offload(model, torch.device("cpu"))
    else:
        accelerate.disk_offload(model, tmp_path / "off", execution_device=torch.device("cpu"))
    run(model, ROWS, store)
    out = run(model, ROWS, store)
    assert store.stats().rows_hit == 1
    assert_same(out, expected)
    out.past_key_values.save(tmp_path / "cache", model)
    kv_hf.PagedCache.load(tmp_path / "cache", make_model("llama")).check_integrity()


def test_a_reset_waits_for_a_store_that_clears_without_holding_what_that_needs():
    """clear() holds its pool's lock when it takes the owner's: reset() in the other order would wait for ever."""
    model, store = shared_model("llama"), kv_hf.PrefixStore()
    run(model, [SYSTEM], store)
    # as a reset does last
    resetting = threading.Thread(target=store.page_memory.clear, daemon=True)
    with store.tree.pool.lock:
        resetting.start()
        resetting.join(0.2)
        assert resetting.is_alive() and store.page_memory.lock.acquire(timeout=10)
        store.page_memory.lock.release()
    resetting.join(60)
    assert not resetting.is_alive()


# -- in a folder ---------------------------------------------------------------------------------------------


def kept_in(folder, name="paged_int4", model=None, rows=(SYSTEM,), salt="", **options):
    """Answer as a process does that begins with the folder; return the answers, and the counts once all is written."""
    store = kv_hf.PrefixStore(folder=folder, **options.pop("of_store", {}))
    found = run(model or make_model("llama"), list(rows), store.for_tenant(salt), name, options)
    store.flush()
    return found, store.stats()


def as_next(family, name):
    """Return what a second prompt is answered with by the store that has computed the first."""
    store, model = kv_hf.PrefixStore(), made(family)
    run(model, [SYSTEM], store, name)
    return run(model, [SYSTEM + words(9, 2)], store, name), store.stats()


def made(family):
    if family == "sliding":
        return make_sliding("gemma3_text", 24)
    return tiny_latent.make_model("deepseek_v3") if family == "latent" else make_model(family)


@pytest.mark.parametrize("family", ["llama", "sliding", "latent"])
@pytest.mark.parametrize("name", ["paged_exact", "paged_int8", "paged_int4"])
def test_a_folder_gives_the_next_process_the_stored_bytes(family, name, tmp_path):
    expected, in_memory = as_next(family, name)
    kept_in(tmp_path, name, made(family))
    found, counts = kept_in(tmp_path, name, made(family), rows=[SYSTEM + words(9, 2)])
    assert torch.equal(found.sequences, expected.sequences)
    assert all(torch.equal(*pair) for pair in zip(found.logits, expected.logits, strict=True))
    assert counts.pages_read > 0 and counts.pages_damaged == 0
    assert counts.tokens_computed == in_memory.tokens_computed - len(SYSTEM)


def test_a_cache_cropped_to_nothing_begins_with_what_the_store_knows():
    model, store, rows = shared_model("llama"), kv_hf.PrefixStore(), BATCHES["one row"]
    first = run(model, rows, store)
    cache = kv_hf.PagedCache(model.config, page_size=16, prefix_store=store)
    beside_stock.run(model, batch([words(9, 3)]), cache, max_new_tokens=2)
    cache.crop(-cache.get_seq_length())
    hits = store.stats().rows_hit
    assert_same(beside_stock.run(model, batch(rows), cache, max_new_tokens=24), first)
    assert store.stats().rows_hit == hits + 1


def test_a_batch_begins_with_a_folder(tmp_path):
    rows = BATCHES["ragged"]
    kept_in(tmp_path, "paged_exact", rows=rows[:1])
    for _ in range(2):
        found, counts = kept_in(tmp_path, "paged_exact", rows=rows)
        assert_same(found, stock(make_model("llama"), rows))
        assert counts.pages_read >= (len(SYSTEM) - 4) // PAGE and counts.rows_hit == 5


def other_sums(path):
    """Change a page, and its checksum with it; return what lies there then."""
    page = {"page": torch.zeros(7, dtype=torch.uint8)}
    path.write_bytes(save(page, prefix_folder.about(path, page)))


DAMAGE = {
    "cut off": lambda path, other: path.write_bytes(path.read_bytes()[:-9]),
    "empty": lambda path, other: path.write_bytes(b""),
    "a flipped bit": lambda path, other: path.write_bytes(
        path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])
    ),
    "another page": lambda path, other: path.write_bytes(other),
    "text": lambda path, other: path.write_text("a page"),
    "of other sizes": lambda path, other: other_sums(path),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("which", ["first tokens", "pages"])
def test_damaged_files_are_computed_anew_said_once_and_written_again(damage, which, tmp_path, said):
    expected, before = kept_in(tmp_path, "paged_exact")
    files = sorted(tmp_path.glob("*/*.safetensors"), key=lambda path: path.stat().st_mtime_ns)
    roots = [path for path in files if path.name.count(".") == 1]
    hit = roots if which == "first tokens" else [path for path in files if path not in roots][2:6:3]
    contents = [path.read_bytes() for path in files]
    for path in hit:
        DAMAGE[damage](path, contents[files.index(path) - 1])
    for _ in hit:  # each run finds the first one that is left
        found, counts = kept_in(tmp_path, "paged_exact")
        assert_same(found, expected)
        assert counts.pages_damaged == 1
    assert len(said("is damaged")) == 1
    _, counts = kept_in(tmp_path, "paged_exact")
    assert (counts.pages_read, counts.pages_damaged) == (before.pages, 0)


def test_metadata_of_a_file_tells_its_state_and_sizes():
    """A file of another model's folder passed for this one's; and without sinks a flipped bit made 3 heads of 2, as no numbers do not tell."""
    told = [
        prefix_folder.about(Path(place), {"0.0": torch.zeros(heads, 0, 16)})
        for place, heads in (("a/b", 2), ("a/b", 3), ("c/b", 2))
    ]
    assert told[0] != told[1] and told[0] != told[2]


def another_weight(model):
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight[0, 0] += 1


OTHERS = {
    "weights": {"change": another_weight},
    "dtype": {"change": lambda model: model.to(torch.bfloat16)},
    "a hook": {
        "change": lambda model: model.model.layers[0].register_forward_hook(lambda *a: None)
    },
    "sinks": {"sink_tokens": 2},
    "formats": {"name": "paged_int8"},
    "layers": {"layers": {"0": {"keys": "exact"}}},
    "a tenant": {"salt": "a"},
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_folder_gives_nothing_to_another(other, tmp_path):
    """Its files stay, and those of the other one, which finds its own, lie beside them."""
    options, model = dict(OTHERS[other]), make_model("llama")
    options.pop("change", lambda model: None)(model)
    _, before = kept_in(tmp_path)
    _, counts = kept_in(tmp_path, model=model, **options)
    assert (counts.pages_read, counts.rows_hit, counts.pages_damaged) == (0, 0, 0)
    _, counts = kept_in(tmp_path, model=model, **options)
    assert (counts.pages_read > 0) == (other != "a hook")
    assert kept_in(tmp_path)[1].pages_read == before.pages


def test_a_full_folder_loses_what_was_used_least_recently(tmp_path):
    texts = [words(150, seed) for seed in range(30, 34)]
    _, counts = kept_in(tmp_path, rows=texts[:1])
    size = sum(path.stat().st_size for path in tmp_path.glob("*/*"))
    bound = {"of_store": {"folder_bytes": int(3.4 * size)}}
    for text in (texts[1], texts[2], texts[0], texts[3]):  # the first one is used again
        kept_in(tmp_path, rows=[text], **bound)
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*")) <= 3.4 * size
    assert kept_in(tmp_path, rows=texts[:1])[1].pages_read == counts.pages
    assert kept_in(tmp_path, rows=texts[3:])[1].pages_read == counts.pages
    assert kept_in(tmp_path, rows=texts[1:2])[1].pages_read < counts.pages
    kept_in(tmp_path / "small", of_store={"folder_bytes": 1})
    assert not list((tmp_path / "small").glob("*/*"))


@pytest.mark.parametrize("why", ["a file is there", "no space"])
def test_a_folder_that_takes_nothing_leaves_the_store_in_memory(why, tmp_path, said, monkeypatch):
    folder = tmp_path / "folder"
    if why == "a file is there":
        folder.write_text("")
    else:
        monkeypatch.setattr(prefix_folder.os, "replace", no_space)
    store = kv_hf.PrefixStore(folder=folder)
    for turn in range(2):
        run(shared_model("llama"), [SYSTEM], store)
        assert store.stats().rows_hit == turn
        store.flush()
    assert len(said("cannot be written to")) == 1
    assert not list(tmp_path.glob("folder/*/*"))


def no_space(*args):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_stores_of_one_folder_work_side_by_side(tmp_path):
    rows = [SYSTEM[:90] + words(60, seed) for seed in range(4)]
    model = shared_model("llama")
    expected = [stock(model, [row]).sequences for row in rows]
    for _ in range(3):
        found = at_once(lambda row: kept_in(tmp_path, "paged_exact", model, rows=[rows[row]]), 4)
        assert all(
            torch.equal(one.sequences, e) for (one, _), e in zip(found, expected, strict=True)
        )
        assert not sum(counts.pages_damaged for _, counts in found)
    assert min(counts.pages_read for _, counts in found) == (150 - 4 - 1) // PAGE


def test_pages_that_wait_for_the_writer_are_not_given_to_others(tmp_path, monkeypatch):
    """A full store would give their ids to the next text, and the file would hold its pages."""
    go, write = threading.Event(), prefix_folder.PrefixFolder._write
    model, texts = shared_model("llama"), [words(150, seed) for seed in range(40, 43)]
    expected = stock(model, texts[:1]).sequences
    store = kv_hf.PrefixStore(max_bytes=20_000, folder=tmp_path)

    def slow(*args):
        assert go.wait(60)
        write(*args)

    monkeypatch.setattr(prefix_folder.PrefixFolder, "_write", slow)
    for text in texts:
        run(model, [text], store)
        gc.collect()
    go.set()
    store.flush()
    found, counts = kept_in(tmp_path, "paged_exact", model, texts[:1])
    assert counts.pages_read > 0 and torch.equal(found.sequences, expected)


def test_pages_that_another_thread_brings_meanwhile_are_not_brought_twice(tmp_path, monkeypatch):
    model, read = shared_model("llama"), prefix_folder.PrefixFolder.pages
    kept_in(tmp_path, "paged_exact", model)
    store = kv_hf.PrefixStore(folder=tmp_path)

    def interrupted(*args):
        monkeypatch.undo()
        found = read(*args)
        run(model, [SYSTEM[:120]], store)
        return found

    monkeypatch.setattr(prefix_folder.PrefixFolder, "pages", interrupted)
    assert_same(run(model, [SYSTEM], store), stock(model, [SYSTEM]))
    assert store.stats().rows_hit == 2
    store.page_memory.pool(None).check_integrity()


def test_clear_removes_what_a_folder_has_of_the_model(tmp_path):
    kept_in(tmp_path)
    _, other = kept_in(tmp_path, sink_tokens=2)
    store = kv_hf.PrefixStore(folder=tmp_path)
    run(make_model("llama"), [SYSTEM], store, "paged_int4")
    store.clear()
    assert kept_in(tmp_path)[1].pages_read == 0
    assert kept_in(tmp_path, sink_tokens=2)[1].pages_read == other.pages


WRITING = """
import sys
import test_prefix_store as tests
for seed in range(1000):
    print(seed, flush=True)
    tests.kept_in(sys.argv[1], rows=[tests.SYSTEM[:100] + tests.words(100, 100 + seed)])
"""


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.11, 0.2, 0.7])
def test_a_writer_that_is_killed_leaves_no_damaged_page(seconds, tmp_path):
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*folders, *sys.path])}
    words_of = [sys.executable, "-c", WRITING, str(tmp_path)]
    with subprocess.Popen(words_of, env=env, stdout=subprocess.PIPE) as writer:
        assert writer.stdout.readline()
        writer.stdout.readline()  # the first text is written
        time.sleep(seconds)
        writer.kill()
    for seed in range(2):
        row = [SYSTEM[:100] + words(100, 100 + seed)]
        found, counts = kept_in(tmp_path, rows=row)
        assert counts.pages_damaged == 0
        assert counts.pages_read or seed
        assert torch.equal(found.sequences, kept_in(tmp_path / "other", rows=row)[0].sequences)


# -- states beside pages -------------------------------------------------------------------------------------

KNOWN = families("causal").keys() - (
    set() if CHUNKS_BEHIND_A_CACHE else {"nemotron_h", "recurrent_gemma"}
)  # 5.17: states in modules
# Mamba, linear attention with and without latents, convolutions, several states a layer
WITH_STATES = [
    name
    for name in ("falcon_h1", "granitemoehybrid", "inkling_text", "kimi_linear", "lfm2", "nemotron_h", "olmo_hybrid", "qwen3_next", "zamba2", "zaya")
    if name in KNOWN
]  # fmt: skip
of_family = functools.cache(build_model)
STEP = 64  # of the snapshots; with 4 sinks they lie behind 68, 132, 196, .. tokens


def cut_at(model, row, ends, cache):
    """Compute the beginning of a row in parts that end there."""
    with torch.no_grad():
        for begin, end in pairwise([0, *ends]):
            model(torch.tensor([row[begin:end]]), past_key_values=cache)
    return cache


TURNS = [  # a prompt, and how many of its tokens no snapshot holds
    (SYSTEM + words(9, 2), 209),
    (SYSTEM + words(40, 3), 44),  # branches in the page behind a snapshot
    (SYSTEM[:180] + words(60, 4), 108),  # branches where pages are known and no snapshot is
    (SYSTEM + words(9, 2), 13),
    (SYSTEM[:90], 22),  # within what is known
]
# where the states of the second one are known then, and where its computing had stopped before
CUTS = [
    ((), 68),
    ((68,), 132),
    ((68, 132), 196),
    ((68, 132, 196), 228),
    ((68,), 84),
]


@pytest.mark.parametrize("family", WITH_STATES)
def test_a_prompt_goes_on_behind_the_last_states_that_are_known(family):
    model, store = of_family(family), kv_hf.PrefixStore(snapshot_tokens=STEP)
    for number, (row, new) in enumerate(TURNS):
        before = store.stats()
        found = run(model, [row], store)
        after = store.stats()
        assert after.tokens_computed - before.tokens_computed == new
        assert after.rows_hit - before.rows_hit == bool(number)
        last = 4 + (len(row) - 5) // PAGE * PAGE
        ends = [*range(68, last, STEP), last]
        by_hand = cut_at(model, row, ends, DynamicCache(config=model.config))
        assert_same(found, beside_stock.run(model, batch([row]), by_hand, max_new_tokens=24))
        assert torch.equal(found.sequences, stock(model, [row]).sequences)
        found.past_key_values.check_integrity()
    # all that generations have done since has not touched what is stored
    space, row = store.bind_model(model), TURNS[1][0]
    nodes = store.tree.find(space, row)
    kept = [4 + PAGE * place for place, node in enumerate(nodes) if node.states is not None]
    assert kept == sorted(end for _, end in CUTS)
    for begins, end in CUTS:
        paged = kv_hf.PagedCache(model.config, page_size=PAGE)
        alone = cut_at(model, row, [*begins, end], paged)
        states = {
            f"{index}.{name}": state
            for index, layer in enumerate(alone.layers)
            for name, state in states_of(layer).items()
        }
        stored = nodes[(end - 4) // PAGE].states
        assert [*states] == [*stored]
        assert all(torch.equal(stored[name], state) for name, state in states.items())


STATE_BATCHES = {
    "equal rows": [SYSTEM + words(8, 3)] * 3,
    "a common beginning": [SYSTEM + words(8, seed) for seed in (3, 4, 5)],
    "nothing in common": [words(80, seed) for seed in (6, 7)],
    "rows that end with a page": [words(100, seed) for seed in (6, 7)],
}


@pytest.mark.parametrize("chunk", [None, *CHUNKS])
@pytest.mark.parametrize("name", STATE_BATCHES)
@pytest.mark.parametrize("family", ["falcon_h1", "qwen3_next"])
def test_rows_of_one_length_begin_with_copies_of_the_states(family, name, chunk):
    model, rows = of_family(family), STATE_BATCHES[name]
    store, options = kv_hf.PrefixStore(snapshot_tokens=STEP), {}
    if chunk is not None:
        options["prefill_chunk_size"] = chunk
    for turn in range(2):
        assert_same(run(model, rows, store, **options), stock(model, rows))
        stats = store.stats()
        assert stats.rows_hit == (turn * len(rows) if rows[0][:9] == SYSTEM[:9] else 0)
    for row in rows:  # what a batch has left is right for each of its rows
        assert_same(run(model, [row], store, **options), stock(model, [row]))
    known = [store.find(store.bind_model(model), row).tokens for row in rows]
    assert known == [{80: 68, 100: 84, 208: 196}[len(row)] for row in rows]
    # and for several at once, which begin where all are known
    assert_same(run(model, rows, store, **options), stock(model, rows))
    more = [row + words(20 + len(row) % 2, 9) for row in rows]
    assert_same(run(model, more, store, **options), stock(model, more))


def test_rows_that_know_different_places_begin_at_one_that_all_know():
    model, store = of_family("qwen3_next"), kv_hf.PrefixStore(snapshot_tokens=STEP)
    rows = [SYSTEM, words(100, 6) + SYSTEM[:100]]
    run(model, rows[:1], store)
    run(model, [rows[1][:90]], store)  # up to 84, with a snapshot at 68
    before = store.stats().tokens_computed
    assert_same(run(model, rows, store), stock(model, rows))
    assert store.stats().tokens_computed - before == 2 * (200 - 68)


def test_left_padding_of_one_row_is_taken_and_that_of_ragged_rows_is_refused():
    model, store = of_family("falcon_h1"), kv_hf.PrefixStore(snapshot_tokens=STEP)
    inputs = batch([SYSTEM + words(20, 2), SYSTEM[:150]])
    alone = {name: given[1:] for name, given in inputs.items()}
    for hits in range(2):
        found = beside_stock.run(model, alone, pages(prefix_store=store), max_new_tokens=24)
        assert_same(found, beside_stock.run(model, alone, max_new_tokens=24))
        assert store.stats().rows_hit == hits
    with pytest.warns(kv_hf.KVCacheWarning, match="prefix_store is not used: rows of several len"):
        found = beside_stock.run(model, inputs, pages(prefix_store=store), max_new_tokens=24)
    assert_same(found, beside_stock.run(model, inputs, max_new_tokens=24))
    assert store.stats().rows == 2


@pytest.mark.parametrize("family", ["granitemoehybrid", "kimi_linear", "zaya"])
@pytest.mark.parametrize("name", ["paged_int8", "paged_int4", "paged_int2"])
def test_the_second_time_a_prompt_is_answered_bit_for_bit_as_the_first(family, name):
    """In pages of any width, which layers may widen, and with exact tokens at the end: states end where pages do."""
    model, store = of_family(family), kv_hf.PrefixStore(snapshot_tokens=STEP)
    rows = [SYSTEM + words(9, 2)]
    first, second = (run(model, rows, store, name) for _ in range(2))
    assert torch.equal(first.sequences, second.sequences)
    assert all(map(torch.equal, first.logits, second.logits))
    exact = first.past_key_values.options.recent_tokens
    known = 4 + (209 - max(1, exact) - 4) // PAGE * PAGE
    assert store.stats().tokens_computed == 2 * 209 - known


def test_states_count_in_the_bytes_of_a_store_and_go_with_their_pages():
    model, texts = of_family("qwen3_next"), [words(150, seed) for seed in range(20, 25)]
    store = kv_hf.PrefixStore(snapshot_tokens=STEP)
    run(model, texts[:1], store)
    space = store.bind_model(model)

    def held():
        nodes = store.tree._nodes.values()
        page = sum(one.spec.page_bytes for one in store.page_memory.storages.values())
        whole = store.tree.counts()[0] * page
        return whole + sum(tensor_bytes((node.sinks, node.states)) for node in nodes)

    one = held()
    assert store.stats().bytes == one and store.stats().pages == 9
    states = tensor_bytes([node.states for node in store.tree.find(space, texts[0])])
    assert states > one // 3
    store = kv_hf.PrefixStore(int(2.5 * one), snapshot_tokens=STEP)
    for text in (*texts[:2], texts[0], *texts[2:4]):
        assert_same(run(model, [text], store), stock(model, [text]))
        gc.collect()
        assert store.stats().bytes == held() <= 2.5 * one + one  # with what the cache held
    store.keep(space, [], (), [], 0)
    assert store.stats().bytes == held() <= 2.5 * one
    known = [store.find(space, [*text, 0]).tokens for text in texts]
    assert known == [68, 0, 148, 148, 0] and store.stats().evictions > 9
    store.clear()
    assert store.stats().bytes == store.tree.counts()[2] == 0
    store = kv_hf.PrefixStore(1, snapshot_tokens=STEP)
    for text in (
        texts[0],
        words(3, 1),
    ):  # the second one, which ends no page, leaves what the first one's cache held
        run(model, [text], store)
        gc.collect()
    assert store.stats().bytes == store.tree.counts()[2] == 0


def test_tenants_and_adapters_share_no_states():
    model, store = build_model("lfm2"), kv_hf.PrefixStore(snapshot_tokens=STEP)
    for tenant in (store, store.for_tenant("a"), store.for_tenant("b")):
        before = store.stats().rows_hit
        for _ in range(2):
            assert_same(run(model, [SYSTEM], tenant), stock(model, [SYSTEM]))
        assert store.stats().rows_hit == before + 1
    with torch.no_grad():
        model.model.layers[0].conv.conv.weight.mul_(1.5)
    found = run(model, [SYSTEM], store)
    assert_same(found, stock(model, [SYSTEM]))


def test_a_second_turn_goes_on_behind_the_first_prompt():
    model, store = of_family("lfm2"), kv_hf.PrefixStore(keep_answers=True, snapshot_tokens=STEP)
    first = run(model, [SYSTEM], store).sequences[0].tolist()
    pages_of_prompt = store.stats().pages
    second = [first + words(20, 5)]
    assert_same(run(model, second, store), stock(model, second))
    assert store.stats().tokens_computed == 200 + len(second[0]) - 196
    assert pages_of_prompt == 12


@pytest.mark.parametrize("family", ["falcon_h1", "kimi_linear", "lfm2"])
@pytest.mark.parametrize("name", ["paged_exact", "paged_int4"])
def test_a_folder_keeps_states_with_their_pages(family, name, tmp_path, said):
    model, of_store = of_family(family), {"snapshot_tokens": STEP}
    stores = [kv_hf.PrefixStore(folder=one, **of_store) for one in (tmp_path, None)]
    for store, length in product(stores, (200, 190)):
        run(model, [SYSTEM[:length]], store, name)
        store.flush()  # the second gives states to a page that is written by then
    files = sorted(tmp_path.glob("*/*.states.safetensors"))
    assert len(files) == stores[0].tree.counts()[2] == (4 if name == "paged_exact" else 3)
    text = SYSTEM[:190] + words(9, 2)
    expected, in_memory = run(model, [text], stores[1], name), stores[1].stats()
    found, counts = kept_in(tmp_path, name, model, [text], of_store=of_store)
    assert torch.equal(found.sequences, expected.sequences)
    assert all(map(torch.equal, found.logits, expected.logits))
    reader = kv_hf.PrefixStore(folder=tmp_path, **of_store)
    run(model, [text], reader, name)
    known = {"paged_exact": 180, "paged_int4": 132}[name]
    assert counts.tokens_computed == len(text) - known and counts.pages_damaged == 0
    assert in_memory.tokens_computed == counts.tokens_computed + stores[0].stats().tokens_computed
    for path in tmp_path.glob("*/*.states.safetensors"):
        DAMAGE["a flipped bit"](path, None)
    found = run(model, [text], reader, name)  # its states are no longer the file's
    assert all(map(torch.equal, found.logits, expected.logits))
    found, counts = kept_in(tmp_path, name, model, [text], of_store=of_store)
    assert torch.equal(found.sequences, expected.sequences)
    assert counts.pages_damaged > 0 == counts.rows_hit and len(said("is damaged")) == 1
    assert kept_in(tmp_path, name, model, [text], of_store=of_store)[1].rows_hit == 1


NOT_FROM_STATES = {
    "bamba": "BambaForCausalLM: its forwards of several tokens do not go on from states",
    "jamba": "do not go on from states",
    "zamba": "do not go on from states",
    "recurrent_gemma": "RecurrentGemmaForCausalLM: layer 0 has None as conv_states.0",
}


@pytest.mark.parametrize("family", [name for name in NOT_FROM_STATES if name in KNOWN])
def test_models_that_do_not_go_on_from_states_get_no_prefixes(family):
    """transformers' Bamba computes the second part of a prompt as if it were the first; its own caches do so, too."""
    model, store = of_family(family), kv_hf.PrefixStore(snapshot_tokens=STEP)
    with pytest.warns(kv_hf.KVCacheWarning, match=NOT_FROM_STATES[family]):
        found = run(model, [SYSTEM], store)
    assert_same(found, stock(model, [SYSTEM]))
    assert store.stats().rows == store.stats().pages == 0


@pytest.mark.parametrize(
    ("family", "given", "says"),
    [
        ("deepseek_v32", {}, "layer 0 is transformers' DynamicIndexedLayer"),
        ("minimax_m3_vl_text", {}, "layer 1 is transformers' MiniMaxM3VLSparseCacheLayer"),
        ("lfm2", {"snapshot_tokens": 96}, "multiple of 64 and of page_size=16, got 96"),
        ("lfm2", {"snapshot_tokens": 32}, "snapshot_tokens must be an integer of at least 64"),
    ],
)
def test_stores_that_cannot_keep_states_are_refused_by_name(family, given, says):
    if family not in families("causal"):
        pytest.skip("the installed transformers has no such family")
    with pytest.raises(kv_hf.CacheOptionError, match=says):
        run(of_family(family), [SYSTEM], kv_hf.PrefixStore(**given))
