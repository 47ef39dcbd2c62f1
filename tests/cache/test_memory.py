"""Bytes: what a cache reports equals its tensors and the prediction, and a decode step stays small."""

import pytest
import rounding
import torch
from allocations import NewTensors
from tiny_models import ONE_FORMAT, left_padded, make_config, make_model, shared_model, tokens
from transformers import DynamicCache

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
        reserve_tokens=options.reserve_tokens,
        max_pages=options.max_pages,
    )


@pytest.mark.parametrize("implementation", ONE_FORMAT)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"page_size": 16, "sink_tokens": 0, "recent_tokens": 24},
        {"page_size": 16, "reserve_tokens": 300},
        {"reserve_tokens": 70},
        {"reserve_tokens": 100_000, "max_pages": 30},
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


@pytest.mark.parametrize(
    ("keys", "limit"), [("int4", 0.30), ("int8", 0.53), ("fp8", 0.53), ("int2", 0.22)]
)
@pytest.mark.parametrize("length", [4096, 4165, 6000])
def test_stored_part_of_bf16_at_head_dim_128(keys, limit, length):
    config = make_config("llama", num_hidden_layers=1, head_dim=128, num_key_value_heads=2)
    cache, dynamic = kv_hf.PagedCache(config, keys=keys), DynamicCache(config=config)
    states = torch.randn(2, 1, 2, length, 128).bfloat16()
    for first, last in ((0, length - 3), (length - 3, length)):
        for made in (cache, dynamic):
            made.update(*states[:, :, :, first:last], 0)
    stored = dynamic.layers[0].keys.nbytes + dynamic.layers[0].values.nbytes
    assert cache.memory().total <= limit * stored


def test_reserved_storage_never_moves_while_it_is_filled():
    model = shared_model("llama")
    cache = kv_hf.PagedCache(model.config, keys="int4", page_size=16, reserve_tokens=200)
    places = set()
    for _ in range(50):
        model(tokens(2, 4), past_key_values=cache)
        side = cache.layers[0].storage.keys
        places.add((side.capacity, side.fields["codes"].data_ptr()))
    assert places == {(2 * ((200 - 4) // 16), next(iter(places))[1])}
    for _ in range(10):
        model(tokens(2, 4), past_key_values=cache)
    assert cache.layers[0].storage.keys.capacity == cache.group.pool.num_held == 2 * 14
    cache.reset()
    assert cache.memory().total == 0


def test_padding_is_learnt_without_generate():
    """A direct forward with the kv_hf attention tells the cache of its padding, chunk by chunk too."""
    model = make_model("llama")
    inputs = left_padded([100, 10])
    cache, dynamic = kv_hf.PagedCache(model.config), DynamicCache(config=model.config)
    with torch.no_grad():
        for first, last in ((0, 40), (40, 95), (95, 100)):
            part = {
                "input_ids": inputs["input_ids"][:, first:last],
                "attention_mask": inputs["attention_mask"][:, :last],
                "position_ids": (inputs["attention_mask"].cumsum(-1) - 1).clamp(0)[:, first:last],
            }
            expected = model(**part, past_key_values=dynamic).logits
            found = model(**part, past_key_values=cache).logits
    rounding.assert_close(found[:, -1], expected[:, -1])
    assert [row.padding for row in cache.group.rows] == [0, 90]
    assert [cache.group.tokens(row) for row in cache.group.rows] == [100, 10]


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
