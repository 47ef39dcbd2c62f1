"""Options of caches: explicit, validated once, frozen; every way to give them is one, and errors name argument, value and remedy."""

import copy
import dataclasses
import inspect
import json
import pickle
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import tiny_encoders
import tiny_models
from transformers import GenerationConfig, LlamaConfig

import kv_hf
from kv_hf.config import CacheConfig
from kv_hf.errors import CacheOptionError
from kv_hf.formats import cache_names, key_scheme
from kv_hf.read_budget import ReadBudget

FORMATS = "must be one of .*int8, "
POWER = "page_size must be a power of two of at least 16, got"
SPAN = "layers.*layer number or a range like '0-3'"
SHARE = "must be a number between 0 and 1"
STORE = {"prefix_store": kv_hf.PrefixStore()}
# options, and a regular expression that the message must match
BAD = [
    ({"keys": "INT8"}, f"keys {FORMATS}.*'INT8'.*did you mean 'int8'"),
    ({"keys": None}, f"keys {FORMATS}.*None"),
    ({"values": "fp88"}, f"values {FORMATS}.*'fp88'.*did you mean 'fp8'"),
    ({"values": "paged_int4"}, f"values {FORMATS}.*'paged_int4'.*did you mean 'int4'"),
    # "cuda" was answered with 'c'
    ({"kernel": "cuda"}, "kernel must be one of auto, .*, got 'cuda'.*did you mean 'triton'"),
    ({"kernel": "cpu"}, "kernel must be one of .*, got 'cpu'.*did you mean 'c'"),
    ({"page_size": 24}, f"{POWER} 24"),
    ({"page_size": True}, "page_size must be an integer.*True"),
    ({"group_size": 0}, "group_size .* at least 1, got 0"),
    ({"group_size": {"values": -8}}, r"group_size\['values'\] .* at least 1, got -8"),
    ({"group_size": {"values": "32"}}, r"group_size\['values'\] must be an integer.*'32'"),
    ({"group_size": {"key": 32}}, "a key of group_size must be one of keys, values, latent, got 'key'.*did you mean 'keys'"),
    ({"group_size": {}}, "group_size={} is read by no format"),
    ({"group_size": 16}, "group_size=16 is read by no format: for keys int6, .* read it, not exact; for values int6, "),
    ({"group_size": {"keys": 16, "values": 16}, "keys": "int4"}, "is read by no format: for values int6, .* not exact"),
    ({"group_size": {"latent": 64}, "latent": "exact"}, "is read by no format: for latent fp8, int8, .* not exact"),
    ({"sink_tokens": -1}, "sink_tokens .* at least 0, got -1"),
    ({"recent_tokens": -5}, "recent_tokens .* at least 0, got -5"),
    ({"max_pages": 0}, "max_pages must be an integer of at least 1, got 0"),
    ({"max_pages": 10.5}, "max_pages must be an integer.*10.5"),
    ({"max_length": 0}, "max_length must be"),
    ({"max_length": 99, "max_pages": 4}, "max_pages=4 does not go with max_length"),
    ({"max_length": 99, "offload": "cpu"}, "offload='cpu' does not go with max_length"),
    ({"offload": "dsk"}, r"offload \(or a folder, as './pages'\) must be one of cpu, disk, got 'dsk'.*did you mean 'disk'"),
    ({"offload": "/no/such"}, "offload must be cpu, disk or a folder that exists, got '/no/such'"),
    ({"offload": Path("dsk")}, "offload must be cpu, disk or a folder that exists, got .*'dsk'"),
    ({"offload": "disk", **STORE}, "does not go with"),
    ({"device_bytes": 4}, "device_bytes=4 needs offload='cpu' or 'disk'"),
    ({"offload": "disk", "device_bytes": 0}, "device_bytes must be an integer of at least 1"),
    ({"widen": "sometimes"}, "widen"),
    ({"cross_attention": "int4"}, "cross_attention must be one of exact, same"),
    ({"cuda_graph": "often"}, "cuda_graph must be one of"),
    ({"read": 131}, r"read must be at least 132 tokens: 4 sink_tokens, 0 recent_tokens, an open page .* got 131"),
    ({"read": 199, "recent_tokens": 68}, "at least 200"),
    ({"read": True}, r"read\['tokens'\] must be an integer"),
    ({"read": "most"}, r"read\['tokens'\] must be a number of tokens such as 8192 or 128k .* got 'most'"),
    ({"read": 0.0}, rf"read\['share'\] {SHARE}, both left out, got 0.0"),
    ({"read": float("nan")}, r"read\['share'\] must be a number"),
    ({"read": {"share": 1}}, rf"read\['share'\] {SHARE}"),
    ({"read": {"share": "most"}}, r"read\['share'\] must be a number"),
    ({"read": {"token": 2048}}, "a key of read must be one of tokens, share, from, got 'token'.*did you mean 'tokens'"),
    ({"read": {"tokens": 2048, "share": 0.5}}, "tokens and share bound the same"),
    ({"read": {"from": 100}}, "read={'from': 100} bounds nothing"),
    ({"read": {}}, "read={} bounds nothing"),
    ({"read": {"tokens": 2048, "from": 0}}, r"read\['from'\] must be an integer of at least 1"),
    ({"latent": {"k_rope": "int4"}}, r"latent\['k_rope'\] must be one of exact, int8, got 'int4'"),
    ({"latent": {"format": "int3"}}, r"latent\['format'\] must be one of .*int8, .* got 'int3'"),
    ({"latent": {"krope": "int8"}}, "a key of latent must be one of format, k_rope, decode, got 'krope' .did you mean 'k_rope'"),
    ({"layers": "int8"}, "layers must map layer numbers or ranges to formats.*'int8'"),
    ({"layers": {-1: "int8"}}, f"{SPAN}.*-1"),
    ({"layers": {"²": "int8"}}, f"{SPAN}.*'²'"),  # str.isdigit() is true for it, int() refuses it
    ({"layers": {"3-1": "int8"}}, "layers.*'3-1'.*ends before it begins"),
    ({"layers": {"0": 8}}, "layers.*'0'.*must give a format.*8"),
    ({"layers": {"0": "int9"}}, f"layers.*'0'.*{FORMATS}.*'int9'.*did you mean"),
    ({"layers": {"0": {"key": "int8"}}}, "layers.*'0'.*keys, values.*'key'.*'keys'"),
    ({"layers": {"0": {"keys": "int"}}}, f"layers.*'0'.*'keys'.*{FORMATS}.*'int'"),
    *(({name: text, "offload": "cpu"}, f"{name} must be .* such as ") for name in ("max_length", "device_bytes")
      for text in ("2 lots", "-1", "")),
    *(({**others, name: 2**70}, f"{name} must be an integer of at most [0-9]+, got") for name, others in {
        "page_size": {}, "group_size": {"keys": "int4"}, "sink_tokens": {},
        "recent_tokens": {}, "max_pages": {}, "max_length": {}, "device_bytes": {"offload": "cpu"}}.items()),
]  # fmt: skip


