"""Conversion of damaged, changing and unfit checkpoints, to places that cannot be written, and by processes that are killed."""

import hashlib
import json
import multiprocessing
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_mha
import torch
import transformers
from huggingface_hub import parse_local_safetensors_file_metadata
from paths import TESTS
from safetensors.torch import load_file, save_file

import kv_hf
from kv_hf.gqa import new_config, writer
from kv_hf.gqa.checkpoint import Checkpoint
from kv_hf.gqa.structure import find_structure
from kv_hf.gqa.tensor_file import TensorFile

LIMIT = 100 * 2**20  # bytes of data
INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-"


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return tiny_mha.save(tiny_mha.make("llama"), tmp_path_factory.mktemp("mha") / "source")


@pytest.fixture
def source(shards, tmp_path):
    subprocess.run(["cp", "-r", str(shards), str(tmp_path / "source")], check=True)
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
    destination = destination or source.parent / "new"
    before = digest(source.parent)
    with pytest.raises(kv_hf.ConversionError, match=says):
        kv_hf.convert_to_gqa(source, destination, kv_heads, **options)
    assert digest(source.parent) == before


def edit_json(path, **changes):
    found = json.loads(path.read_text())
    path.write_text(json.dumps({**found, **changes}))


def first_shard(source):
    return min(source.glob(f"{FIRST}*"))


# what cannot be converted


@pytest.mark.parametrize(
    ("kv_heads", "says"),
    [
        (3, "must divide the 4 kv heads of the model, and be less: it can be 1 or 2, got 3"),
        (8, "must divide the 4 kv heads of the model, and be less: it can be 1 or 2, got 8"),
        (4, "the model has 4 kv heads already, there is nothing to do"),
        (0, "must be an integer of at least 1, got 0"),
        (-1, "must be an integer of at least 1, got -1"),
        (True, "must be an integer of at least 1, got True"),
        ("2", "must be an integer of at least 1, got '2'"),
        (2.0, "must be an integer of at least 1, got 2.0"),
    ],
)
def test_numbers_of_heads_that_do_not_fit_are_refused(kv_heads, says, source):
    refuses(source, says, kv_heads)


def test_one_kv_head_cannot_be_merged_further(source):
    kv_hf.convert_to_gqa(source, source.parent / "one", 1)
    with pytest.raises(
        kv_hf.ConversionError, match="the model has 1 kv head, which cannot be merged into fewer"
    ):
        kv_hf.convert_to_gqa(source.parent / "one", source.parent / "two", 2)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \(gptq\)"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, r"quantization_config \(awq\)"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, r"compression_config \(compressed-tensors\)"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling.My"}}, "auto_map"),
        ({"model_type": None}, "names no model_type"),
        ({"model_type": "never_heard_of"}, "never_heard_of"),
        ({"num_key_value_heads": [4, 2]}, "num_key_value_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads|multiple"),
        ({"hidden_size": 48, "head_dim": 12}, r"is \[48, 32\], and the config says \[48, 48\]"),
        ({"per_layer_config": {"1": {"num_key_value_heads": 2}}}, "different numbers of heads"),
        ({"architectures": ["NoSuchModel"], "model_type": "clip_vision_model"}, "no class 'NoSuchModel'"),
    ],
)  # fmt: skip
def test_configs_that_cannot_be_converted_are_refused(changes, says, source):
    edit_json(source / "config.json", **changes)
    refuses(source, says)


def tiny(name, **options):
    """Return a model of a config class that is in none of the lists."""
    config = getattr(transformers, name)(**{**tiny_mha.COMMON, **options})
    return transformers.AutoModelForCausalLM.from_config(config)


MLA = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
NEW_FALCON = {**tiny_mha.FALCON, "new_decoder_architecture": True, "num_kv_heads": 4}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: tiny("OPTConfig", ffn_dim=32, word_embed_proj_dim=32), "opt: .*no grouped kv heads. What can be converted: .*falcon"),
        (lambda: tiny("GPTJConfig", **tiny_mha.GPT_LIKE, rotary_dim=4), "gptj: .*no grouped kv heads"),
        (lambda: tiny("BloomConfig", n_head=4, n_layer=2), "bloom: .*no grouped kv heads"),
        (lambda: tiny("DeepseekV3Config", **MLA, n_routed_experts=2, n_group=1, topk_group=1, num_experts_per_tok=1, moe_intermediate_size=8), "latents .MLA."),
        (lambda: tiny("MiMoV2FlashConfig", head_dim=8, v_head_dim=8, n_routed_experts=2, moe_intermediate_size=8, num_experts_per_tok=1, n_group=1, topk_group=1), "the places of its heads are not known"),
        (lambda: tiny("DogeConfig"), "the places of its heads are not known"),
        (lambda: tiny("JetMoeConfig", kv_channels=8), "the places of its heads are not known"),
        (lambda: transformers.FalconForCausalLM(transformers.FalconConfig(**NEW_FALCON)), "would not make the cache smaller"),
        (lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(
            vocab_size=48, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)), "t5 is an encoder-decoder model"),
    ],
    ids=["opt", "gptj", "bloom", "mla", "mimo", "doge", "jetmoe", "falcon-new", "t5"],
)  # fmt: skip
def test_models_that_cannot_be_converted_are_refused_with_the_reason(make, says, tmp_path):
    refuses(tiny_mha.save(make(), tmp_path / "source"), says)


