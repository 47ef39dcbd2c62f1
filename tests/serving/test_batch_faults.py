"""Continuous batching on pages where things go wrong: ids used twice, managers side by side, full caches, changed models."""

import gc
import re
import time
import weakref

import torch
from test_batch import answers, batching, collected, config, prompts, running
from tiny_models import make_model
from transformers import AutoModelForCausalLM, Gemma2Config

import kv_hf

TEXT = prompts()[3]


def wait_for(true, seconds=30):
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.005)
    assert true()


def begun(manager, request_id, text=TEXT, **options):
    """Add a streaming request, and wait for its first token."""
    manager.add_request(text, request_id=request_id, streaming=True, **options)
    while manager.get_result(timeout=10) is None:
        pass


def test_children_that_wait_for_a_row_keep_the_salt():
    sampled = {"do_sample": True, "top_k": 1, "num_return_sequences": 3}
    with running(make_model("llama"), new=4, sampled=sampled, max_requests_per_batch=1) as manager:
        manager.add_request(TEXT, request_id="a", cache_salt="x")
        assert len(collected(manager, 3)) == 3
        manager.num_return_sequences = 1
        store = manager.batch_processor.cache.prefix_store
        before = store.stats().tokens_computed
        manager.add_request(TEXT, request_id="b")
        collected(manager, 1)
        assert store.stats().tokens_computed - before == len(TEXT)


def test_an_id_that_is_in_use_is_refused_and_the_others_go_on():
    with running(make_model("llama"), new=60) as manager:
        begun(manager, "a")
        manager.add_request([5, 6, 7], request_id="a")
        manager.add_request([5, 6, 7], request_id="b")
        done = []
        while len(done) < 3:
            output = manager.get_result(timeout=10)
            assert output is not None
            done += [output] if output.is_finished() else []
        assert {(one.request_id, one.error is None) for one in done} == {
            ("a", False),
            ("a", True),
            ("b", True),
        }


def test_starved_requests_leave_until_kept_prefixes_make_room_and_no_longer():
    left = {}
    for sharing in (True, False):
        rows = {"blocks": 24, "max_requests_per_batch": 8, "max_batch_tokens": 1000}
        with running(make_model("llama"), new=200, **rows, allow_block_sharing=sharing) as manager:
            for text in prompts((100,) * 8)[:8]:
                manager.add_request(text)
            found = collected(manager, 8)
            assert [one.error for one in found.values()] == [None] * 8
            left[sharing] = kv_hf.BatchCounts.of(manager).requests_evicted
    assert 0 < left[True] <= left[False]


def test_waiting_requests_go_on_when_all_others_are_cancelled():
    with running(make_model("llama"), new=600, blocks=12, max_requests_per_batch=8) as manager:
        scheduler = manager.batch_processor.scheduler
        for index, text in enumerate(prompts((100,) * 6)[:6]):
            manager.add_request(text, request_id=str(index))
        wait_for(lambda: scheduler.block_new_requests)
        with manager.pause():
            waiting = list(scheduler.waiting_requests)
            for request_id in scheduler.active_requests:
                manager.cancel_request(request_id)
        wait_for(lambda: not set(waiting) & set(scheduler.waiting_requests))


def eager_model():
    """Return a tiny model of a family without sdpa."""
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    model = AutoModelForCausalLM.from_config(Gemma2Config(**sizes, **heads)).eval()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


def test_managers_leave_a_model_its_eager_attention():
    """One stops, another goes on, and transformers' own pages are read as if there had been none."""
    model = eager_model()
    with running(model, new=60) as second:
        with running(model, new=60):
            begun(second, "a")
        assert collected(second, 1)["a"].error is None
    own, ours = (
        answers(model, [TEXT], config(one, 4), batching()) for one in (None, "paged_exact")
    )
    assert own == ours
    assert model.config._attn_implementation == "eager"


def test_an_attention_that_is_changed_under_a_manager_is_named():
    model = make_model("llama")
    with running(model, new=500) as manager:
        begun(manager, "a")
        model.set_attn_implementation("eager")
        said = (
            "was changed, .* its attention is 'eager', which does not read pages; stop the manager"
        )
        assert re.search(said, collected(manager, 1)["a"].error)


def test_stop_frees_the_cache_of_a_manager_that_is_still_named():
    with running(make_model("llama"), new=6) as manager:
        cache = weakref.ref(manager.batch_processor.cache)
    gc.collect()
    assert cache() is None


def test_pages_of_generate_in_a_shared_store_leave_a_manager_its_room():
    model, store = make_model("llama"), kv_hf.PrefixStore()
    options = {"max_bytes": "1MiB", "prefix_store": store}
    with running(model, new=6, options=options) as manager:
        cache = kv_hf.PagedCache(model.config, keys="int8", values="int8", prefix_store=store)
        ids = torch.randint(3, 97, (6, 900), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            model(input_ids=ids, past_key_values=cache)
        manager.add_request(TEXT * 2, request_id="a")
        assert collected(manager, 1)["a"].error is None
