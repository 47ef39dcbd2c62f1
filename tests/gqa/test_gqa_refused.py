"""Checkpoints and places that are refused, and conversions that do not end: nothing is written, the source stays as it was."""

import hashlib
import json
import os
import shutil

import pytest
import tiny_mha
import torch
import transformers
from safetensors.torch import load_file, save_file

import kv_hf
from kv_hf.gqa import convert
from kv_hf.gqa.structure import config_of, model_class

INDEX = "model.safetensors.index.json"
NAME, UP = "model.layers.0.self_attn.k_proj.weight", "model.layers.0.mlp.up_proj.weight"
MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return tiny_mha.save(tiny_mha.make("llama"), tmp_path_factory.mktemp("mha") / "source")


@pytest.fixture
def source(made, tmp_path):
    shutil.copytree(made, tmp_path / "source")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").write_text("the secret of another folder")
    return tmp_path / "source"


def digest(folder):
    """Return what is in a folder: names and hashes."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def refuses(source, says, kv_heads=2, destination=None, **options):
    """Check that a conversion is refused with `says`, and leaves nothing behind and the source as it was."""
    before = digest(source.parent)
    with pytest.raises(kv_hf.ConversionError, match=says):
        kv_hf.convert_to_gqa(source, destination or source.parent / "new", kv_heads, **options)
    assert digest(source.parent) == before and not (source.parent / "new").exists()


def edit_config(source, **changes):
    path = source / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(source, edit):
    """Let `edit` change the tensors {name: tensor} of the shard that holds NAME."""
    shard = source / json.loads((source / INDEX).read_text())["weight_map"][NAME]
    tensors = load_file(shard)
    edit(tensors)
    save_file(tensors, shard, {"format": "pt"})
    index = json.loads((source / INDEX).read_text())
    kept = {name: file for name, file in index["weight_map"].items() if file != shard.name}
    index["weight_map"] = kept | dict.fromkeys(tensors, shard.name)
    (source / INDEX).write_text(json.dumps(index))


def config(**changes):
    return lambda source: edit_config(source, **changes)


def tensors(edit):
    return lambda source: edit_tensors(source, edit)


def index(edit):
    return lambda source: (source / INDEX).write_text(edit((source / INDEX).read_text()))


def link(name):
    """Let the file of a checkpoint whose name begins so be a link to one elsewhere."""

    def damage(source):
        folder, away = source / "additional_chat_templates", source.parent / "elsewhere" / "away"
        folder.mkdir()
        for path in (folder / "a.jinja", source / "tokenizer.json", source / "README.md"):
            path.write_text("x")
        place = next(
            p for p in sorted(source.rglob("*")) if str(p.relative_to(source)).startswith(name)
        )
        place.rename(away)
        place.symlink_to(away)

    return damage


DAMAGE = {
    "gptq": (config(quantization_config={"quant_method": "gptq"}), r"quantization_config \(gptq\)"),
    "awq in a part": (config(text_config={"quantization_config": {"quant_method": "awq"}}), r"\(awq\)"),
    "remote code": (config(auto_map={"AutoModelForCausalLM": "modeling.My"}), "auto_map"),
    "unknown model": (config(model_type="never_heard_of"), "never_heard_of"),
    "huge model": (config(num_hidden_layers=10**9), "num_hidden_layers must be a whole number from 1 to"),
    "other sizes": (config(hidden_size=48, head_dim=12), r"is \[.*\] of .*, and the config says \["),
    "float8": (tensors(lambda t: t.update({NAME: torch.zeros(32, 32).to(torch.float8_e4m3fn)})), "convert the unquantized checkpoint"),
    "uint8": (tensors(lambda t: t.update({NAME: torch.zeros(32, 32, dtype=torch.uint8)})), "convert the unquantized checkpoint"),
    "no tensor": (tensors(lambda t: t.pop(NAME)), f"lacks '{NAME}'"),
    "other shape": (tensors(lambda t: t.update({NAME: t[NAME][:-1].clone()})), rf"'{NAME}' is \[31, 32\] of torch.float32, and the config says"),
    "cut off": (lambda s: os.truncate(min(s.glob("model-*")), 100), "is damaged or cut off"),
    "no file": (lambda s: min(s.glob("model-*")).unlink(), "is not there"),
    "file outside": (index(lambda text: '{"weight_map": {"a": "../source/x"}}'), "has no weight_map"),
    "no JSON": (index(lambda text: "{"), "is no JSON"),
    **{
        f"linked {name}": (link(name), "leads out of the checkpoint")
        for name in ("tokenizer.json", "README.md", "config.json", INDEX, "model-00001", "additional_chat_templates", "additional_chat_templates/a.jinja")
    },
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_checkpoints_that_are_not_converted(name, source):
    damage, says = DAMAGE[name]
    damage(source)
    refuses(source, says)


@pytest.mark.parametrize(
    ("kv_heads", "options", "says"),
    [
        (3, {}, "must be 1 or 2: the model has 4 kv heads; got 3"),
        (4, {}, "must be 1 or 2: the model has 4 kv heads; got 4"),
        ("2", {}, "; got '2'"),
        (2, {"method": "svd"}, "'svd' needs calibration text"),
        (2, {"calibration": "text"}, "'mean' reads no calibration text"),
    ],
)
def test_arguments_that_do_not_fit(kv_heads, options, says, source):
    refuses(source, says, kv_heads, **options)
    with pytest.raises(kv_hf.CacheOptionError, match="method"):
        kv_hf.convert_to_gqa(source, source.parent / "new", 2, method="align")


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("OPTConfig", {"ffn_dim": 32, "word_embed_proj_dim": 32}, "opt.*no grouped kv heads"),
        ("DeepseekV3Config", {**MLA, "n_routed_experts": 2, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 8}, "no tensor of DeepseekV3ForCausalLM changes with num_key_value_heads"),
        ("DogeConfig", {}, "the places of its heads are not known"),
        ("FalconConfig", {"new_decoder_architecture": True, "num_kv_heads": 4}, "must be left as it is"),
        ("StableLmConfig", {"qk_layernorm": True}, "exists with one number of kv heads only"),
        ("DiffLlamaConfig", {}, "DiffLlamaForCausalLM cannot be built with num_key_value_heads=1"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_converted(name, options, says, tmp_path):
    config = getattr(transformers, name)(**{**tiny_mha.COMMON, **options})
    model = transformers.AutoModelForCausalLM.from_config(config)
    refuses(tiny_mha.save(model, tmp_path / "source"), says, 1)


# strangers


def test_a_snapshot_of_the_hubs_cache_reaches_its_blobs_and_no_further(source, tmp_path):
    (source / "LICENSE").write_text("terms")
    folder = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs = tmp_path / "models--a--b" / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(source.iterdir())):
        path.rename(blobs / str(number))
        (folder / path.name).symlink_to(f"../../blobs/{number}")
    kv_hf.convert_to_gqa(folder, tmp_path / "one", 2)
    assert (tmp_path / "one" / "LICENSE").read_text() == "terms"
    assert not (tmp_path / "one" / "LICENSE").is_symlink()
    (folder / "LICENSE").unlink()
    (folder / "LICENSE").symlink_to(tmp_path / "elsewhere" / "secret")
    with pytest.raises(kv_hf.ConversionError, match="leads out of the checkpoint"):
        kv_hf.convert_to_gqa(folder, tmp_path / "two", 2)


@pytest.mark.parametrize("names", [["set_seed"], ["AutoModelForCausalLM"], [3], "pipeline"])
def test_no_name_of_a_file_is_called_but_classes_of_its_config(names, source, monkeypatch):
    """Whatever transformers has under that name would otherwise be called with the config."""
    called = []
    monkeypatch.setattr(transformers, "set_seed", lambda *given, **_: called.append(given))
    config = config_of(json.loads((source / "config.json").read_text()), type("S", (), {"folder": source}))  # fmt: skip
    config.architectures = names
    assert model_class(config) is transformers.LlamaForCausalLM and not called
    config.architectures = ["LlamaForSequenceClassification"]
    assert model_class(config) is transformers.LlamaForSequenceClassification


def test_kernels_and_code_that_files_name_are_not_asked_for(source, monkeypatch):
    """transformers would load a kernel from the hub, and ask at the terminal whether to run a tokenizer's code."""
    asked = []
    monkeypatch.setattr(
        transformers.PreTrainedModel,
        "_check_and_adjust_attn_implementation",
        lambda self, name, *_, **__: asked.append(name) or "eager",
    )
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it was asked"))
    edit_config(source, attn_implementation="kernels-community/anything")
    kv_hf.convert_to_gqa(source, source.parent / "mean", 2)
    assert set(asked) == {"eager"}
    (source / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["code.Mine", None]}, "tokenizer_class": "Mine"})
    )
    (source / "code.py").write_text("raise SystemExit('it was run')")
    refuses(
        source, "cannot be read with the tokenizer of", method="svd", calibration="lincoln_1862"
    )


