"""Every method of Cache and CacheLayerMixin on exact pages against DynamicCache, and bad input: an error, and nothing is broken after it."""

import contextlib
import copy

import pytest
import torch
import transformers
from tiny_models import make_config, shared_model, tokens
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin

import kv_hf
from kv_hf.cache.model_shape import CROP_TAKES_LENGTHS
from kv_hf.errors import CacheOptionError

LAYERS, HEADS, DIM = 2, 2, 16


def states(rows, length, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randn(rows, HEADS, length, DIM, generator=generator).to(dtype) for _ in range(2)]
        for _ in range(LAYERS)
    ]


def append(cache, parts):
    return [cache.update(keys, values, layer) for layer, (keys, values) in enumerate(parts)]


def make(keys="exact", **options):
    config = make_config("llama", head_dim=DIM)
    options = {"page_size": 16, "sink_tokens": 2, **options}
    return kv_hf.PagedCache(config, keys=keys, **options), DynamicCache(config=config)


def assert_equal(paged, dynamic):
    paged.check_integrity()
    assert paged.get_seq_length() == dynamic.get_seq_length()
    for mine, theirs in zip(paged.layers, dynamic.layers, strict=True):
        if theirs.get_seq_length() == 0:
            assert mine.keys is None or mine.keys.numel() == 0
            continue
        assert torch.equal(mine.keys, theirs.keys)
        assert torch.equal(mine.values, theirs.values)


def filled(rows=3, lengths=(20, 1, 1, 30), **options):
    paged, dynamic = make(**options)
    for seed, length in enumerate(lengths):
        parts = states(rows, length, seed)
        for (k, v), (k2, v2) in zip(append(paged, parts), append(dynamic, parts), strict=True):
            assert k.shape == k2.shape
            assert k.dtype == k2.dtype
            assert k.device == k2.device
            assert torch.equal(k * 1, k2)
            assert torch.equal(v * 1, v2)
    return paged, dynamic


def test_every_public_method_of_cache_is_covered_or_inherited():
    """A method that a new transformers adds must be looked at before it is trusted."""
    known = """
    activate_past_recording batch_repeat_interleave batch_select_indices batch_size crop early_initialization get_conv_state
    get_mask_sizes get_max_cache_shape get_max_length get_query_offset get_recurrent_state get_seq_length has_previous_state
    is_compileable is_croppable is_dummy is_initialized is_linear is_recording_past is_sliding lazy_initialization max_batch_size
    max_cache_len offload prefetch reorder_cache reset supports_early_init update update_conv_state update_indexer
    update_recurrent_state
    """
    found = {
        name for cls in (Cache, CacheLayerMixin) for name in vars(cls) if not name.startswith("_")
    }
    assert found <= set(known.split())


def test_first_update_returns_the_very_tensors():
    paged, _ = make("int4")
    parts = states(2, 40, 0)
    for (keys, values), (k, v) in zip(append(paged, parts), parts, strict=True):
        assert keys is k
        assert values is v


def test_properties_equal_dynamic_cache():
    paged, dynamic = filled()
    names = "is_compileable is_croppable is_sliding is_initialized is_linear batch_size"
    for name in names.split():
        if hasattr(dynamic, name):
            assert getattr(paged, name) == getattr(dynamic, name), name
    assert len(paged) == len(dynamic) == LAYERS
    assert paged.get_max_length() == dynamic.get_max_length() == -1
    for sizes in ((1, 0), (5, 1)):
        assert paged.get_mask_sizes(*sizes) == dynamic.get_mask_sizes(*sizes)
    assert isinstance(paged, DynamicCache)


@pytest.mark.parametrize("count", [-30, torch.tensor(-51), -500, 11])
def test_crop_equals_dynamic_cache(count):
    """A positive number is a length in old versions of transformers, and an error in others."""
    paged, dynamic = filled()
    refused = count > 0 and not CROP_TAKES_LENGTHS
    for cache in (paged, dynamic):
        with pytest.raises(ValueError) if refused else contextlib.nullcontext():
            cache.crop(count)
    assert_equal(paged, dynamic)
    for cache in (paged, dynamic):
        append(cache, states(3, 25, 99))
    assert_equal(paged, dynamic)


