"""Planned bytes equal those of real caches, part by part: behind generate(), and filled by hand with any options."""

import copy
import inspect

import pytest
import tiny_latent
import tiny_models
import torch
import transformers
from beside_stock import run
from harness import slow_but
from hypothesis import example, given, settings
from hypothesis import strategies as st
from measure.family_models import build_config, families
from tiny_models import COMMON, left_padded, tokens
from transformers import DynamicCache, StaticCache

import kv_hf
from kv_hf.cache.model_shape import CACHE, CROP_TAKES_LENGTHS
from kv_hf.config import CacheConfig
from kv_hf.errors import DeviceBudgetError, PagePoolExhaustedError, PlanError, UnsupportedModelError
from kv_hf.planner.cache_bytes import Pages, Stock
from kv_hf.planner.inventory import CachedLayer, Inventory
from kv_hf.planner.meta_model import model_kind
from kv_hf.planner.source import load_inventory

PARTS = ("payload", "scales", "tail", "tables", "staging", "other", "offloaded")
# families with states, chunks, blocks or latents of their own, from the defaults of their configs
WALKED = """
axk2 bailing_hybrid bamba falcon_h1 falcon_mamba granitemoehybrid inkling_text jamba kimi_linear lfm2 lfm2_moe llama4_text
longcat_flash mamba mamba2 mimo_v2_flash minimax minimax_m3_vl_text nemotron_h olmo_hybrid qwen3_next recurrent_gemma zamba zamba2
"""
FAMILIES = [
    *(("plain", name) for name in tiny_models.FAMILIES),
    *(("latent", name) for name in tiny_latent.FAMILIES),
    *(("layers", name) for name in {**tiny_models.WINDOWS, **tiny_models.SHARED}),
    *(("walked", name) for name in WALKED.split()),
]
# the others are slow
QUICK_NAMES = """
llama gpt2 qwen3_next jamba lfm2 gemma4_text llama4_text minimax_m3_vl_text deepseek_v32 dots3_note mistral_large4 kimi_linear
falcon_h1 zamba2
"""
QUICK = QUICK_NAMES.split()
# without layers that pages could hold, or with a cache of their own
NOT_GENERATED = ("falcon_mamba", "mamba", "mamba2", "minimax")


def predict(inventory, kind, options=None, *, row_tokens, prompt=None, bound=None, on_cpu=False):
    """Return the planned bytes of a cache, by formulas."""
    if kind == "paged":
        return Pages(inventory, options or CacheConfig(), on_cpu).report(row_tokens, prompt)
    return Stock(inventory, kind, bound).report(row_tokens, prompt)


def config_of(kind, name):
    makers = {
        "plain": (tiny_models.make_config, tiny_models.FAMILIES),
        "latent": (tiny_latent.make_config, filter(tiny_latent.is_there, tiny_latent.FAMILIES)),
        "layers": (
            tiny_models.make_layers,
            filter(tiny_models.is_there, tiny_models.WINDOWS | tiny_models.SHARED),
        ),
        "walked": (build_config, families("causal")),
    }
    make, there = makers[kind]
    if name not in there:
        pytest.skip("the installed transformers has no such family")
    if name == "deepseek_v32" and CROP_TAKES_LENGTHS:  # 5.17
        pytest.skip("the installed transformers caches expanded keys of sparse models")
    return make(name)


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
    return [one for x in items for one in leaves(x)] if isinstance(value, (dict, list)) else []


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
    return run(model, left_padded(list(lengths)), cache, max_new_tokens=new).past_key_values


@pytest.mark.parametrize(("kind", "name"), FAMILIES, ids=lambda value: value)
def test_the_meta_model_says_what_a_real_forward_caches(kind, name):
    config = config_of(kind, name)
    planned = load_inventory(config, dtype="bfloat16")
    model = model_of(config, torch.bfloat16)
    takes = inspect.signature(model.forward).parameters
    argument = CACHE if CACHE in takes else "cache_params"
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


# cache, options, (real lengths of the rows' prompts, new tokens): each with every family
PADDED, ALIKE = ((40, 3, 21), 24), ((150, 150), 2)
INT4 = {"keys": "int4", "values": "int8", "page_size": 16}
OFFLOADED = {"keys": "int8", "page_size": 16, "offload": "disk"}
PART = {**OFFLOADED, "read": {"tokens": 52, "from": 96}, "widen": "never"}
TABLE = [
    ("dynamic", {}, PADDED),
    ("static", {}, PADDED),
    ("paged", INT4, PADDED),
    ("paged", {**INT4, "sink_tokens": 0, "recent_tokens": 20}, PADDED),
    ("paged", {**INT4, "page_size": 32}, PADDED),
    ("paged", OFFLOADED, ALIKE),
]
LATENTS = {"keys": "format", "values": "k_rope"}  # what latent attention calls them