# destinations, and conversions that do not end


def test_destinations_that_cannot_be(source, tmp_path):
    refuses(source, "is not empty", destination=source)
    refuses(source, "lies within the source", destination=source / "new" / "er")
    refuses(source, "is not empty", destination=tmp_path / "elsewhere")
    refuses(source, "is a file", destination=tmp_path / "elsewhere" / "secret")
    (tmp_path / "link").symlink_to("source")
    refuses(source, "lies within the source", destination=tmp_path / "link" / "new")


def test_an_empty_folder_and_missing_parents_are_filled(source, tmp_path):
    (tmp_path / "empty").mkdir()
    kv_hf.convert_to_gqa(source, tmp_path / "empty", 2)
    kv_hf.convert_to_gqa(source, tmp_path / "a" / "b" / "new", 2)
    assert digest(tmp_path / "empty") == digest(tmp_path / "a" / "b" / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "elsewhere", "empty", "source"]


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt(), MemoryError()]
)
def test_whatever_happens_while_it_writes_leaves_nothing_behind(
    error, source, tmp_path, monkeypatch
):
    names, write = [], convert.save_file

    def failing(tensors, path, metadata):
        names.append(path)
        if len(names) == 3:
            raise error
        write(tensors, path, metadata)

    monkeypatch.setattr(convert, "save_file", failing)
    before = digest(tmp_path)
    with pytest.raises(kv_hf.ConversionError if isinstance(error, OSError) else type(error)):
        kv_hf.convert_to_gqa(source, tmp_path / "new", 2)
    assert digest(tmp_path) == before and not (tmp_path / "new").exists()
