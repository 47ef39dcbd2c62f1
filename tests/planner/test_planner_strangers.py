"""Configs and folders of strangers: every one of them ends soon, with a plan or with an error that names what is wrong."""

import contextlib
import json
import os
import re

import pytest
import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING

import kv_hf
from kv_hf.config_numbers import check_numbers
from kv_hf.errors import PlanError
from kv_hf.planner import meta_model, presets
from kv_hf.planner.plan_command import main
from kv_hf.planner.source import load_inventory

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
}
KNOWN, UNKNOWN = {"model_type": "llama", **SIZES}, {"model_type": "brand_new", **SIZES}
INDEX = "model.safetensors.index.json"


def write(folder, config):
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


def refused(folder, says):
    with pytest.raises(kv_hf.KVCacheError, match=says) as caught:
        load_inventory(folder)
    assert len(str(caught.value)) < 1500
    return str(caught.value)


@pytest.mark.parametrize("config", [KNOWN, UNKNOWN], ids=["known", "unknown"])
@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("num_hidden_layers", 10**9, "from 1 to 1,024, got 1000000000"),
        ("num_hidden_layers", 0, "from 1 to 1,024, got 0"),
        ("num_hidden_layers", True, "from 1 to 1,024, got True"),
        ("num_hidden_layers", "2", "from 1 to 1,024, got '2'"),
        ("num_hidden_layers", 2.0, "from 1 to 1,024, got 2.0"),
        ("num_hidden_layers", [[2]], "from 1 to 1,024, got"),
        ("num_attention_heads", -4, "from 1 to 65,536, got -4"),
        ("num_attention_heads", 0, "from 1 to 65,536, got 0"),
        ("num_key_value_heads", -2, "from 1 to 65,536, got -2"),
        ("num_key_value_heads", 0, "from 1 to 65,536, got 0"),
        ("num_key_value_heads", [2, -2], r"from 1 to 65,536, got \[2, -2\]"),
        ("hidden_size", 1e30, r"from 1 to 1,048,576, got 1e\+30"),
        ("head_dim", -16, "from 0 to 1,048,576, got -16"),
        ("max_position_embeddings", 1e30, r"from 0 to 1,073,741,824, got 1e\+30"),
        ("max_position_embeddings", float("inf"), "got inf"),
        ("max_position_embeddings", float("nan"), "got nan"),
        ("sliding_window", 10**12, "from 0 to 16,777,216, got 1000000000000"),
        ("kv_lora_rank", -1, "from 0 to 1,048,576, got -1"),
        ("vocab_size", 10**400, "from 1 to 1,073,741,824, got 1000"),
        ("num_labels", 10**9, "from 0 to 1,048,576, got 1000000000"),
        ("layer_types", 3, "must be a list of names, got 3"),
        ("layer_types", [3, 4], "must be a list of names"),
        ("num_towers_layers", 10**9, "num_towers_layers must be at most 1,024"),
        ("anything", 1 << 70, "anything must be at most"),
    ],
)
def test_numbers_that_no_model_has_are_refused(config, field, value, rule, tmp_path):
    found = refused(write(tmp_path, {**config, field: value}), rule)
    assert field in found and str(tmp_path) in found


def test_numbers_in_the_parts_of_a_config_are_looked_at_too(tmp_path):
    parts = {"vision_config": {"num_hidden_layers": 10**9}}
    found = refused(write(tmp_path, {**KNOWN, **parts}), "from 1 to 1,024")
    assert "vision_config.num_hidden_layers" in found
    with pytest.raises(PlanError, match="num_key_value_heads must be .* got -2"):
        kv_hf.plan(CONFIG_MAPPING["llama"].from_dict({**KNOWN, "num_key_value_heads": -2}))


def test_numbers_of_presets_are_allowed():
    for name in presets.preset_names():
        check_numbers(presets.read_preset(name)["config"], name)