def test_an_odd_number_of_kv_heads_is_left_to_the_class_to_refuse(tmp_path):
    source = tiny_mha.save(tiny_mha.make("diffllama"), tmp_path / "source")
    refuses(source, "DiffLlamaForCausalLM cannot be built with num_key_value_heads=1", 1)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.int8, torch.int32])
def test_tensors_of_quantized_weights_are_refused(dtype, source):
    shard = first_shard(source)
    tensors = load_file(shard)
    name = next(iter(tensors))
    tensors[name] = torch.zeros(tensors[name].shape).to(dtype)
    save_file(tensors, shard, {"format": "pt"})
    refuses(source, "as quantized checkpoints are")


@pytest.mark.parametrize("part", ["weight_scale", "qweight", "weight.absmax"])
def test_names_that_only_quantized_checkpoints_have_are_refused(part, source):
    add(source, f"model.layers.0.mlp.up_proj.{part}", torch.ones(2))
    refuses(source, "is quantized")


def add(source, name, tensor):
    """Put another tensor into the first shard, and into the index."""
    shard = first_shard(source)
    save_file({**load_file(shard), name: tensor}, shard, {"format": "pt"})
    index = json.loads((source / INDEX).read_text())
    index["weight_map"][name] = shard.name
    (source / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("pytorch_model.bin", "no safetensors: load it with transformers"),
        ("model.gguf", "no safetensors: load it with transformers"),
        ("nothing.txt", "holds neither model.safetensors nor"),
    ],
)
def test_folders_without_safetensors_are_refused(file, says, source):
    for path in source.glob("model*"):
        path.unlink()
    (source / file).write_bytes(b"x")
    refuses(source, says)


def test_adapters_are_refused(source):
    (source / "adapter_config.json").write_text("{}")
    refuses(source, "holds an adapter")


@pytest.mark.parametrize("name", ["no/such/folder", "/no/such", "./nothing", "nothing", "~/model"])
def test_sources_that_are_not_there_are_refused(name, tmp_path):
    with pytest.raises(kv_hf.ConversionError, match="there is no such folder|neither a folder nor"):
        kv_hf.convert_to_gqa(name, tmp_path / "new", 2)


def test_a_file_as_source_is_refused(source):
    shard = first_shard(source)
    with pytest.raises(kv_hf.ConversionError, match="got the file"):
        kv_hf.convert_to_gqa(shard, source.parent / "new", 2)


# damaged and odd files


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00", '{"model_type": "llama"' + "[" * 5000])
@pytest.mark.parametrize("file", ["config.json", INDEX])
def test_damaged_json_is_named(file, text, source):
    (source / file).write_text(text)
    refuses(source, f"{file}' (is no JSON|must hold a JSON object)")


@pytest.mark.parametrize("left", [0, 5, 8, 100, -1, -4000])
def test_truncated_shards_are_named(left, source):
    shard = first_shard(source)
    os.truncate(shard, left if left >= 0 else shard.stat().st_size + left)
    refuses(source, f"{shard.name} is damaged or cut off")


def test_a_header_that_claims_too_much_is_refused(source):
    shard = first_shard(source)
    body = shard.read_bytes()
    shard.write_bytes((2**62).to_bytes(8, "little") + body[8:])
    refuses(source, f"{shard.name} is damaged or cut off")


def edit_index(source, edit):
    index = json.loads((source / INDEX).read_text())
    edit(index["weight_map"])
    (source / INDEX).write_text(json.dumps(index))


NAME = "model.layers.0.self_attn.k_proj.weight"
OTHER = "model.norm.weight"


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda names: names.update({NAME: names[OTHER]}), f"lists '{NAME}' in .*, and .* holds it"),
        (lambda names: names.update({"model.none": names[OTHER]}), "lists 'model.none' in .* does not hold it"),
        (lambda names: names.pop(NAME), f"holds '{NAME}', which {INDEX} does not list"),
        (lambda names: names.update({NAME: "model-00009-of-00009.safetensors"}), "which is not there"),
        (lambda names: names.update({NAME: "../source/model.safetensors"}), "names a file outside of its folder"),
        (lambda names: names.update({NAME: 3}), "has no weight_map of tensors and files"),
        (lambda names: names.clear(), "has no weight_map of tensors and files"),
    ],
    ids=["other-file", "extra-name", "missing-name", "missing-file", "outside", "number", "empty"],
)  # fmt: skip
def test_an_index_that_does_not_fit_its_files_is_refused(edit, says, source):
    edit_index(source, edit)
    refuses(source, says)


