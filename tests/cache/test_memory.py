"""Bytes and steps: what a cache reports equals its tensors, a decode step stays small, and a cache says what it is."""

import gc
import os
import sys
import weakref
from importlib.util import find_spec

import pytest
import torch
from allocations import NewTensors
from beside_stock import run
from paged_inputs import needs_library
from tiny_models import ONE_FORMAT, left_padded, make_model, shared_model, tokens

import kv_hf
from kv_hf.backends.reference.pages import TILE_TOKENS
from kv_hf.bridge.masks import within_generate
from kv_hf.cache.store import Residual
from kv_hf.pages.step import block_table


def tensor_bytes(cache):
    """Add up the tensors of a cache by hand: codes, what stands beside them, exact tokens, tables."""
    sides = [side.fields for layer in cache.paged_layers for side in layer.storage.sides]
    codes = sum(fields["codes"].nbytes for fields in sides)
    pages = sum(tensor.nbytes for fields in sides for tensor in fields.values())
    exact = sum(one.tokens.nbytes for layer in cache.paged_layers for one in layer.residuals)
    return codes, pages - codes, exact, block_table(cache._group.batch.pages).nbytes


@pytest.mark.parametrize(
    ("implementation", "options"),
    [
        *((name, {}) for name in ONE_FORMAT),
        ("paged_int4", {"page_size": 16, "sink_tokens": 0, "recent_tokens": 24}),
        ("paged_exact", {"page_size": 16, "max_length": 300}),
    ],
    ids=str,
)
def test_memory_equals_tensors_after_generation(implementation, options):
    model = shared_model("qwen2")
    pages = {"cache_implementation": implementation, "cache_config": options}
    for inputs in ({"input_ids": tokens(1, 3)}, left_padded([150, 4, 77])):
        cache = run(model, inputs, pages, max_new_tokens=41).past_key_values
        found, expected = cache.memory(), tensor_bytes(cache)
        assert (found.payload, found.scales, found.tail, found.tables) == expected
        assert found.total == sum(expected)


@pytest.mark.parametrize("implementation", ONE_FORMAT)
@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_largest_temporary_of_a_decode_step_is_one_tile(implementation, kernel):
    """The cache is many tiles long, so a dense copy of even one side of one layer would show."""
    model = make_model("llama", max_position_embeddings=8192)
    config = model.config
    heads, dim = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    length = 10 * TILE_TOKENS + 40  # the step seals no page, so no storage grows
    cache = kv_hf.PagedCache.from_implementation(config, implementation, {"kernel": kernel})
    with torch.no_grad():
        model(tokens(1, length), past_key_values=cache)
        with NewTensors() as made:
            model(tokens(1, 1), past_key_values=cache)
    tile = heads * TILE_TOKENS * dim * 4  # fp32
    dense = heads * length * dim * 4
    assert made.largest <= max(tile, *(p.nbytes for p in model.parameters()))
    assert made.largest < dense / 4


@torch.no_grad()
def test_a_chunk_leaves_no_exact_tokens_behind(monkeypatch):
    """The packed arguments of the C kernel kept those of the last chunk, in every layer, until the next forward."""
    model, runs, run = shared_model("llama"), [], Residual.run

    def noted(*args):
        found = run(*args)
        runs.append(weakref.ref(found))
        return found

    monkeypatch.setattr(Residual, "run", noted)
    cache = kv_hf.PagedCache(model.config, keys="int4", page_size=16)
    for count in (40, 100, 100):
        model(tokens(1, count), past_key_values=cache)
    gc.collect()
    assert runs and not any(one() is not None for one in runs)


# -- what a decode step launches, and how often Python calls --------------------------------------------------

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed (pip install -e '.[gpu]')"
)


def counted(steps=20, *, batch=1, context=300, **options):
    """Return what each of `steps` steps of two layers launches; every row seals a page in one of them."""
    from fake_driver import HostRun, gpu
    from measure.shapes import AttentionShape

    with gpu() as fake, within_generate():
        shape = AttentionShape(8, 2, 128, 2)
        run = HostRun(shape, batch, context, "int4", page_size=16, **options)
        run.step()
        return [run.count(fake) for _ in range(steps)]


