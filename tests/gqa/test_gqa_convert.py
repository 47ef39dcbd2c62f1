"""Conversion to fewer kv heads: means made by hand, what loads in plain transformers, and what is refused with nothing written."""

import json
import os
import shutil

import pytest
import tiny_encoders
import tiny_mha
import torch
import transformers
from harness import slow_but
from huggingface_hub import ModelCard
from huggingface_hub.errors import StrictDataclassFieldValidationError
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_mha import digest
from tiny_tokenizer import make_tokenizer

import kv_hf
import kv_hf_cli
from kv_hf.gqa.structure import config_of, model_class

# one family of every layout; the others run with the slow tests
FAST = [
    "llama-tied",
    "llama-bias",
    "llama-wide",
    "gemma3_text",
    "olmo2",
    "cohere-norm",
    "qwen3_moe",
    "gpt_oss",
    "phi3",
    "stablelm",
    "lfm2",
    "nemotron_h",
    "falcon-bias",
    "gpt_bigcode",
]
PROMPT = torch.tensor([[5, 6, 7, 8]])
HEADS = 4  # of all tiny models, queries' and keys'


def mean_of_heads(tensor, kv_heads):
    """Return the mean of each group of neighbouring heads of rows, summed in fp64."""
    heads = tensor.double().unflatten(0, (kv_heads, HEADS // kv_heads, len(tensor) // HEADS))
    return (heads.sum(1) * kv_heads / HEADS).flatten(0, 1).to(tensor.dtype)


def by_hand(before, name, new, kv_heads):
    """Return what a tensor of the result must be, by the layouts of the families: separate, fused, by head."""
    old = before[name]
    if new.shape == old.shape:
        return old
    dim = len(old) // HEADS // 3
    if "query_key_value" in name or "c_attn" in name:  # [query, key, value] of each head
        rows = [
            [(3 * h + place) * dim + d for h in range(HEADS) for d in range(dim)]
            for place in range(3)
        ]
    elif "qkv_proj" in name:  # all queries, all keys, all values
        rows = [range(place * HEADS * dim, (place + 1) * HEADS * dim) for place in range(3)]
    else:
        return mean_of_heads(old, kv_heads)
    query, key, value = (old[list(each)] for each in rows)
    return torch.cat([query, mean_of_heads(key, kv_heads), mean_of_heads(value, kv_heads)])


def check_converted(source, target, report, kv_heads):
    """Check every tensor, the index, the report and the caches of a conversion."""
    before, after = tiny_mha.stored(source), tiny_mha.stored(target)
    changed = 0
    for name, new in after.items():
        wanted = by_hand(before, name, new, kv_heads)
        assert new.dtype == wanted.dtype and torch.equal(new, wanted), name
        changed += new.shape != before[name].shape
    assert changed == len(report.changed) > 0
    numbers = [sum(t.numel() for t in tensors.values()) for tensors in (before, after)]
    assert numbers == [report.parameters, report.new_parameters]
    nbytes = sum(tensor.nbytes for tensor in after.values())
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert report.nbytes == index["metadata"]["total_size"] == nbytes
    assert all(name in load_file(target / file) for name, file in index["weight_map"].items())
    assert set(index["weight_map"]) == set(after)
    out = tiny_mha.load(target).generate(
        PROMPT, max_new_tokens=3, min_new_tokens=3, return_dict_in_generate=True, do_sample=False
    )
    layers = [getattr(layer, "keys", None) for layer in out.past_key_values.layers]
    kept = [keys for keys in layers if keys is not None]
    assert kept and all(keys.shape[1] == kv_heads for keys in kept)
    assert report.new_kv_bytes_per_token == sum(2 * 2 * kv_heads * k.shape[-1] for k in kept)
    assert report.kv_bytes_per_token * kv_heads == report.new_kv_bytes_per_token * HEADS


@pytest.mark.parametrize("kv_heads", [2, 1])
@pytest.mark.parametrize("family", slow_but(FAST, {**tiny_mha.FAMILIES, **tiny_mha.ALL_OR_ONE}))
def test_convert_to_gqa_writes_means_of_neighbouring_heads(family, kv_heads, tmp_path):
    source = tiny_mha.save(tiny_mha.make(family), tmp_path / "source")
    if family in tiny_mha.ALL_OR_ONE and kv_heads == 2:
        with pytest.raises(kv_hf.ConversionError, match="must be 1: .*all heads or one; got 2"):
            kv_hf.convert_to_gqa(source, tmp_path / "new", kv_heads)
        return
    report = kv_hf.convert_to_gqa(source, tmp_path / "new", kv_heads)
    assert (report.num_kv_heads, report.new_kv_heads) == (HEADS, kv_heads)
    check_converted(source, tmp_path / "new", report, kv_heads)


@pytest.mark.parametrize("name", slow_but(("llava", "qwen2_vl"), tiny_encoders.MODELS))
def test_convert_to_gqa_converts_the_text_part_of_a_vision_language_model(name, tmp_path):
    model, given = tiny_encoders.make(name)
    source = tiny_mha.save(model, tmp_path / "source")
    report = kv_hf.convert_to_gqa(source, tmp_path / "one", 1)
    assert report.num_kv_heads == 2 and not any("vision" in changed for changed in report.changed)
    before, after = tiny_mha.stored(source), tiny_mha.stored(tmp_path / "one")
    for changed in report.changed:
        first, second = before[changed].double().chunk(2)  # the two heads
        assert torch.equal(after[changed], ((first + second) / 2).to(after[changed].dtype))
    new, info = type(model).from_pretrained(tmp_path / "one", output_loading_info=True)
    assert not any(info.values())
    out = new.eval().generate(**given, max_new_tokens=3, return_dict_in_generate=True)
    assert all(layer.keys.shape[1] == 1 for layer in out.past_key_values.layers)
    config, old = (json.loads((f / "config.json").read_text()) for f in (tmp_path / "one", source))
    assert config["text_config"]["num_key_value_heads"] == 1 and "num_key_value_heads" not in config
    assert config["vision_config"] == old["vision_config"]


def test_convert_to_gqa_knows_old_files_that_keep_the_text_config_at_the_top(tmp_path):
    model, _ = tiny_encoders.make("qwen2_vl")
    source = tiny_mha.save(model, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    text = config.pop("text_config")
    flat = {**{name: value for name, value in text.items() if name != "model_type"}, **config}
    (source / "config.json").write_text(json.dumps(flat))
    kv_hf.convert_to_gqa(source, tmp_path / "one", 1)
    written = json.loads((tmp_path / "one" / "config.json").read_text())
    assert "text_config" not in written and written["num_key_value_heads"] == 1
    new, info = type(model).from_pretrained(tmp_path / "one", output_loading_info=True)
    assert not any(info.values()) and new.config.text_config.num_key_value_heads == 1


def test_convert_to_gqa_copies_what_a_model_needs_and_nothing_else(source, tmp_path):
    kept = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE"]
    for name in (*kept, "pytorch_model.bin", "optimizer.pt", "model.gguf", "training_args.bin"):
        (source / name).write_text(f"this is {name}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("tools")
    kv_hf.convert_to_gqa(source, tmp_path / "two", 2)
    there = {
        str(p.relative_to(tmp_path / "two")) for p in (tmp_path / "two").rglob("*") if p.is_file()
    }
    weights = {path.name for path in source.glob("model*")} - {"model.gguf"}
    made = {"config.json", "generation_config.json", "README.md"}
    assert there == {*kept, "additional_chat_templates/tools.jinja", *made, *weights}
    assert all((tmp_path / "two" / name).read_text() == f"this is {name}" for name in kept)


def test_convert_to_gqa_keeps_every_word_of_the_config(source, tmp_path):
    config = json.loads((source / "config.json").read_text())
    config |= {"_name_or_path": "/home/me/model", "my_own": {"a": [1]}, "torch_dtype": "float32"}
    del config["dtype"]
    (source / "config.json").write_text(json.dumps(config))
    kv_hf.convert_to_gqa(source, tmp_path / "two", 2)
    written = json.loads((tmp_path / "two" / "config.json").read_text())
    del config["_name_or_path"]
    record = written.pop("kv_hf_conversion")
    assert written == {**config, "num_key_value_heads": 2, "head_dim": 8}
    assert record == {
        "kv_hf": kv_hf.__version__, "source": "source", "method": "mean", "num_key_value_heads": [4, 2],
    }  # fmt: skip


def test_the_card_has_front_matter_for_the_hub_and_the_sources_own_text(source, tmp_path):
    cards = {
        "---\nlicense: mit\ntags: [stories]\n---\n": {"license": "mit", "tags": ["stories", "kv_hf", "gqa"]},
        "---\nlicense: [\n---\n": {"tags": ["kv_hf", "gqa"]},
        "---\ntags: [stories, {a: b}, [c]]\n---\n": {"tags": ["stories", "kv_hf", "gqa"]},
        f"---\ntags: {'[' * 5000}\n---\n": {"tags": ["kv_hf", "gqa"]},
        "": {"tags": ["kv_hf", "gqa"]},
    }  # fmt: skip
    for number, (own, fields) in enumerate(cards.items()):
        (source / "README.md").write_text(f"{own}# The original\n")
        kv_hf.convert_to_gqa(source, tmp_path / str(number), 2)
        text = (tmp_path / str(number) / "README.md").read_text()
        found = ModelCard(text).data.to_dict()
        assert found == {**fields, "base_model": "source", "library_name": "transformers"}
        assert "# source, 4 to 2 kv heads" in text and "Without further training" in text
        assert text.rstrip().endswith("# The original")


def test_tensors_that_the_class_does_not_have_are_copied_and_told(tmp_path):
    source = tiny_mha.save(tiny_mha.make("llama"), tmp_path / "source", "1GB")
    extra = {
        "model.layers.2.self_attn.k_proj.weight": torch.ones(32, 32),
        "model.layers.0.rotary_emb.inv_freq": torch.ones(4),
        "model.flags": torch.tensor([True, False, True]),
    }
    metadata = {"format": "pt", "a": "b"}
    save_file({**tiny_mha.stored(source), **extra}, source / "model.safetensors", metadata)
    report = kv_hf.convert_to_gqa(source, tmp_path / "two", 2)
    assert report.notes[0].startswith("2 tensors unknown to the class")
    after = tiny_mha.stored(tmp_path / "two")
    assert all(torch.equal(after[name], tensor) for name, tensor in extra.items())
    with safe_open(tmp_path / "two" / "model.safetensors", "pt") as opened:
        assert opened.metadata() == metadata


def test_a_hub_models_config_is_looked_at_before_its_weights(source, tmp_path, monkeypatch):
    asked = []
    cache = tmp_path / "models--me--tiny" / "snapshots" / ("ab" * 20)
    cache.parent.mkdir(parents=True)
    source.rename(cache)

    def download(name, allow_patterns):
        asked.append((name, [name for name in allow_patterns if name.endswith("safetensors")]))
        return str(cache)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("kv_hf.gqa.source.why_not_model", lambda name: None)
    kv_hf.convert_to_gqa("me/tiny", tmp_path / "two", 2)
    shards = sorted(path.name for path in cache.glob("*.safetensors"))
    assert asked == [("me/tiny", []), ("me/tiny", shards)]
    record = json.loads((tmp_path / "two" / "config.json").read_text())["kv_hf_conversion"]
    assert (record["source"], record["revision"]) == ("me/tiny", "ab" * 20)
    config = json.loads((cache / "config.json").read_text())
    (cache / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "x.Y"}}))
    asked.clear()
    with pytest.raises(kv_hf.ConversionError, match="auto_map"):
        kv_hf.convert_to_gqa("me/tiny", tmp_path / "three", 2)
    assert asked == [("me/tiny", [])]


# another class


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"attention_bias": False}, {"hidden_act": "relu", "layer_norm_eps": 1e-3},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ],
    ids=["pythia", "no-bias", "relu", "linear-rope"],
)  # fmt: skip
def test_neox_as_phi_computes_the_same(changes, tmp_path):
    model = tiny_mha.make("gpt_neox", **changes)
    source = tiny_mha.save(model, tmp_path / "source")
    make_tokenizer().save_pretrained(source)
    report = kv_hf.convert_to_gqa(source, tmp_path / "phi", 4)
    new = tiny_mha.load(tmp_path / "phi")
    assert type(new) is transformers.PhiForCausalLM
    assert report.method == "exact" and report.notes[1] == "No heads were merged."
    old = tiny_mha.logits(model)
    assert (tiny_mha.logits(new) - old).abs().max() <= 4e-6 * old.abs().max()
    kv_hf.convert_to_gqa(tmp_path / "phi", tmp_path / "steps", 2)
    kv_hf.convert_to_gqa(source, tmp_path / "once", 2)
    steps, once = tiny_mha.stored(tmp_path / "steps"), tiny_mha.stored(tmp_path / "once")
    assert steps.keys() == once.keys()
    for name in steps:
        torch.testing.assert_close(steps[name], once[name], atol=1e-6, rtol=1e-5)
    record = json.loads((tmp_path / "once" / "config.json").read_text())["kv_hf_conversion"]
    assert record["class"] == ["gpt_neox", "PhiForCausalLM"]
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "once")
    assert loaded("the cat")["input_ids"] == make_tokenizer()("the cat")["input_ids"]


