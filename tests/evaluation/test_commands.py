"""kv-hf demo and eval on a tiny model, in 80 columns; and the scripts that add this repository's models."""

import shutil

import pytest
from measure.family_models import build_model

import kv_hf_cli
from kv_hf.evaluation import pareto
from kv_hf.evaluation.demo_command import CACHES
from kv_hf.evaluation.models import LoadedModel, revision_of
from kv_hf.evaluation.recommend import interval
from kv_hf.evaluation.rows import read_rows


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
    model = {(row["model"], row["model_revision"]) for row in rows}
    assert model == {(str(folder), revision_of(str(folder)))}
    assert rows[0]["kv_ratio"] == 1 and rows[1]["leading_equal_tokens"] == 4
    for row in rows:
        assert any(line.startswith(f"{row['cache']} ") for line in printed.out.splitlines())


def test_demo_and_eval_say_what_a_model_without_keys_lacks(folder, tmp_path, capsys):
    shutil.copytree(folder, tmp_path / "mamba")
    build_model("mamba").save_pretrained(tmp_path / "mamba")
    asked = ("--model", tmp_path / "mamba", "--text", folder / "text.txt", "--device", "cpu")
    code, printed = run(capsys, "demo", *asked, "--prompt-tokens", 20, "--new-tokens", 2)
    assert code == 2 and "error: 'mamba' has no attention layer that pages" in printed.err
    sizes = ("--window", 40, "--prompt", 20, "--windows", 1)
    code, printed = run(capsys, "eval", *asked, *sizes, "--caches", "dynamic")
    assert code == 1 and "no figures for dynamic: the model keeps no keys" in printed.err


SIZES = ("--window", 200, "--prompt", 100, "--windows", 1, "--device", "cpu")


def test_eval_records_rows_names_the_best_and_draws(folder, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    asked = ("--model", folder, "--text", folder / "text.txt", *SIZES)
    caches = ("--caches", "paged_exact", "paged_int4", "paged_int8")
    more = ("--record", "--bits", 15, "--plot", "plots/a.png")
    code, printed = run(capsys, "eval", *asked, *caches, *more)
    assert code == 0, printed.err
    assert "KL" in printed.out and "100 scored tokens" in printed.out
    assert "-0.00" not in printed.out  # fp32 noise of exact pages may be below nothing
    rows = read_rows(tmp_path / "kv_hf_eval.jsonl")
    assert [row["cache"] for row in rows] == list(caches[1:])
    assert rows[0]["model"] == str(folder) and rows[0]["model_revision"] == revision_of(str(folder))
    least = min(rows[1:], key=lambda row: row["kl_mean"])
    assert f"least KL within 15 bits: {least['cache']}, {least['kl_mean']:.5f}" in printed.out
    assert (tmp_path / "plots" / "a.png").read_bytes().startswith(b"\x89PNG")
    table = (tmp_path / "plots" / "a.md").read_text("utf-8").splitlines()
    assert len(table) == 5 and table[2].startswith("| `paged_exact` | ")
    assert all(path.is_file() for path in pareto(rows, tmp_path / "plots" / "no-ending"))
    figures = {row["cache"]: (row["stored_bits"], row["kl_mean"]) for row in rows}
    for line in table[2:]:
        bits, kl = figures[line.split("`")[1]]
        beaten = any(b <= bits and k < kl for b, k in figures.values())
        assert line.endswith("| yes |") != beaten
    code, printed = run(capsys, "eval", *asked, "--caches", "paged_int8", "--bits", 2)
    assert code == 1 and "no cache holds at most 2 bits" in printed.err


def test_pareto_takes_rows_of_one_model_and_text(tmp_path):
    row = {"cache": "a", "model": "m", "text": "t", "stored_bits": 4.0, "kl_mean": 0.1}
    for rows, says in (
        ([row, {**row, "cache": "b", "text": "u"}], "got .'m, t', 'm, u'."),
        ([], "got none"),
    ):
        with pytest.raises(ValueError, match=says):
            pareto(rows, tmp_path / "a.png")
    assert not list(tmp_path.iterdir())
    # fp32 noise of exact pages may be below nothing
    assert interval({"kl_mean": -1e-6, "kl_low": -1e-5, "kl_high": 0.01}).startswith("0.00000 (-")


def test_eval_says_which_cache_gave_no_figures_and_stops_at_an_interrupt(
    folder, tmp_path, capsys, monkeypatch
):
    measure = LoadedModel.accuracy

    def some(self, cache, *args):
        if cache == "paged_int4":
            raise ValueError("not today")
        if cache == "paged_int2":
            raise KeyboardInterrupt
        return measure(self, cache, *args)

    monkeypatch.setattr(LoadedModel, "accuracy", some)
    asked = ("--model", folder, "--text", folder / "text.txt", *SIZES, "--record")
    code, printed = run(capsys, "eval", *asked, "--caches", "paged_int4", "paged_int8")
    assert code == 1 and "no figures for paged_int4: not today" in printed.err
    code, printed = run(capsys, "eval", *asked, "--caches", "paged_int8", "paged_int2", "dynamic")
    assert code == 130 and "interrupted; 1 of 3 caches are measured" in printed.err
    assert "Traceback" not in printed.err and "paged_int8" in printed.out
    rows = read_rows(tmp_path / "kv_hf_eval.jsonl")
    assert [row["cache"] for row in rows] == ["paged_int8"] * 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["demo", "--model", "./nothing"], "model './nothing': there is no such folder"),
        (["demo", "--new-tokens", "1"], "--new-tokens must be an integer of at least 2, got 1"),
        (["eval", "--model", "x", "--caches", "paged_int"], "paged_int"),
        (["eval", "--model", "x", "--windows", "-1"], "windows must be an integer of at least 1"),
        (["eval", "--model", "x", "--prompt", "1599"], "prompt must be an integer of at most 1598"),
        (["eval", "--model", "x", "--device", ""], "device must be a CPU or CUDA, got ''"),
        (["eval", "--model", "x", "--bits", "0"], "bits must be a number above 0"),
        (["eval", "--model", "x", "--device", "cuda:99"], "device 'cuda:99' cannot be used here: "),
    ],
    ids=" ".join,
)
def test_commands_say_why_they_end(arguments, says, capsys):
    code, printed = run(capsys, *arguments)
    assert code == 2
    error = printed.err.splitlines()[-1]
    assert error.startswith(f"kv-hf {arguments[0]}: error: ") and says in error
