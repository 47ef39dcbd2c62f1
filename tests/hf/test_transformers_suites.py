"""scripts/transformers_suites.py: its verdicts, and a run on a checkout made up for the purpose."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

SCRIPTS = ROOT / "scripts"
MADE_UP = """
import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

SIZES = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32, "vocab_size": 50}


class ModelTester:
    def __init__(self, seq_length=7):
        self.seq_length = seq_length


class TestCaches:
    max_new_tokens = 3

    def test_generate(self):
        model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
        ids = torch.randint(3, 50, (1, ModelTester().seq_length))
        out = model.generate(ids, max_new_tokens=self.max_new_tokens, eos_token_id=None, pad_token_id=0)
        assert out.shape[1] == ids.shape[1] + self.max_new_tokens

    def test_cache_class(self):
        assert type(DynamicCache(config=LlamaConfig(**SIZES))) is DynamicCache

    def test_cache_broken(self):
        raise ValueError("broken with every cache")

    @pytest.mark.skip(reason="never")
    def test_cache_skipped(self):
        pass


def test_something_else():
    raise ValueError("not selected")
"""


@pytest.fixture
def suites(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import transformers_suites

    return transformers_suites


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ("passed", "passed", "passed"),
        ("passed", "failed", "only_ours_failed"),
        ("skipped", "failed", "only_ours_failed"),
        ("failed", "passed", "only_stock_failed"),
        ("failed", "skipped", "only_stock_failed"),
        ("failed", "failed", "both_failed"),
        ("passed", "skipped", "skipped"),
        ("skipped", "skipped", "skipped"),
        (None, "passed", "new_passed"),
        (None, "failed", "new_failed"),
        ("passed", None, "lost"),
    ],
)
def test_verdict(suites, before, after, verdict):
    stock, ours = ({"outcome": outcome} if outcome else None for outcome in (before, after))
    assert suites.verdict(stock, ours) == verdict


def test_compare_counts_tests_that_used_pages(suites):
    stock = {f"a.py::T::{name}": {"outcome": "passed"} for name in "xyz"}
    ours = {
        "a.py::T::x": {"outcome": "passed", "generate": 1, "pages": 4},
        "a.py::T::y": {"outcome": "passed", "pages": 0},
        "a.py::T::z": {"outcome": "failed", "made": 1, "pages": 9},
        "b.py::new": {"outcome": "passed", "made": 1, "pages": 2},
    }
    found = suites.compare(stock, ours)
    assert found["a.py"]["tests"] == {"passed": ["T::x", "T::y"], "only_ours_failed": ["T::z"]}
    assert (found["a.py"]["paged"], found["a.py"]["pages"]) == (1, 4)
    assert found["b.py"]["tests"] == {"new_passed": ["new"]}


def test_checkout_without_tests_is_refused(suites, tmp_path):
    assert suites.main(["--checkout", str(tmp_path)]) == 2


def test_default_suites_are_the_general_ones_and_those_of_every_family(suites, tmp_path):
    for name in ("gemma4", "minimax_m3_vl", "git", "t5", "whisper", "llava", "vit"):
        folder = tmp_path / "tests" / "models" / name
        folder.mkdir(parents=True)
        (folder / f"test_modeling_{name}.py").touch()
    for name in suites.GENERAL:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = suites.default_suites(tmp_path)
    assert tuple(found[:2]) == suites.GENERAL
    names = {Path(name).parent.name for name in found[2:]}
    have = {
        "git",
        "t5",
        "whisper",
        "llava",
        "gemma4",
        "minimax_m3_vl",
    } & modules_of_this_transformers(suites)
    assert names == have and {"git", "t5"} <= names  # vit does not generate


def modules_of_this_transformers(suites):
    return {
        suites.model_type_to_module_name(name)
        for role in suites.ROLES
        for name in suites.families(role)
    }


def test_the_run_on_dynamic_cache_imports_nothing_of_kv_hf():
    """Importing it patches generate(), which would no longer be transformers' own."""
    code = "import sys, transformers_suites as own; own.pytest_configure(); sys.exit('kv_hf' in sys.modules)"
    environment = {**os.environ, "KV_HF_SUITE": json.dumps({"cache": "dynamic"})}
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, cwd=SCRIPTS, env=environment, timeout=120).returncode == 0


@pytest.mark.slow
def test_run_on_a_checkout(suites, tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_made_up.py").write_text(MADE_UP)
    out = tmp_path / "rows.jsonl"
    command = ["--checkout", str(tmp_path), "tests/test_made_up.py", "--record", "--out", str(out)]
    code = suites.main(command)
    assert code == 1  # something fails with pages only
    (row,) = [json.loads(line) for line in out.read_text().splitlines()]
    counts = {name: row[name] for name in suites.COLUMNS}
    assert counts == {
        "passed": 1,
        "only_ours_failed": 1,
        "only_stock_failed": 0,
        "both_failed": 1,
        "skipped": 1,
    }
    assert row["names"]["only_ours_failed"] == ["TestCaches::test_cache_class"]
    assert (row["passed_with_pages"], row["pages_sealed"]) == (1, 3)  # 40 + 11 tokens, no sinks