@pytest.mark.slow
def test_numbers_of_every_config_of_transformers_are_allowed():
    checked = 0
    for name in CONFIG_MAPPING:
        try:
            config = CONFIG_MAPPING[name]().to_dict()
        except Exception:  # a few have no defaults
            continue
        check_numbers(config, name)
        checked += 1
    assert checked > 300


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 500 + "1" + "}" * 500, "nested deeper than 64"),
        ('{"model_type": "llama", "num_hidden_layers": 2, "num_hidden_layers": 4}', "occurs twice"),
        ('{"model_type": ' + "9" * 5000 + "}", "digits"),
        ("\x00", "is no JSON"),
        ('"text"', "must hold a JSON object, got str"),
    ],
)
def test_texts_that_break_their_readers_are_refused(text, says, tmp_path):
    refused(write(tmp_path, text), says)


def test_a_config_with_the_mark_of_some_editors_is_read(tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(UNKNOWN).encode())
    assert len(load_inventory(tmp_path).layers) == 2


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a POSIX system")
def test_configs_that_are_no_files_are_refused(tmp_path):
    (tmp_path / "config.json").mkdir()
    refused(tmp_path, "must be a regular file, got a folder")
    (tmp_path / "config.json").rmdir()
    os.mkfifo(tmp_path / "config.json")
    refused(tmp_path, "must be a regular file, got a pipe")
    refused(tmp_path / "config.json", "must be a regular file, got a pipe")
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").symlink_to("/dev/zero")
    refused(tmp_path, "must be a regular file, got a device")
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").touch()
    os.truncate(tmp_path / "config.json", 1 << 33)
    refused(tmp_path, "is too large: 8,589,934,592 bytes, at most 16,777,216 are read")


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "~nobody-of-this-name/x", "a/b/\x1b[2J"])
def test_names_that_can_be_no_files_are_refused(name):
    assert "\x1b" not in refused(name, "is no name of a file|there is no file|is no folder")


@pytest.mark.parametrize(
    "fields",
    [
        {"to_dict": 1},
        {"get_text_config": 1},
        {"sub_configs": 1},
        {"text_config": "text"},
        {"rope_parameters": [1]},
        {"quantization_config": [1]},
        {"dtype": ["a"]},
        {"dtype": "load"},
        {"architectures": 3},
        {"model_type": ["llama"]},
        {"_attn_implementation": "a/b"},
        {"per_layer_config": 3},
    ],
    ids=str,
)
def test_fields_that_break_the_code_that_reads_them_end_in_a_plan_or_an_error(fields, tmp_path):
    """transformers sets whatever a config.json holds as attributes of its config, methods included."""
    for config in (KNOWN, UNKNOWN):
        with contextlib.suppress(kv_hf.KVCacheError):
            found = load_inventory(write(tmp_path, {**config, **fields}))
            assert [layer.kv_heads for layer in found.layers] == [2, 2]


def test_models_of_modules_without_end_are_stopped(tmp_path, monkeypatch):
    """Whatever the name of the number is that repeats a part."""
    monkeypatch.setattr(meta_model, "MOST_MODULES", 20)
    refused(write(tmp_path, {**KNOWN, "num_hidden_layers": 100}), "has more than 20 modules")


# -- weights -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "a/b", "..", ".", "", "a\\../b/c"]
)
def test_an_index_names_no_file_outside_of_its_folder(name, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.zeros(1000)}, tmp_path / "secret.safetensors")
    write(folder, UNKNOWN)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    refused(folder, f"{INDEX}: weight_map must name files of its own folder, got")


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ({"metadata": {"total_parameters": 1e30}}, r"total_parameters must be .* got 1e\+30"),
        ({"metadata": {"total_size": float("inf")}}, "total_size must be .* got inf"),
        ({"metadata": {"total_size": float("nan")}}, "total_size must be .* got nan"),
        ({"metadata": {"total_size": -5}}, "total_size must be .* got -5"),
        ({"metadata": {"total_size": "12"}}, "total_size must be .* got '12'"),
        ({"metadata": {"total_size": True}}, "total_size must be .* got True"),
        ({"weight_map": {"a": 3}}, "weight_map must map tensors to files"),
        ({"weight_map": ["a"]}, "weight_map must map tensors to files"),
    ],
    ids=str,
)
def test_an_index_of_impossible_numbers_is_refused(index, says, tmp_path):
    write(tmp_path, UNKNOWN)
    (tmp_path / INDEX).write_text(json.dumps(index))
    refused(tmp_path, says)


