"""Decode steps under torch.compile: one graph, the tokens and bytes of the eager caches, nothing that waits.

Most tests use the backends "eager" and "aot_eager", which trace as any backend does and compile nothing.
"""

import gc
import itertools
import logging
import re
import weakref

import pytest
import rounding
import torch
from harness import slow_but
from tiny_models import (
    FAMILIES,
    NO_INTERFACE,
    left_padded,
    make_model,
    make_sliding,
    shared_model,
    tokens,
)
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from transformers import AttentionInterface, CompileConfig, DynamicCache

import kv_hf

PAGE, LENGTH = 16, 96
sdpa = AttentionInterface._global_mapping["sdpa"]
INPUTS = {
    "one": {"input_ids": tokens(1, 23), "attention_mask": torch.ones(1, 23, dtype=torch.long)},
    "batch": {"input_ids": tokens(3, 23), "attention_mask": torch.ones(3, 23, dtype=torch.long)},
    "padded": left_padded([20, 33]),
}


@pytest.fixture(autouse=True)
def _forget_graphs(monkeypatch):
    # pytest listens to all loggers; torch writes out every guard for whoever listens to this one
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs():
    return counters["stats"]["unique_graphs"]


def compiling(backend="eager", fullgraph=True):
    """The options with which generate() compiles on a CPU too."""
    config = CompileConfig(backend=backend, mode=None, fullgraph=fullgraph)
    config._compile_all_devices = True
    return config


def preallocated(model, keys="int4", **options):
    return kv_hf.PagedCache(model.config, keys=keys, page_size=PAGE, max_length=LENGTH, **options)


def compiled(keys="exact", backend="eager"):
    """Return a model of one layer, its compiled forward, and a cache beside transformers' own."""
    model = make_model("llama", num_hidden_layers=1)
    step = torch.compile(model.forward, fullgraph=True, backend=backend)
    return model, step, preallocated(model, keys), DynamicCache(config=model.config)


def generate(model, inputs, name, *, steps=40, compile_config=None, **options):
    return model.generate(
        **inputs,
        max_new_tokens=steps,
        do_sample=False,
        cache_implementation=name,
        cache_config={"page_size": PAGE, **options} if name else None,
        compile_config=compile_config,
    )


# -- generate() ----------------------------------------------------------------------------------------------------


FAST = {("paged_exact", "one"), ("paged_int8", "batch"), ("paged_int4", "padded")}
ALL = itertools.product(["paged_exact", "paged_int8", "paged_int4"], INPUTS)


@pytest.mark.parametrize(("name", "inputs"), slow_but(FAST, ALL))
def test_generate_compiles_one_graph_and_gives_the_eager_tokens(name, inputs):
    model, inputs = shared_model("llama"), INPUTS[inputs]
    wanted = generate(model, inputs, name)
    config = compiling("aot_eager" if name == "paged_int4" else "eager")
    got = generate(model, inputs, name, max_length=LENGTH, compile_config=config)
    assert torch.equal(got, wanted)
    assert graphs() == 1  # 39 decode steps, over more than two pages
    assert torch.equal(
        generate(model, inputs, name, max_length=LENGTH, compile_config=config), wanted
    )
    assert graphs() == 1  # a new cache of the same sizes runs the same code
    if name == "paged_exact":
        assert torch.equal(got, generate(model, inputs, None))
        # dynamo makes a number that differs from call to call symbolic: no step may put it into a text
        longer = generate(model, inputs, name, max_length=LENGTH + 44, compile_config=config)
        assert torch.equal(got, longer)


@pytest.mark.parametrize(
    "family", slow_but(("qwen3", "gpt2"), [one for one in FAMILIES if one not in NO_INTERFACE])
)
def test_families_compile_without_a_break(family):
    model, inputs = shared_model(family), INPUTS["padded"]
    wanted = generate(model, inputs, None, steps=20)
    got = generate(
        model, inputs, "paged_exact", steps=20, max_length=LENGTH, compile_config=compiling()
    )
    assert torch.equal(got, wanted)
    assert graphs() == 1


