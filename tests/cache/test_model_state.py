"""What a prefix store and a saved cache know a model by: weights however they were written, hooks, autocast."""

import gc

import pytest
import torch
from test_prefix_store import KEPT, SYSTEM, batch, check, run, words
from tiny_models import make_model, tokens
from torch import nn

import kv_hf
from kv_hf.cache.identity import (
    WHOLE,
    ModelId,
    Weight,
    described,
    drops_numbers,
    sample,
    weights_of,
)

ROWS = [SYSTEM + words(9, 2)]
DROPPED = "weights of the model have changed"


def matrix(rows, columns, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, columns, generator=generator).to(dtype)


SHAPES = [(576, 576), (1536, 576), (576, 1536), (4096, 64), (130, 127), (1, 20001), (20001, 1)]


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


@pytest.mark.parametrize("line", ["row", "column"])
def test_described_finds_a_line_written_through_data(line):
    model = nn.Linear(400, 300)
    weights = weights_of(model)
    before = described(weights)
    assert described(weights_of(model)) == before
    data = model.weight.data if line == "row" else model.weight.data.T
    data[77] *= 1.001
    assert described(weights) != before


# -- the store ---------------------------------------------------------------------------------------------------


def through_data(model):
    model.model.layers[0].self_attn.k_proj.weight.data.mul_(1.5)


def in_place(model):
    model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)


def one_number(model):
    model.model.layers[0].self_attn.v_proj.weight.data[3, 4] += 2.0


def assigned(model):
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data * 1.5


def buffer(model):
    model.model.rotary_emb.inv_freq.data.mul_(0.5)


def swapped(model):
    layer = model.model.layers[0].mlp
    layer.up_proj = nn.Linear(64, 96, bias=False)


@pytest.mark.parametrize("change", [in_place, through_data, one_number, assigned, buffer, swapped])
def test_weights_that_change_unseen_by_torch_empty_the_store(change):
    model, store = make_model("llama"), kv_hf.PrefixStore()
    run(model, ROWS, store)
    with torch.no_grad():
        change(model)
    with pytest.warns(kv_hf.KVCacheWarning, match=DROPPED):
        found = run(model, ROWS, store)
    check(found, model.generate(**batch(ROWS), **KEPT))
    assert store.stats().rows_hit == 0
    run(model, ROWS, store)
    assert store.stats().rows_hit == 1


def test_weights_made_in_inference_mode_are_watched():
    with torch.inference_mode():
        model = make_model("llama")
    store = kv_hf.PrefixStore()
    run(model, ROWS, store)
    run(model, ROWS, store)
    assert store.stats().rows_hit == 1
    with torch.inference_mode():
        model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
    with pytest.warns(kv_hf.KVCacheWarning, match=DROPPED):
        found = run(model, ROWS, store)
    check(found, model.generate(**batch(ROWS), **KEPT))


def test_a_cache_that_went_on_with_other_weights_is_not_kept():
    model, store = make_model("llama"), kv_hf.PrefixStore()
    out = run(model, ROWS, store)
    through_data(model)
    text = torch.cat([out.sequences, tokens(1, 5)], 1)
    out = model.generate(text, past_key_values=out.past_key_values, **KEPT)
    with pytest.raises(kv_hf.CacheMismatchError, match="more than one state of the model"):
        store.add(out.past_key_values, [out.sequences[0, :-1].tolist()])


def test_a_hook_has_prefixes_of_its_own():
    """A steering vector changes keys and values, and goes again."""
    model, store = make_model("llama"), kv_hf.PrefixStore()
    run(model, ROWS, store)
    handle = model.model.layers[0].register_forward_hook(lambda module, given, out: out + 0.5)
    steered = run(model, ROWS, store)
    check(steered, model.generate(**batch(ROWS), **KEPT))
    assert store.stats().rows_hit == 0
    run(model, ROWS, store)
    handle.remove()
    check(run(model, ROWS, store), model.generate(**batch(ROWS), **KEPT))
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
    check(run(model, ROWS, store), model.generate(**batch(ROWS), **KEPT))
    assert store.stats().rows_hit == 0


def test_dropout_that_is_a_number_is_not_shared_in_training():
    """Llama's attention_dropout is no module: pages filled under it were found again in eval mode."""
    model, store = make_model("llama", attention_dropout=0.5).train(), kv_hf.PrefixStore()
    training = ModelId.for_store(model).space
    with pytest.warns(kv_hf.KVCacheWarning, match="drops numbers at random"):
        run(model, ROWS, store)
    model.eval()
    assert ModelId.for_store(model).space != training
    check(run(model, ROWS, store), model.generate(**batch(ROWS), **KEPT))
    assert store.stats().rows_hit == 0
    model.model.layers[0].self_attn.train()
    assert drops_numbers(model) and not drops_numbers(make_model("llama").train())


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_offloaded_weights_are_not_told_and_change_nothing(place, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model, store = make_model("llama"), kv_hf.PrefixStore()
    expected = model.generate(**batch(ROWS), **KEPT)
    if place == "cpu":
        accelerate.cpu_offload(model, torch.device("cpu"))
    else:
        accelerate.disk_offload(model, tmp_path / "off", execution_device=torch.device("cpu"))
    run(model, ROWS, store)
    out = run(model, ROWS, store)
    assert store.stats().rows_hit == 1
    check(out, expected)
    out.past_key_values.save(tmp_path / "cache", model)
    kv_hf.PagedCache.load(tmp_path / "cache", make_model("llama")).check_integrity()
