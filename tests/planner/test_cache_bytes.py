"""Planned bytes equal those of real caches, part by part: after generation, and filled by hand with any options."""

import copy
import inspect
import random
import re

import planned_models
import pytest
import tiny_latent
import tiny_models
import torch
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_models import COMMON, left_padded, tokens
from transformers import DynamicCache, StaticCache

import kv_hf
from kv_hf.cache.compat import CROP_TAKES_LENGTHS, SPARSE_MODELS_CACHE_LATENTS
from kv_hf.config import CacheConfig
from kv_hf.errors import (
    DeviceBudgetError,
    PagePoolExhaustedError,
    PlanError,
    UnsupportedModelError,
)
from kv_hf.planner.cache_bytes import Pages, Stock
from kv_hf.planner.inventory import CachedLayer, Inventory
from kv_hf.planner.meta_model import model_kind
from kv_hf.planner.source import load_inventory

PARTS = ("payload", "scales", "tail", "tables", "staging", "other", "offloaded")
GIB = 2**30
MAKERS = {"plain": tiny_models, "latent": tiny_latent, "other": planned_models}
FAMILIES = [
    *(("plain", name) for name in tiny_models.FAMILIES),
    *(("latent", name) for name in tiny_latent.FAMILIES),
    *(("other", name) for name in planned_models.ALL),
]
# the others are slow
QUICK = ("llama", "gpt2", "qwen3_next", "jamba", "lfm2", "gemma4_text", "llama4_text", "minimax_m3")
QUICK += ("deepseek_v32", "dots3_note", "mistral_large4", "kimi_linear", "falcon_h1", "zamba2")
# without layers that pages could hold, or with a cache of their own
NOT_GENERATED = ("falcon_mamba", "mamba", "mamba2", "minimax")


def predict(inventory, kind, options=None, *, row_tokens, prompt=None, bound=None, on_cpu=False):
    """Return the planned bytes of a cache, by formulas."""
    if kind == "paged":
        return Pages(inventory, options or CacheConfig(), on_cpu).report(row_tokens, prompt)
    return Stock(inventory, kind, bound).report(row_tokens, prompt)


def config_of(kind, name):
    if kind != "plain" and not MAKERS[kind].is_there(name):
        pytest.skip("the installed transformers has no such family")
    if name == "deepseek_v32" and not SPARSE_MODELS_CACHE_LATENTS:
        pytest.skip("the installed transformers caches expanded keys of sparse models")
    return MAKERS[kind].make_config(name)


def model_of(config, dtype=torch.float32):
    torch.manual_seed(0)
    model = model_kind(config).from_config(copy.deepcopy(config), dtype=dtype).eval()
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


def leaves(value):
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    return (
        [one for item in items for one in leaves(item)] if isinstance(value, (dict, list)) else []
    )


def stored(cache, alive=False):
    """Return (payload, other) bytes of a cache of transformers: of its tensors, or of the memory that they keep alive."""
    found = [0, 0]
    for layer in [*cache.layers, *({"state": one} for one in getattr(cache, "linear_cache", []))]:
        for name, value in (layer if isinstance(layer, dict) else vars(layer)).items():
            for tensor in leaves(value):
                size = tensor.untyped_storage().nbytes() if alive else tensor.nbytes
                found[name not in ("keys", "values")] += size
    return tuple(found)


def generated(model, cache, lengths, new):
    """Return the cache after `new` tokens behind left-padded prompts of these lengths."""
    return model.generate(
        **left_padded(list(lengths)),
        max_new_tokens=new,
        do_sample=False,
        past_key_values=cache,
        return_dict_in_generate=True,
    ).past_key_values


def check_paged(model, inventory, lengths, new, **options):
    """Check a PagedCache behind generate(), and that no prompt leads to more than is said without one."""
    cache = generated(model, kv_hf.PagedCache(model.config, **options), lengths, new)
    # the last new token is not in the cache
    rows = {"row_tokens": [length + new - 1 for length in lengths], "on_cpu": True}
    found = predict(inventory, "paged", cache.options, prompt=max(lengths), **rows)
    assert found == cache.memory()
    if cache.options.offload is None:
        bound = predict(inventory, "paged", cache.options, **rows)
        assert all(getattr(bound, part) >= getattr(found, part) for part in PARTS)
    return cache