@needs_triton
@pytest.mark.parametrize(
    ("options", "plain", "sealing"),
    [
        ({"max_length": 512, "batch": 5, "ragged": True}, 3, 4),
        ({"max_length": 512}, 3, 4),
        ({"max_length": 8192, "context": 4200, "batch": 2, "read": 512}, 5, 6),
    ],
    ids=["ragged", "preallocated", "chosen pages"],
)
def test_a_step_launches_few_kernels_and_waits_for_nothing(options, plain, sealing):
    steps = counted(**options)
    assert min(step.in_a_layer for step in steps) == plain
    assert max(step.in_a_layer for step in steps) == sealing
    assert not any(step.waits for step in steps)


@needs_triton
def test_what_is_done_once_per_step_does_not_grow_with_the_context():
    short, long = (counted(3, context=n, max_length=8192) for n in (300, 4000))
    assert [step.kernels for step in short] == [step.kernels for step in long]


@needs_library
@pytest.mark.parametrize("options", [{}, {"max_length": 256}], ids=["growing", "max_length"])
def test_a_layer_of_a_decode_step_makes_few_python_calls(options):
    """Short texts are bound by the host: each call counts, those of the backends apart."""
    model = make_model("llama", num_hidden_layers=4)
    cache = kv_hf.PagedCache(model.config, keys="int8", **options)
    calls = {-1: 0}

    def count(frame, event, arg):
        code = frame.f_code
        ours = f"{os.sep}kv_hf{os.sep}" in code.co_filename
        if event != "call" or not ours or f"{os.sep}backends{os.sep}" in code.co_filename:
            return
        if code.co_qualname == "PagedCache.update":
            calls[frame.f_locals["layer_idx"]] = 0
        calls[max(calls)] += 1

    with torch.no_grad():
        for length in (100, 1, 1):
            model(tokens(1, length), past_key_values=cache)
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            model(tokens(1, 1), past_key_values=cache)
        finally:
            sys.setprofile(before)
    assert calls[-1] <= 16
    assert calls[0] <= 30
    assert all(calls[layer] <= 13 for layer in (1, 2, 3)), calls


# -- what a cache says it is --------------------------------------------------------------------------------

# options, and what repr says of them
SHOWN = [
    ({"keys": "int8", "values": "int4"}, "keys='int8', values='int4', page_size=64, rows=1, tokens=100, pages=1, bytes="),
    ({"keys": "int8", "layers": {"1": "int4"}, "sink_tokens": 8}, "page_size=64, sink_tokens=8, layers={'1': 'int4'}, rows=1"),
    ({"keys": "int4", "max_length": "1k"}, "page_size=64, max_length=1024, rows=1, tokens=100, "),
    ({"keys": "int4", "offload": "disk"}, "page_size=64, offload='disk', rows=1, "),
]  # fmt: skip


def filled(**options):
    model = shared_model("llama")
    cache = kv_hf.PagedCache(model.config, **options)
    for ids in tokens(1, 100).split([99, 1], dim=1):
        model(ids, past_key_values=cache)
    return cache


@pytest.mark.parametrize(("options", "part"), SHOWN, ids=str)
def test_cache_shows_its_options_and_contents(options, part):
    cache = filled(**options)
    assert repr(cache).startswith("PagedCache(keys=") and repr(cache).endswith(")")
    assert part in repr(cache) and f"bytes={cache.memory().total}" in repr(cache)


def test_memory_report_lists_its_parts():
    report = kv_hf.MemoryReport(
        payload=3 << 20, scales=1 << 20, tail=512, tables=0, other=0,
        pages_held=3, pages_allocated=4, tokens=6144, offloaded=2 << 30,
    )  # fmt: skip
    assert str(report) == (
        "4.00 MiB (codes 3.00 MiB, scales 1.00 MiB, exact tokens 512 B); 2.00 GiB outside of the device; 6,144 tokens, "
        "pages 3 of 4"
    )


def test_cache_config_prints_what_was_given():
    given = kv_hf.CacheConfig(keys="int8", values="int4", offload="cpu", device_bytes="1MiB")
    said = "CacheConfig(keys='int8', values='int4', offload='cpu', device_bytes=1048576)"
    assert str(given) == said and "sink_tokens=4" in repr(given)
