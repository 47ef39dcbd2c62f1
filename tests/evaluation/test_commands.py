"""kv-hf demo and eval on a tiny model, in 80 columns; and the scripts that add this repository's models."""

import json
import runpy
import sys

import pytest
import torch
from paths import ROOT
from tiny_harness import sentence, tiny_tokenizer
from tiny_models import make_model

import kv_hf_cli
from kv_hf.evaluation.demo_command import CACHES
from kv_hf.evaluation.rows import read_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama with a tokenizer and a chat template, and a text of its words."""
    found = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    make_model("llama").save_pretrained(found)
    tiny_tokenizer().save_pretrained(found)
    (found / "text.txt").write_text(sentence(900, seed=3))
    (found / "other.txt").write_text(sentence(900, seed=4))
    return found


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)


def run(capsys, *arguments):
    """Run a command; return its exit code and what it printed, which fits 80 columns but for paths."""
    code = kv_hf_cli.main(list(map(str, arguments)))
    printed = capsys.readouterr()
    wide = [line for line in printed.out.splitlines() if len(line) > 80 and "/" not in line]
    assert not wide
    return code, printed


def test_demo_shows_every_cache_and_records_rows(folder, tmp_path, capsys):
    sizes = ("--prompt-tokens", 100, "--new-tokens", 4, "--device", "cpu")
    out = tmp_path / "rows.jsonl"
    text = ("--text", folder / "text.txt")
    code, printed = run(capsys, "demo", "--model", folder, *sizes, *text, "--record", "--out", out)
    assert code == 0, printed.err
    rows = read_rows(out)
    assert [row["cache"] for row in rows] == ["dynamic", *CACHES]
    assert rows[0]["kv_ratio"] == 1 and rows[1]["leading_equal_tokens"] == 4
    for row in rows:
        assert any(line.startswith(f"{row['cache']} ") for line in printed.out.splitlines())


def test_eval_records_rows(folder, tmp_path, capsys):
    sizes = ("--window", 200, "--prompt", 100, "--windows", 1, "--divergence", 4)
    asked = ("--model", folder, "--text", folder / "text.txt", "--device", "cpu", *sizes)
    caches = ("--caches", "paged_int4", "paged_int8")
    code, printed = run(capsys, "eval", *asked, *caches, "--record")
    assert code == 0, printed.err
    assert "KL" in printed.out and "100 scored tokens" in printed.out
    assert [row["cache"] for row in read_rows(tmp_path / "kv_hf_eval.jsonl")] == list(caches[1:])


def test_eval_says_which_cache_gave_no_figures(folder, capsys, monkeypatch):
    from kv_hf.evaluation.loaded_model import LoadedModel

    def refuse(*_):
        raise ValueError("not today")

    monkeypatch.setattr(LoadedModel, "accuracy", refuse)
    asked = ("--model", folder, "--text", folder / "text.txt", "--window", 200, "--prompt", 100)
    code, printed = run(capsys, "eval", *asked, "--caches", "paged_int4", "--device", "cpu")
    assert code == 1
    assert "no figures for paged_int4: not today" in printed.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["demo", "--model", "./nothing"], "model './nothing': there is no such folder"),
        (["eval", "--model", "./nothing"], "model './nothing': there is no such folder"),
        (["eval", "--model", "x", "--caches", "paged_int"], "paged_int"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_commands_say_why_they_end(arguments, says, capsys):
    code, printed = run(capsys, *arguments)
    assert code == 2
    error = printed.err.splitlines()[-1]
    assert error.startswith(f"kv-hf {arguments[0]}: error: ") and says in error


@pytest.mark.parametrize("name", ["demo", "perplexity"])
def test_scripts_know_the_packaged_models(name, capsys, monkeypatch):
    """They are the commands, with models that come in PyPI packages."""
    monkeypatch.setattr(sys, "argv", [name])
    main = runpy.run_path(str(ROOT / "scripts" / f"{name}.py"))["main"]
    assert main(["--model", "tinyllama-1.1b-not", "--text", "x"]) == 2
    assert f"{name}.py: error: " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--help"])
    assert json.dumps(capsys.readouterr().out).count("smollm2-135m") >= (name != "demo")