@pytest.mark.parametrize(("kind", "name"), FAMILIES, ids=lambda value: value)
def test_the_meta_model_says_what_a_real_forward_caches(kind, name):
    config = config_of(kind, name)
    planned = load_inventory(config, dtype="bfloat16")
    model = model_of(config, torch.bfloat16)
    takes = inspect.signature(model.forward).parameters
    argument = "past_key_values" if "past_key_values" in takes else "cache_params"
    own = name == "minimax"  # takes none but its own class
    cache, ids = None if own else DynamicCache(config=model.config), tokens(3, 10)
    with torch.no_grad():
        for part in (ids[:, :9], ids[:, 9:]):
            out = model(input_ids=part, use_cache=True, **{argument: cache})
            cache = getattr(out, argument) if own else cache
    found = predict(planned, "dynamic", row_tokens=[10] * 3, prompt=9)
    assert (found.payload, found.other) == stored(cache, alive=True)
    assert planned.parameters == sum(p.numel() for p in model.parameters())
    assert [layer.cache_class for layer in planned.layers] == [
        type(x).__name__ for x in cache.layers
    ]
    assert [layer.window for layer in planned.layers if layer.elements] == [
        getattr(x, "sliding_window", None)
        for x, layer in zip(cache.layers, planned.layers, strict=True)
        if layer.elements
    ]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=() if name in QUICK else pytest.mark.slow)
        for kind, name in FAMILIES
        if name not in NOT_GENERATED
    ],
)
def test_planned_bytes_are_those_of_caches_behind_generate(kind, name):
    config = config_of(kind, name)
    model, inventory = model_of(config), load_inventory(config, dtype="float32")
    # glm5_next makes its masks by itself: the cache does not learn of padding, and stores it
    lengths, new = ((40, 40, 40) if name == "glm5_next" else (40, 3, 21)), 24
    rows = [length + new - 1 for length in lengths]
    cache = generated(model, DynamicCache(config=model.config), lengths, new)
    found = predict(inventory, "dynamic", row_tokens=rows, prompt=40)
    assert (found.payload, found.other) == stored(cache, alive=True)
    room = 40 + new + 5
    # transformers 5.17 fails to make the mask of chunks for a static cache
    if not (name == "llama4_text" and CROP_TAKES_LENGTHS):
        static = StaticCache(config=model.config, max_cache_len=room)
        cache = generated(model, static, lengths, new)
        found = predict(inventory, "static", row_tokens=rows, bound=room)
        assert (found.payload, found.other) == stored(cache)
    kinds = [{"keys": "int4", "values": "int8", "page_size": 16}]
    if any(layer.latent for layer in inventory.layers):
        kinds = [{"latent": "fp8", "k_rope": "exact", "page_size": 16}]
    if name not in QUICK:
        kinds += [
            {"keys": "int2", "page_size": 32, "sink_tokens": 0, "recent_tokens": 20},
            {"keys": "int8", "page_size": 16, "reserve_tokens": 60},
            {"keys": "fp8", "page_size": 16, "offload": "disk"},
        ]
    for options in kinds:
        check_paged(model, inventory, lengths, new, **options)


# -- random options, lengths and windows, on caches that are filled by hand -----------------------------------

HEADS, DIM = 2, 32
FORMATS = ("exact", "fp8", "int8", "int4", "int2")
OPTIONS = st.fixed_dictionaries(
    {
        "keys": st.sampled_from(FORMATS),
        "values": st.sampled_from(FORMATS),
        "page_size": st.sampled_from([16, 32]),
        "sink_tokens": st.sampled_from([0, 1, 4, 20]),
        "recent_tokens": st.sampled_from([0, 1, 16, 50]),
    },
    optional={
        "reserve_tokens": st.integers(0, 200),
        "max_pages": st.integers(1, 60),
        "layers": st.sampled_from([{"0": "int8"}, {"1-2": {"keys": "int4"}}, {"2": "exact"}]),
    },
)
LENGTHS = st.lists(st.integers(1, 150), min_size=1, max_size=4)
PATTERN = st.lists(st.booleans(), min_size=3, max_size=3)


