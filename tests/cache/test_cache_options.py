"""Options of caches are explicit: editors, `help` and `inspect.signature` show them, and each way to give them is one."""

import copy
import dataclasses
import inspect
import pickle
import subprocess
import sys

import pytest
import tiny_encoder_decoders
import tiny_models
from transformers import GenerationConfig

import kv_hf
from kv_hf.config import CacheConfig
from kv_hf.errors import CacheOptionError

SHOWING = (kv_hf.PagedCache, kv_hf.CrossCache, kv_hf.PagedEncoderDecoderCache, kv_hf.register_cache)
SIZES = {"reserve_tokens": "32k", "max_length": "8k", "device_bytes": "2GiB"}


@pytest.mark.parametrize("function", SHOWING, ids=lambda one: one.__name__)
def test_signature_shows_every_option_with_its_default(function):
    shown = inspect.signature(function).parameters
    for field in dataclasses.fields(CacheConfig):
        assert shown[field.name].kind is inspect.Parameter.KEYWORD_ONLY
        if field.name not in ("keys", "values"):
            assert shown[field.name].default == field.default
    assert not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in shown.values())


def test_signature_of_a_subclass_is_its_own():
    class Named(kv_hf.PagedCache):
        def __init__(self, config, name):
            super().__init__(config)
            self.name = name

    assert list(inspect.signature(Named).parameters) == ["config", "name"]
    assert Named(tiny_models.make_config("llama"), "a").name == "a"


# -- sizes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "given"), SIZES.items())
def test_cache_config_reads_sizes_with_units(name, given):
    number = {"32k": 32 * 1024, "8k": 8 * 1024, "2GiB": 2**31}[given]
    others = {"offload": "cpu"} if name == "device_bytes" else {}
    config = CacheConfig(**{name: given}, **others)
    assert getattr(config, name) == number
    assert config == CacheConfig(**{name: number}, **others)
    assert copy.deepcopy(config) == config == pickle.loads(pickle.dumps(config))
    assert dataclasses.replace(config, sink_tokens=8) != config


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("given", ["2 lots", "-1", "1.5", ""])
def test_cache_config_refuses_text_that_is_no_size(name, given):
    with pytest.raises(CacheOptionError, match=rf"{name} must be .* such as "):
        CacheConfig(**{name: given, "offload": "cpu"})


def test_prefix_store_reads_its_bound_with_a_unit():
    assert kv_hf.PrefixStore(max_bytes="512MiB").max_bytes == 512 * 2**20
    with pytest.raises(CacheOptionError, match=r"max_bytes must be .* such as 24GiB .* got '512M'"):
        kv_hf.PrefixStore(max_bytes="512M")


# -- a CacheConfig in place of options ---------------------------------------------------------------------


@pytest.mark.parametrize("given", [CacheConfig(keys="int8", values="int4", page_size=32), None])
def test_paged_cache_takes_a_cache_config(given):
    config = tiny_models.make_config("llama")
    made = kv_hf.PagedCache(config, given)
    assert made.options == (given or CacheConfig())
    assert kv_hf.PagedCache(config, cache_config=given).options == made.options


def test_paged_cache_lets_options_by_name_win_over_a_cache_config():
    config = tiny_models.make_config("llama")
    given = CacheConfig(keys="int8", values="int4", page_size=32)
    made = kv_hf.PagedCache(config, given, keys="int4", sink_tokens=8)
    assert made.options == CacheConfig(keys="int4", values="int4", page_size=32, sink_tokens=8)
    assert kv_hf.PagedCache(config, {"page_size": 32}, keys="int8").options == CacheConfig(
        keys="int8", values="int8", page_size=32
    )


@pytest.mark.parametrize("given", [CacheConfig(max_length=64), {"max_length": 64}])
def test_paged_cache_of_a_cache_config_with_max_length_is_preallocated(given):
    made = kv_hf.PagedCache(tiny_models.make_config("llama"), given)
    assert made.max_length == 64