def check(model, inventory, kind, options, load):
    """Check a cache behind generate(), and that no prompt leads to more than is said without one."""
    lengths, new = load
    # the last new token is not in the cache
    rows, prompt = [length + new - 1 for length in lengths], max(lengths)
    if kind != "paged":
        room = prompt + new + 5 if kind == "static" else None
        made = {"config": model.config, **({"max_cache_len": room} if room else {})}
        cache = generated(model, (StaticCache if room else DynamicCache)(**made), lengths, new)
        found = predict(inventory, kind, row_tokens=rows, prompt=prompt, bound=room)
        assert (found.payload, found.other) == stored(cache, alive=not room)
        return cache
    cache = generated(model, kv_hf.PagedCache(model.config, **options), lengths, new)
    given = {"row_tokens": rows, "on_cpu": True}
    assert predict(inventory, kind, cache.options, prompt=prompt, **given) == cache.memory()
    most = predict(inventory, kind, cache.options, **given)
    assert all(getattr(most, part) >= getattr(cache.memory(), part) for part in PARTS)
    return cache


GENERATED = [one for one in FAMILIES if one[1] not in NOT_GENERATED]


@pytest.mark.parametrize(
    ("kind", "name"), slow_but([one for one in GENERATED if one[1] in QUICK], GENERATED)
)
def test_planned_bytes_are_those_of_caches_behind_generate(kind, name):
    config = config_of(kind, name)
    model, inventory = model_of(config), load_inventory(config, dtype="float32")
    heads = {(x.kv_heads, x.key_dim, x.value_dim) for x in inventory.layers if x.elements}
    for cache, options, load in TABLE:
        if any(layer.latent for layer in inventory.layers):
            parts = {LATENTS[side]: options[side] for side in LATENTS if side in options}
            options = {key: value for key, value in options.items() if key not in LATENTS}
            options |= {"latent": parts} if parts else {}
        if (
            name == "glm5_next"
        ):  # makes its masks itself: the cache does not learn of padding, and stores it
            load = ((40, 40, 40), 24)
        # the first forward with an offload takes all layers for ones like the first
        if options.get("offload") and (len(heads) > 1 or name == "glm5_next"):
            continue
        # transformers 5.17 fails to make the mask of chunks for a static cache
        if not (cache == "static" and name == "llama4_text" and CROP_TAKES_LENGTHS):
            check(model, inventory, cache, options, load)


@pytest.mark.parametrize(
    ("options", "offloaded"),
    [
        ({**OFFLOADED, "device_bytes": 60_000}, 2),
        ({**OFFLOADED, "device_bytes": 140_000}, 0),
        (PART, 4),
        ({**PART, "keys": "int4", "device_bytes": 40_000}, 2),
        ({**PART, "read": {"share": 0.3, "from": 20}}, 4),
    ],
)
def test_offloaded_pages(options, offloaded):
    config = config_of("layers", "gemma3_text")
    model, inventory = model_of(config), load_inventory(config, dtype="float32")
    cache = check(model, inventory, "paged", options, ALIKE)
    away = [layer for layer in cache.paged_layers if layer.storage.offloaded_bytes]
    assert len(away) == offloaded


# -- a machine that draws options, lengths, windows and latents, on caches that are filled by hand -----------------

DIM, RANK = 32, 128
FORMATS = ("exact", "fp8", "int8", "int4", "int2")
OPTIONS = st.fixed_dictionaries(
    {
        "keys": st.sampled_from(FORMATS),
        "values": st.sampled_from(FORMATS),
        "page_size": st.sampled_from([16, 32]),
        "sink_tokens": st.sampled_from([0, 1, 4, 20]),
    },
    optional={
        "recent_tokens": st.sampled_from([0, 1, 16, 50]),
        "max_pages": st.integers(1, 60),
        "layers": st.sampled_from([{"0": "int8"}, {"1-2": {"keys": "int4"}}, {"2": "exact"}]),
    },
)
LENGTHS = st.lists(st.integers(1, 150), min_size=1, max_size=4)
PATTERN = st.lists(st.booleans(), min_size=3, max_size=3)


def small(window, slides):
    """Return a config and an inventory of layers of which some have a sliding window; `slides` None: latents."""
    if slides is None:
        config = transformers.DeepseekV3Config(**{**tiny_latent.COMMON, "kv_lora_rank": RANK})
        layer = CachedLayer(kv_heads=1, key_dim=RANK, value_dim=8, latent=True)
        return config, Inventory("hand", "deepseek_v3", "float32", (layer,) * 2, config=config)
    kinds = ["sliding_attention" if one else "full_attention" for one in slides]
    config = transformers.Gemma3TextConfig(
        **{**COMMON, "num_hidden_layers": len(slides), "head_dim": DIM, "layer_types": kinds},
        sliding_window=window,
    )
    sizes = {"kv_heads": 2, "key_dim": DIM, "value_dim": DIM}
    full = CachedLayer(**sizes)
    moving = CachedLayer("DynamicSlidingWindowLayer", **sizes, window=window)
    layers = tuple(moving if one else full for one in slides)
    return config, Inventory("hand", "gemma3_text", "float32", layers, config=config)


