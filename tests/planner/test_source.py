"""Where the planner's figures come from: folders, files, presets, the hub, a forward without weights."""

import copy
import json
import logging
import socket
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import tiny_encoders
import tiny_latent
import tiny_models
import torch
import transformers
from huggingface_hub import constants
from measure.family_models import build_config
from safetensors.torch import save_file

import kv_hf
from kv_hf.cache.model_shape import CROP_TAKES_LENGTHS
from kv_hf.errors import PlanError
from kv_hf.model_fields import check_numbers
from kv_hf.planner import meta_model, source
from kv_hf.planner.inventory import Inventory
from kv_hf.planner.source import load_inventory

NAMES = {
    **{"model_type": "brand_new", "num_hidden_layers": 4, "hidden_size": 64},
    **{"num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 99},
}
LLAMA = {**NAMES, "model_type": "llama"}


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def refuse(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def write(folder, config):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


# -- presets and the hub ----------------------------------------------------------------------------------------


def test_presets_are_configs_with_their_sources():
    assert len(source.preset_names()) >= 52
    for name in source.preset_names():
        preset = source.read_preset(name)
        assert set(preset) - {"notes"} == {"name", "model", "source", "config"}
        assert source.preset_of_model(preset["model"].upper()) is not None
        check_numbers(preset["config"], name)


@pytest.mark.parametrize("offline", [False, True])
def test_a_hub_id_that_cannot_be_had_names_near_presets(offline, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    why = "HF_HUB_OFFLINE forbids" if offline else "no network"
    said = rf"'someone/Qwen3-8B-tuned' is no folder, file or preset.*{why}.*qwen3-8b"
    with pytest.raises(PlanError, match=said):
        load_inventory("someone/Qwen3-8B-tuned")


def test_a_presets_hub_id_works_without_the_hub(caplog):
    model = source.read_preset("llama-3.1-8b")["model"]
    assert load_inventory(model) == load_inventory("Llama-3.1-8B")
    assert "the preset llama-3.1-8b is taken" in caplog.text


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("./nothing", "there is no file or folder"),
        ("llama-3.1-8", r"did you mean .*llama-3\.1-8b"),
        ("x" * 5000, "is no name of a file"),
        ("some-model", "--list-presets. lists the presets"),
    ],
)
def test_names_of_no_model_are_refused(model, message):
    with pytest.raises(PlanError, match=message):
        load_inventory(model)


# -- folders, files and configs -----------------------------------------------------------------------------------


def test_folders_files_configs_and_inventories_say_the_same(tmp_path, monkeypatch):
    config = tiny_models.make_config("llama", dtype="float16")
    config.save_pretrained(tmp_path / "gpt2")
    found = load_inventory(tmp_path / "gpt2")
    assert (found.name, found.dtype) == ("gpt2", "float16")
    assert load_inventory(tmp_path / "gpt2" / "config.json").layers == found.layers
    assert load_inventory(config).layers == found.layers
    assert load_inventory(found) == found
    assert load_inventory(found, dtype=torch.bfloat16).dtype == "bfloat16"
    monkeypatch.chdir(tmp_path)
    assert load_inventory("gpt2").layers == found.layers  # a folder goes before the preset gpt2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "is no JSON"),
        (json.dumps({**LLAMA, "num_hidden_layers": 10**9}), "from 1 to 1,024, got 1000000000"),
        (json.dumps({**LLAMA, "num_key_value_heads": 3}), "cannot be run without weights"),
        (json.dumps({"model_type": "bert", "num_hidden_layers": 1}), "is an encoder"),
        (json.dumps({"model_type": "t5"}), "encoder-decoder"),
        (transformers.XLNetConfig(d_model=64, n_layer=1, n_head=4), "takes no cache"),
        (transformers.ViTConfig(), "no class that generates text"),
        (transformers.xLSTMConfig(vocab_size=97, hidden_size=64, num_hidden_layers=1, num_heads=4), "no attention"),
    ],
    )  # fmt: skip