@pytest.mark.parametrize(("options", "says"), BAD, ids=lambda one: str(one)[:40])
def test_bad_options_are_refused_before_a_cache_is_made(options, says):
    with pytest.raises(CacheOptionError, match=says):
        CacheConfig(**options)


# options that only a model tells to be wrong
BAD_FOR_LLAMA = [
    ({"group_size": {"values": 24}}, "values format 'int4': group_size must divide head_dim 16, got 24"),
    ({"group_size": {"keys": 24}}, "keys format 'int4': group_size must divide page_size 64, got 24"),
    ({"group_size": {"keys": 128}}, "group_size must divide page_size 64, got 128"),
    ({"group_size": {"latent": 8}}, "names latent, and this model stores keys and values alone"),
    ({"layers": {"0-9": "int8"}}, "0-9 goes past the last layer 1"),
    ({"page_sise": 64}, "page_sise.*did you mean 'page_size'"),
    ([1], "cache_config must be a kv_hf.CacheConfig or a dict"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "says"), BAD_FOR_LLAMA, ids=lambda one: str(one)[:24])
def test_bad_cache_config_is_refused_before_generation(config, says):
    model, ran = tiny_models.make_model("llama"), []
    model.register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.raises(CacheOptionError, match=says):
        asked(model, cache_implementation="paged_int4", cache_config=config)
    assert not ran