def sliding(window, slides):
    """Return a config and an inventory of layers of which some have a sliding window."""
    kinds = ["sliding_attention" if one else "full_attention" for one in slides]
    config = transformers.Gemma3TextConfig(
        **{**COMMON, "num_hidden_layers": len(slides), "head_dim": DIM, "layer_types": kinds},
        sliding_window=window,
    )
    sizes = {"kv_heads": HEADS, "key_dim": DIM, "value_dim": DIM}
    full = CachedLayer(**sizes)
    moving = CachedLayer("DynamicSlidingWindowLayer", **sizes, window=window)
    layers = tuple(moving if one else full for one in slides)
    return config, Inventory("hand", "gemma3_text", "float32", layers, config=config)


def fill(cache, lengths, new, shapes):
    """Append left-padded prompts of these lengths in one forward, then `new` tokens one by one."""
    width = max(lengths)
    if isinstance(cache, kv_hf.PagedCache):
        cache.observe_padding(torch.tensor([[0] * (width - n) + [1] * n for n in lengths]))
    for columns in (width, *[1] * new):
        for index, (heads, key_dim, value_dim) in enumerate(shapes):
            keys = torch.zeros(len(lengths), heads, columns, key_dim)
            cache.update(keys, torch.zeros(len(lengths), heads, columns, value_dim), index)
    return cache


@settings(max_examples=60)
@given(
    options=OPTIONS, lengths=LENGTHS, new=st.integers(0, 60), window=st.integers(1, 120), slides=PATTERN
)  # fmt: skip
@example({"page_size": 16, "reserve_tokens": 4803}, [149] * 16, 151, 9, [False] * 3)
def test_pages_of_any_options(options, lengths, new, window, slides):
    config, inventory = sliding(window, slides)
    chosen, cache = CacheConfig(**options), kv_hf.PagedCache(config, **options)
    rows = {"row_tokens": [length + new for length in lengths], "prompt": max(lengths)}
    try:
        fill(cache, lengths, new, [(HEADS, DIM, DIM)] * 3)
    except PagePoolExhaustedError:
        with pytest.raises(PagePoolExhaustedError, match="max_pages"):
            predict(inventory, "paged", chosen, **rows)
        return
    assert predict(inventory, "paged", chosen, on_cpu=True, **rows) == cache.memory()
    assert predict(inventory, "paged", chosen, **rows) == cache.memory()


@settings(max_examples=60)
@given(
    options=OPTIONS, rows=st.integers(1, 4), columns=st.integers(1, 400), window=st.integers(1, 200),
    slides=PATTERN, part=st.none() | st.floats(0, 1),
)  # fmt: skip
def test_a_cache_filled_with_meta_tensors_takes_what_the_formula_says(
    options, rows, columns, window, slides, part
):
    options = {name: one for name, one in options.items() if name != "max_pages"}
    _, inventory = sliding(window, slides)
    prompt = None if part is None else max(1, round(part * columns))
    told = predict(
        inventory, "paged", CacheConfig(**options), row_tokens=[columns] * rows, prompt=prompt
    )
    found = Pages(inventory, CacheConfig(**options)).filled(rows, columns, prompt)
    if prompt is None and any(slides):
        # the formula takes the most pages that a row holds between two of its last steps; a table has 4 bytes for each
        assert (found.payload, found.scales, found.tail) == (told.payload, told.scales, told.tail)
        assert 0 <= told.tables - found.tables <= 4 * rows
    else:
        assert found == told