def test_configs_that_cannot_be_planned_are_refused(tmp_path, config, message):
    given = write(tmp_path / "new", config) if isinstance(config, str) else config
    with pytest.raises(kv_hf.KVCacheError, match=message):
        load_inventory(given)


def test_the_dtype_is_what_is_given_then_the_configs_then_that_of_the_files(tmp_path, caplog):
    assumed = "its config names no dtype: bfloat16 is taken for weights and cache"
    plain = tiny_models.make_config("llama")
    assert load_inventory(plain).notes == (assumed,) and load_inventory(plain).dtype == "bfloat16"
    assert load_inventory(tiny_models.make_config("llama", dtype="float32")).dtype == "float32"
    folder = write(tmp_path / "new", LLAMA)
    assert assumed in load_inventory(folder).notes
    tensors = {"a": torch.zeros(3, 5), "b": torch.zeros(7, dtype=torch.float16)}
    save_file(tensors, folder / "model.safetensors")
    found = load_inventory(folder)
    assert found.dtype == "float32"
    assert found.notes == ("its config names no dtype: float32 is that of its files",)
    assert load_inventory(folder, dtype="float16").dtype == "float16"
    with pytest.raises(kv_hf.KVCacheError, match="floating-point dtype"):
        load_inventory(plain, dtype="int8")
    assert "deprecated" not in caplog.text