def test_encoder_decoder_cache_takes_a_cache_config():
    config = tiny_encoder_decoders.make_model("t5").config
    given = CacheConfig(keys="int8", values="int8", cross_attention="same")
    assert kv_hf.PagedEncoderDecoderCache(config, given).options == given


def test_from_options_takes_the_fields_of_a_cache_config_that_are_not_defaults():
    named = CacheConfig.from_options("paged_int4", CacheConfig(page_size=32))
    assert named == CacheConfig(keys="int4", values="int4", page_size=32)


def test_from_options_takes_the_formats_of_a_cache_config_together():
    named = CacheConfig.from_options("paged_int4", CacheConfig(values="int8"))
    assert (named.keys, named.values) == ("exact", "int8")


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


def test_paged_cache_names_an_unknown_option_in_a_mapping():
    with pytest.raises(CacheOptionError, match=r"cache_config option .*did you mean 'page_size'"):
        kv_hf.PagedCache(tiny_models.make_config("llama"), {"page_sise": 32})


# -- generate(cache_config=..) -----------------------------------------------------------------------------


def asked(model, **options):
    """The options of the cache that generate() makes."""
    done = model.generate(
        tiny_models.tokens(1, 8), max_new_tokens=2, return_dict_in_generate=True, **options
    )
    return getattr(done.past_key_values, "options", None)


@pytest.mark.parametrize("name", [None, "paged_int4"])
def test_generate_takes_a_cache_config(name):
    given = CacheConfig(keys="int8", values="int4", page_size=32)
    model = tiny_models.shared_model("llama")
    assert asked(model, cache_implementation=name, cache_config=given) == given


def test_generate_takes_a_cache_config_of_an_encoder_decoder_model():
    given = CacheConfig(keys="int8", values="int8", cross_attention="same")
    model = tiny_encoder_decoders.shared_model("t5")
    source = tiny_encoder_decoders.sources([5])
    done = model.generate(
        **source, max_new_tokens=2, return_dict_in_generate=True, cache_config=given
    )
    assert done.past_key_values.options == given


def test_generate_refuses_a_cache_config_beside_another_cache():
    model = tiny_models.shared_model("llama")
    with pytest.raises(CacheOptionError, match=r"for paged caches, got .*='static'.*paged_int4"):
        asked(model, cache_implementation="static", cache_config=CacheConfig())
    with pytest.raises(CacheOptionError, match="cache_config must be .* got list"):
        asked(model, cache_implementation="paged_int4", cache_config=[1])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cache_config": {"page_size": 32}}, "none was given. Pass one of paged_exact"),
        (
            {"cache_config": {"page_size": 32}, "past_key_values": True},
            "the PagedCache that was passed has options of its own",
        ),
        (
            {"cache_config": CacheConfig(), "past_key_values": True},
            "the PagedCache that was passed has options of its own",
        ),
    ],
    ids=["no-name", "with-a-cache", "config-with-a-cache"],
)
def test_generate_says_that_a_cache_config_is_not_read(options, says):
    model = tiny_models.shared_model("llama")
    if "past_key_values" in options:
        options = {**options, "past_key_values": kv_hf.PagedCache(model.config)}
    with pytest.warns(kv_hf.KVCacheWarning, match=rf"cache_config=.* is not read: .*{says}"):
        asked(model, **options)


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


def test_dir_lists_all_names_that_can_be_had():
    shown = dir(kv_hf)
    assert {*kv_hf.__all__, "convert_to_gqa", "recommend", "needle_grid", "doctor"} <= set(shown)
    for name in kv_hf.__all__:
        assert getattr(kv_hf, name) is not None
    assert kv_hf.gqa.convert.convert_to_gqa is kv_hf.convert_to_gqa
    with pytest.raises(AttributeError, match="has no attribute 'convert_to_gqas'"):
        _ = kv_hf.convert_to_gqas


def test_import_leaves_alone_what_dir_lists_for_later():
    script = "import sys, kv_hf; dir(kv_hf); print(*(name for name in sys.modules if name.startswith('kv_hf.')))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    parts = {name.split(".")[1] for name in done.stdout.split()}
    assert not parts & {"evaluation", "gqa", "planner", "doctor"}
