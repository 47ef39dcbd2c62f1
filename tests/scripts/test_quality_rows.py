"""Workloads of quality: rows as they were, each measured once, a reason for what fails, over several processes too."""

import subprocess
import sys

import pytest
from measure import quality
from measure.runner import FAILED, WORKLOADS, run
from paths import ROOT
from tiny_models import make_model
from tiny_tokenizer import make_tokenizer

from kv_hf.backends.cpu import library
from kv_hf.evaluation.rows import read_rows

TEXT = {"text": "code", "windows": 1, "window": 160, "prompt": 100}


@pytest.fixture(scope="module", name="model")
def saved_model(tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("model"), make_tokenizer()
    sizes = {"num_attention_heads": 6, "head_dim": 16, "hidden_size": 48}
    make_model("llama", vocab_size=len(tokenizer), **sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def rows_of(name, out, model, caches, **config):
    """Measure configurations in this process; return the rows in `out`, and the outcome."""
    same = {"model": model, "dtype": "float32", **config}
    asked = [{**same, "cache": cache} for cache in caches]
    outcome = run(WORKLOADS[name], asked, out=out, isolated=False, say=str)
    return [row for row in read_rows(out) if row["kind"] != FAILED], outcome


def accuracy(out, model, caches, **changes):
    return rows_of("accuracy", out, model, caches, **{**TEXT, **changes})


def test_accuracy_rows_are_measured_once_and_failures_have_a_reason(model, tmp_path, monkeypatch):
    out = tmp_path / "rows.jsonl"
    rows, outcome = accuracy(out, model, ["paged_exact", "offloaded", "paged_int2_v1"])
    assert [row["cache"] for row in rows] == ["paged_exact", "paged_int2_v1"]
    assert rows[0]["kl_mean"] < 1e-6 < 1e-3 < rows[1]["kl_mean"]
    assert rows[0]["tokens"] == 60
    assert rows[1]["stored_bits"] < rows[0]["stored_bits"]
    assert len(outcome.failed) == 1 and "cannot run here" in outcome.failed[0]
    (failed,) = [row for row in read_rows(out) if row["kind"] == FAILED]
    assert failed["cache"] == "offloaded" and "cannot run here" in failed["failed"]
    monkeypatch.setattr(quality, "held", lambda *args, **how: pytest.fail("measured again"))
    again, outcome = accuracy(out, model, ["paged_exact", "paged_int2_v1"])
    assert again == rows and not outcome.failed


def test_peers_are_measured_by_their_names_with_their_bits(model, tmp_path):
    names = ["kivi_int2:page_size=16,key_group_size=16,value_group_size=16", "turboquant_int4"]
    (kivi, turboquant), _ = accuracy(tmp_path / "rows.jsonl", model, names)
    assert kivi["bits_per_element"] == 2 + 2 * 16 / 16  # a scale and an offset of 16 numbers
    assert turboquant["bits_per_element"] == 4 + 16 / 16  # a norm of 16 channels


def test_state_follows_texts_and_weights_and_refuses_what_is_not_there(model, tmp_path):
    own = tmp_path / "own.txt"
    own.write_text("one")
    config = {"model": model, "text": str(own), "cache": "dynamic"}
    before = quality.state_of(config)
    own.write_text("two")
    assert quality.state_of(config)[1] != before[1]
    other = tmp_path / "other"
    make_model("llama").save_pretrained(other)
    assert quality.state_of({**config, "model": str(other)})[0] != before[0]
    for name, value in (("cache", "paged_int5"), ("text", "nowhere.txt"), ("model", "./nowhere")):
        with pytest.raises(ValueError, match=value):
            quality.state_of({**config, name: value})


@pytest.mark.skipif(library.missing() is not None, reason="the C kernel is not there")
def test_steps_that_read_a_part_lose_more_and_are_counted(model, tmp_path):
    long = {"text": "code", "windows": 1, "window": 600, "prompt": 536}
    parts = ("read_tokens=200", "read_top_p=0.5", "read_top_p=0.999")
    caches = ["paged_exact", *(f"paged_exact:read_from=300,{part}" for part in parts)]
    rows, outcome = rows_of("reading", tmp_path / "rows.jsonl", model, caches, **long)
    assert not outcome.failed and [row["cache"] for row in rows] == caches
    dense, tokens, half, most = rows
    assert dense["kl_mean"] < 1e-6 < 1e-3 < tokens["kl_mean"] and tokens["read_tokens"] == 200
    assert half["kl_mean"] > most["kl_mean"] and half["read_top_p"] == 0.5
    assert 64 + 4 <= half["tokens_read_p10"] <= half["tokens_read_mean"] <= half["tokens_read_p90"]
    assert half["tokens_read_mean"] < most["tokens_read_mean"] <= 600


def test_a_stopped_command_goes_on_and_names_what_cannot_run(model, tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / "accuracy_vs_memory.py"), "accuracy", "--out"]
    asked = {**TEXT, "model": model}
    only = [f"{name}={value}" for name, value in asked.items()]

    def run_with(*caches):
        given = [*command, tmp_path, "--only", *only, *(f"cache={name}" for name in caches)]
        return subprocess.run(given, capture_output=True, text=True, timeout=300)

    done = run_with("turboquant_int4")
    assert done.returncode == 0, done.stderr
    done = run_with("turboquant_int4", "offloaded")
    assert done.returncode == 1 and "cannot run here" in done.stdout + done.stderr
    rows = read_rows(tmp_path / "accuracy_vs_memory.jsonl")
    assert [row["cache"] for row in rows] == ["turboquant_int4", "offloaded"]
    done = run_with("paged_int5")
    assert done.returncode == 2 and "paged_int5" in done.stderr


@pytest.mark.slow
def test_two_processes_measure_a_grid_together(model, tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launch, str(ROOT / "scripts" / "accuracy_vs_memory.py"), "accuracy"]
    caches = ["dynamic", "paged_exact", "paged_int4"]
    config = {**TEXT, "model": model}
    only = [f"{name}={value}" for name, value in config.items()]
    only += [f"cache={name}" for name in caches]
    command += ["--device", "cpu", "--out", str(tmp_path), "--only", *only]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("failed: 0") == 2
    rows = read_rows(tmp_path / "accuracy_vs_memory.jsonl")
    assert sorted(row["cache"] for row in rows) == caches
