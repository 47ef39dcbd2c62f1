"""Where the planner's figures come from: folders, files, presets, the hub, names of unknown models."""

import json
import socket

import pytest
import tiny_latent
import tiny_models
import torch
import transformers
from safetensors.torch import save_file

import kv_hf
from kv_hf.cache.compat import SPARSE_MODELS_CACHE_LATENTS
from kv_hf.errors import PlanError
from kv_hf.planner import presets
from kv_hf.planner.fields import inventory_of_fields
from kv_hf.planner.inventory import CachedLayer, Inventory
from kv_hf.planner.source import inventory_of_preset, load_inventory

# one of each kind; the others take half a minute, and are probed again by the slow test
QUICK = ("llama-3.2-1b", "gemma-2b", "gpt2", "deepseek-v2-lite", "gpt-oss-20b", "lfm2-1.2b")
NAMES = {
    "model_type": "brand_new",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "dtype": "bfloat16",
}


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def refuse(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(socket, "create_connection", refuse)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def of_names(**changes):
    config = {key: value for key, value in {**NAMES, **changes}.items() if value is not None}
    return inventory_of_fields(
        config, name="new", model_type="brand_new", dtype="bfloat16", source="a test"
    )


def refused(**changes):
    with pytest.raises(kv_hf.UnsupportedModelError) as caught:
        of_names(**changes)
    return str(caught.value)


def write(folder, config):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def known(preset):
    return preset["config"]["model_type"] in transformers.CONFIG_MAPPING


def check_preset(name):
    preset = presets.read_preset(name)
    if not known(preset):
        pytest.skip(f"this transformers has no {preset['config']['model_type']}")
    again = inventory_of_preset(preset, again=True)
    shipped = Inventory.from_dict(preset["inventory"])
    assert shipped.how == "meta"
    if SPARSE_MODELS_CACHE_LATENTS or not any(layer.index_dim for layer in shipped.layers):
        assert again == shipped


@pytest.mark.parametrize("name", QUICK)
def test_a_preset_carries_what_its_config_says(name):
    check_preset(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(presets.preset_names()) - set(QUICK)))
def test_every_preset_carries_what_its_config_says(name):
    check_preset(name)


@pytest.mark.parametrize("name", presets.preset_names())
def test_presets_are_complete(name):
    preset = presets.read_preset(name)
    assert set(preset) - {"notes"} == {"name", "model", "source", "config", "inventory"}
    assert set(preset.get("notes", ())) <= set(preset["inventory"]["notes"])
    assert preset["name"] == name
    inventory = Inventory.from_dict(preset["inventory"])
    assert inventory.name == name
    assert inventory.as_dict() == preset["inventory"]
    assert load_inventory(name) == inventory or not SPARSE_MODELS_CACHE_LATENTS
    assert inventory.parameters > 10**8
    assert presets.preset_of_model(preset["model"]) is not None


def test_there_are_presets_of_every_kind():
    layers = {
        name: Inventory.from_dict(presets.read_preset(name)["inventory"]).layers
        for name in presets.preset_names()
    }
    assert len(layers) >= 20
    for kind in (
        lambda layer: layer.elements and layer.kv_heads == layer.query_heads,
        lambda layer: 1 < layer.kv_heads < layer.query_heads,
        lambda layer: layer.kv_heads == 1 and not layer.latent,
        lambda layer: layer.latent,
        lambda layer: layer.index_dim,
        lambda layer: layer.window,
        lambda layer: layer.states,
        lambda layer: layer.readers > 1,
    ):
        assert any(kind(layer) for own in layers.values() for layer in own)


@pytest.mark.parametrize(
    ("name", "billions"),
    # as their makers give them
    [
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-70b", 70.6),
        ("deepseek-v3", 671.0),
        ("qwen2.5-7b", 7.62),
        ("mixtral-8x7b", 46.7),
        ("gpt-oss-120b", 116.8),
        ("gpt2", 0.124),
    ],
)
def test_weights_of_presets_are_those_that_their_makers_give(name, billions):
    assert load_inventory(name).parameters / 1e9 == pytest.approx(billions, rel=0.004)


def test_presets_are_found_in_any_case_and_wrong_names_get_near_ones():
    assert load_inventory("Llama-3.1-8B") == load_inventory("llama-3.1-8b")
    with pytest.raises(PlanError, match=r"did you mean .*llama-3\.1-8b"):
        load_inventory("llama-3.1-8")
    with pytest.raises(PlanError, match="no preset 'x'; .*--list-presets. lists"):
        presets.read_preset("x")