@settings(max_examples=60)
@given(lengths=LENGTHS, new=st.integers(0, 60), window=st.integers(1, 120), slides=PATTERN)
@example([150], 0, 40, [True] * 3)
@example([150], 1, 1, [True] * 3)
def test_memory_that_a_dynamic_cache_keeps_alive(lengths, new, window, slides):
    config, inventory = sliding(window, slides)
    cache = fill(DynamicCache(config=config), lengths, new, [(HEADS, DIM, DIM)] * 3)
    rows = [length + new for length in lengths]
    found = predict(inventory, "dynamic", row_tokens=rows, prompt=max(lengths))
    assert (found.payload, found.other) == stored(cache, alive=True)
    if new:
        assert predict(inventory, "dynamic", row_tokens=rows) == found


@settings(max_examples=25)
@given(
    latent=st.sampled_from([*FORMATS, "fp8_ds_mla"]),
    k_rope=st.sampled_from([None, "exact", "int8"]),
    page_size=st.sampled_from([16, 64]),
    lengths=LENGTHS,
    new=st.integers(0, 40),
)
def test_pages_of_latents(latent, k_rope, page_size, lengths, new):
    config = transformers.DeepseekV3Config(**{**tiny_latent.COMMON, "kv_lora_rank": 128})
    layer = CachedLayer(kv_heads=1, key_dim=128, value_dim=8, latent=True)
    inventory = Inventory("hand", "deepseek_v3", "float32", (layer,) * 2, config=config)
    options = {"latent": latent, "k_rope": k_rope, "page_size": page_size}
    cache = fill(kv_hf.PagedCache(config, **options), lengths, new, [(1, 128, 8)] * 2)
    rows = [length + new for length in lengths]
    assert predict(inventory, "paged", CacheConfig(**options), row_tokens=rows) == cache.memory()
    alike = predict(inventory, "paged", CacheConfig(**options), row_tokens=[rows[0]] * 3)
    assert Pages(inventory, CacheConfig(**options)).filled(3, rows[0]) == alike


@settings(max_examples=25)
@given(
    keys=st.sampled_from(FORMATS),
    page_size=st.sampled_from([16, 32]),
    sinks=st.sampled_from([0, 4, 40]),
    lengths=LENGTHS,
    new=st.integers(0, 30),
    room=st.integers(0, 70),
)
def test_pages_of_a_preallocated_cache(keys, page_size, sinks, lengths, new, room):
    options = {
        **{"keys": keys, "values": "int8", "page_size": page_size, "sink_tokens": sinks},
        "max_length": max(lengths) + new + room,
    }
    cache = kv_hf.PagedCache(tiny_models.make_config("llama", head_dim=DIM), **options)
    fill(cache, lengths, new, [(HEADS, DIM, DIM)] * 2)
    _, inventory = sliding(9, [False, False])
    rows = [length + new for length in lengths]
    assert predict(inventory, "paged", CacheConfig(**options), row_tokens=rows) == cache.memory()


# -- offload ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "budgets"),
    [("gemma3", {30_000: 3, 45_000: 2, 75_000: 0}), ("gemma4_text", {40_000: 4, 60_000: 2})],
)
def test_pages_outside_of_the_device(name, budgets):
    config = config_of("other", name)
    model, inventory = model_of(config), load_inventory(config, dtype="float32")
    for budget, outside in budgets.items():
        options = {"keys": "int8", "page_size": 16, "offload": "disk", "device_bytes": budget}
        cache = check_paged(model, inventory, (90, 9, 33), 40, **options)
        storages = [layer.storage for layer in cache.paged_layers]
        assert sum(storage.offloaded_bytes > 0 for storage in storages) == outside
    if name == "gemma3":  # so many pages that what lies outside grows by a quarter
        check_paged(model, inventory, (150,) * 5, 20, page_size=16, offload="disk")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_pages_outside_of_the_device_at_random(seed):
    chance = random.Random(seed)
    name = chance.choice(["gemma3", "gemma4_text", "mistral", "qwen3_next", "mimo_v2_flash"])
    config = config_of("other", name)
    model, inventory = model_of(config), load_inventory(config, dtype="float32")
    lengths = [chance.randint(1, 150) for _ in range(chance.randint(1, 4))]
    new, budget = chance.randint(1, 80), chance.choice(["device_bytes", "device_pages"])
    options = {
        **dict.fromkeys(("keys", "values"), chance.choice(FORMATS)),
        "page_size": chance.choice([16, 32]),
        "reserve_tokens": chance.choice([0, 0, 70]),
        "offload": "disk",
        budget: chance.randint(20, 80) * (1 if budget == "device_pages" else 4000),
    }
    try:
        check_paged(model, inventory, lengths, new, **options)
    except DeviceBudgetError as error:
        rows = {"row_tokens": [length + new - 1 for length in lengths], "prompt": max(lengths)}
        with pytest.raises(DeviceBudgetError, match=re.escape(str(error))):
            predict(inventory, "paged", CacheConfig(**options), on_cpu=True, **rows)


