"""Options are validated once, with errors that name argument, value and remedy."""

import copy
import dataclasses
from types import MappingProxyType

import pytest
import tiny_models
import torch
from transformers import LlamaConfig

import kv_hf
from kv_hf.backends import registry
from kv_hf.checks import check_choice
from kv_hf.config import CacheConfig, check_option_names
from kv_hf.errors import CacheOptionError
from kv_hf.formats import cache_names, format_names, key_scheme, value_scheme
from kv_hf.spec import LANES, PageSpec

ALL_FORMATS = "must be one of exact, fp8, int8, int4, int2"
POWER_OF_TWO = "page_size must be a power of two of at least 16"

# id -> (options, what the message must say)
BAD_OPTIONS = {
    "keys-near": ({"keys": "int44"}, ["keys", "'int44'", ALL_FORMATS, "did you mean 'int4'?"]),
    "keys-other-case": ({"keys": "INT8"}, ["keys", "'INT8'", ALL_FORMATS]),
    "keys-none": ({"keys": None}, ["keys", "None", ALL_FORMATS]),
    "keys-number": ({"keys": 4}, ["keys", "4", ALL_FORMATS]),
    "values-near": ({"values": "fp88"}, ["values", "'fp88'", ALL_FORMATS, "did you mean 'fp8'?"]),
    "values-implementation-name": (
        {"values": "paged_int4"},
        ["values", "'paged_int4'", ALL_FORMATS],
    ),
    "page_size-24": ({"page_size": 24}, [POWER_OF_TWO, "24"]),
    "page_size-96": ({"page_size": 96}, [POWER_OF_TWO, "96"]),
    "page_size-8": ({"page_size": 8}, ["page_size", "at least 16", "8"]),
    "page_size-0": ({"page_size": 0}, ["page_size", "at least 16", "0"]),
    "page_size-negative": ({"page_size": -64}, ["page_size", "at least 16", "-64"]),
    "page_size-true": ({"page_size": True}, ["page_size", "integer", "True"]),
    "page_size-text": ({"page_size": "64"}, ["page_size", "integer", "'64'"]),
    "page_size-float": ({"page_size": 64.0}, ["page_size", "integer", "64.0"]),
    "page_size-none": ({"page_size": None}, ["page_size", "integer", "None"]),
    "key_group_size-24": (
        {"key_group_size": 24},
        ["key_group_size must divide page_size 64", "24"],
    ),
    "key_group_size-128": (
        {"key_group_size": 128},
        ["key_group_size must divide page_size 64", "128"],
    ),
    "key_group_size-0": ({"key_group_size": 0}, ["key_group_size", "at least 1", "0"]),
    "key_group_size-negative": ({"key_group_size": -32}, ["key_group_size", "at least 1", "-32"]),
    "key_group_size-true": ({"key_group_size": True}, ["key_group_size", "integer", "True"]),
    "value_group_size-0": ({"value_group_size": 0}, ["value_group_size", "at least 1", "0"]),
    "value_group_size-negative": (
        {"value_group_size": -8},
        ["value_group_size", "at least 1", "-8"],
    ),
    "value_group_size-text": ({"value_group_size": "32"}, ["value_group_size", "integer", "'32'"]),
    "sink_tokens-negative": ({"sink_tokens": -1}, ["sink_tokens", "at least 0", "-1"]),
    "sink_tokens-none": ({"sink_tokens": None}, ["sink_tokens", "integer", "None"]),
    "recent_tokens-negative": ({"recent_tokens": -5}, ["recent_tokens", "at least 0", "-5"]),
    "reserve_tokens-negative": ({"reserve_tokens": -1}, ["reserve_tokens", "at least 0", "-1"]),
    "recent_tokens-true": ({"recent_tokens": True}, ["recent_tokens", "integer", "True"]),
    "max_pages-0": ({"max_pages": 0}, ["max_pages", "at least 1", "0"]),
    "max_pages-negative": ({"max_pages": -3}, ["max_pages", "at least 1", "-3"]),
    "max_pages-float": ({"max_pages": 10.5}, ["max_pages", "integer", "10.5"]),
}