def test_a_hub_id_that_cannot_be_had_names_near_presets():
    with pytest.raises(
        PlanError,
        match=r"'someone/Qwen3-8B-tuned' is no folder, file or preset.*no network.*qwen3-8b",
    ):
        load_inventory("someone/Qwen3-8B-tuned")


def test_a_presets_hub_id_works_without_the_hub(caplog):
    model = presets.read_preset("llama-3.1-8b")["model"]
    assert load_inventory(model) == load_inventory("llama-3.1-8b")
    assert "the preset llama-3.1-8b is taken" in caplog.text


@pytest.mark.parametrize("path", ["./nothing", "/no/such/folder", "a/b/c", "missing.json"])
def test_paths_that_are_not_there_are_no_hub_ids(path):
    with pytest.raises(PlanError, match="there is no file or folder"):
        load_inventory(path)


def test_folders_files_configs_and_inventories_say_the_same(tmp_path):
    config = tiny_models.make_config("llama", dtype="float16")
    config.save_pretrained(tmp_path / "tiny")
    found = load_inventory(tmp_path / "tiny")
    assert (found.name, found.dtype, found.how) == ("tiny", "float16", "meta")
    assert load_inventory(str(tmp_path / "tiny" / "config.json")) == load_inventory(
        tmp_path / "tiny" / "config.json"
    )
    assert load_inventory(config).layers == found.layers
    assert load_inventory(found) is found
    assert load_inventory(found, dtype=torch.bfloat16).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "must hold a JSON object, got list"),
        (None, "has no config.json"),
    ],
)
def test_folders_without_a_config_are_refused(tmp_path, text, message):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(PlanError, match=message):
        load_inventory(tmp_path)


@pytest.mark.parametrize("model", [3, None, {"model_type": "llama"}])
def test_other_things_are_refused(model):
    with pytest.raises(PlanError, match="model must be a path"):
        load_inventory(model)


def test_code_of_a_model_is_never_run(tmp_path, caplog):
    folder = write(tmp_path / "new", {**NAMES, "auto_map": {"AutoConfig": "code.NewConfig"}})
    (folder / "code.py").write_text("raise SystemExit('it was run')")
    found = load_inventory(folder)
    assert found.how == "fields"
    assert found.layers == (CachedLayer(kv_heads=4, key_dim=16, value_dim=16, query_heads=4),) * 4
    assert "does not know model_type 'brand_new'" in found.notes[-1]
    assert "names of its config were read" in caplog.text


def test_weights_of_unknown_models_are_counted_in_their_files(tmp_path):
    folder = write(tmp_path / "new", NAMES)
    assert load_inventory(folder).parameters is None
    (folder / "model.safetensors.index.json").write_text('{"metadata": {"total_parameters": 99}}')
    assert load_inventory(folder).parameters == 99
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(7)}, folder / "model.safetensors")
    assert load_inventory(folder).parameters == 22


def test_quantized_weights_are_noted(tmp_path):
    config = tiny_latent.make_config("deepseek_v3").to_dict()
    quantized = {**config, "quantization_config": {"quant_method": "fp8"}}
    found = load_inventory(write(tmp_path / "tiny", quantized), dtype="bfloat16")
    assert found.how == "meta"
    assert found.notes == ("its weights are stored as fp8; they are counted as bfloat16",)


def test_another_number_of_kv_heads():
    config = tiny_models.make_config("llama")
    two, one = load_inventory(config), load_inventory(config, kv_heads=1)
    assert {layer.kv_heads for layer in one.layers} == {1}
    # a head of 16 less in two projections of 64 channels of two layers
    assert two.parameters - one.parameters == 2 * 2 * 64 * 16
    assert config.num_key_value_heads == 2
    assert {layer.kv_heads for layer in load_inventory("llama-3.2-1b", kv_heads=4).layers} == {4}


@pytest.mark.parametrize(
    ("make", "kv_heads", "message"),
    [
        (
            lambda: tiny_models.make_config("llama"),
            3,
            r"divide the 4 query heads of llama \(1, 2, 4\), got 3",
        ),
        (lambda: tiny_models.make_config("llama"), 0, r"got 0"),
        (lambda: tiny_models.make_config("llama"), True, r"got True"),
        (lambda: tiny_models.make_config("gpt2"), 2, "has no number of key/value heads"),
        (lambda: tiny_latent.make_config("deepseek_v3"), 2, "caches latents"),
        (lambda: Inventory("x", "x", "bfloat16", ()), 2, "an Inventory has none"),
        (lambda: tiny_models.make_config("opt"), 2, r"have \[4\] kv heads whatever"),
    ],
)
def test_kv_heads_that_cannot_be(make, kv_heads, message):
    with pytest.raises(kv_hf.KVCacheError, match=message):
        load_inventory(make(), kv_heads=kv_heads)


