"""Decode steps of generate() as one CUDA graph, with a recording in place of the graph: tokens, limits, what forbids it."""

import copy
import logging
import threading

import pytest
import tiny_latent
import torch
import wrapped_kernels as tape
from tiny_models import left_padded, make_model, shared_model, stressed, tokens, value_channel
from tiny_models import make_sliding as windows

import kv_hf
from kv_hf.cache.model_shape import CACHE
from kv_hf.errors import CacheMismatchError, CacheOptionError, KVCacheWarning
from kv_hf.hf import generation, step_graph
from kv_hf.pages import moved

GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
FAMILIES = ["llama", "gpt2", "mixtral"]


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """A machine where the model seems to lie on a GPU, and graphs are recordings; counts what was recorded and replayed."""
    counts = {"captures": 0, "replays": 0}

    def capture(function):
        replay, made = tape.capture(function)
        counts["captures"] += 1

        def count():
            counts["replays"] += 1
            replay()

        return count, made

    tape.use_taped_kernels(monkeypatch)
    monkeypatch.setattr(moved, "is_host", lambda device: False)
    monkeypatch.setattr(moved, "is_recorded", lambda device: tape.Tape.active is not None)
    monkeypatch.setattr(generation, "why_not_captured", lambda model: None)
    monkeypatch.setattr(generation, "free_memory", lambda device: 1 << 40)
    monkeypatch.setattr(step_graph, "capture", capture)
    monkeypatch.setattr(step_graph, "on_side_stream", lambda function: function())
    kv_hf.notices.forget()
    return counts


def both(model, inputs, implementation="paged_exact", new=80, **options):
    """Tokens without kv_hf's graphs, and with them."""
    given = {**inputs, **GREEDY, "max_new_tokens": new, "cache_implementation": implementation}
    config = {"page_size": 16, **options}
    grown = model.generate(**given, cache_config={**config, "cuda_graph": "never"})
    return grown, model.generate(**given, cache_config=config)


RECENT = {"recent_tokens": 20}
CAPTURED = [
    *((family, "paged_exact", {}, 79) for family in FAMILIES),
    ("llama", "paged_int4", {"recent_tokens": 0}, 79),
    ("llama", "paged_fp8", {}, 79),
    # a mask that stood for nothing was built for the graph, and steps that get one read everything
    ("llama", "paged_exact", {"read": {"share": 0.25, "from": 32}}, 79),
    ("deepseek_v3", "paged_exact", {"latent": {"decode": "expand"}}, 79),  # computes with the mask
    ("gpt_oss", "paged_exact", {}, 40),
    *((family, "paged_exact", RECENT, 40) for family in ("gemma3_text", "deepseek_v3")),
]


@pytest.mark.parametrize(("family", "name", "options", "replays"), CAPTURED, ids=str)
def test_generate_captures_one_step_and_gives_the_tokens_of_the_growing_cache(
    family, name, options, replays, gpu
):
    """One token comes from the prompt; windows that give pages back take some steps of Python."""
    if family == "deepseek_v3":
        model = tiny_latent.make_model(family)
    else:
        model = make_model(family) if family in FAMILIES else windows(family, 24)
    grown, captured = both(model, left_padded([37, 20, 64]), name, **options)
    assert torch.equal(grown, captured)
    assert gpu["captures"] == 1 and replays <= gpu["replays"] <= 79


def test_generate_says_once_that_it_captures(caplog):
    with caplog.at_level(logging.WARNING, "kv_hf"):
        both(shared_model("llama"), left_padded([30, 20]))
        both(shared_model("llama"), left_padded([30, 20]))
    said = [line.message for line in caplog.records if "CUDA graph" in line.message]
    assert len(said) == 1 and "'cuda_graph': 'never'" in said[0]


def test_step_that_waits_for_the_device_is_run_by_python_and_says_why(gpu):
    model = make_model("llama")
    norm = model.model.norm
    norm.register_forward_hook(lambda module, args, out: out * float(out.abs().max() >= 0))
    with pytest.warns(KVCacheWarning, match="not as one CUDA graph: it cannot be captured .operat"):
        grown, made = both(model, left_padded([37, 20]))
    assert torch.equal(grown, made)
    assert gpu["replays"] == 0