@pytest.mark.parametrize("keys", ["exact", "int4"])
@pytest.mark.parametrize("new", [1, 2, 40])
def test_pages_outside_of_which_a_part_is_read(keys, new):
    """The index of the pages and buffers for the chosen ones; of a short text neither is less than all."""
    part = {"keys": keys, "values": "int4", "page_size": 16, "offload": "disk", "widen": "never"}
    part |= {"read_tokens": 52, "read_from": 96}
    share = {**part, "read_tokens": None, "read_share": 0.3, "read_from": 20}
    for name, lengths in (("gemma3", (150, 9, 90)), ("gemma4_text", (200,)), ("gemma3", (80,))):
        config = config_of("other", name)
        model, inventory = model_of(config), load_inventory(config, dtype="float32")
        for options in (part, {**part, "device_bytes": 120_000}, share):
            check_paged(model, inventory, lengths, new, **options)


# -- worked examples, and what is refused -------------------------------------------------------------


def attention(layers, kv_heads, dim=128, **more):
    layer = CachedLayer(kv_heads=kv_heads, key_dim=dim, value_dim=dim, **more)
    config = transformers.LlamaConfig(num_hidden_layers=layers, head_dim=dim)
    return Inventory("example", "llama", "bfloat16", (layer,) * layers, config=config)


def test_worked_examples():
    def dynamic(inventory, *row_tokens):
        return predict(inventory, "dynamic", row_tokens=row_tokens).total

    llama_70b = attention(80, 8)
    assert dynamic(llama_70b, *[8192] * 32) == 85_899_345_920
    assert dynamic(attention(80, 64), 32_768) == 80 * GIB
    assert dynamic(attention(80, 1), 32_768) == 1.25 * GIB
    latent = CachedLayer(kv_heads=1, key_dim=512, value_dim=64, latent=True)
    assert dynamic(Inventory("example", "deepseek_v3", "bfloat16", (latent,) * 61), 1) == 70_272
    # 56 full pages of 16, and the one that is being filled
    options = CacheConfig(page_size=16, sink_tokens=0)
    found = predict(llama_70b, "paged", options, row_tokens=[900])
    assert found.pages_held == 56
    assert found.payload + found.tail == 57 * 16 * 327_680 == 285 * 2**20


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"max_length": 499}, kv_hf.KVCacheError, "max_length=499"),
        ({"prefix_store": kv_hf.PrefixStore()}, kv_hf.KVCacheError, "prefix_store"),
        ({"max_pages": 3}, PagePoolExhaustedError, "max_pages=3"),
        ({"offload": "cpu", "device_bytes": 9}, DeviceBudgetError, "device_bytes=9"),
    ],
)
def test_options_that_no_plan_can_have_are_refused(options, error, text):
    with pytest.raises(error, match=text):
        predict(attention(2, 1), "paged", CacheConfig(**options), row_tokens=[500, 20])


def test_layers_of_unknown_growth_are_refused():
    inventory = Inventory("v4", "deepseek_v4", "bfloat16", (CachedLayer("DeepseekV4HCACache"),))
    for cache in ("dynamic", "static", "paged"):
        with pytest.raises(UnsupportedModelError, match="DeepseekV4HCACache.*not known"):
            predict(inventory, cache, row_tokens=[5])
    by_hand = Inventory("hand", "llama", "bfloat16", (CachedLayer(),))
    with pytest.raises(PlanError, match="'hand' has no config"):
        predict(by_hand, "paged", row_tokens=[5])