def test_kv_heads_of_unknown_models(tmp_path):
    folder = write(tmp_path / "new", NAMES)
    assert load_inventory(folder, kv_heads=2).layers[0].kv_heads == 2
    with pytest.raises(PlanError, match=r"\(1, 2, 4\), got 3"):
        load_inventory(folder, kv_heads=3)


ASSUMED = "its config names no dtype: weights and cache are taken to be bfloat16"


def test_a_config_without_a_dtype_is_taken_to_be_bfloat16(caplog):
    found = load_inventory(tiny_models.make_config("llama"))
    assert found.dtype == "bfloat16" and found.notes == (ASSUMED,)
    assert load_inventory(tiny_models.make_config("llama", dtype="float32")).notes == ()
    assert "deprecated" not in caplog.text


@pytest.mark.parametrize("kind", ["llama", "brand_new"])
def test_a_dtype_that_the_config_lacks_is_that_of_the_files(tmp_path, kind):
    config = {**NAMES, "model_type": kind, "intermediate_size": 64, "vocab_size": 99}
    del config["dtype"]
    folder = write(tmp_path / "new", config)
    assert load_inventory(folder).dtype == "bfloat16"
    assert ASSUMED in load_inventory(folder).notes
    tensors = {"a": torch.zeros(3, 5), "b": torch.zeros(7, dtype=torch.float16)}
    save_file(tensors, folder / "model.safetensors")
    found = load_inventory(folder)
    assert found.dtype == "float32"
    assert "its config names no dtype: float32 is that of its files" in found.notes
    assert ASSUMED not in found.notes
    assert load_inventory(folder, dtype="float16").dtype == "float16"


@pytest.mark.parametrize("kind", ["llama", "brand_new"])
def test_bytes_of_quantized_files_are_counted(tmp_path, kind):
    config = {**NAMES, "model_type": kind, "intermediate_size": 64, "vocab_size": 99}
    config["quantization_config"] = {"quant_method": "gptq"}
    folder = write(tmp_path / "new", config)
    save_file({"a": torch.zeros(9, dtype=torch.int32)}, folder / "model-1.safetensors")
    save_file({"b": torch.zeros(7, dtype=torch.float16)}, folder / "model-2.safetensors")
    save_file({"a": torch.zeros(9)}, folder / "consolidated.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found = load_inventory(folder)
    assert found.stored_bytes == 9 * 4 + 7 * 2
    assert Inventory.from_dict(found.as_dict()) == found
    assert "its weights are stored as gptq: the 50 bytes of its files are counted" in found.notes
    assert kv_hf.plan(found, caches=["dynamic"], tensor_parallel=2).weights == 25
    # with other heads these are not the weights
    assert load_inventory(folder, kv_heads=2).weight_bytes is None
    del config["quantization_config"]
    found = load_inventory(write(folder, config))
    assert found.stored_bytes == (50 if kind == "brand_new" else found.parameters * 2)


def test_heads_that_do_not_divide_are_refused(tmp_path):
    for kind in ("llama", "brand_new"):
        folder = write(tmp_path / kind, {**NAMES, "model_type": kind, "num_key_value_heads": 3})
        with pytest.raises(PlanError, match="3 key/value heads do not divide the 4 query heads"):
            load_inventory(folder)


def test_encoders_are_refused(tmp_path):
    folder = write(tmp_path / "bert", {"model_type": "bert", "num_hidden_layers": 1})
    with pytest.raises(kv_hf.UnsupportedModelError, match="is an encoder"):
        load_inventory(folder)
    write(folder, {"model_type": "bert", "num_hidden_layers": 1, "is_decoder": True})
    assert len(load_inventory(folder).layers) == 1


def test_what_hides_a_preset_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanError, match="model must be .*, got an empty name"):
        load_inventory("")
    (tmp_path / "gpt2").touch()
    with pytest.raises(PlanError, match="is no JSON.*this file hides the preset gpt2"):
        load_inventory("gpt2")
    folder = tmp_path / "meta-llama" / "Llama-3.1-8B"
    folder.mkdir(parents=True)
    with pytest.raises(PlanError, match="no config.json; this folder hides the preset llama-3.1"):
        load_inventory("meta-llama/Llama-3.1-8B")
    write(folder, NAMES)
    found = load_inventory("meta-llama/Llama-3.1-8B")
    assert found.notes[-1].endswith("was read from here, not the preset llama-3.1-8b")
    assert load_inventory(folder).notes == found.notes[:-1]
    with pytest.raises(PlanError, match="there is no file or folder.*--list-presets") as caught:
        load_inventory("./zzzzzz")
    assert len(str(caught.value)) < 120