def test_graph_whose_replay_differs_is_dropped_and_no_token_is_lost(gpu):
    model = make_model("llama")
    steps = []

    def drift(module, args, out):  # a number of Python's, which a graph holds as it was
        steps.append(0)
        return out * (1.0 + len(steps) % 2)

    model.lm_head.register_forward_hook(drift)
    with pytest.warns(KVCacheWarning, match="its replay gave other logits than Python"):
        grown, made = both(model, left_padded([37, 20]))
    assert torch.equal(grown, made)
    assert gpu == {"captures": 1, "replays": 1}


def static_cache(model, length=128, **options):
    return kv_hf.PagedCache(model.config, keys="int8", page_size=16, max_length=length, **options)


def test_given_cache_is_captured_in_every_generation_and_continues(gpu):
    model, prompt = shared_model("llama"), {"input_ids": tokens(1, 30)}
    made = []
    for choice in ("never", "auto"):
        cache = static_cache(model, 200, cuda_graph=choice)
        text = prompt["input_ids"]
        for _ in range(2):
            # without one generate() makes a mask that hides tokens which look like padding
            mask = torch.ones_like(text)
            text = model.generate(
                text, attention_mask=mask, **GREEDY, max_new_tokens=40, past_key_values=cache
            )
            text = torch.cat([text, tokens(1, 5, seed=9)], 1)
        cache.check_integrity()
        assert cache.get_seq_length() == text.shape[1] - 6
        made.append(text)
    assert torch.equal(*made)
    assert gpu["captures"] == 2


def test_replay_past_the_end_raises_and_changes_nothing(gpu):
    model, prompt = shared_model("llama"), tokens(2, 20)
    cache = static_cache(model, 24)
    graph = step_graph.StepGraph(model, cache)
    with torch.no_grad():
        graph(input_ids=prompt, **{CACHE: cache})
        token = tokens(2, 1)
        for column in range(20, 24):
            position = torch.full((2, 1), column)
            graph(input_ids=token, **{CACHE: cache}, position_ids=position)
        assert gpu["replays"] == 4
        held = cache.layers[0].keys
        with pytest.raises(CacheMismatchError, match="max_length=24 is reached"):
            graph(input_ids=token, **{CACHE: cache}, position_ids=position)
    assert torch.equal(cache.layers[0].keys, held)
    cache.check_integrity()


def test_stopped_replay_is_found_by_the_next_step(gpu, monkeypatch):
    model, cache = shared_model("llama"), static_cache(shared_model("llama"))
    graph = step_graph.StepGraph(model, cache)

    def stopped():
        taken, acquire = [], cache.page_memory.lock.acquire
        thread = threading.Thread(target=lambda: taken.append(acquire(blocking=False)))
        thread.start()
        thread.join()
        assert taken == [False]  # no other thread makes pages grow under a replay
        raise KeyboardInterrupt

    with torch.no_grad():
        graph(input_ids=tokens(2, 20), **{CACHE: cache})
        for seed in range(3):
            graph(input_ids=tokens(2, 1, seed=seed), **{CACHE: cache})
        copied = copy.deepcopy(cache)  # pages stay where they are as long as it lives
        graph._replay = stopped
        with pytest.raises(KeyboardInterrupt):
            graph(input_ids=tokens(2, 1), **{CACHE: cache})
        with pytest.raises(kv_hf.InterruptedForwardError, match="call reset"):
            graph(input_ids=tokens(2, 1), **{CACHE: cache})
        cache.reset()
        for new in (20, 1):
            graph(input_ids=tokens(2, new), **{CACHE: cache})
    assert gpu["captures"] == 2  # the windows are others
    for one in (cache, copied):
        one.check_integrity()


FORBIDDEN = {
    "never": ({}, {"cuda_graph": "never"}),
    "few tokens": ({"max_new_tokens": 31}, {}),
    "beams": ({"num_beams": 2}, {}),
    "disable_compile": ({"disable_compile": True}, {}),
    "returned": ({"return_dict_in_generate": True}, {}),
    "chunks": ({"prefill_chunk_size": 16}, {}),
    "offload": ({}, {"offload": "disk"}),
    "lookup": ({"prompt_lookup_num_tokens": 3}, {}),
    "no compiled steps": ({}, {}),
}