def test_a_shard_that_the_index_does_not_list_is_refused(source):
    save_file({"a": torch.ones(2)}, source / "model-00008-of-00009.safetensors")
    refuses(source, "model-00008-of-00009.safetensors, which .* does not list")


def test_a_tensor_that_two_files_hold_is_refused(source):
    shards = sorted(source.glob(f"{FIRST[:6]}*.safetensors"))
    name = next(iter(load_file(shards[0])))
    save_file({**load_file(shards[1]), name: torch.ones(2)}, shards[1], {"format": "pt"})
    refuses(source, f"{shards[1].name} holds '{name}', which {shards[0].name} holds too")


def edit_tensor(source, name, edit):
    """Put another tensor in the place of one, wherever it lies; None takes it away."""
    for shard in source.glob("*.safetensors"):
        tensors = load_file(shard)
        if name in tensors:
            tensors[name] = edit(tensors[name])
            kept = {one: t for one, t in tensors.items() if t is not None}
            save_file(kept or {"model.none": torch.ones(1)}, shard, {"format": "pt"})
            more = {} if kept else {"model.none": shard.name}
            if tensors[name] is None and (source / INDEX).is_file():
                edit_index(source, lambda names, more=more: (names.pop(name), names.update(more)))


OUTPUT, UP = "model.layers.1.self_attn.o_proj.weight", "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize("name", [NAME, OTHER, OUTPUT, UP, "lm_head.weight"])
def test_a_tensor_that_is_missing_everywhere_is_refused(name, source):
    edit_tensor(source, name, lambda tensor: None)
    refuses(source, f"lacks '{name}'")


@pytest.mark.parametrize("name", [NAME, OTHER, OUTPUT, UP])
def test_a_tensor_of_another_shape_is_refused(name, source):
    edit_tensor(source, name, lambda tensor: tensor[:-1].clone())
    refuses(source, rf"'{name}' is \[\d+.*\], and the config says")


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_what_another_class_is_made_of_is_checked_too(family, tmp_path):
    source = tiny_mha.save(tiny_mha.make(family), tmp_path / "source")
    name = next(n for n in tiny_mha.stored(source) if n.endswith(("c_attn.weight", "value.weight")))
    edit_tensor(source, name, lambda tensor: tensor[:-1].clone())
    refuses(source, rf"'{name}' is \[\d+.*\], and the config says", 1)


def test_a_link_to_a_tokenizer_that_is_not_there_is_refused(source):
    (source / "tokenizer.json").symlink_to("nowhere")
    refuses(source, "tokenizer.json is a link to a file that is not there")
    refuses(source, "tokenizer.json is a link to a file that is not there", dry_run=True)


def test_odd_tensors_are_kept_as_they_are(source, tmp_path):
    odd = {
        'a name with spaces, \u00fcml\u00e4uts, \U0001f600 and "quotes"': torch.ones(3),
        "model.empty": torch.zeros(0, 4),
        "model.scalar": torch.tensor(3.5, dtype=torch.float64),
        "model.flags": torch.tensor([True, False, True]),
        "model.counts": torch.arange(5),
        "model.half": torch.tensor([1.0, 2.0, 3.0], dtype=torch.float16),
    }
    for name, tensor in odd.items():
        add(source, name, tensor)
    kv_hf.convert_to_gqa(source, tmp_path / "new", 2)
    after = tiny_mha.stored(tmp_path / "new")
    for name, tensor in odd.items():
        assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor), name
    kv_hf.convert_to_gqa(source, tmp_path / "cast", 2, dtype="bfloat16")
    cast = tiny_mha.stored(tmp_path / "cast")
    assert (
        cast["model.counts"].dtype == torch.int64 and cast["model.scalar"].dtype == torch.bfloat16
    )