def fill(cache, lengths, new, layers):
    """Append left-padded prompts of these lengths in one forward, then `new` tokens one by one."""
    width = max(lengths)
    if isinstance(cache, kv_hf.PagedCache):
        cache.observe_padding(torch.tensor([[0] * (width - n) + [1] * n for n in lengths]))
    for columns in (width, *[1] * new):
        for index, one in enumerate(layers):
            sides = ((len(lengths), one.kv_heads, columns, d) for d in (one.key_dim, one.value_dim))
            cache.update(*map(torch.zeros, sides), index)
    return cache


@settings(max_examples=80)
@given(
    options=OPTIONS,
    lengths=LENGTHS,
    new=st.integers(0, 60),
    window=st.integers(1, 120),
    slides=st.none() | PATTERN,
    room=st.none() | st.integers(0, 70),
)
@example({"page_size": 16, "keys": "int4", "values": "int8"}, [90, 33], 7, 9, [False] * 3, 5)
@example(
    {"page_size": 16, "keys": "int8", "values": "int8"}, [2100, 2116], 20, 9, [False] * 3, None
)
def test_any_options_lengths_and_layers(options, lengths, new, window, slides, room):
    config, inventory = small(window, slides)
    rows = {"row_tokens": [length + new for length in lengths], "prompt": max(lengths)}
    cache = fill(DynamicCache(config=config), lengths, new, inventory.layers)
    found = predict(inventory, "dynamic", **rows)
    assert (found.payload, found.other) == stored(cache, alive=True)
    if slides is None:
        rope = {"k_rope": options["values"]} if options["values"] in ("exact", "int8") else {}
        plain = {k: v for k, v in options.items() if k not in ("keys", "values", "layers")}
        options = {**plain, "latent": {"format": options["keys"], **rope}}
    elif room is not None and not any(slides):  # preallocated
        options = {k: v for k, v in options.items() if k in ("keys", "values", "sink_tokens")}
        options |= {"page_size": 16, "max_length": max(rows["row_tokens"]) + room}
    chosen, cache = CacheConfig(**options), kv_hf.PagedCache(config, **options)
    try:
        fill(cache, lengths, new, inventory.layers)
    except PagePoolExhaustedError:
        with pytest.raises(PagePoolExhaustedError, match="max_pages"):
            predict(inventory, "paged", chosen, **rows)
        return
    assert predict(inventory, "paged", chosen, on_cpu=True, **rows) == cache.memory()
    assert predict(inventory, "paged", chosen, **rows) == cache.memory()
    if len({*lengths}) == 1:  # and of a real cache without memory
        sizes = len(lengths), rows["row_tokens"][0], rows["prompt"]
        assert Pages(inventory, chosen).filled(*sizes) == cache.memory()


# -- worked examples, and what is refused -------------------------------------------------------------


def attention(layers, kv_heads, dim=128, **more):
    layer = CachedLayer(kv_heads=kv_heads, key_dim=dim, value_dim=dim, **more)
    config = transformers.LlamaConfig(num_hidden_layers=layers, head_dim=dim)
    return Inventory("example", "llama", "bfloat16", (layer,) * layers, config=config)


@pytest.mark.parametrize(
    ("name", "values", "error", "more"),
    [
        ("max_length", (1, 20, 499), kv_hf.KVCacheError, {}),
        ("max_pages", (1, 3, 5), PagePoolExhaustedError, {}),
        ("device_bytes", (1, 9, 60_000), DeviceBudgetError, {"offload": "cpu"}),
        ("prefix_store", (kv_hf.PrefixStore(),), kv_hf.KVCacheError, {}),
    ],
)
def test_options_that_no_plan_can_have_are_refused(name, values, error, more):
    for value in values:
        said = name if name == "prefix_store" else f"{name}={value}"
        options = CacheConfig(**{name: value}, **more)
        with pytest.raises(error, match=said):
            predict(attention(2, 1), "paged", options, row_tokens=[500, 20])


def test_layers_of_unknown_growth_are_refused():
    inventory = Inventory("v4", "deepseek_v4", "bfloat16", (CachedLayer("DeepseekV4HCACache"),))
    for cache in ("dynamic", "static", "paged"):
        with pytest.raises(UnsupportedModelError, match="DeepseekV4HCACache.*not known"):
            predict(inventory, cache, row_tokens=[5])
    by_hand = Inventory("hand", "llama", "bfloat16", (CachedLayer(),))
    with pytest.raises(PlanError, match="'hand' has no config"):
        predict(by_hand, "paged", row_tokens=[5])