def test_group_size_that_no_format_of_a_model_reads_is_refused():
    """In int8 latents alone have groups to set."""
    config = tiny_models.make_config("llama")
    with pytest.raises(CacheOptionError, match="group_size=16 is read by no format: for keys int6"):
        kv_hf.PagedCache(config, keys="int8", group_size=16)
    kv_hf.PagedCache(config, keys="int8", layers={"0": {"values": "int4"}}, group_size=16)


def test_group_size_is_that_of_every_side_that_reads_it():
    config = CacheConfig(keys="int4", values="int4", group_size=8)
    assert [one.scale_group for one in config.schemes(0, 1)] == [(8, 1), (1, 8)]
    sides = dataclasses.replace(config, group_size={"values": 4})
    assert [one.scale_group for one in sides.schemes(0, 1)] == [(0, 1), (1, 4)]
    assert CacheConfig(**json.loads(json.dumps(sides.to_dict()))) == sides
    assert CacheConfig(values="int4", group_size=8).schemes(0, 1)[0] == key_scheme("exact")


# -- what is accepted --------------------------------------------------------------------------------------

SIZES = {"max_length": ("8k", 8 * 1024), "device_bytes": ("2GiB", 2**31)}  # fmt: skip


@pytest.mark.parametrize(("name", "given"), SIZES.items())
def test_cache_config_reads_sizes_with_units(name, given):
    others = {"offload": "cpu"} if name == "device_bytes" else {}
    config = CacheConfig(**{name: given[0]}, **others)
    assert getattr(config, name) == given[1]
    assert config == CacheConfig(**{name: given[1]}, **others) == CacheConfig(**config.to_dict())
    assert copy.deepcopy(config) == config == pickle.loads(pickle.dumps(config))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.page_size = 32


@pytest.mark.parametrize(
    ("given", "held", "budget"),
    [
        ("2k", {"tokens": 2048}, ReadBudget(pages=30)),
        (0.25, {"share": 0.25}, ReadBudget(share=0.25)),
        ({"share": 0.9, "from": "8k"}, {"share": 0.9, "from": 8192}, ReadBudget(share=0.9, from_tokens=8192)),
    ],
    ids=str,
)  # fmt: skip
def test_read_is_one_budget(given, held, budget):
    config = CacheConfig(read=given)
    assert config.budget == budget and config.to_dict() == {"read": held}
    assert CacheConfig(**json.loads(json.dumps(config.to_dict()))) == config
    assert copy.deepcopy(config) == config == pickle.loads(pickle.dumps(config))
    smaller = dataclasses.replace(config, page_size=32)
    assert smaller.budget == CacheConfig(read=given, page_size=32).budget


def test_prefix_store_reads_its_bound_with_a_unit():
    assert kv_hf.PrefixStore(max_bytes="512MiB").max_bytes == 512 * 2**20
    with pytest.raises(CacheOptionError, match=r"max_bytes must be .* such as 24GiB .* got '512M'"):
        kv_hf.PrefixStore(max_bytes="512M")


def test_cache_config_keeps_its_layers_when_the_given_dict_changes():
    """The options are validated once and frozen: an edit of the caller's dict must not pass unchecked."""
    layers = {"0": {"keys": "int8"}}
    config = CacheConfig(layers=layers)
    layers["0"]["keys"] = "int4"
    layers["1"] = "no such format"
    assert [scheme.name for scheme in config.schemes(0, 2)] == ["int8", "exact"]
    assert [scheme.name for scheme in config.schemes(1, 2)] == ["exact", "exact"]