def test_a_header_of_a_megabyte_and_its_metadata_are_kept(source, tmp_path):
    shard = first_shard(source)
    save_file(load_file(shard), shard, {"format": "pt", "story": "long " * 200_000})
    kv_hf.convert_to_gqa(source, tmp_path / "new", 2)
    from safetensors import safe_open

    with safe_open(tmp_path / "new" / shard.name, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt", "story": "long " * 200_000}
    tiny_mha.load(tmp_path / "new")


# destinations


def test_destinations_that_cannot_be_are_refused(source, tmp_path):
    refuses(source, "is the source, which is never changed", destination=source)
    refuses(source, "is the source, which", destination=source / ".." / "source")
    refuses(source, "lies within the source", destination=source / "new" / "er")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    refuses(source, "is not empty", destination=tmp_path / "full")
    refuses(source, "is a file", destination=tmp_path / "full" / "x")
    refuses(source, "no folder can be made in", destination=tmp_path / "full" / "x" / "new")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    (tmp_path / "dangling").symlink_to("nowhere")
    refuses(source, "is a link", destination=tmp_path / "link")
    refuses(source, "is a link", destination=tmp_path / "dangling")
    (tmp_path / "to-source").symlink_to("source")
    refuses(source, "lies within the source", destination=tmp_path / "to-source" / "new")
    refuses(source, "destination", destination=Path("/proc/kv_hf/new"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_parent_is_refused(source, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    refuses(source, "no folder can be made", destination=tmp_path / "locked" / "new")


def test_an_empty_folder_and_missing_parents_are_filled(source, tmp_path):
    (tmp_path / "empty").mkdir()
    kv_hf.convert_to_gqa(source, tmp_path / "empty", 2)
    kv_hf.convert_to_gqa(source, tmp_path / "a" / "b" / "new", 2)
    assert digest(tmp_path / "empty") == digest(tmp_path / "a" / "b" / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "empty", "source"]


def test_a_source_that_may_only_be_read_is_enough(source, tmp_path):
    before = digest(source)
    for path in source.iterdir():
        path.chmod(0o444)
    source.chmod(0o555)
    kv_hf.convert_to_gqa(source, tmp_path / "new", 2)
    assert digest(source) == before
    assert all(os.access(path, os.W_OK) for path in (tmp_path / "new").iterdir())
    source.chmod(0o755)


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(source, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: usage)
    refuses(source, r"needs [0-9,]+ bytes, and .* has 1,000 free")


def test_a_write_that_fails_leaves_nothing_behind(source, tmp_path):
    """Files may have 15 kB: a shard is cut off by the system, as on a full disk."""
    before = digest(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (15_000, hard))
    try:
        with pytest.raises(kv_hf.ConversionError, match="cannot be written: File too large"):
            kv_hf.convert_to_gqa(source, tmp_path / "a" / "new", 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert digest(tmp_path) == before and not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt(), MemoryError()]
)
@pytest.mark.parametrize("after", [0, 3, 12])
def test_whatever_happens_while_it_writes_leaves_nothing_behind(
    error, after, source, tmp_path, monkeypatch
):
    calls = 0

    def failing(done, of):
        nonlocal calls
        calls += 1
        if calls > after:
            raise error

    before = digest(tmp_path)
    with pytest.raises(kv_hf.ConversionError if isinstance(error, OSError) else type(error)):
        kv_hf.convert_to_gqa(source, tmp_path / "a" / "new", 2, progress=failing)
    assert digest(tmp_path) == before and not (tmp_path / "a").exists()


def test_a_destination_that_somebody_fills_meanwhile_is_left_alone(source, tmp_path):
    def fill(done, of):
        (tmp_path / "new").mkdir(exist_ok=True)
        (tmp_path / "new" / "theirs").write_text("x")

    with pytest.raises(kv_hf.ConversionError, match="cannot be written: Directory not empty"):
        kv_hf.convert_to_gqa(source, tmp_path / "new", 2, progress=fill)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "source"]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["theirs"]


# a source that changes


def touch(path):
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize(
    "change",
    [touch, lambda path: os.truncate(path, 2000), Path.unlink],
    ids=["touched", "cut", "gone"],
)
@pytest.mark.parametrize("which", ["first", "last", "config.json", INDEX])
def test_a_source_that_changes_while_it_is_read_is_an_error(which, change, source, tmp_path):
    shards = sorted(source.glob("*.safetensors"))
    path = {"first": shards[0], "last": shards[-1]}.get(which) or source / which
    calls = 0

    def disturb(done, of):
        nonlocal calls
        calls += 1
        if calls == 2:
            change(path)

    with pytest.raises(
        kv_hf.ConversionError, match=f"{path.name}.*(was changed|cannot be read|is gone)"
    ):
        kv_hf.convert_to_gqa(source, tmp_path / "new", 2, progress=disturb)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_shard_cut_off_between_two_checks_is_an_error_not_a_crash(source, monkeypatch):
    """A mapped file would end the process (SIGBUS) where its bytes are gone."""
    shard = first_shard(source)
    file = TensorFile.open(shard)
    monkeypatch.setattr(TensorFile, "check", lambda self: None)
    os.truncate(shard, 2000)
    with pytest.raises(kv_hf.ConversionError, match=f"{shard.name}: .* cannot be read"):
        file.read(list(file.tensors)[-1])


# processes that are killed


def slowed(source, target, began):
    began.set()
    kv_hf.convert_to_gqa(source, target, 2, progress=lambda done, of: time.sleep(0.01))


@pytest.mark.parametrize("seed", range(5))
def test_a_conversion_that_is_killed_leaves_no_destination_or_all_of_it(seed, source, tmp_path):
    whole = tmp_path / "whole"
    kv_hf.convert_to_gqa(source, whole, 2)
    before, wanted = digest(source), digest(whole)
    target = tmp_path / "new"
    fork = multiprocessing.get_context("fork")
    began = fork.Event()
    process = fork.Process(target=slowed, args=(source, target, began))
    process.start()
    assert began.wait(60)
    time.sleep(random.Random(seed).uniform(0.05, 0.6))
    process.kill()
    process.join()
    assert digest(source) == before
    assert not target.exists() or digest(target) == wanted
    left = {path.name.rpartition(".")[2] for path in tmp_path.iterdir()}
    assert left <= {"source", "whole", "new", "kv_hf-converting"}
    kv_hf.convert_to_gqa(source, tmp_path / "again", 2)  # what was left is in nobody's way
    assert digest(tmp_path / "again") == wanted


# memory


@pytest.mark.slow
def test_a_checkpoint_larger_than_the_memory_is_converted(tmp_path):
    """478 MB in files that are larger than the limit too, by a process that may use 100 MB more data than it had before it began."""
    config = transformers.LlamaConfig(
        **{
            **tiny_mha.COMMON,
            "vocab_size": 16384,
            "hidden_size": 512,
            "intermediate_size": 8192,
            "num_hidden_layers": 7,
        }
    )
    config.num_attention_heads = config.num_key_value_heads = 8
    model = transformers.AutoModelForCausalLM.from_config(config)
    source = tiny_mha.save(model, tmp_path / "source", "300MB")
    del model
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    largest = max(tensor.nbytes for tensor in Checkpoint.open(source).tensors.values())
    assert size > 450e6 and largest < 40e6
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(kv_hf.__file__).parent.parent),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        str(TESTS / "gqa_worker.py"),
        str(source),
        str(tmp_path / "new"),
        "2",
    ]
    done = subprocess.run(
        [*command, str(LIMIT)], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "no memory for more than that" in done.stdout  # the limit is one
    growth = int(done.stdout.split()[-1])
    print(f"{size:,} bytes, largest tensor {largest:,}, peak of resident memory grew by {growth:,}")
    assert growth < 3 * largest


def test_write_shard_lays_wide_dtypes_first_so_that_all_lie_aligned(tmp_path):
    tensors = {
        "flags": torch.tensor([True, False, True]),
        "half": torch.ones(3).half(),
        "counts": torch.arange(5),
    }
    entries = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    writer.write_shard(tmp_path / "x.safetensors", entries, tensors.__getitem__)
    header = parse_local_safetensors_file_metadata(tmp_path / "x.safetensors").tensors
    file = TensorFile.open(tmp_path / "x.safetensors")
    for name, stored in file.tensors.items():
        assert header[name].data_offsets[0] % stored.dtype.itemsize == 0
    assert int.from_bytes((tmp_path / "x.safetensors").read_bytes()[:8], "little") % 8 == 0
    assert all(torch.equal(file.read(name), tensor) for name, tensor in tensors.items())


def test_a_config_that_does_not_read_as_it_should_is_refused(source):
    checkpoint = Checkpoint.open(source)
    structure = find_structure(checkpoint, 2)
    new_config.verify(checkpoint, {**checkpoint.config, "num_key_value_heads": 2}, structure)
    with pytest.raises(
        kv_hf.ConversionError, match="reads otherwise than expected.*num_key_value_heads"
    ):
        new_config.verify(checkpoint, checkpoint.config, structure)
