"""The planner's bytes equal those of real caches: DynamicCache, StaticCache and PagedCache, part by part."""

import functools
import random
import re

import pytest
import tiny_latent
import tiny_models
import torch
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from planned_models import ALL, WINDOWS, is_there, make_config
from planner_runs import check_paged_cache, check_transformers_caches, parts_of, stored_parts
from tiny_models import COMMON

import kv_hf
from kv_hf.cache.compat import CROP_TAKES_LENGTHS, SPARSE_MODELS_CACHE_LATENTS
from kv_hf.config import CacheConfig
from kv_hf.errors import (
    CacheOptionError,
    DeviceBudgetError,
    PagePoolExhaustedError,
    UnsupportedModelError,
)
from kv_hf.planner.figures import Figures
from kv_hf.planner.growing import behind_prefill
from kv_hf.planner.inventory import CachedLayer, Inventory
from kv_hf.planner.predict import figures, predict
from kv_hf.planner.probe import probe
from kv_hf.spec import LANES, ROWS

# without layers that pages could hold, or with a cache of their own
NO_PAGES = ("falcon_mamba", "mamba", "mamba2")
OWN_CACHE = ("minimax",)
GIB = 2**30


@functools.cache
def planned(name):
    """Return a random model of tests/planned_models.py, and its inventory after a real run."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(make_config(name)).eval()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


def check_model(model, lengths, new, every_option):
    inventory = check_transformers_caches(model, lengths, new)
    kinds = [{"keys": "int4", "values": "int8", "page_size": 16}]
    if inventory.layers and any(layer.latent for layer in inventory.layers):
        kinds = [{"latent": "fp8", "k_rope": "exact", "page_size": 16}]
    if every_option:
        kinds += [
            {},
            {"keys": "int2", "page_size": 32, "sink_tokens": 0, "recent_tokens": 20},
            {"keys": "int8", "page_size": 16, "reserve_tokens": 60},
            {"keys": "fp8", "page_size": 16, "offload": "disk"},
        ]
    for options in kinds:
        check_paged_cache(model, inventory, lengths, new, **options)
    return inventory


# -- families ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["qwen3_next", "jamba", "lfm2", "gemma4_text", "llama4_text", "minimax_m3"]
)
def test_hybrid_sliding_and_shared_families(name):
    if not is_there(name):
        pytest.skip("the installed transformers has no such family")
    if name == "llama4_text" and CROP_TAKES_LENGTHS:
        pytest.skip("transformers 5.17 fails to make the mask of chunks for a static cache")
    check_model(planned(name), (40, 3, 21), 24, every_option=False)


@pytest.mark.parametrize("family", ["deepseek_v32", "dots3_note", "mistral_large4", "kimi_linear"])
def test_latent_families(family):
    if not tiny_latent.is_there(family):
        pytest.skip("the installed transformers has no such family")
    if family == "deepseek_v32" and not SPARSE_MODELS_CACHE_LATENTS:
        pytest.skip("the installed transformers caches expanded keys of sparse models")
    check_model(tiny_latent.shared_model(family), (40, 3, 21), 24, every_option=False)


@pytest.mark.slow
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_every_family_of_full_attention(family):
    check_model(tiny_models.shared_model(family), (50, 3, 31), 40, every_option=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", tiny_latent.FAMILIES)
def test_every_family_of_latent_attention(family, dtype):
    if not tiny_latent.is_there(family):
        pytest.skip("the installed transformers has no such family")
    # glm5_next makes its masks by itself: the cache does not learn of padding, and stores it
    lengths = (50, 50, 50) if family == "glm5_next" else (50, 3, 31)
    check_model(tiny_latent.make_model(family, dtype), lengths, 40, every_option=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in ALL if n not in (*NO_PAGES, *OWN_CACHE)])
def test_every_family_of_other_layers(name):
    if not is_there(name):
        pytest.skip("the installed transformers has no such family")
    model = planned(name)
    read = check_model(model, (50, 3, 31), 40, every_option=True)
    # what the model's code says without weights gives the same bytes
    probed = probe(model.config, name=name, source="", dtype=torch.float32)
    for cache in ("dynamic", "static", "paged"):
        rows = {"row_tokens": [89, 42, 70], "prompt": 50}
        assert predict(probed, cache, **rows) == predict(read, cache, **rows)


@pytest.mark.parametrize("name", ["falcon_h1", "inkling_text", "zamba2"])
def test_families_with_attention_and_states_in_one_layer(name):
    if not is_there(name):
        pytest.skip("the installed transformers has no such family")
    check_model(planned(name), (40, 3, 21), 24, every_option=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral", "qwen2", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("window", [1, 2, 17, 40, 71, 300])
def test_windows_shorter_and_longer_than_the_text(name, window):
    torch.manual_seed(0)
    config = make_config(name, sliding_window=window)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    for lengths, new in (((60, 3, 33), 80), ((130,), 3), ((5, 5), 1)):
        check_model(model, lengths, new, every_option=True)


# -- random options, lengths and windows, on caches that are filled by hand -----------------------------------

HEADS, DIM = 2, 32
FORMATS = ("exact", "fp8", "int8", "int4", "int2")


def sliding_config(windows):
    """A config with a sliding window (or None) for each layer; all windows are alike."""
    kinds = ["sliding_attention" if window else "full_attention" for window in windows]
    return transformers.Gemma3TextConfig(
        **{**COMMON, "num_hidden_layers": len(windows), "head_dim": DIM, "layer_types": kinds},
        sliding_window=max(window or 0 for window in windows) or 4096,
    )


def sliding_inventory(windows):
    layers = [
        CachedLayer(
            "DynamicSlidingWindowLayer" if window else "DynamicLayer",
            kv_heads=HEADS,
            key_dim=DIM,
            value_dim=DIM,
            window=window,
        )
        for window in windows
    ]
    return Inventory("hand", "gemma3_text", "float32", tuple(layers))


def fill(cache, lengths, new, shapes):
    """Append left-padded prompts of these lengths in one forward, then `new` tokens one by one."""
    width = max(lengths)
    mask = torch.tensor([[0] * (width - n) + [1] * n for n in lengths])
    cache.observe_padding(mask)
    for columns in (width, *[1] * new):
        for index, (heads, key_dim, value_dim) in enumerate(shapes):
            keys = torch.zeros(len(lengths), heads, columns, key_dim)
            values = torch.zeros(len(lengths), heads, columns, value_dim)
            cache.update(keys, values, index)
    return cache


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


@settings(max_examples=60)
@given(
    options=OPTIONS,
    lengths=LENGTHS,
    new=st.integers(0, 60),
    window=st.integers(1, 120),
    pattern=st.lists(st.booleans(), min_size=3, max_size=3),
)
@example({"page_size": 16, "reserve_tokens": 4803}, [149] * 16, 151, 9, [False] * 3)
def test_pages_of_any_options(options, lengths, new, window, pattern):
    windows = [window if slides else None for slides in pattern]
    inventory = sliding_inventory(windows)
    chosen = CacheConfig(**options)
    rows = [length + new for length in lengths]
    cache = kv_hf.PagedCache(sliding_config(windows), **options)

    def told(prompt):
        return predict(inventory, "paged", chosen, row_tokens=rows, prompt=prompt, layout=LANES)

    try:
        fill(cache, lengths, new, [(HEADS, DIM, DIM)] * 3)
    except PagePoolExhaustedError:
        with pytest.raises(PagePoolExhaustedError, match="max_pages"):
            told(max(lengths))
        return
    found = told(max(lengths))
    assert found == cache.memory()
    given = {"row_tokens": rows, "prompt": max(lengths)}
    assert predict(inventory, "paged", chosen, layout=ROWS, **given) == found
    assert figures(inventory, "paged", chosen, **given).waste == wasted(cache)


@settings(max_examples=60)
@given(
    lengths=LENGTHS,
    new=st.integers(0, 60),
    window=st.integers(1, 120),
    pattern=st.lists(st.booleans(), min_size=3, max_size=3),
)
@example([150], 0, 40, [True] * 3)
@example([150], 1, 1, [True] * 3)
def test_memory_that_a_dynamic_cache_keeps_alive(lengths, new, window, pattern):
    windows = [window if slides else None for slides in pattern]
    cache = transformers.DynamicCache(config=sliding_config(windows))
    for columns in (max(lengths), *[1] * new):
        for index in range(3):
            keys = torch.zeros(len(lengths), HEADS, columns, DIM)
            cache.update(keys, keys.clone(), index)
    inventory, rows = sliding_inventory(windows), [length + new for length in lengths]

    def told(prompt):
        return predict(inventory, "dynamic", row_tokens=rows, prompt=prompt)

    assert parts_of(told(max(lengths))) == stored_parts(cache)
    if new:
        assert told(None) == told(max(lengths))
    more = behind_prefill(inventory, rows, torch.float32)
    assert told(max(rows)).total - told(None).total == more
    unseen = sum(pattern) * max(0, max(rows) - window) if window > 1 else 0
    assert more == len(rows) * unseen * 2 * HEADS * DIM * 4


def wasted(cache):
    """Bytes that hold no token, counted on the cache itself."""
    free = 0
    for layer in cache.paged_layers:
        group, spec = layer.group, layer.spec
        free += (layer.storage.keys.capacity - group.pool.num_held) * spec.page_bytes
        tail = sum(window.tokens.nbytes for window in layer.residuals)
        filled = sum(row.exact for row in group.rows)
        free += tail - spec.window_bytes(1, filled)
    return free


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
    inventory = Inventory("hand", "deepseek_v3", "float32", (layer,) * 2)
    options = {"latent": latent, "k_rope": k_rope, "page_size": page_size}
    cache = kv_hf.PagedCache(config, **options)
    fill(cache, lengths, new, [(1, 128, 8)] * 2)
    rows = [length + new for length in lengths]
    told = predict(inventory, "paged", CacheConfig(**options), row_tokens=rows)
    assert told == cache.memory()


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
    inventory = sliding_inventory([None, None])
    rows = [length + new for length in lengths]
    found = figures(inventory, "paged", CacheConfig(**options), row_tokens=rows)
    memory = cache.memory()
    assert found.report == memory
    stored = sum(layer.spec.page_bytes for layer in cache.paged_layers)
    page = (memory.pages_allocated - memory.pages_held) * stored
    slots = len(rows) * (sinks + page_size) - int(cache.table.exact_lens.sum())
    assert found.waste == page + slots * 2 * 2 * HEADS * DIM * 4


def test_pages_beyond_256_with_a_reserve_depend_on_the_prompt_alone():
    """Storage that is reserved is not rounded up: unless more pages than that are ever in use."""
    inventory = sliding_inventory([None])
    options = CacheConfig(page_size=16, sink_tokens=0, reserve_tokens=16 * 299)

    def pages(tokens, prompt):
        report = predict(inventory, "paged", options, row_tokens=[tokens], prompt=prompt)
        return report.pages_allocated

    config = sliding_config([None])
    for tokens, prompt in ((16 * 299, 16), (16 * 299, 16 * 299), (16 * 300, 16)):
        cache = kv_hf.PagedCache(config, page_size=16, sink_tokens=0, reserve_tokens=16 * 299)
        keys = torch.zeros(1, 1, tokens, 16)
        cache.update(keys[:, :, :prompt], keys[:, :, :prompt], 0)
        for first in range(prompt, tokens, 16):
            cache.update(keys[:, :, first : first + 16], keys[:, :, first : first + 16], 0)
        assert cache.memory().pages_allocated == pages(tokens, prompt)
    assert [pages(16 * 299, 16), pages(16 * 299, 16 * 299)] == [299, 300]


# -- offload --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "budgets"),
    [("gemma3", {30_000: 3, 45_000: 2, 75_000: 0}), ("gemma4_text", {40_000: 4, 60_000: 2})],
)
def test_pages_outside_of_the_device(name, budgets):
    model = planned(name)
    inventory = check_transformers_caches(model, (40, 9), 4)
    for budget, outside in budgets.items():
        options = {"keys": "int8", "page_size": 16, "offload": "disk", "device_bytes": budget}
        cache = check_paged_cache(model, inventory, (90, 9, 33), 40, **options)
        storages = [layer.storage for layer in cache.paged_layers]
        assert sum(storage.offloaded_bytes > 0 for storage in storages) == outside
    if name == "gemma3":  # so many pages that what lies outside grows by a quarter
        check_paged_cache(model, inventory, (150,) * 5, 20, page_size=16, offload="disk")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_pages_outside_of_the_device_at_random(seed):
    chance = random.Random(seed)
    name = chance.choice(["gemma3", "gemma4_text", "mistral", "qwen3_next", "mimo_v2_flash"])
    model = planned(name)
    inventory = check_transformers_caches(model, (30, 9), 4)
    lengths = [chance.randint(1, 150) for _ in range(chance.randint(1, 4))]
    options = {
        **dict.fromkeys(("keys", "values"), chance.choice(FORMATS)),
        "page_size": chance.choice([16, 32]),
        "reserve_tokens": chance.choice([0, 0, 70]),
        "offload": "disk",
        chance.choice(["device_bytes", "device_bytes", "device_pages"]): None,
    }
    budget = next(name for name in options if name.startswith("device"))
    options[budget] = chance.randint(20, 80) * (1 if budget == "device_pages" else 4000)
    new = chance.randint(1, 80)
    try:
        check_paged_cache(model, inventory, lengths, new, **options)
    except DeviceBudgetError as error:
        rows = [length + new - 1 for length in lengths]
        given = {"row_tokens": rows, "prompt": max(lengths), "layout": LANES}
        with pytest.raises(DeviceBudgetError, match=re.escape(str(error))):
            predict(inventory, "paged", CacheConfig(**options), **given)


@pytest.mark.parametrize("keys", ["exact", "int8", "int4", "int4_mixed"])
@pytest.mark.parametrize("new", [1, 2, 40])
def test_pages_outside_of_which_a_part_is_read(keys, new):
    """The index of the pages and buffers for the chosen ones; of a short text neither is less than all."""
    part = {"keys": keys, "values": "int4", "page_size": 16, "offload": "disk", "widen": "never"}
    part |= {"read_tokens": 52, "read_from": 96}
    for name, lengths in (("gemma3", (150, 9, 90)), ("gemma4_text", (200,)), ("gemma3", (80,))):
        model = planned(name)
        inventory = check_transformers_caches(model, (40, 9), 4)
        for budget in ({}, {"device_bytes": 120_000}):
            check_paged_cache(model, inventory, lengths, new, **part, **budget)
    inventory = check_transformers_caches(planned("gemma3"), (40, 9), 4)
    options = {**part, "read_tokens": None, "read_share": 0.3}
    check_paged_cache(planned("gemma3"), inventory, (150, 150), new, **options)
    # layers that differ in size, and rows that differ in length
    inventory = check_transformers_caches(planned("gemma4_text"), (40, 9), 4)
    options |= {"read_from": 20}
    check_paged_cache(planned("gemma4_text"), inventory, (300, 140, 190), new, **options)


# -- worked examples --------------------------------------------------------------------------------------------


def attention(layers, kv_heads, dim=128):
    layer = CachedLayer(kv_heads=kv_heads, key_dim=dim, value_dim=dim)
    return Inventory("example", "llama", "bfloat16", (layer,) * layers)


def dynamic(inventory, row_tokens):
    return predict(inventory, "dynamic", row_tokens=row_tokens).total


def test_worked_examples_of_dynamic_caches():
    llama_70b = attention(80, 8)
    assert dynamic(llama_70b, [8192] * 32) == 85_899_345_920
    assert dynamic(attention(80, 64), [32_768]) == 80 * GIB
    assert dynamic(llama_70b, [32_768]) == 10 * GIB
    assert dynamic(attention(80, 1), [32_768]) == 1.25 * GIB
    assert dynamic(llama_70b, [1]) == 327_680
    assert dynamic(llama_70b, [131_072]) == 42_949_672_960
    assert dynamic(attention(80, 64), [16_384]) == 40 * GIB
    assert dynamic(attention(80, 64), [16_385]) > 40 * GIB
    latent = CachedLayer(kv_heads=1, key_dim=512, value_dim=64, latent=True)
    deepseek_v3 = Inventory("example", "deepseek_v3", "bfloat16", (latent,) * 61)
    assert dynamic(deepseek_v3, [1]) == 70_272
    assert dynamic(deepseek_v3, [1000]) == 70_272_000


def test_worked_example_of_57_pages():
    options = CacheConfig(page_size=16, sink_tokens=0)
    found = figures(attention(80, 8), "paged", options, row_tokens=[900])
    page = 80 * 2 * 8 * 16 * 128 * 2
    assert found.report.pages_held == 56
    assert found.report.payload == 56 * page and found.report.tail == page
    assert found.report.payload + found.report.tail == 57 * page == 285 * 2**20
    assert found.waste == (57 * 16 - 900) * 327_680


# -- what the other parts of the planner count on ---------------------------------------------------------------


@settings(max_examples=40)
@given(
    tokens=st.integers(1, 3000),
    more=st.integers(0, 200),
    rows=st.integers(1, 3),
    window=st.integers(1, 900),
    options=OPTIONS,
)
def test_more_tokens_and_rows_never_take_less(tokens, more, rows, window, options):
    options = {name: value for name, value in options.items() if name != "max_pages"}
    inventory = sliding_inventory([window, None, window])
    for cache, chosen in (("dynamic", None), ("static", None), ("paged", CacheConfig(**options))):

        def total(rows, tokens, cache=cache, chosen=chosen):
            return predict(inventory, cache, chosen, row_tokens=[tokens] * rows).total

        assert total(rows, tokens) <= total(rows, tokens + more) <= total(rows + 1, tokens + more)


def test_figures_add_up():
    one = figures(attention(2, 1), "paged", row_tokens=[500, 30])
    both = one + one
    assert isinstance(both, Figures)
    assert both.report.total == 2 * one.report.total and both.waste == 2 * one.waste
    assert both.report.tokens == 530


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"cache": "pagd"}, CacheOptionError, "cache must be one of.*did you mean 'paged'"),
        ({"cache": "static", "max_length": 9}, CacheOptionError, "no room for a row of 500"),
        ({"cache": "dynamic", "max_length": 9}, CacheOptionError, "cache='static'"),
        ({"cache": "dynamic", "options": CacheConfig()}, CacheOptionError, "options"),
        ({"row_tokens": [3, -1]}, CacheOptionError, "row_tokens"),
        ({"prompt": 501}, CacheOptionError, "prompt=501 is more than"),
        ({"layout": "rowz"}, CacheOptionError, "layout"),
        ({"options": CacheConfig(max_length=499)}, CacheOptionError, "max_length=499"),
        ({"options": CacheConfig(latent="int4")}, CacheOptionError, "latent='int4' is for models"),
        ({"options": CacheConfig(layers={"2": "int4"})}, CacheOptionError, "past the last layer"),
        (
            {"options": CacheConfig(prefix_store=kv_hf.PrefixStore())},
            CacheOptionError,
            "prefix_store",
        ),
        ({"options": CacheConfig(cross_attention="same")}, CacheOptionError, "cross_attention"),
        ({"options": CacheConfig(max_pages=3)}, PagePoolExhaustedError, "max_pages=3"),
        (
            {"options": CacheConfig(offload="cpu"), "layout": LANES},
            CacheOptionError,
            "offload='cpu'",
        ),
        (
            {"options": CacheConfig(offload="cpu", device_bytes=9)},
            DeviceBudgetError,
            "device_bytes=9",
        ),
    ],
)
def test_bad_arguments(given, error, text):
    given = {"cache": "paged", "row_tokens": [500, 20], **given}
    with pytest.raises(error, match=text):
        predict(attention(2, 1), **given)


def test_layers_of_unknown_growth_are_refused():
    inventory = Inventory("v4", "deepseek_v4", "bfloat16", (CachedLayer("DeepseekV4HCACache"),))
    for cache in ("dynamic", "static", "paged"):
        with pytest.raises(UnsupportedModelError, match="DeepseekV4HCACache.*not known"):
            predict(inventory, cache, row_tokens=[5])


def test_windows_are_in_the_table_of_families():
    assert {"mistral", "qwen2", "gemma3", "gpt_oss"} <= set(WINDOWS)