@pytest.mark.parametrize("keys", ["int4", "fp8"])
def test_crop_of_tokens_drafted_one_by_one_leaves_no_trace(keys):
    """An assistant model drafts in forwards of one token and takes them back together."""
    paged, _ = make(keys)
    straight, _ = make(keys)
    for cache in (paged, straight):
        cache.activate_past_recording()
        cache.reset()  # which ended it, apart from transformers' layers
        append(cache, states(2, 45, 0))
        cache.crop(0)
    for seed in range(1, 15):
        kept, rejected = states(2, 2, seed), states(2, 9, 100 + seed)
        append(paged, kept)
        append(straight, kept)
        for at in range(9):
            append(paged, [[side[:, :, at : at + 1] for side in layer] for layer in rejected])
        paged.crop(-9)
        straight.crop(0)
        for mine, theirs in zip(paged.paged_layers, straight.paged_layers, strict=True):
            assert torch.equal(mine.keys, theirs.keys)
            assert torch.equal(mine.values, theirs.values)
    assert paged._group.pool.num_held == straight._group.pool.num_held > 4
    paged.check_integrity()


def test_crop_into_a_sealed_page_says_so_and_stays_close():
    paged, dynamic = make("int8")
    parts = states(2, 60, 0)
    append(paged, parts)
    append(dynamic, parts)
    with pytest.warns(kv_hf.KVCacheWarning, match="activate_past_recording"):
        paged.crop(-20)
    dynamic.crop(-20)
    paged.check_integrity()
    torch.testing.assert_close(paged.layers[1].keys, dynamic.layers[1].keys, rtol=0, atol=0.05)


def test_early_initialization_then_update():
    paged, dynamic = make()
    for cache in (paged, dynamic):
        cache.early_initialization(3, HEADS, DIM, torch.float32, torch.device("cpu"))
        assert cache.is_initialized
        assert cache.get_seq_length() == 0
    parts = states(3, 40, 0)
    append(paged, parts)
    append(dynamic, parts)
    assert_equal(paged, dynamic)


def test_keys_of_a_layer_are_read_only():
    paged, dynamic = filled()
    layer = paged.layers[0]
    others = (layer.keys + 1, layer.keys[:1], layer.keys.double(), [1.0])
    for value in others:
        with pytest.raises(AttributeError, match="keys of a paged layer are a read-only"):
            layer.keys = value
    with pytest.raises(AttributeError, match="values of a paged layer"):
        layer.values = layer.keys
    # writing back what was read, as code that copies caches does, changes nothing
    layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
    assert_equal(paged, dynamic)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.reorder_cache(torch.tensor([1, 0, 2])),
        lambda layer: layer.crop(-3),
        lambda layer: layer.batch_repeat_interleave(2),
        lambda layer: layer.batch_select_indices(torch.tensor([0, 1])),
        lambda layer: layer.reset(),
        lambda layer: layer.offload(),
        lambda layer: layer.prefetch(),
    ],
)
def test_single_layers_refuse_changes_of_rows_that_they_share(change):
    paged, dynamic = filled()
    with pytest.raises(CacheOptionError, match="of the cache|offload='cpu'"):
        change(paged.layers[0])
    assert_equal(paged, dynamic)


@pytest.mark.parametrize("keys", ["exact", "int4"])
def test_reorder_writes_no_sealed_page_and_only_the_rows_that_change(keys):
    """Beams move as references, whatever the length of their history."""
    paged, _ = make(keys)
    append(paged, states(4, 100, 0))
    append(paged, states(4, 1, 1))
    sides = [side for layer in paged.paged_layers for side in layer.storage.sides]
    windows = [window for layer in paged.paged_layers for window in layer.residuals]
    fields, places = (
        [dict(side.fields) for side in sides],
        [one.tokens.data_ptr() for one in windows],
    )
    before, rows = copy.deepcopy(fields), [one.tokens.clone() for one in windows]
    paged.reorder_cache(torch.tensor([0, 0, 2, 1]))
    for side, own, old in zip(sides, fields, before, strict=True):
        assert all(side.fields[name] is own[name] for name in old)
        assert all(torch.equal(own[name], old[name]) for name in old)
    assert places == [one.tokens.data_ptr() for one in windows]
    for window, old in zip(windows, rows, strict=True):
        assert torch.equal(window.tokens, old[[0, 0, 2, 1]])