SPAN = "layer number or a range like '0-3'"
# id -> (layers, what the message must say besides "layers")
BAD_LAYERS = {
    "text": ("int8", ["must map layer numbers or ranges to formats", "'int8'"]),
    "list": ([("0", "int8")], ["must map layer numbers or ranges to formats", "('0', 'int8')"]),
    "span-word": ({"first": "int8"}, [SPAN, "'first'"]),
    "span-empty": ({"": "int8"}, [SPAN, "''"]),
    "span-negative": ({"-1": "int8"}, [SPAN, "'-1'"]),
    "span-negative-number": ({-1: "int8"}, [SPAN, "-1"]),
    "span-three-parts": ({"0-1-2": "int8"}, [SPAN, "'0-1-2'"]),
    "span-no-end": ({"0-": "int8"}, [SPAN, "'0-'"]),
    "span-python-slice": ({"0:2": "int8"}, [SPAN, "'0:2'"]),
    # str.isdigit() is true for it, int() refuses it
    "span-superscript": ({"²": "int8"}, [SPAN, "'²'"]),
    "span-backwards": ({"3-1": "int8"}, ["'3-1'", "ends before it begins"]),
    "format-number": ({"0": 8}, ["'0'", "must give a format", "8"]),
    "format-none": ({"0-1": None}, ["'0-1'", "must give a format", "None"]),
    "format-unknown": ({"0": "int9"}, ["'0'", "'int9'", ALL_FORMATS, "did you mean"]),
    "side-unknown": ({"0": {"key": "int8"}}, ["'0'", "'key'", "keys, values", "'keys'"]),
    "side-format-unknown": ({"0": {"keys": "int"}}, ["'0'", "'keys'", "'int'", ALL_FORMATS]),
}


def _refused(options):
    with pytest.raises(CacheOptionError) as error:
        CacheConfig(**options)
    return str(error.value)


@pytest.mark.parametrize(("options", "says"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_cache_config_refuses_bad_option(options, says):
    message = _refused(options)
    assert message.startswith(next(iter(options)))
    assert [part for part in says if part not in message] == []


@pytest.mark.parametrize(("layers", "says"), BAD_LAYERS.values(), ids=BAD_LAYERS)
def test_cache_config_refuses_bad_layers(layers, says):
    message = _refused({"layers": layers})
    assert message.startswith("layers")
    assert [part for part in says if part not in message] == []


@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 1024])
@pytest.mark.parametrize("name", format_names("keys", "values"))
def test_cache_config_default_groups_fit_every_page_size(name, page_size):
    """int2's default of 32 tokens per key scale once met a page of 16, which is a documented size."""
    config = CacheConfig(keys=name, values=name, page_size=page_size)
    spec = PageSpec.build(
        *config.schemes(0, 1),
        num_kv_heads=1,
        key_dim=64,
        value_dim=64,
        page_size=page_size,
        dtype=torch.float16,
    )
    assert spec.keys.page_size == page_size


@pytest.mark.parametrize("layers", [{}, {"0": "int8"}, {0: "int8"}, {"0-1": {"values": "int4"}}])
def test_cache_config_accepts_layers(layers):
    assert CacheConfig(layers=layers).layers == layers


def test_cache_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        CacheConfig().page_size = 32


def test_cache_config_keeps_its_layers_when_the_given_dict_changes():
    """The options are validated once and frozen: an edit of the caller's dict must not pass unchecked."""
    layers = {"0": {"keys": "int8"}}
    config = CacheConfig(layers=layers)
    layers["0"]["keys"] = "int4"
    layers["1"] = "no such format"
    assert [scheme.name for scheme in config.schemes(0, 2)] == ["int8", "exact"]
    assert [scheme.name for scheme in config.schemes(1, 2)] == ["exact", "exact"]


def test_check_choice_gives_no_hint_when_nothing_is_near():
    with pytest.raises(CacheOptionError) as error:
        check_choice("keys", "zzz", format_names("keys", "values"))
    assert str(error.value) == f"keys {ALL_FORMATS}, got 'zzz'"


def test_check_option_names_suggests_the_nearest():
    with pytest.raises(
        CacheOptionError, match=r"got 'page_sise' \(did you mean 'page_size'\?\)"
    ) as error:
        check_option_names({"keys": "int4", "page_sise": 32})
    assert "cache_config option must be one of" in str(error.value)
    for field in dataclasses.fields(CacheConfig):
        assert field.name in str(error.value)