def test_bytes_of_quantized_files_are_counted(tmp_path):
    config = {**LLAMA, "dtype": "bfloat16", "quantization_config": {"quant_method": "gptq"}}
    folder = write(tmp_path / "new", config)
    assert load_inventory(folder).notes[-1].endswith("stored as gptq; they are counted as bfloat16")
    save_file({"a": torch.zeros(9, dtype=torch.int32)}, folder / "model-1.safetensors")
    halves = {"b": torch.zeros(7, dtype=torch.float16), "c": torch.zeros(3, dtype=torch.bool)}
    save_file(halves, folder / "model-2.safetensors")
    save_file({"a": torch.zeros(9)}, folder / "consolidated.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found = load_inventory(folder)
    assert found.stored_bytes == 9 * 4 + 7 * 2 + 3
    assert found.notes[-1].endswith("stored as gptq: the 53 bytes of its files are counted")
    assert kv_hf.plan(found, caches=["dynamic"], tensor_parallel=2).weights == 27
    del config["quantization_config"]
    found = load_inventory(write(folder, config))
    assert found.stored_bytes == found.parameters * 2
    (folder / "model-1.safetensors").write_bytes(b"\xff" * 20)  # claims more than it holds
    assert load_inventory(folder).stored_bytes == found.stored_bytes
    other = write(tmp_path / "other", {**config, "quantization_config": {"quant_method": "gptq"}})
    index["weight_map"] = {"a": "../new/model-2.safetensors"}
    (other / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "counted as bfloat16" in load_inventory(other).notes[-1]  # no file of another folder
    (other / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    assert "counted as bfloat16" in load_inventory(other).notes[-1]
    save_file({"a": torch.zeros(5)}, other / "model.safetensors")  # goes before an index
    assert load_inventory(other).stored_bytes == 5 * 4


def test_another_number_of_kv_heads():
    config = tiny_models.make_config("llama")
    two, one = load_inventory(config), load_inventory(config, kv_heads=1)
    assert {layer.kv_heads for layer in one.layers} == {1} and config.num_key_value_heads == 2
    # a head of 16 less in two projections of 64 channels of two layers
    assert two.parameters - one.parameters == 2 * 2 * 64 * 16
    for made, kv_heads, message in (
        (config, 3, r"divide the 4 query heads of llama \(1, 2, 4\), got 3"),
        (tiny_models.make_config("gpt2"), 2, "has no number of key/value heads"),
        (tiny_latent.make_config("deepseek_v3"), 2, "has no number of key/value heads"),
        (Inventory("x", "x", "bfloat16", ()), 2, "an Inventory has none"),
        (tiny_models.make_config("opt"), 2, r"have \[4\] kv heads whatever"),
    ):
        with pytest.raises(kv_hf.KVCacheError, match=message):
            load_inventory(made, kv_heads=kv_heads)


def test_code_of_a_model_is_never_run(tmp_path):
    folder = write(tmp_path / "new", {**NAMES, "auto_map": {"AutoConfig": "code.NewConfig"}})
    (folder / "code.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(kv_hf.UnsupportedModelError, match="does not know model_type 'brand_new'"):
        load_inventory(folder)


# -- a forward without weights --------------------------------------------------------------------------------------


def test_vision_models_are_planned_with_their_tower():
    for name in ("llava", "qwen2_vl"):
        model, _ = tiny_encoders.make(name)
        planned = load_inventory(model.config, dtype="bfloat16")
        assert planned.parameters == sum(p.numel() for p in model.parameters())
        assert {(layer.kv_heads, layer.key_dim) for layer in planned.layers} == {(2, 16)}


@pytest.mark.skipif(
    CROP_TAKES_LENGTHS, reason="layers of transformers 5.17 pass shared keys on themselves"
)
def test_layers_that_share_keys_are_counted_as_readers():
    """Layers 4 and 5 of 6 read what 2 (sliding) and 3 (full) hold; of latents, 2 and 3 of 5 read 0 and 1."""
    for family in filter(tiny_models.is_there, tiny_models.SHARED):
        layers = load_inventory(tiny_models.make_layers(family)).layers
        assert [layer.readers for layer in layers[:4]] == [1, 1, 2, 2]
    if tiny_latent.is_there("mistral_large4"):
        layers = load_inventory(tiny_latent.make_config("mistral_large4")).layers
        assert [layer.readers for layer in layers] == [2, 2, 1, 1, 1]
        assert [bool(layer.index_dim) for layer in layers] == [True, False, True, False, True]


def test_experts_are_told_apart():
    for makers, family in ((tiny_models, "mixtral"), (tiny_latent, "deepseek_v3")):
        config = makers.make_config(family)
        planned = load_inventory(config)
        kind = meta_model.model_kind(config)
        named = kind.from_config(copy.deepcopy(config)).named_modules()
        experts = [m for _, m in named if type(m).__name__.endswith("Experts")]
        own = sum(p.numel() for module in experts for p in module.parameters())
        assert planned.expert_parameters == own > 0
        assert (planned.experts, planned.experts_per_token) == (4, 2)
    states = load_inventory(build_config("jamba"), dtype="float32").layers[0].states
    assert [state.dtype for state in states] == [None, "float32"]


def test_nothing_else_notices_a_forward(caplog, monkeypatch):
    config = build_config("jamba")
    before, filters = copy.deepcopy(config.to_dict()), list(logging.getLogger().handlers[0].filters)
    state, implementation = torch.get_rng_state(), config._attn_implementation

    def check():
        assert config.to_dict() == before and config._attn_implementation == implementation
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.get_default_dtype() == torch.float32 and torch.zeros(1).device.type == "cpu"
        assert torch.ones(2)[0].item() == 1  # no mode is left that takes numbers for 0
        assert logging.getLogger().handlers[0].filters == filters

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        load_inventory(config)
    assert not said and not caplog.records
    check()

    def broken(self, input_ids=None, past_key_values=None, cache=None, **kwargs):
        raise ZeroDivisionError("no numbers here")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", broken)
    with pytest.raises(kv_hf.UnsupportedModelError, match="ZeroDivisionError: no numbers here"):
        load_inventory(tiny_models.make_config("llama"))
    check()


def test_forwards_in_threads_do_not_mix():
    configs = [tiny_models.make_config(family) for family in ["llama", "gpt2", "gemma", "phi"] * 2]
    with ThreadPoolExecutor(len(configs)) as threads:
        assert list(threads.map(load_inventory, configs)) == list(map(load_inventory, configs))
