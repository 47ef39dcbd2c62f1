"""Checkpoints of strangers: links out of them, and names that are to be called."""

import json
import os
import subprocess

import pytest
import tiny_mha
import transformers

import kv_hf
from kv_hf.gqa import beside
from kv_hf.gqa.structure import load_config, model_class

SECRET = "the secret of another folder"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return tiny_mha.save(tiny_mha.make("llama"), tmp_path_factory.mktemp("mha") / "source")


@pytest.fixture
def source(made, tmp_path):
    subprocess.run(["cp", "-r", str(made), str(tmp_path / "source")], check=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").write_text(SECRET)
    return tmp_path / "source"


def refuses(source, says, **options):
    target = source.parent / "new"
    with pytest.raises(kv_hf.ConversionError, match=says):
        kv_hf.convert_to_gqa(source, target, 2, **options)
    assert not target.exists()


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json",
        "LICENSE",
        "README.md",
        "chat_template.jinja",
        "additional_chat_templates/a.jinja",
        "tokenizer_more",
    ],
)
def test_a_link_out_of_a_checkpoint_is_refused(name, source):
    """It was copied into the result, the card included."""
    place = source / name
    place.parent.mkdir(exist_ok=True)
    place.unlink(missing_ok=True)
    place.symlink_to("../elsewhere/secret" if "/" not in name else "../../elsewhere/secret")
    refuses(source, "leads out of the checkpoint")
    if name != "README.md":
        refuses(source, "leads out of the checkpoint", dry_run=True)


def test_a_folder_that_is_a_link_out_of_a_checkpoint_is_refused(source):
    (source / "tokenizer").symlink_to("../elsewhere")
    refuses(source, "leads out of the checkpoint")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "model-00001"])
def test_configs_and_weights_that_are_links_out_of_a_checkpoint_are_refused(name, source):
    place = next(path for path in sorted(source.iterdir()) if path.name.startswith(name))
    away = source.parent / "elsewhere" / place.name
    place.rename(away)
    place.symlink_to(away)
    refuses(source, "leads out of the checkpoint")


def test_a_link_that_is_swapped_in_behind_the_check_is_refused(source, tmp_path):
    path = source / "LICENSE"
    path.write_text("terms")
    found = beside.files_beside(source)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere" / "secret")
    (tmp_path / "new").mkdir()
    with pytest.raises(kv_hf.ConversionError, match="leads out of the checkpoint"):
        beside.copy_files(source, tmp_path / "new", found)


def test_links_within_a_checkpoint_and_links_to_the_folder_are_followed(source, tmp_path):
    (source / "files").mkdir()
    (source / "LICENSE").write_text("terms")
    os.replace(source / "LICENSE", source / "files" / "terms")
    (source / "LICENSE").symlink_to("files/terms")
    (tmp_path / "link").symlink_to(source)
    kv_hf.convert_to_gqa(tmp_path / "link", tmp_path / "new", 2)
    copied = tmp_path / "new" / "LICENSE"
    assert copied.read_text() == "terms" and not copied.is_symlink()


def snapshot_of(source, root):
    """A checkpoint as the hub's cache keeps it: a folder of links to blobs."""
    folder, blobs = root / "models--a--b" / "snapshots" / "0123", root / "models--a--b" / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(path for path in sorted(source.iterdir()) if path.is_file()):
        path.rename(blobs / str(number))
        (folder / path.name).symlink_to(f"../../blobs/{number}")
    return folder


def test_snapshots_of_the_hubs_cache_are_converted_but_reach_no_further(source, tmp_path):
    (source / "LICENSE").write_text("terms")
    folder = snapshot_of(source, tmp_path / "hub")
    kv_hf.convert_to_gqa(folder, tmp_path / "one", 2)
    assert (tmp_path / "one" / "LICENSE").read_text() == "terms"
    (folder / "LICENSE").unlink()
    (folder / "LICENSE").symlink_to(tmp_path / "elsewhere" / "secret")
    with pytest.raises(kv_hf.ConversionError, match="leads out of the checkpoint"):
        kv_hf.convert_to_gqa(folder, tmp_path / "two", 2)
    # blobs that are themselves a way out
    (tmp_path / "hub" / "models--a--b" / "blobs").rename(tmp_path / "blobs")
    (tmp_path / "hub" / "models--a--b" / "blobs").symlink_to(tmp_path / "blobs")
    with pytest.raises(kv_hf.ConversionError, match="leads out of the checkpoint"):
        kv_hf.convert_to_gqa(folder, tmp_path / "two", 2)