def test_without_max_length_nothing_is_compiled():
    generate(shared_model("llama"), INPUTS["padded"], "paged_int4", compile_config=compiling())
    assert graphs() == 0


def test_chunked_prefill_compiles_on_an_initialized_cache():
    model, inputs = make_model("llama", num_hidden_layers=1), INPUTS["padded"]
    options = {**inputs, "max_new_tokens": 20, "do_sample": False, "prefill_chunk_size": 16}
    grown = kv_hf.PagedCache(model.config, keys="int4", page_size=PAGE)
    wanted = model.generate(**options, past_key_values=grown)
    cache = preallocated(model)
    cache.early_initialization(2, 2, 16, torch.float32, torch.device("cpu"))
    got = model.generate(**options, past_key_values=cache, compile_config=compiling())
    assert torch.equal(got, wanted)
    assert graphs() > 1
    assert cache._group.batch.padding.tolist() == [13, 0]
    cache.check_integrity()


# -- a step by itself ----------------------------------------------------------------------------------------------


def decode(model, step, cache, inputs, count, padded_to=LENGTH):
    """Prefill, then `count` steps; return the logits of all steps. The 2D mask keeps one width."""
    rows, width = inputs["input_ids"].shape
    mask = torch.zeros(rows, padded_to, dtype=torch.long)
    mask[:, :width] = inputs["attention_mask"]
    out, logits = model(**inputs, past_key_values=cache), []
    for at in range(width, width + count):
        mask[:, at] = 1
        token = tokens(rows, 1, seed=at)
        places = mask.sum(-1, keepdim=True) - 1
        out = step(
            input_ids=token,
            attention_mask=mask[:, :padded_to],
            position_ids=places,
            past_key_values=cache,
        )
        logits.append(out.logits)
    return torch.cat(logits, 1)


@pytest.mark.parametrize("name", slow_but(["int2"], ["exact", "int2"]))
@torch.no_grad()
def test_compiled_forward_gives_the_logits_and_bytes_of_the_eager_step(name):
    model, inputs = make_model("llama"), INPUTS["padded"]
    eager, compiled = preallocated(model, name), preallocated(model, name)
    wanted = decode(model, model, eager, inputs, 40)
    step = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    assert torch.equal(decode(model, step, compiled, inputs, 40), wanted)
    assert graphs() == 1
    calls = iter(range(100))
    mixed = preallocated(model, name)
    taking_turns = lambda **options: (step if next(calls) % 3 else model)(**options)  # noqa: E731
    assert torch.equal(decode(model, taking_turns, mixed, inputs, 40), wanted)
    assert graphs() == 1
    mixed.check_integrity()
    compiled.check_integrity()
    for mine, theirs in zip(compiled.layers, eager.layers, strict=True):
        assert torch.equal(mine.keys, theirs.keys) and torch.equal(mine.values, theirs.values)
        for side, like in zip(mine.storage.sides, theirs.storage.sides, strict=True):
            for name, one in side.fields.items():
                assert one.numpy().tobytes() == like.fields[name].numpy().tobytes()
    if name == "exact":
        dynamic = decode(model, model, DynamicCache(config=model.config), inputs, 40)
        rounding.assert_close(wanted, dynamic)


def recording(targets):
    """A backend that notes the aten operators of each graph and runs them as they are."""

    def compiler(graph, inputs):
        # an operator that changes its arguments is the first argument of one that makes it functional
        targets.append([f"{node.target} {node.args[:1]}" for node in graph.graph.nodes])
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=compiler)


def addresses(cache):
    stores = [layer.store for layer in cache.layers]
    fields = [one for store in stores for side in store.pages.sides for one in side.fields.values()]
    return [t.data_ptr() for t in (*fields, *(w.tokens for s in stores for w in s.residuals))]


