"""Freed memory goes back to the system once behind a prefill: never per step, only beside glibc, and not where it is turned off."""

import os
import sys

import pytest
import torch
from tiny_models import make_model, tokens
from transformers import LlamaConfig

import kv_hf
from kv_hf.evaluation import measure_footprint
from kv_hf.pages import cpu_memory
from kv_hf.pages.cpu_memory import (
    LEAST_COLUMNS,
    TRIM_VARIABLE,
    PrefillWatch,
    give_back_freed,
    trim_heap,
)

CPU, LONG = torch.device("cpu"), LEAST_COLUMNS


@pytest.fixture
def calls(monkeypatch):
    """One entry for each time that memory was given back."""
    found = []
    monkeypatch.setattr(cpu_memory, "give_back_freed", lambda: found.append(1))
    return found


def test_watch_gives_back_once_behind_a_prefill(calls):
    watch = PrefillWatch()
    for columns in (LONG, LONG, LONG):  # chunks of one prefill
        watch.begin(columns, CPU)
    assert not calls
    for _ in range(5):
        watch.begin(1, CPU)
    watch.end()
    assert len(calls) == 1
    watch.begin(LONG, CPU)
    watch.end()
    watch.begin(1, CPU)
    assert len(calls) == 2


def test_watch_leaves_short_forwards_and_other_devices_alone(calls):
    watch = PrefillWatch()
    watch.begin(LONG - 1, CPU)
    watch.begin(1, CPU)
    watch.begin(LONG, torch.device("cuda"))
    watch.begin(1, torch.device("cuda"))
    watch.end()
    assert not calls


@pytest.mark.parametrize(
    ("batch", "options"),
    [
        (1, {}),
        (3, {}),
        (1, {"num_beams": 3}),
        (1, {"prefill_chunk_size": LONG}),
        (1, {"cache_config": {"max_length": 400}}),
        (1, {"prompt_lookup_num_tokens": 3}),
    ],
    ids=str,
)
def test_generate_gives_back_once_per_prompt(calls, batch, options):
    model = make_model("llama")
    model.generate(
        tokens(batch, 2 * LONG + 5),
        cache_implementation="paged_int4",
        max_new_tokens=12,
        do_sample=False,
        **options,
    )
    assert len(calls) == 1


def test_each_turn_of_a_chat_gives_back_once(calls):
    model = make_model("llama")
    cache = kv_hf.PagedCache(model.config, keys="int4", values="int4")
    text = tokens(1, 100)
    for turn in range(1, 4):
        text = model.generate(text, past_key_values=cache, max_new_tokens=9, do_sample=False)
        assert len(calls) == turn
        text = torch.cat([text, tokens(1, 80)], 1)
    model.generate(text[:, :-60], past_key_values=cache, max_new_tokens=9, do_sample=False)
    assert len(calls) == 3  # a short turn leaves little behind


def test_own_loop_gives_back_at_its_first_step_or_when_it_says_so(calls):
    model = make_model("llama")
    for says_so in (False, True):
        cache = kv_hf.PagedCache(model.config, keys="int4", values="int4")
        with torch.no_grad():
            model(tokens(1, 100), past_key_values=cache)
            if says_so:
                cache.end_prefill()
                assert len(calls) == 2
            for _ in range(4):
                model(tokens(1, 1), past_key_values=cache)
    assert len(calls) == 2


def test_generate_gives_back_for_a_shared_beginning_and_for_the_rest(calls):
    """Rows with one long beginning: it is computed once, in a forward of its own."""
    model = make_model("llama")
    prompt = torch.cat([tokens(1, 200).repeat(2, 1), tokens(2, 70)], 1)
    store = kv_hf.PrefixStore()
    model.generate(
        prompt,
        cache_implementation="paged_int4",
        cache_config={"prefix_store": store},
        max_new_tokens=5,
        do_sample=False,
    )
    assert len(calls) == 2


@pytest.fixture
def asked(monkeypatch):
    """The arguments of malloc_trim, which is replaced."""
    found = []
    monkeypatch.setattr(cpu_memory, "_malloc_trim", lambda: found.append)
    return found


def test_give_back_freed_obeys_its_switch(asked, monkeypatch):
    monkeypatch.delenv(TRIM_VARIABLE, raising=False)
    assert give_back_freed() and asked == [0]
    monkeypatch.setenv(TRIM_VARIABLE, "never")
    assert not give_back_freed() and asked == [0]


@pytest.mark.parametrize("version", ["musl 1.2", "", None, ValueError, OSError])
def test_trim_heap_does_nothing_beside_other_libraries(version, monkeypatch):
    def confstr(name):
        if isinstance(version, type):
            raise version
        return version

    monkeypatch.setattr(os, "confstr", confstr)
    cpu_memory._malloc_trim.cache_clear()
    try:
        assert not trim_heap()
    finally:
        cpu_memory._malloc_trim.cache_clear()


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is a library of Linux")
def test_trim_heap_finds_glibc():
    try:
        glibc = (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (OSError, ValueError):
        glibc = False
    assert trim_heap() == glibc


@pytest.mark.slow
@pytest.mark.skipif(not cpu_memory._malloc_trim(), reason="only glibc keeps what a prefill frees")
def test_process_with_int4_stays_below_one_with_dynamic_cache():
    """Two processes of their own, as users start them: a small model with heads as real ones have them."""
    sizes = {
        "vocab_size": 512,
        "hidden_size": 512,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
    }
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    config = LlamaConfig(
        **sizes, **heads, max_position_embeddings=1 << 20, tie_word_embeddings=False
    )
    grown = {
        cache: measure_footprint(config, cache, 8192, steps=4)
        for cache in ("dynamic", "paged_int4")
    }
    if grown["dynamic"]["prefill_grown_bytes"] is None:
        pytest.skip("this system does not tell what is resident")
    for field in ("prefill_grown_bytes", "steps_grown_bytes"):
        assert grown["paged_int4"][field] < grown["dynamic"][field]