def test_a_file_beside_the_weights_that_fills_the_disk_is_refused(source):
    (source / "tokenizer.json").touch()
    os.truncate(source / "tokenizer.json", 1 << 33)
    refuses(source, "tokenizer.json has 8,589,934,592 bytes; files beside weights have")


@pytest.mark.parametrize("kind", ["pipe", "endless"])
@pytest.mark.parametrize("name", ["config.json", "README.md", "tokenizer.json"])
def test_files_without_an_end_are_not_read(kind, name, source):
    (source / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(source / name)
    else:
        (source / name).symlink_to("/dev/zero")
    if name == "config.json":
        refuses(source, "regular file|leads out of the checkpoint")
    elif kind == "endless" and name == "tokenizer.json":
        refuses(source, "leads out of the checkpoint")
    else:  # it is no file of the checkpoint
        kv_hf.convert_to_gqa(source, source.parent / "new", 2)
        assert (source.parent / "new" / name).exists() == (name == "README.md")


# -- names that are to be called -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "pipeline",
        "set_seed",
        "AutoModelForCausalLM",
        "PreTrainedModel",
        "LlamaConfig",
        "LlamaTokenizer",
        "Trainer",
        "logging",
        "__class__",
        "GPT2LMHeadModel",
        "BertModel",
        "GenerationMixin",
    ],
)
def test_architectures_names_no_class_of_another_kind(name, source, monkeypatch):
    """Whatever transformers had under that name was called with the config."""
    path = source / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": [name]}))
    called = []
    monkeypatch.setattr(transformers, "set_seed", lambda *given, **_: called.append(given))
    refuses(source, f"architectures names '{name}', which is no class of a llama model")
    assert not called


@pytest.mark.parametrize(
    "names", [[3], [None], [["LlamaForCausalLM"]], "LlamaForCausalLM", {"a": 1}]
)
def test_architectures_that_are_no_names_are_refused(names, source):
    path = source / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": names}))
    refuses(source, "architectures")


def test_classes_of_the_config_are_taken(source):
    config = load_config(source)
    for name in ("LlamaForCausalLM", "LlamaModel", "LlamaForSequenceClassification"):
        config.architectures = [name]
        assert model_class(config) is getattr(transformers, name)
    for names in ([], None, ["NoSuchClass"]):
        config.architectures = names
        assert model_class(config) is transformers.LlamaForCausalLM


@pytest.mark.parametrize("field", ["attn_implementation", "_attn_implementation"])
def test_kernels_that_a_config_names_are_not_fetched(field, source, monkeypatch):
    """transformers loads such code from the hub when it builds the model, where its package for that is installed."""
    asked = []
    monkeypatch.setattr(
        transformers.PreTrainedModel,
        "_check_and_adjust_attn_implementation",
        lambda self, name, *_, **__: asked.append(name) or "eager",
    )
    path = source / "config.json"
    named = {field: "kernels-community/anything"}
    path.write_text(json.dumps({**json.loads(path.read_text()), **named}))
    kv_hf.convert_to_gqa(source, source.parent / "new", 2)
    assert set(asked) == {"eager"}


def test_code_that_a_tokenizer_names_is_not_asked_for(source, monkeypatch):
    """transformers asks at the terminal whether to run it."""
    (source / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["code.Mine", None]}, "tokenizer_class": "Mine"})
    )
    (source / "code.py").write_text("raise SystemExit('it was run')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it was asked"))
    (source.parent / "text").write_text("words " * 5000)
    refuses(source, "has no tokenizer", method="svd", calibration=str(source.parent / "text"))


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 10**9}, {"num_attention_heads": -4}])
def test_numbers_that_no_model_has_are_refused_before_it_is_built(changes, source):
    """A thousand million layers were built one by one."""
    path = source / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    refuses(source, f"config.json: {next(iter(changes))} must be a whole number from 1 to")