def test_masks_of_old_neox_files_are_left_out_and_nothing_else_is(tmp_path):
    source = tiny_mha.save(tiny_mha.make("gpt_neox"), tmp_path / "source", "1GB")
    tensors = tiny_mha.stored(source)
    tensors["gpt_neox.layers.0.attention.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.uint8)
    tensors["gpt_neox.layers.0.attention.masked_bias"] = torch.tensor(-1e9)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    kv_hf.convert_to_gqa(source, tmp_path / "phi", 2)
    tiny_mha.load(tmp_path / "phi")
    tensors["gpt_neox.extra.weight"] = torch.ones(3)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(kv_hf.ConversionError, match="'gpt_neox.extra.weight', which would be lost"):
        kv_hf.convert_to_gqa(source, tmp_path / "more", 2)


@pytest.mark.parametrize("tied", [True, False])
def test_gpt2_as_gpt_bigcode_computes_the_same(tied, tmp_path):
    model = tiny_mha.make("gpt2", tie_word_embeddings=tied)
    source = tiny_mha.save(model, tmp_path / "source", "1GB")
    # files of old releases name tensors without the prefix, and hold masks
    short = {n.removeprefix("transformer."): t for n, t in tiny_mha.stored(source).items()}
    short["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    save_file(short, source / "model.safetensors", {"format": "pt"})
    kv_hf.convert_to_gqa(source, tmp_path / "all", 4)
    new = tiny_mha.load(tmp_path / "all")
    assert type(new) is transformers.GPTBigCodeForCausalLM and not new.config.multi_query
    torch.testing.assert_close(tiny_mha.logits(new), tiny_mha.logits(model), atol=1e-6, rtol=1e-6)
    for layer in model.transformer.h:
        for tensor in (layer.attn.c_attn.weight, layer.attn.c_attn.bias):
            heads = tensor.data.unflatten(-1, (3, 4, 8))
            heads[..., 1:, :, :] = heads[..., 1:, :1, :]
    source = tiny_mha.save(model, tmp_path / "equal")
    report = kv_hf.convert_to_gqa(source, tmp_path / "one", 1)
    one = tiny_mha.load(tmp_path / "one")
    assert one.config.multi_query and report.new_kv_bytes_per_token * 4 == report.kv_bytes_per_token
    torch.testing.assert_close(tiny_mha.logits(one), tiny_mha.logits(model), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("family", "changes", "kv_heads", "says"),
    [
        ("gpt_neox", {"use_parallel_residual": False}, 2, "use_parallel_residual=False"),
        ("gpt_neox", {}, 3, "must be 1 or 2 or 4: .*; got 3"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, 1, "layer_idx=True"),
    ],
)
def test_what_another_class_would_compute_otherwise_is_refused(
    family, changes, kv_heads, says, tmp_path
):
    source = tiny_mha.save(tiny_mha.make(family, **changes), tmp_path / "source")
    with pytest.raises(kv_hf.ConversionError, match=says):
        kv_hf.convert_to_gqa(source, tmp_path / "new", kv_heads)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


# the command line


def test_command_converts_and_prints_a_table(source, tmp_path, capsys):
    arguments = ["convert-gqa", str(source), str(tmp_path / "two"), "--num-kv-heads", "2"]
    assert kv_hf_cli.main([*arguments, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "| kv heads of a layer | 4 | 2 |\n" in out and " (bf16) | 256 | 128 |\n" in out
    assert "nothing was written (dry run)" in out and not (tmp_path / "two").exists()
    assert kv_hf_cli.main(arguments) == 0
    out, errors = capsys.readouterr()
    assert "written to" in out and "Without further training" in out and errors == ""
    assert tiny_mha.load(tmp_path / "two").config.num_key_value_heads == 2
    assert kv_hf_cli.main(arguments) == 2
    out, errors = capsys.readouterr()
    assert out == "" and "is not empty" in errors and "Traceback" not in errors


# -- what is refused -----------------------------------------------------------------------------------------

INDEX = "model.safetensors.index.json"
NAME = "model.layers.0.self_attn.k_proj.weight"
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
    "no tensor": (tensors(lambda t: t.pop(NAME)), f"lacks '{NAME}'"),
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
    try:
        config.architectures = names
    except StrictDataclassFieldValidationError:  # an older transformers refuses it itself
        pytest.skip("refused by the config")
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