@torch.no_grad()
def test_a_step_never_waits_and_moves_no_tensor():
    model, cache = make_model("llama"), preallocated(make_model("llama"))
    targets: list[list[str]] = []
    step = torch.compile(model.forward, fullgraph=True, backend=recording(targets))
    model(tokens(2, 20), past_key_values=cache)
    places = addresses(cache)
    for at in range(20):
        step(tokens(2, 1, seed=at), past_key_values=cache)
    assert addresses(cache) == places
    assert len(targets) == 1
    ran = " ".join(targets[0])
    for name in ("kv_hf.append", "kv_hf.attend", "kv_hf.seen"):
        assert name in ran
    # or inductor would ask for the columns, from which masks are made, behind an append
    assert not any(one.startswith("kv_hf.seen") for one in targets[0])
    for name in ("local_scalar_dense", "nonzero", "masked_select", "unique", "_to_copy.device"):
        assert name not in ran


@pytest.mark.parametrize("backend", slow_but(["aot_eager"], ["eager", "aot_eager"]))
@torch.no_grad()
def test_a_compiled_step_past_the_end_is_an_error(backend):
    model, step, cache, _ = compiled("int4", backend)
    model(tokens(2, LENGTH - 2), past_key_values=cache)
    for _ in range(2):
        step(tokens(2, 1), past_key_values=cache)
    with pytest.raises(kv_hf.CacheMismatchError, match=f"max_length={LENGTH} is reached"):
        step(tokens(2, 1), past_key_values=cache)
    with pytest.raises(kv_hf.CacheMismatchError, match=f"{LENGTH} columns are held"):
        model(tokens(2, 1), past_key_values=cache)


@torch.no_grad()
def test_a_mask_changed_in_place_is_compared_anew():
    """A step over another mask at the same place and length (a crop before) left out what that mask hid."""
    model, ids, token = (
        make_model("llama", num_hidden_layers=1),
        tokens(1, 30),
        tokens(1, 1, seed=3),
    )
    cache, stock = preallocated(model, "exact"), DynamicCache(config=model.config)
    step = torch.compile(model.forward, fullgraph=True, backend="eager")
    for one in (cache, stock):
        model(ids, past_key_values=one)
    mask = torch.zeros(1, 1, 1, LENGTH, dtype=torch.bool)
    for first in (0, 20):
        mask[..., :first], mask[..., first:31] = False, True
        found = step(token, attention_mask=mask, past_key_values=cache).logits
        wanted = model(token, attention_mask=mask[..., :31], past_key_values=stock).logits
        rounding.assert_close(found, wanted)
        cache.crop(-1)
        stock.crop(-1)


@torch.no_grad()
def test_a_prompt_compiles_whole_on_a_cache_without_tokens():
    """On a new one torch refused a min() with a key; on one cropped to nothing the AttributeError was of pages of no tokens."""
    model, step, cropped, _ = compiled()
    model(tokens(1, 9), past_key_values=cropped)
    step(tokens(1, 1), past_key_values=cropped)
    cropped.crop(-10)
    for cache in (cropped, preallocated(model, "exact")):
        stock = DynamicCache(config=model.config)
        for part in (tokens(1, 3), tokens(1, 1)):
            found, wanted = (
                call(part, past_key_values=one).logits
                for call, one in ((step, cache), (model, stock))
            )
            rounding.assert_close(found, wanted)


@torch.no_grad()
def test_reset_after_a_compiled_step_gives_all_tensors_back():
    """What the step's operators had left for each other kept pages and windows alive."""
    model, step, cache, _ = compiled("int4")
    model(tokens(1, 40), past_key_values=cache)
    step(tokens(1, 1), past_key_values=cache)
    store = cache.layers[0].store
    windows = [weakref.ref(one.tokens) for one in store.residuals]
    pages = [weakref.ref(one) for side in store.pages.sides for one in side.fields.values()]
    del store
    cache.reset()
    gc.collect()
    assert not any(one() is not None for one in windows + pages)


@torch.no_grad()
def test_steps_run_while_another_thread_compiles(monkeypatch):
    """torch says to all threads that it compiles: operators of a step that ran called themselves, RecursionError."""
    model, step, cache, stock = compiled()
    for one in (cache, stock):
        model(tokens(1, 20), past_key_values=one)
    for one in (step, step, model):
        found = one(tokens(1, 1), past_key_values=cache).logits
        rounding.assert_close(found, model(tokens(1, 1), past_key_values=stock).logits)
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)