# -- names and dicts ---------------------------------------------------------------------------------------

INT4 = {"keys": "int4", "values": "int4", "recent_tokens": 64}


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("paged_int8", None, {"keys": "int8", "values": "int8"}),
        ("paged_int6", {}, {"keys": "int6", "values": "int6", "latent": "int8"}),
        ("paged_k8v4", {}, {"keys": "int8", "values": "int4"}),
        ("paged_int4", None, INT4),
        ("paged_int3", None, {**INT4, "keys": "int3", "values": "int3"}),
        ("paged_int4", {"keys": "int8", "page_size": 32}, {**INT4, "keys": "int8", "page_size": 32}),
        ("paged_int2", {**INT4, "recent_tokens": 0}, {**INT4, "recent_tokens": 0}),
        ("paged_int4", CacheConfig(page_size=32), {**INT4, "page_size": 32}),
        ("paged_int4", CacheConfig(values="int8"), {"values": "int8", "recent_tokens": 64}),
    ],
    ids=str,
)  # fmt: skip
def test_from_options_takes_what_is_given_and_the_rest_from_the_name(name, options, expected):
    assert CacheConfig.from_options(name, options) == CacheConfig(**expected)


def test_a_name_may_bring_a_format_of_latents_that_other_models_have():
    model = LlamaConfig(num_hidden_layers=1, num_attention_heads=2, hidden_size=32, vocab_size=9)
    for options in ({}, {"keys": "int4"}, {"values": "int4"}):
        held = kv_hf.PagedCache.from_implementation(model, "paged_int6", options)
        assert held.report()[0].keys == options.get("keys", "int6")
    with pytest.raises(CacheOptionError, match="latent='int2' is for models with multi-head"):
        kv_hf.PagedCache.from_implementation(model, "paged_int4", {"latent": "int2"})


def test_parts_of_an_option_stand_beside_those_of_the_name():
    """Where one names the format of latents, and another that of RoPE keys."""
    config = CacheConfig.from_options("paged_int6", {"latent": {"k_rope": "exact"}})
    assert config.latent == {"format": "int8", "k_rope": "exact"}
    assert CacheConfig.from_options("paged_int6", {"latent": {}}).latent == {"format": "int8"}
    assert CacheConfig.from_options("paged_int6", {"latent": "int4"}).latent == "int4"
    joined = CacheConfig.from_arguments(
        "int8", None, {"read": {"from": 512}}, {"read": {"tokens": 256}}
    )
    assert joined.read == {"tokens": 256, "from": 512}


def test_a_folder_of_offloaded_pages_stays_one(tmp_path, monkeypatch):
    """Also where it is called as a place is: what a config holds is given again by replace(), a file, a request."""
    monkeypatch.chdir(tmp_path)
    for name in ("pages", "disk", "cpu"):
        (tmp_path / name).mkdir()
        config = CacheConfig(offload=Path(name))
        assert config.offload == str(tmp_path / name)
        assert replace(config, page_size=32).offload == CacheConfig(**config.to_dict()).offload
    assert CacheConfig(offload="disk").offload == "disk"


def test_to_dict_hands_out_copies():
    config = CacheConfig(read={"tokens": 2048}, layers={"0": {"keys": "int8"}})
    given = config.to_dict()
    given["read"]["tokens"], given["layers"]["0"]["keys"] = 4096, "fp8"
    assert config == CacheConfig(read=2048, layers={"0": {"keys": "int8"}})


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
        ("magic", {}, ["cache_implementation", "'magic'", ", ".join(cache_names())]),
        (
            "int4",
            {},
            [
                "paged_int8, paged_int6, paged_int4, paged_int3, .., got 'int4' (did you mean 'paged_int4'?)"
            ],
        ),
        ("paged_int4", {"groupsize": 32}, ["cache_config option", "did you mean 'group_size'"]),
        ("paged_int4", {"nbits": 4}, ["'nbits' (did you mean 'keys'?)"]),
        ("paged_int4", {"read_tokens": 2048}, ["got 'read_tokens' (did you mean 'read'?)"]),
        ("paged_int4", {"k_rope": "int8"}, [" latent,", "'k_rope' (did you mean 'latent'?)"]),
        ("paged_int4", {3: 4}, ["cache_config option", "got 3"]),
        ("paged_int4", {"page_size": 24}, [POWER, "24"]),
    ],
    ids=str,
)
def test_from_options_refuses(implementation, options, says):
    with pytest.raises(CacheOptionError) as error:
        CacheConfig.from_options(implementation, options)
    assert [part for part in says if part not in str(error.value)] == []