def layer(**given):
    return CachedLayer(**{"kv_heads": 4, "key_dim": 16, "value_dim": 16, "query_heads": 4, **given})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [layer()] * 4),
        ({"num_key_value_heads": 2}, [layer(kv_heads=2)] * 4),
        ({"multi_query": True}, [layer(kv_heads=1)] * 4),
        ({"multi_query_attention": True, "multi_query_group_num": 2}, [layer(kv_heads=2)] * 4),
        ({"multi_query_attention": False, "multi_query_group_num": 2}, [layer()] * 4),
        ({"head_dim": 24, "v_head_dim": 8}, [layer(key_dim=24, value_dim=8)] * 4),
        ({"num_kv_heads": [1, 2, 4, 4]}, [layer(kv_heads=n) for n in (1, 2, 4, 4)]),
        ({"attn_config": {"kv_n_heads": 1}}, [layer(kv_heads=1)] * 4),
        ({"num_hidden_layers": None, "n_layer": 1}, [layer()]),
        ({"hidden_size": None, "d_model": 128}, [layer(key_dim=32, value_dim=32)] * 4),
        (
            {"sliding_window": 20},
            [layer(window=20, cache_class="DynamicSlidingWindowLayer")] * 4,
        ),
        ({"sliding_window": 20, "use_sliding_window": False}, [layer()] * 4),
        (
            {"sliding_window": 20, "sliding_window_pattern": 2},
            [layer(window=20, cache_class="DynamicSlidingWindowLayer"), layer()] * 2,
        ),
        (
            {"sliding_window": 20, "max_window_layers": 3},
            [layer()] * 3 + [layer(window=20, cache_class="DynamicSlidingWindowLayer")],
        ),
        (
            {"attention_chunk_size": 20},
            [layer(window=20, cache_class="DynamicSlidingWindowLayer")] * 4,
        ),
        (
            {"layer_types": ["full_attention"] * 4, "num_kv_shared_layers": 2},
            [layer(), layer(readers=3)] + [CachedLayer(cache_class="DummyLayer")] * 2,
        ),
        (
            {"kv_lora_rank": 32, "qk_rope_head_dim": 8},
            [layer(kv_heads=1, key_dim=32, value_dim=8, latent=True)] * 4,
        ),
        (
            {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "index_head_dim": 16}
            | {"indexer_types": ["full", "full", "full", "shared"]},
            [
                layer(
                    **{"kv_heads": 1, "key_dim": 32, "value_dim": 8, "latent": True},
                    **{"cache_class": "DynamicIndexedLayer", "index_dim": dim},
                )
                for dim in (16, 16, 16, 0)
            ],
        ),
        ({"text_config": {**NAMES, "num_hidden_layers": 2}}, [layer()] * 2),
    ],
)
def test_names_of_a_config(changes, expected):
    assert list(of_names(**changes).layers) == expected


def test_names_that_do_not_say_enough_are_refused():
    assert "does not say the number of layers: none of num_hidden_layers" in refused(
        num_hidden_layers=None
    )
    assert "it has dtype, hidden_size, model_type, num_attention_heads" in refused(
        num_hidden_layers=None
    )
    assert "the number of query heads" in refused(num_attention_heads=None)
    assert "64 channels do not divide into 3 heads" in refused(num_attention_heads=3)
    assert "no qk_rope_head_dim" in refused(kv_lora_rank=32)
    assert "its sliding window" in refused(layer_types=["sliding_attention"] * 4)
    assert "layer_types has 1 entries for 4 layers" in refused(layer_types=["full_attention"])
    assert "(mamba, mamba_d_state)" in refused(layer_types=["mamba"] * 4, mamba_d_state=4)
    assert "(block_configs)" in refused(block_configs=[{}])
    assert "encoder-decoder" in refused(is_encoder_decoder=True)