def header(**entry):
    text = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **entry}})
    return len(text).to_bytes(8, "little") + text.encode() + bytes(8)


@pytest.mark.parametrize(
    "data",
    [
        header(shape=[1 << 60]),
        header(shape=[-2]),
        header(shape=[1 << 60] * 10_000),
        header(data_offsets=[0, 1 << 60]),
        header(data_offsets=[8, 0]),
        header(data_offsets=[-8, 0]),
        header(shape=[True]),
        header(dtype="U4", shape=[1 << 50]),
        header(dtype=["F32"]),
        header(shape=None),
        (1 << 62).to_bytes(8, "little"),
        (50_000).to_bytes(8, "little") + b"[" * 50_000,
        b"version https://git-lfs.github.com/spec/v1\n",
        b"",
    ],
)
def test_weights_that_claim_what_they_do_not_hold_are_not_counted(data, tmp_path):
    write(tmp_path, UNKNOWN)
    (tmp_path / "model.safetensors").write_bytes(data)
    assert load_inventory(tmp_path).stored_bytes is None
    (tmp_path / "model.safetensors").write_bytes(header())
    assert load_inventory(tmp_path).parameters == 2


# -- the terminal --------------------------------------------------------------------------------------------

ESCAPES = "\x1b]0;title\x07\x1b[2J\x9b1m\u202e\r\nnote: all is well"


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": ESCAPES},
        {"model_type": ESCAPES, "num_hidden_layers": None},
        {"dtype": ESCAPES},
        {"quantization_config": {"quant_method": ESCAPES}},
        {"layer_types": [ESCAPES] * 2},
        {f"mamba{ESCAPES}": 1},
        {f"{ESCAPES}_layers": 10**9},
    ],
    ids=range(7),
)
def test_no_field_of_a_config_reaches_the_terminal_as_it_is(fields, tmp_path, capsys, caplog):
    folder = tmp_path / "model\x1b[2J"
    folder.mkdir()
    write(folder, {name: v for name, v in {**UNKNOWN, **fields}.items() if v is not None})
    main([str(folder), "--cache", "dynamic"])
    printed = "".join(capsys.readouterr()) + caplog.text
    assert "x1b" in printed
    assert not [sign for sign in printed if not sign.isprintable() and sign != "\n"]
    assert not [line for line in printed.splitlines() if line.startswith("note: all is well")]


# -- arguments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--context", "9" * 30], "context must be at most"),
        (["--context", "2000000000000"], "context must be at most 1,099,511,627,776"),
        (["--context", "9" * 5000], "context must be at most"),
        (["--device-memory", "9" * 400], "device_memory must be at most"),
        (["--bandwidth", "9" * 400 + "TB/s"], "bandwidth must be at most"),
        (["--weights", "9" * 400], "weights must be at most"),
        (["--context", "1000000000", "--prompt", "5", "--cache", "paged_int4:offload=cpu"], "followed through"),
        (["--cache", "recipe:/dev/zero"], "must be a regular file, got a device"),
        (["--cache", "paged_int4:layers=" + "[" * 5000], "layers|recipe|cache"),
    ],
    ids=range(9),
)  # fmt: skip
def test_arguments_beyond_all_use_say_their_reason(arguments, says, capsys):
    assert main(["gemma-2b", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kv-hf memory: error: ") and len(error) < 11_000
    assert re.search(says, error)