def test_schemes_apply_layers_per_layer_and_side():
    layers = {"0-1": "int8", "3": {"keys": "fp8"}, 4: {"values": "exact"}, "5": {}}
    config = CacheConfig(keys="int4", values="int2", layers=layers, group_size={"keys": 16})
    schemes = [config.schemes(layer, 7) for layer in range(7)]
    names = [
        "int8 int8",
        "int8 int8",
        "int4 int2",
        "fp8 int2",
        "int4 exact",
        "int4 int2",
        "int4 int2",
    ]
    assert [f"{keys.name} {values.name}" for keys, values in schemes] == names
    assert schemes[2][0].scale_group == (16, 1)


def test_layer_override_of_a_layer_that_is_not_paged_is_refused():
    config = LlamaConfig(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    with pytest.raises(
        kv_hf.CacheOptionError, match="0-0 holds no paged layer.*LinearAttentionLayer"
    ):
        kv_hf.PagedCache(config, keys="int4", layers={"0": "int8"})
    kv_hf.PagedCache(config, keys="int4", layers={"0-1": "int8"})


def test_cache_config_documents_every_field():
    documented = CacheConfig.__doc__.partition("Attributes")[2]
    assert [one.name for one in dataclasses.fields(CacheConfig) if one.name not in documented] == []


# -- signatures, and a CacheConfig in place of options -----------------------------------------------------


SHOWING = (kv_hf.PagedCache, kv_hf.CrossCache, kv_hf.PagedEncoderDecoderCache, kv_hf.register_cache)


@pytest.mark.parametrize("function", SHOWING, ids=lambda one: one.__name__)
def test_signature_shows_every_option_with_its_default(function):
    shown = inspect.signature(function).parameters
    for field in dataclasses.fields(CacheConfig):
        assert shown[field.name].kind is inspect.Parameter.KEYWORD_ONLY
        if field.name not in ("keys", "values"):
            assert shown[field.name].default == field.default
    assert not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in shown.values())


GIVEN = CacheConfig(keys="int8", values="int4", page_size=32)
# (what is given, options by name) -> the options of the cache
TAKEN = [
    ((GIVEN,), {}, GIVEN),
    ((None,), {}, CacheConfig()),
    ((), {"cache_config": GIVEN}, GIVEN),
    ((GIVEN,), {"keys": "int4", "sink_tokens": 8}, CacheConfig(keys="int4", values="int4", page_size=32, sink_tokens=8)),
    (({"page_size": 32},), {"keys": "int8"}, CacheConfig(keys="int8", values="int8", page_size=32)),
    ((CacheConfig(max_length=64),), {}, CacheConfig(max_length=64)),
]  # fmt: skip


@pytest.mark.parametrize(("given", "named", "options"), TAKEN, ids=str)
def test_paged_cache_takes_a_cache_config(given, named, options):
    made = kv_hf.PagedCache(tiny_models.make_config("llama"), *given, **named)
    assert made.options == options and made.options.max_length == options.max_length


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("int4", ["got 'int4'", "a format is given by name: keys='int4'"]),
        ("paged_int4", ["got 'paged_int4'", "cache_implementation='paged_int4'"]),
        ("other", ["got 'other'", "such as keys='int8', values='int4'"]),
        (4, ["got int"]),
    ],
)
def test_paged_cache_says_where_a_format_belongs(given, says):
    with pytest.raises(CacheOptionError, match="cache_config must be a kv_hf.CacheConfig") as error:
        kv_hf.PagedCache(tiny_models.make_config("llama"), given)
    assert [part for part in says if part not in str(error.value)] == []