# -- bad input -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    return shared_model("llama")


def test_model_without_attention_is_refused():
    config = transformers.MambaConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=8, pad_token_id=0
    )
    model = transformers.MambaForCausalLM(config)
    with pytest.raises(kv_hf.UnsupportedModelError, match="'mamba' has no attention layer"):
        model.generate(tokens(1, 8), max_new_tokens=2, cache_implementation="paged_int4")
    with pytest.raises(kv_hf.UnsupportedModelError, match=r"model\.config.*got dict"):
        kv_hf.PagedCache({"hidden_size": 64})


BAD = {
    "no rows": (torch.ones(2, 0, 2, 1, 16), "batch of 0"),
    "other rows": (torch.ones(2, 3, 2, 1, 16), "batch of 2 rows.*got keys for 3"),
    "heads": (torch.ones(2, 2, 3, 1, 16), "layer 0 of this cache holds 2 kv heads of 16"),
    "head_dim": (torch.ones(2, 2, 2, 1, 8), "layer 0 of this cache holds 2 kv heads of 16"),
    "dtype": (torch.ones(2, 2, 2, 1, 16).double(), "layer 0 of this cache holds 2 kv heads of 16"),
}


@pytest.mark.parametrize(("bad", "says"), BAD.values(), ids=BAD)
def test_keys_that_do_not_fit_are_refused_and_harm_nothing(bad, says):
    paged, dynamic = filled(rows=2)
    with pytest.raises(kv_hf.CacheMismatchError, match=says):
        paged.update(*bad, 0)
    assert_equal(paged, dynamic)
    for cache in (paged, dynamic):
        append(cache, states(2, 1, 9))
    assert_equal(paged, dynamic)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([0, 3], "row index 3 is out of range .* 3 rows"),
        ([0, -4], "row index -4"),
        ([], "at least one"),
    ],
)
def test_rows_that_are_not_there_are_refused_and_change_nothing(rows, says):
    paged, dynamic = make()
    paged.batch_select_indices(torch.tensor([0]))  # of nothing: nothing
    for cache in (paged, dynamic):
        append(cache, states(3, 20, 0))
    with pytest.raises(kv_hf.CacheMismatchError, match=says):
        paged.reorder_cache(torch.tensor(rows, dtype=torch.long))
    assert_equal(paged, dynamic)


def test_a_crop_into_the_padding_keeps_what_is_left_of_it():
    paged, dynamic = make()
    visible = torch.arange(45) >= torch.tensor([[0], [30]])
    paged.observe_padding(visible[:, :40])
    for cache in (paged, dynamic):
        append(cache, states(2, 40, 0))
        cache.crop(-20)
    assert [row.padding for row in paged._group.rows] == [0, 20]
    paged.observe_padding(visible)
    for cache in (paged, dynamic):
        append(cache, states(2, 25, 1))
    assert [row.padding for row in paged._group.rows] == [0, 30]
    paged.check_integrity()
    for ours, theirs in zip(paged.layers, dynamic.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys * visible[:, None, :, None])


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32], ids=str)
def test_observe_padding_counts_leading_zeros_only(dtype):
    paged, _ = make()
    paged.observe_padding(torch.tensor([[0, 0, 1, 0, 1], [1, 0, 1, 1, 0]]).to(dtype))
    append(paged, states(2, 5, 0))
    assert [row.padding for row in paged._group.rows] == [2, 0]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda group: group.pool._free.append(0), "free at once"),
        (lambda group: setattr(group.pool, "num_ids", 1), "free at once"),
        (lambda group: setattr(group, "seen", group.seen + 1), "lack tokens"),
    ],
    ids=["free-but-held", "never-handed-out", "length"],
)
def test_check_integrity_finds_damage(damage, says):
    paged, _ = filled()
    damage(paged._group)
    with pytest.raises(ValueError, match=says):
        paged.check_integrity()