# -- from_options ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "formats"),
    [
        *((name, {"keys": one, "values": one}) for name, one in tiny_models.ONE_FORMAT.items()),
        ("paged_int2", {"keys": "int2_mixed", "values": "int2_rotated", "latent": "int2"}),
        ("paged_int3", {"keys": "int2_mixed", "values": "int3_rotated"}),
        ("paged_k5v3", {"keys": "int4_mixed", "values": "int3_rotated", "latent": "int4"}),
    ],
)
@pytest.mark.parametrize("options", [None, {}], ids=["none", "empty"])
def test_from_options_takes_the_formats_from_the_name(name, formats, options):
    assert CacheConfig.from_options(name, options) == CacheConfig(**formats)


def test_from_options_lets_options_override_the_name():
    config = CacheConfig.from_options("paged_int4", {"keys": "int8", "page_size": 32})
    assert config == CacheConfig(keys="int8", values="int4", page_size=32)
    config = CacheConfig.from_options("paged_int2", {"keys": "int4", "values": "int4"})
    assert config == CacheConfig(keys="int4", values="int4")


def test_a_name_may_bring_a_format_of_latents_that_other_models_have():
    model = LlamaConfig(num_hidden_layers=1, num_attention_heads=2, hidden_size=32, vocab_size=9)
    for options in ({}, {"keys": "int4"}, {"values": "int4"}):
        held = kv_hf.PagedCache.from_implementation(model, "paged_int2", options)
        assert held.report()[0].keys == options.get("keys", "int2_mixed")
    with pytest.raises(CacheOptionError, match="latent='int2' is for models with multi-head"):
        kv_hf.PagedCache.from_implementation(model, "paged_int4", {"latent": "int2"})


def test_from_options_never_changes_the_dict():
    """transformers users pass one dict to many calls; KIVI-style `pop` would break the second."""
    options = {"keys": "int8", "page_size": 32, "layers": {"0-1": {"keys": "exact"}, 2: "fp8"}}
    before = copy.deepcopy(options)
    first = CacheConfig.from_options("paged_int4", options)
    first.schemes(0, 4)
    assert options == before
    assert CacheConfig.from_options("paged_int4", options) == first
    with pytest.raises(CacheOptionError):
        CacheConfig.from_options("paged_int4", {**options, "page_size": 24})
    assert options == before
    # a mapping that cannot be written at all
    assert CacheConfig.from_options("paged_int4", MappingProxyType(options)) == first


@pytest.mark.parametrize(
    ("implementation", "options", "says"),
    [
        ("paged_int5", {}, ["cache_implementation", "'paged_int5'", ", ".join(cache_names())]),
        ("int4", {}, ["cache_implementation", "'int4'", ", ".join(cache_names())]),
        ("paged_int4", {"group_size": 32}, ["cache_config option", "'group_size'", "did you mean"]),
        ("paged_int4", {"nbits": 4}, ["cache_config option", "'nbits'", "keys, values, page_size"]),
        ("paged_int4", {3: 4}, ["cache_config option", "got 3"]),
        ("paged_int4", {"page_size": 24}, [POWER_OF_TWO, "24"]),
    ],
    ids=["unknown-name", "format-name", "near-option", "far-option", "no-text", "bad-value"],
)
def test_from_options_refuses(implementation, options, says):
    with pytest.raises(CacheOptionError) as error:
        CacheConfig.from_options(implementation, options)
    assert [part for part in says if part not in str(error.value)] == []


# -- layers ------------------------------------------------------------------------------------------------


def test_schemes_apply_layers_per_layer_and_side():
    layers = {"0-1": "int8", "3": {"keys": "fp8"}, 4: {"values": "exact"}, "5": {}}
    config = CacheConfig(keys="int4", values="int2", layers=layers)
    names = [tuple(scheme.name for scheme in config.schemes(layer, 7)) for layer in range(7)]
    assert names == [
        ("int8", "int8"),
        ("int8", "int8"),
        ("int4", "int2"),
        ("fp8", "int2"),
        ("int4", "exact"),
        ("int4", "int2"),
        ("int4", "int2"),
    ]


def test_schemes_give_overrides_the_group_sizes():
    config = CacheConfig(key_group_size=16, value_group_size=8, layers={"1": "int4"})
    keys, values = config.schemes(1, 2)
    assert (keys.scale_group, values.scale_group) == ((16, 1), (1, 8))


@pytest.mark.parametrize("span", ["4", "2-4", "4-9", 4])
@pytest.mark.parametrize("layer_idx", [0, 3])
def test_schemes_refuse_a_range_past_the_last_layer(span, layer_idx):
    config = CacheConfig(layers={span: "int8"})
    low, _, high = str(span).partition("-")
    with pytest.raises(CacheOptionError, match=f"layers: {low}-{high or low} .*last layer 3 "):
        config.schemes(layer_idx, 4)
    assert len(config.schemes(layer_idx, 10)) == 2