# -- generate(cache_config=..) -----------------------------------------------------------------------------


def asked(model, **options):
    """The options of the cache that generate() makes."""
    done = model.generate(
        tiny_models.tokens(1, 8), max_new_tokens=2, return_dict_in_generate=True, **options
    )
    return getattr(done.past_key_values, "options", None)


@pytest.mark.parametrize("name", [None, "paged_int4"])
def test_generate_takes_a_cache_config(name):
    model = tiny_models.shared_model("llama")
    recent = 0 if name is None else 64  # of the name
    expected = replace(GIVEN, recent_tokens=recent)
    assert asked(model, cache_implementation=name, cache_config=GIVEN) == expected
    given = CacheConfig(keys="int8", values="int8", cross_attention="same")
    model, source = tiny_encoders.shared_model("t5"), tiny_encoders.sources([5])
    assert kv_hf.PagedEncoderDecoderCache(model.config, given).options == given
    options = {"max_new_tokens": 2, "return_dict_in_generate": True, "cache_config": given}
    assert model.generate(**source, **options).past_key_values.options == given


def test_generate_refuses_a_cache_config_beside_another_cache():
    model = tiny_models.shared_model("llama")
    with pytest.raises(CacheOptionError, match=r"for paged caches, got .*='static'.*paged_int4"):
        asked(model, cache_implementation="static", cache_config=CacheConfig())


@pytest.mark.parametrize(
    ("given", "with_cache"),
    [({"page_size": 32}, False), ({"page_size": 32}, True), (CacheConfig(), True)],
    ids=["no-name", "with-a-cache", "config-with-a-cache"],
)
def test_generate_says_that_a_cache_config_is_not_read(given, with_cache):
    model = tiny_models.shared_model("llama")
    options = {"past_key_values": kv_hf.PagedCache(model.config)} if with_cache else {}
    with pytest.warns(
        kv_hf.KVCacheWarning,
        match="is not read: .* Pass one of paged_exact.* was passed has options",
    ):
        asked(model, cache_config=given, **options)


def test_generate_leaves_the_cache_config_of_others_alone(recwarn):
    model = tiny_models.shared_model("llama")
    asked(model, cache_config={"backend": "quanto", "nbits": 4})
    assert not [one for one in recwarn if "cache_config" in str(one.message)]


@pytest.mark.parametrize(
    "config",
    [
        CacheConfig(keys="int8", values="int4", layers={0: "int8"}),
        CacheConfig(prefix_store=kv_hf.PrefixStore()),
    ],
    ids=["layers", "store"],
)  # fmt: skip
def test_generation_config_with_a_cache_config_is_saved_and_read(config, tmp_path):
    held = GenerationConfig(cache_implementation="paged_exact", cache_config=config)
    assert "cache_config" in repr(held)
    held.save_pretrained(tmp_path)
    read = GenerationConfig.from_pretrained(tmp_path).cache_config
    found = CacheConfig.from_options("paged_exact", read)
    assert found.schemes(0, 1) == config.schemes(0, 1)


# -- names of the package ----------------------------------------------------------------------------------


def test_dir_lists_what_users_need_and_more_can_be_had():
    assert dir(kv_hf) == sorted(kv_hf.__all__)
    assert len(dir(kv_hf)) <= 30
    for name in (*kv_hf.__all__, *kv_hf._LATER, *kv_hf._PARTS):
        assert getattr(kv_hf, name) is not None
    assert kv_hf.gqa.convert.convert_to_gqa is kv_hf.convert_to_gqa
    with pytest.raises(AttributeError, match="has no attribute 'convert_to_gqas'"):
        _ = kv_hf.convert_to_gqas