def test_pool_limit_in_mid_generation_leaves_cache_and_model_usable(model):
    cache = kv_hf.PagedCache(model.config, keys="int4", page_size=16, max_pages=4)
    with pytest.raises(kv_hf.PagePoolExhaustedError, match="max_pages=4 is reached.*unchanged"):
        model.generate(tokens(1, 40), past_key_values=cache, max_new_tokens=100)
    cache.check_integrity()
    held = cache.get_seq_length()
    assert held == 4 + 16 * 5 - 1
    cache.crop(-30)
    with torch.no_grad():
        model(tokens(1, 5), past_key_values=cache)
    assert cache.get_seq_length() == held - 25


@pytest.mark.parametrize("kind", ["the first forward", "a later one"])
def test_forward_of_other_columns_in_the_next_layer_is_refused(kind):
    """How many layers take part is known from the second forward on, so that its first layer has appended."""
    paged, dynamic = make()
    parts, first = states(2, 20, 0), kind == "the first forward"
    if not first:
        append(paged, parts)
    paged.update(*parts[0], 0)
    if first:  # layer 1 never follows
        paged.update(*parts[0], 0)
    wrong = [(1, 2, 40), (1, 1, 20), *([] if first else [(0, 2, 20)])]
    for layer, rows, columns in wrong:
        with pytest.raises(kv_hf.InterruptedForwardError, match="layer 1 cannot|half-way"):
            paged.update(*states(rows, columns, 1)[layer], layer)
    if first:
        for layer in (0, 1):
            with pytest.raises(kv_hf.InterruptedForwardError, match=r"reset\(\)"):
                paged.update(*parts[layer], layer)
        paged.reset()
        paged.update(*parts[0], 0)
    else:
        append(dynamic, parts)
    paged.update(*parts[1], 1)  # the change that was asked for still goes
    append(dynamic, parts)
    assert_equal(paged, dynamic)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("keys", ["fp8", "int8", "int4", "int2"])
def test_numbers_that_are_not_finite_are_reported_and_stay_in_their_page(model, keys, bad):
    cache = kv_hf.PagedCache(model.config, keys=keys, page_size=16)
    clean = kv_hf.PagedCache(model.config, keys=keys, page_size=16)
    good = torch.randn(2, 1, 2, 80, 16)
    spoilt = good.clone()
    spoilt[:, 0, 1, 30, 3] = bad  # page 1 holds tokens 20 to 35
    for layer in (0, 1):
        clean.update(*good, layer)
        if layer == 0:
            with pytest.warns(kv_hf.KVCacheWarning, match="inf, nan or numbers beyond"):
                cache.update(*spoilt, layer)
        else:
            cache.update(*good, layer)
    for side in ("keys", "values"):
        found, expected = (getattr(c.layers[0], side) for c in (cache, clean))
        assert torch.isfinite(found).all()
        outside = torch.ones(80, dtype=torch.bool)
        outside[20:36] = False
        assert torch.equal(found[:, :, outside], expected[:, :, outside])
        assert torch.equal(found[:, 0], expected[:, 0])


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        ([[1, 1]], "must be a tensor .*got list"),
        (torch.ones(5), r"got \[5\]"),
        (torch.tensor([[0.0, -1e9]]), "must hold 0 and 1"),
        (torch.ones(2, 1, 3, 3), r"got \[2, 1, 3, 3\]"),
    ],
)
def test_observe_padding_refuses_what_is_no_mask(mask, says):
    cache = kv_hf.PagedCache(make_config("llama"))
    with pytest.raises(kv_hf.CacheMismatchError, match=says):
        cache.observe_padding(mask)
    cache.observe_padding(None)
    cache.update(*torch.randn(2, 2, 2, 5, 16), 0)
    cache.update(*torch.randn(2, 2, 2, 5, 16), 1)
    with pytest.raises(kv_hf.CacheMismatchError, match="comes too late"):
        cache.observe_padding(torch.ones(2, 5))