# -- every field is read -----------------------------------------------------------------------------------


def _observe(**options):
    """Everything that an option may change, as a cache shows it after 100 tokens of two layers."""
    config = tiny_models.make_config("llama", head_dim=32)
    cache = kv_hf.PagedCache(config, **options)
    torch.manual_seed(0)
    tokens = torch.randn(1, 2, 100, 32)
    for layer in range(2):
        cache.update(tokens, tokens, layer)
    layers = [layer for layer in cache.layers if layer.storage is not None]
    return {
        "formats": [(row.keys, row.values) for row in cache.report()],
        "pages": [len(row.pages) for row in cache.group.rows],
        "exact": [row.exact for row in cache.group.rows],
        "sinks": cache.group.sink_tokens,
        "scales": [
            {name: tuple(t.shape[1:]) for name, t in side.fields.items() if name != "codes"}
            for layer in layers
            for side in layer.storage.sides
        ],
    }


INT4 = {"keys": "int4", "values": "int4"}
# field -> (options without it, its value, what must differ)
EFFECTS = {
    "keys": ({}, "int8", {"formats", "scales"}),
    "values": ({}, "int8", {"formats", "scales"}),
    "page_size": ({}, 32, {"pages", "exact"}),
    "key_group_size": (INT4, 16, {"scales"}),
    "value_group_size": (INT4, 16, {"scales"}),
    "sink_tokens": ({}, 40, {"pages", "exact", "sinks"}),
    "recent_tokens": ({}, 60, {"pages", "exact"}),
    "layers": ({}, {"1": {"keys": "fp8"}}, {"formats", "scales"}),
}


@pytest.mark.parametrize(("options", "value", "differ"), EFFECTS.values(), ids=EFFECTS)
def test_cache_config_field_changes_the_cache(request, options, value, differ):
    field = request.node.callspec.id
    base = _observe(**{"values": "exact", **options})
    changed = _observe(**{"values": "exact", **options, field: value})
    assert {name for name in base if base[name] != changed[name]} == differ


def test_cache_config_max_pages_bounds_the_pool():
    assert _observe(page_size=16, max_pages=6)["pages"] == [6]
    with pytest.raises(kv_hf.PagePoolExhaustedError, match="max_pages=5"):
        _observe(page_size=16, max_pages=5)


@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_cache_config_kernel_decides_who_reads_the_pages(kernel, monkeypatch):
    used = []
    spec = PageSpec.build(
        key_scheme("int8"),
        value_scheme("int8"),
        num_kv_heads=2,
        key_dim=16,
        value_dim=16,
        page_size=64,
        dtype=torch.float32,
        layout=LANES,
    )
    auto = registry.choose("auto", torch.device("cpu"), spec).name
    name = auto if kernel == "auto" else kernel
    chosen = registry.load(name)

    def load(asked):
        assert asked == name
        return dataclasses.replace(
            chosen, attend=lambda call: used.append(asked) or chosen.attend(call)
        )

    monkeypatch.setattr(registry, "load", load)
    model = tiny_models.make_model("llama", num_hidden_layers=1)
    model.generate(
        tiny_models.tokens(1, 5),
        max_new_tokens=3,
        min_new_tokens=3,
        cache_implementation="paged_int8",
        cache_config={"kernel": kernel},
    )
    assert used == [name] * 2


def test_cache_config_documents_and_tests_every_field():
    names = {field.name for field in dataclasses.fields(CacheConfig)}
    assert names == {
        *EFFECTS,
        "max_pages",
        "max_bytes",  # serving/test_batch.py
        "reserve_tokens",
        *("max_length", "cuda_graph"),  # test_static_cache.py, test_step_graph.py
        "kernel",
        "prefix_store",
        "cross_attention",
        *("offload", "device_bytes", "offload_dir"),  # test_offload.py
        "widen",  # test_widening.py
        *("read_tokens", "read_share", "read_top_p", "read_from"),  # test_reading.py
        *("latent", "latent_group_size", "k_rope", "mla"),  # test_latent.py
    }
    assert [
        name for name in names if name not in CacheConfig.__doc__.partition("Attributes")[2]
    ] == []