# -- what cannot be traced says so ---------------------------------------------------------------------------------


UNCOMPILED = [("sdpa", (20, 1, 1)), ("sdpa", (20, 18, 1)), ("eager", (20, 1, 18, 1))]


@pytest.mark.parametrize(("attention", "lengths"), slow_but(UNCOMPILED[:1], UNCOMPILED))
@torch.no_grad()
def test_what_cannot_be_traced_runs_uncompiled_where_breaks_are_allowed(attention, lengths):
    """The prompt, a long chunk and another attention: torch leaves the graph there, and all is well."""
    model = make_model("llama", num_hidden_layers=2)
    model.set_attn_implementation(attention)
    step = torch.compile(model.forward, backend="eager")
    cache, grown = preallocated(model), kv_hf.PagedCache(model.config, keys="int4", page_size=PAGE)
    for length in lengths:
        part = tokens(2, length)
        got, wanted = (
            f(part, past_key_values=c).logits for f, c in ((step, cache), (model, grown))
        )
        rounding.assert_close(got, wanted)
    cache.check_integrity()


def changed(module, query, key, value, *args, **options):
    """Attend as sdpa does, to keys that the model has changed."""
    return sdpa(module, query, key * 1, value, *args, **options)


# (attention, tokens, whether gradients are wanted) -> what is said
UNTRACED = {
    ("eager", 1, False): "set_attn_implementation('sdpa')",
    ("sdpa", 17, False): "takes at most 16 tokens, got 17",
    ("sdpa", 1, True): "use torch.no_grad()",
    ("changed", 1, False): "changes keys or values",
}


@pytest.mark.parametrize(("attention", "length", "learns"), UNTRACED)
def test_what_cannot_be_traced_says_so(attention, length, learns, monkeypatch):
    """torch shows an error of traced code in its own words around ours."""
    if attention == "changed":
        monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", changed)
    model = make_model("llama")
    if attention == "eager":
        model.set_attn_implementation("eager")
    cache = preallocated(model)
    with torch.set_grad_enabled(learns):
        model(tokens(1, 5), past_key_values=cache)
        step = torch.compile(model.forward, backend="eager", fullgraph=True)
        said = UNTRACED[attention, length, learns]
        with pytest.raises(Exception, match=re.escape(said)):
            step(tokens(1, length), past_key_values=cache)


# -- slow: real backends -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["exact", "int8"])
@torch.no_grad()
def test_inductor_gives_the_eager_logits(name):
    """Fused code rounds in another order; of int8 that may change a code, which loses less than all codes together."""
    model, inputs = make_model("llama"), INPUTS["padded"]
    wanted = decode(model, model, preallocated(model, name), inputs, 40)
    exact = decode(model, model, preallocated(model, "exact"), inputs, 40)
    step = torch.compile(model.forward, fullgraph=True)
    got = decode(model, step, preallocated(model, name), inputs, 40)
    assert graphs() == 1
    most = float((wanted - exact).abs().max()) + rounding.allowed(wanted)
    torch.testing.assert_close(got, wanted, rtol=0, atol=most)


@pytest.mark.slow
@pytest.mark.parametrize(("window", "count"), [(None, 14), (20, 1)])
@torch.no_grad()
def test_inductor_makes_masks_before_tokens_are_appended(window, count):
    """It asked for the columns behind the append: masks of several tokens, and of windows, were those of later tokens."""
    model = make_sliding("mistral", window)
    cache, stock = preallocated(model, "exact"), DynamicCache(config=model.config)
    step = torch.compile(model.forward, fullgraph=True)
    for one in (cache, stock):
        model(tokens(2, 40), past_key_values=one)
    found = step(tokens(2, count), past_key_values=cache).logits
    rounding.assert_close(found, model(tokens(2, count), past_key_values=stock).logits)