@pytest.mark.parametrize("case", FORBIDDEN)
def test_generate_lets_the_cache_grow_where_a_graph_is_forbidden(case, gpu, monkeypatch):
    arguments, options = FORBIDDEN[case]
    made = []
    build = kv_hf.PagedCache.from_options.__func__
    spy = lambda cls, *args: made.append(build(cls, *args)) or made[-1]  # noqa: E731
    monkeypatch.setattr(kv_hf.PagedCache, "from_options", classmethod(spy))
    given = {"input_ids": tokens(1, 40), **GREEDY, "max_new_tokens": 40, **arguments}
    given["cache_implementation"], config = "paged_exact", {"page_size": 16, **options}
    model = make_model("llama")
    model._can_compile_fullgraph = case != "no compiled steps"
    model.generate(**given, cache_config=config)
    assert made[-1].options.max_length is None and gpu["captures"] == 0
    if case != "never":
        with pytest.raises(CacheOptionError, match="cuda_graph='always': decode steps cannot be"):
            model.generate(**given, cache_config={**config, "cuda_graph": "always"})


def test_generate_lets_the_cache_grow_where_memory_is_short(gpu, monkeypatch):
    monkeypatch.setattr(generation, "free_memory", lambda device: 100_000)
    grown, made = both(shared_model("llama"), left_padded([37, 20]))
    assert torch.equal(grown, made)
    assert gpu["captures"] == 0


@pytest.mark.parametrize(("lengths", "recent"), [([18, 9], 20), ([9, 5], 0)])
def test_a_step_is_captured_again_once_the_first_pages_are_wider(lengths, recent, gpu):
    """Python runs the step that seals them, behind others that were replayed: the graph writes to memory of narrow pages."""
    model = stressed(make_model("llama"), value_channel(100))
    grown, captured = both(model, left_padded(lengths), "paged_int4", recent_tokens=recent)
    assert torch.equal(grown, captured)
    assert gpu["captures"] == 2


def test_a_step_is_captured_again_once_pages_have_grown_for_those_of_a_copy(gpu):
    """The cache and its copy hold more pages than max_length is room for: replays wrote beyond the memory of the old ones."""
    model, prompt, made = shared_model("llama"), tokens(1, 60), []
    for choice in ("never", "auto"):
        cache = static_cache(model, 200, cuda_graph=choice)
        with torch.no_grad():
            model(prompt, **{CACHE: cache})
            copied = copy.deepcopy(cache)
            model(tokens(1, 100, seed=3), **{CACHE: copied})
        text = torch.cat([prompt, tokens(1, 3, seed=5)], 1)
        mask = torch.ones_like(text)
        text = model.generate(
            text, attention_mask=mask, **GREEDY, max_new_tokens=130, past_key_values=cache
        )
        with torch.no_grad():
            made.append((text, model(text[:, -1:], **{CACHE: cache}).logits))
    assert torch.equal(made[0][0], made[1][0]) and torch.equal(made[0][1], made[1][1])
    assert gpu["captures"] > 1


def test_always_raises_on_a_cpu(monkeypatch):
    monkeypatch.undo()
    with pytest.raises(CacheOptionError, match="the model is on cpu"):
        shared_model("llama").generate(
            tokens(1, 8), cache_implementation="paged_int4", cache_config={"cuda_graph": "always"}
        )


@pytest.mark.parametrize("options", [{}, {"max_length": 64}], ids=["growing", "max_length"])
def test_a_graph_of_the_users_own_is_refused_while_it_is_captured(options, monkeypatch):
    """A replay runs no Python, so that it would write the same token's place again, without a word."""
    model = shared_model("llama")
    cache = kv_hf.PagedCache(model.config, page_size=16, **options)
    model(tokens(1, 20), past_key_values=cache)
    with monkeypatch.context() as patched:
        patched.setattr(moved, "is_recorded", lambda device: True)
        with pytest.raises(
            CacheOptionError, match="CUDA graph of a forward .* outside of the capt"
        ):
            model(tokens(1, 1), past_key_values=cache)
    model(tokens(1, 1), past_key_values=cache)
    assert cache.get_seq_length() == 21
    cache.check_integrity()


def test_bench_times_the_graph_of_generate(gpu):
    from measure.gpu import decoding_of

    decoding = decoding_of(shared_model("llama"), 40, 2, "paged_int4", "graph")
    logits = [decoding.run() for _ in range(6)]
    assert gpu == {"captures": 1, "replays": 6}
    assert all(torch.isfinite(one).all() for one in logits)
    assert decoding.cache.get_seq_length() == 46
