"""Bytes: what a cache reports equals its tensors and the prediction, a decode step stays small, and a cache says what it is."""

import pytest
import torch
from allocations import NewTensors
from tiny_models import ONE_FORMAT, left_padded, make_model, shared_model, tokens

import kv_hf
from kv_hf.backends.reference.pages import TILE_TOKENS
from kv_hf.pages.step import block_table


def tensor_bytes(cache):
    """Add up the tensors of a cache by hand."""
    total = 0
    for layer in cache.paged_layers:
        total += sum(t.nbytes for side in layer.storage.sides for t in side.fields.values())
        total += sum(window.tokens.nbytes for window in layer.residuals)
    return total + block_table(cache.group.batch.pages).nbytes


def predicted(cache):
    options = cache.options
    return kv_hf.predict_memory(
        [layer.spec for layer in cache.paged_layers],
        [cache.group.tokens(row) for row in cache.group.rows],
        sink_tokens=options.sink_tokens,
        recent_tokens=options.recent_tokens,
        max_length=options.max_length,
    )


@pytest.mark.parametrize(
    ("implementation", "options"),
    [
        *((name, {}) for name in ONE_FORMAT),
        ("paged_int4", {"page_size": 16, "sink_tokens": 0, "recent_tokens": 24}),
        ("paged_exact", {"page_size": 16, "max_length": 300}),
    ],
    ids=str,
)
def test_memory_equals_tensors_and_prediction_after_generation(implementation, options):
    model = shared_model("qwen2")
    for inputs in ({"input_ids": tokens(1, 3)}, left_padded([150, 4, 77])):
        out = model.generate(
            **inputs,
            max_new_tokens=41,
            cache_implementation=implementation,
            cache_config=options,
            return_dict_in_generate=True,
        )
        cache = out.past_key_values
        report = cache.memory()
        assert report.total == tensor_bytes(cache)
        assert report == predicted(cache)


def test_reserved_storage_never_moves_while_it_is_filled():
    model = shared_model("llama")
    cache = kv_hf.PagedCache(model.config, keys="int4", page_size=16, max_length=200)
    places = set()
    for _ in range(50):
        model(tokens(2, 4), past_key_values=cache)
        side = cache.layers[0].storage.keys
        places.add((side.capacity, side.fields["codes"].data_ptr()))
    assert places == {(2 * ((200 - 4) // 16), next(iter(places))[1])}
    cache.reset()
    assert cache.memory().total == 0


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
    assert (
        str(given) == "CacheConfig(keys='int8', values='int4', offload='cpu', device_bytes=1048576)"
    )
    assert "sink_tokens=4" in repr(given)
