"""Conversion to fewer kv heads within a class: families, what stays, what is written beside the weights."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_mha
import tiny_vision
import torch
import transformers
from paths import ROOT
from safetensors.torch import save_file

import kv_hf
import kv_hf_cli
from kv_hf.gqa import convert, convert_command
from kv_hf.gqa.checkpoint import Checkpoint
from kv_hf.gqa.layouts import join, parts_of
from kv_hf.gqa.pooling import pool_heads
from kv_hf.gqa.structure import find_structure

# one family of every layout; the others run with the slow tests
FAST = [
    "llama-tied", "llama-wide", "gemma3_text", "olmo2", "cohere-norm", "qwen2", "qwen3_moe", "gpt_oss", "phi3",
    "stablelm-norm", "lfm2", "apertus",
]  # fmt: skip


def families(names, fast):
    """Return all names, those that are not in `fast` with the slow marker."""
    assert set(fast) <= set(names)
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


PROMPT = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture
def llama(tmp_path):
    return tiny_mha.save(tiny_mha.make("llama"), tmp_path / "source")


def raw(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def check_converted(source, target, report, kv_heads):
    """Check a conversion against its source; return the model."""
    before, after = tiny_mha.stored(source), tiny_mha.stored(target)
    copied = [name for name in before if name not in report.changed and name in after]
    assert len(copied) + len(report.changed) == len(after)
    for name in copied:
        assert torch.equal(raw(before[name]), raw(after[name])), name
    shards = [
        sorted(path.name for path in folder.glob("*.safetensors*")) for folder in (source, target)
    ]
    assert shards[0] == shards[1]
    assert report.new_parameters == sum(tensor.numel() for tensor in after.values())
    assert report.nbytes == sum(tensor.nbytes for tensor in after.values())
    if len(shards[0]) > 1:
        index = json.loads((target / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == report.nbytes
        assert set(index["weight_map"]) == set(after)
    model = tiny_mha.load(target)
    out = model.generate(
        PROMPT, max_new_tokens=3, min_new_tokens=3, return_dict_in_generate=True, do_sample=False
    )
    kept = [
        layer.keys
        for layer in out.past_key_values.layers
        if getattr(layer, "keys", None) is not None
    ]
    assert kept and all(keys.shape[1] == kv_heads for keys in kept)
    dims = {keys.shape[-1] for keys in kept}
    assert report.new_kv_bytes_per_token == sum(2 * 2 * kv_heads * dim for dim in dims) * len(kept)
    assert (
        report.kv_bytes_per_token * kv_heads == report.new_kv_bytes_per_token * report.num_kv_heads
    )
    return model


def repeated(source, structure, target):
    """Return the tensors of `source` with the heads of `target` repeated, by name."""
    found = dict(tiny_mha.stored(source))
    pooled = tiny_mha.stored(target)
    size = structure.num_kv_heads // structure.new_kv_heads
    for name, (old, _) in structure.changed.items():
        parts = parts_of(name, structure)
        dim = structure.head_dim
        if len(parts) == 3:  # all queries, keys, values: the only layout of fewer kv heads
            query, key, value = pooled[name].split(
                [structure.num_heads * dim, *[structure.new_kv_heads * dim] * 2]
            )
            heads = {
                "query": query.unflatten(0, (-1, dim)),
                "key": key.unflatten(0, (-1, dim)).repeat_interleave(size, 0),
                "value": value.unflatten(0, (-1, dim)).repeat_interleave(size, 0),
            }
            stacked = (
                torch.stack(list(heads.values()), 1).flatten(0, 2)
                if parts[0].interleaved
                else join(heads, parts)
            )
        else:
            stacked = (
                pooled[name]
                .unflatten(0, (structure.new_kv_heads, -1))
                .repeat_interleave(size, 0)
                .flatten(0, 1)
            )
        assert stacked.shape == old
        found[name] = stacked
    for name in structure.removed:
        if (begin := name.partition(".norms.")[0]) != name:
            for head in range(structure.num_kv_heads):
                found[f"{begin}.norms.{head}.weight"] = pooled[
                    f"{begin}.norms.{head // size}.weight"
                ]
    return found


def check_repeated(source, target, model, tmp_path):
    """Check that repeating the heads of a converted model gives a model of the old class with the same logits and back."""
    kv_heads = model.config.get_text_config().num_key_value_heads
    structure = find_structure(Checkpoint.open(source), kv_heads)
    tensors = repeated(source, structure, target)
    own = {name: tensors[disk] for name, disk in structure.names.items() if disk in tensors}
    wide = tiny_mha.load(source)
    missing = wide.load_state_dict(own, strict=False)
    assert not missing.unexpected_keys
    torch.testing.assert_close(tiny_mha.logits(wide), tiny_mha.logits(model), atol=2e-6, rtol=1e-5)
    again = tiny_mha.save(wide, tmp_path / f"repeated{kv_heads}")
    kv_hf.convert_to_gqa(again, tmp_path / f"again{kv_heads}", kv_heads)
    before, after = tiny_mha.stored(target), tiny_mha.stored(tmp_path / f"again{kv_heads}")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("family", families(tiny_mha.FAMILIES, FAST))
def test_convert_to_gqa_gives_a_checkpoint_of_the_family(family, tmp_path):
    source = tiny_mha.save(tiny_mha.make(family), tmp_path / "source")
    for kv_heads in (2, 1):
        target = tmp_path / f"target{kv_heads}"
        report = kv_hf.convert_to_gqa(source, target, kv_heads)
        assert (report.num_heads, report.num_kv_heads, report.new_kv_heads) == (4, 4, kv_heads)
        assert report.new_class == ""
        model = check_converted(source, target, report, kv_heads)
        text = model.config.get_text_config()
        assert text.num_key_value_heads == kv_heads
        if kv_heads == 2:
            check_repeated(source, target, model, tmp_path)


@pytest.mark.parametrize("family", families(tiny_mha.ALL_OR_ONE, ["falcon-bias", "gpt_bigcode"]))
def test_convert_to_gqa_makes_one_kv_head_where_a_class_knows_all_or_one(family, tmp_path):
    source = tiny_mha.save(tiny_mha.make(family), tmp_path / "source")
    with pytest.raises(kv_hf.ConversionError, match="knows all heads or one.*got 2"):
        kv_hf.convert_to_gqa(source, tmp_path / "two", 2)
    report = kv_hf.convert_to_gqa(source, tmp_path / "one", 1)
    model = check_converted(source, tmp_path / "one", report, 1)
    model.config.num_key_value_heads = 1
    check_repeated(source, tmp_path / "one", model, tmp_path)
    with pytest.raises(kv_hf.ConversionError, match="1 kv heads already, there is nothing to do"):
        kv_hf.convert_to_gqa(tmp_path / "one", tmp_path / "two", 1)


def test_convert_to_gqa_keeps_an_even_number_of_kv_heads_for_diffllama(tmp_path):
    source = tiny_mha.save(tiny_mha.make("diffllama"), tmp_path / "source")
    report = kv_hf.convert_to_gqa(source, tmp_path / "two", 2)
    model = check_converted(source, tmp_path / "two", report, 2)
    check_repeated(source, tmp_path / "two", model, tmp_path)


@pytest.mark.parametrize("name", families(tiny_vision.MODELS, ["llava", "qwen2_vl", "gemma3"]))
def test_convert_to_gqa_converts_the_text_part_of_a_vision_language_model(name, tmp_path):
    model, given = tiny_vision.make(name)
    source = tiny_mha.save(model, tmp_path / "source")
    report = kv_hf.convert_to_gqa(source, tmp_path / "one", 1)
    assert report.num_kv_heads == 2 and not any("vision" in changed for changed in report.changed)
    new, info = type(model).from_pretrained(tmp_path / "one", output_loading_info=True)
    assert not any(info.values())
    out = new.eval().generate(**given, max_new_tokens=3, return_dict_in_generate=True)
    assert all(layer.keys.shape[1] == 1 for layer in out.past_key_values.layers)
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    assert config["text_config"]["num_key_value_heads"] == 1 and "num_key_value_heads" not in config
    assert (
        config["vision_config"] == json.loads((source / "config.json").read_text())["vision_config"]
    )


def test_convert_to_gqa_knows_old_files_that_keep_the_text_config_at_the_top(tmp_path):
    model, _ = tiny_vision.make("qwen2_vl")
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


def test_convert_to_gqa_goes_on_with_a_model_that_has_grouped_heads(tmp_path):
    wide = tiny_mha.make("qwen2", num_attention_heads=8, num_key_value_heads=8, torch_dtype=None)
    source = tiny_mha.save(wide, tmp_path / "8")
    for old, new in ((8, 4), (4, 2), (8, 2)):
        at = tmp_path / (f"{old}" if old == 8 else "4")
        kv_hf.convert_to_gqa(
            at if old == 4 else source,
            tmp_path / f"{new}{'' if old != 8 or new != 2 else '-at-once'}",
            new,
        )
    steps, once = tiny_mha.stored(tmp_path / "2"), tiny_mha.stored(tmp_path / "2-at-once")
    for name in steps:  # the mean of means, rounded twice
        torch.testing.assert_close(steps[name], once[name], atol=1e-7, rtol=2**-22)
    record = json.loads((tmp_path / "2" / "config.json").read_text())["kv_hf_conversion"]
    assert record["num_key_value_heads"] == [4, 2]
    assert record["before"]["num_key_value_heads"] == [8, 4]


def test_convert_to_gqa_gives_equal_logits_for_equal_heads(tmp_path):
    model = tiny_mha.make(
        "llama-bias", hidden_size=48, num_attention_heads=12, num_key_value_heads=12
    )
    for layer in model.model.layers:
        for part in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            for tensor in (part.weight, part.bias):
                heads = tensor.data.unflatten(0, (12, 4))
                heads.copy_(heads[::3].repeat_interleave(3, 0))
    source = tiny_mha.save(model, tmp_path / "source")
    kv_hf.convert_to_gqa(source, tmp_path / "four", 4)
    new = tiny_mha.load(tmp_path / "four")
    assert (tiny_mha.logits(new) - tiny_mha.logits(model)).abs().max() <= 1e-6
    kv_hf.convert_to_gqa(source, tmp_path / "two", 2)
    assert (
        tiny_mha.logits(tiny_mha.load(tmp_path / "two")) - tiny_mha.logits(model)
    ).abs().max() > 1e-3


def test_convert_to_gqa_keeps_the_first_heads_with_method_first(llama, tmp_path):
    kv_hf.convert_to_gqa(llama, tmp_path / "two", 2, method="first")
    name = "model.layers.1.self_attn.v_proj.weight"
    before, after = tiny_mha.stored(llama)[name], tiny_mha.stored(tmp_path / "two")[name]
    assert torch.equal(after, torch.cat([before[:8], before[16:24]]))


@pytest.mark.parametrize("size", [2, 3, 4, 6, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pool_heads_gives_back_repeated_heads_bit_for_bit(size, dtype):
    generator = torch.Generator().manual_seed(size)
    heads = torch.randn(2, 16, 33, generator=generator).to(dtype)
    assert torch.equal(pool_heads(heads.repeat_interleave(size, 0), 2, "mean"), heads)


def test_pool_heads_rounds_once():
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(12, 16, 33, generator=generator)
    wanted = heads.double().unflatten(0, (2, 6)).mean(1)
    assert torch.equal(pool_heads(heads, 2, "mean"), wanted.float())
    assert not torch.equal(heads.unflatten(0, (2, 6)).mean(1), wanted.float())  # what float32 gives


@pytest.mark.parametrize("family", ["llama-bias", "qwen2", "phi3"])
def test_convert_to_gqa_drops_as_many_parameters_as_the_formula_says(family, tmp_path):
    source = tiny_mha.save(tiny_mha.make(family), tmp_path / "source")
    report = kv_hf.convert_to_gqa(source, tmp_path / "one", 1, dry_run=True)
    bias = family != "phi3"
    assert report.parameters - report.new_parameters == 2 * 2 * (4 - 1) * 8 * (32 + bias)
    assert (report.kv_bytes_per_token, report.new_kv_bytes_per_token) == (256, 64)
    assert not (tmp_path / "one").exists()


def test_convert_to_gqa_casts_all_weights_when_asked(llama, tmp_path):
    report = kv_hf.convert_to_gqa(llama, tmp_path / "two", 2, dtype="bfloat16")
    before, after = tiny_mha.stored(llama), tiny_mha.stored(tmp_path / "two")
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    assert report.nbytes == 2 * report.new_parameters
    name = "model.layers.0.self_attn.k_proj.weight"
    pooled = before[name].double().unflatten(0, (2, 2, 8)).mean(1).flatten(0, 1)
    assert torch.equal(after[name], pooled.float().bfloat16())
    assert json.loads((tmp_path / "two" / "config.json").read_text())["dtype"] == "bfloat16"
    assert (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "two", dtype="auto").dtype
        == torch.bfloat16
    )


def test_convert_to_gqa_refuses_numbers_that_the_dtype_cannot_hold(tmp_path):
    model = tiny_mha.make("llama")
    model.model.embed_tokens.weight.data[3, 3] = 1e5
    source = tiny_mha.save(model, tmp_path / "source")
    with pytest.raises(
        kv_hf.ConversionError, match=r"embed_tokens.* holds 1e\+05, which float16 cannot hold"
    ):
        kv_hf.convert_to_gqa(source, tmp_path / "two", 2, dtype="float16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_convert_to_gqa_copies_what_a_model_needs_and_nothing_else(llama, tmp_path):
    kept = [
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "merges.txt",
        "LICENSE",
        "special_tokens_map.json",
    ]
    for name in (*kept, "pytorch_model.bin", "optimizer.pt", "model.gguf", "training_args.bin"):
        (llama / name).write_text(f"this is {name}")
    (llama / "additional_chat_templates").mkdir()
    (llama / "additional_chat_templates" / "tools.jinja").write_text("tools")
    kv_hf.convert_to_gqa(llama, tmp_path / "two", 2)
    there = {
        str(path.relative_to(tmp_path / "two"))
        for path in (tmp_path / "two").rglob("*")
        if path.is_file()
    }
    shards = {path.name for path in llama.glob("model*")} - {"model.gguf"}
    assert there == {
        *kept,
        "additional_chat_templates/tools.jinja",
        "config.json",
        "generation_config.json",
        "README.md",
        *shards,
    }
    assert all((tmp_path / "two" / name).read_text() == f"this is {name}" for name in kept)


def test_convert_to_gqa_keeps_every_word_of_the_config(llama, tmp_path):
    config = json.loads((llama / "config.json").read_text())
    config |= {"_name_or_path": "/home/me/model", "my_own": {"a": [1]}, "torch_dtype": "float32"}
    del config["dtype"]
    (llama / "config.json").write_text(json.dumps(config))
    kv_hf.convert_to_gqa(llama, tmp_path / "two", 2)
    written = json.loads((tmp_path / "two" / "config.json").read_text())
    del config["_name_or_path"]
    record = written.pop("kv_hf_conversion")
    assert written == {**config, "num_key_value_heads": 2, "head_dim": 8}
    assert record == {
        "kv_hf": kv_hf.__version__,
        "source": "source",
        "method": "mean",
        "num_key_value_heads": [4, 2],
    }


def test_convert_to_gqa_writes_a_card_under_the_front_matter_of_the_source(llama, tmp_path):
    (llama / "README.md").write_text(
        "---\nlicense: mit\n---\n# The original\n\nText --- and more.\n"
    )
    kv_hf.convert_to_gqa(llama, tmp_path / "two", 2)
    card = (tmp_path / "two" / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\n---\n\n# source, 4 to 2 kv heads\n")
    assert (
        "arXiv 2305.13245" in card
        and "Without further training" in card
        and "stories15M" not in card
        and "was not measured" in card
    )
    assert "| bytes of a token's keys and values (bf16) | 256 | 128 |" in card
    assert card.rstrip().endswith("# The original\n\nText --- and more.")


@pytest.mark.parametrize(
    "head",
    [
        "---\nlicense: mit # ours\nversion: 1.10\n---\n",
        "\n---\r\nlicense: mit\r\n---\r\n",
        "---\nlicense: [\n---\n",
    ],
    ids=["spelling", "line ends", "no YAML"],
)
def test_front_matter_stays_as_it_is_spelt(head, llama, tmp_path):
    (llama / "README.md").write_bytes(head.encode() + b"# The original\n")
    kv_hf.convert_to_gqa(llama, tmp_path / "two", 2)
    card = (tmp_path / "two" / "README.md").read_bytes().decode()
    assert card.startswith(head.rstrip() + "\n\n# source, 4 to 2 kv heads\n")
    assert card.count("license") == 1


def test_convert_to_gqa_reports_progress_in_bytes(llama, tmp_path):
    seen = []
    report = kv_hf.convert_to_gqa(
        llama, tmp_path / "two", 2, progress=lambda done, of: seen.append((done, of))
    )
    assert seen[-1] == (report.nbytes, report.nbytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len(seen) == len(tiny_mha.stored(llama))


def test_convert_to_gqa_takes_a_hub_model_config_first(llama, tmp_path, monkeypatch):
    asked = []
    cache = tmp_path / "models--me--tiny" / "snapshots" / ("ab" * 20)
    cache.parent.mkdir(parents=True)
    llama.rename(cache)

    def download(name, allow_patterns):
        asked.append((name, [pattern for pattern in allow_patterns if "safetensors" in pattern]))
        return str(cache)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("kv_hf.gqa.checkpoint.why_not_model", lambda name: None)
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
    assert asked == [("me/tiny", [])]  # no weights for a model that cannot be converted


def test_converted_model_runs_with_paged_formats(llama, tmp_path):
    kv_hf.convert_to_gqa(llama, tmp_path / "two", 2)
    model = tiny_mha.load(tmp_path / "two")
    ids = torch.arange(3, 23)[None]
    plain = model.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    paged = model.generate(
        ids, max_new_tokens=6, min_new_tokens=6, do_sample=False, cache_implementation="paged_exact"
    )
    assert torch.equal(plain, paged)


# the command line


def test_command_prints_a_table_and_writes_nothing_on_a_dry_run(llama, tmp_path, capsys):
    assert (
        kv_hf_cli.main(
            ["convert-gqa", str(llama), str(tmp_path / "two"), "--num-kv-heads", "2", "--dry-run"]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert re.search(r"kv heads of a layer +4 +2\n", out)
    assert re.search(r"kv bytes per token \(bf16\) +256 +128\n", out)
    assert re.search(r"parameters +[0-9,]+ +[0-9,]+\n4 tensors change", out)
    assert "nothing was written (dry run)" in out and not (tmp_path / "two").exists()


def test_command_converts_and_shows_a_bar(llama, tmp_path, capsys):
    arguments = [str(llama), str(tmp_path / "two"), "--num-kv-heads", "2", "--dtype", "bfloat16"]
    assert convert_command.main(arguments) == 0
    out, errors = capsys.readouterr()
    assert f"written to {tmp_path / 'two'}" in out and "Without further training" in out
    assert "writing: 100%" in errors
    assert tiny_mha.load(tmp_path / "two").config.num_key_value_heads == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--num-kv-heads", "3"], "error: num_kv_heads must divide the 4 kv heads of the model, and be less: it can be 1 or 2, got 3"),
        (["--num-kv-heads", "2", "--method", "svd"], "error: method 'svd' needs calibration text"),
        (["--num-kv-heads", "2", "--calibration", "x"], "error: method 'mean' reads no calibration text"),
    ],
)  # fmt: skip
def test_command_says_what_is_wrong_with_exit_code_2(options, says, llama, tmp_path, capsys):
    assert convert_command.main([str(llama), str(tmp_path / "new"), *options]) == 2
    out, errors = capsys.readouterr()
    assert out == "" and says in errors and "Traceback" not in errors


def test_command_that_is_stopped_leaves_the_destination_as_it_was(
    llama, tmp_path, capsys, monkeypatch
):
    def stop(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, "write_rest", stop)
    assert convert_command.main([str(llama), str(tmp_path / "new"), "--num-kv-heads", "2"]) == 130
    assert "is as it was" in capsys.readouterr().err and not (tmp_path / "new").exists()


@pytest.mark.slow
def test_script_says_its_error_without_a_traceback(tmp_path):
    root = Path(kv_hf.__file__).parent.parent
    script = [sys.executable, str(root / "scripts" / "convert_mha_to_gqa.py")]
    done = subprocess.run(
        [*script, "no-such", str(tmp_path / "new"), "--num-kv-heads", "2"],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert (
        done.returncode == 2
        and "there is no such folder" in done.stderr
        and "Traceback" not in done.stderr
    )


def test_example_of_the_documentation_runs(tmp_path, monkeypatch, capsys):
    text = (ROOT / "docs" / "gqa.md").read_text()
    example = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "docs/gqa.md", "exec"), {})
    assert capsys.readouterr().out.splitlines()[0] == "256 128"


def test_convert_to_gqa_says_which_tensors_the_class_does_not_have(tmp_path):
    source = tiny_mha.save(tiny_mha.make("llama"), tmp_path / "source", "1GB")
    extra = {
        "model.layers.2.self_attn.k_proj.weight": torch.ones(32, 32),
        "model.layers.0.rotary_emb.inv_freq": torch.ones(4),
    }
    save_file({**tiny_mha.stored(source), **extra}, source / "model.safetensors", {"format": "pt"})
    report = kv_hf.convert_to_gqa(source, tmp_path / "two", 2)
    assert (
        len(report.notes) == 1
        and "'model.layers.2.self_attn.k_proj.weight': copied" in report.notes[0]
    )
    after = tiny_mha.stored(tmp_path / "two")
    assert all(torch.equal(after[name], tensor) for name, tensor in extra.items())
