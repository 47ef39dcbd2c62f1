"""scripts/measure/suites.py: its columns, and a run on a checkout made up for the purpose."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from measure import suites
from measure.family_models import ROLES, families
from measure.runner import WORKLOADS, run
from paths import ROOT
from transformers.models.auto.configuration_auto import model_type_to_module_name

from kv_hf.evaluation.rows import read_rows

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
        assert type(DynamicCache(config=LlamaConfig(**SIZES))) is DynamicCache OR_NOT

    def test_cache_broken(self):
        raise ValueError("broken with every cache")

    @pytest.mark.skip(reason="never")
    def test_cache_skipped(self):
        pass


def test_something_else():
    raise ValueError("not selected")
"""


@pytest.mark.parametrize(
    ("before", "after", "column"),
    [
        ("passed", "passed", "passed"),
        ("passed", "failed", "only_ours_failed"),
        ("skipped", "failed", "only_ours_failed"),
        ("failed", "passed", "only_stock_failed"),
        ("failed", "skipped", "only_stock_failed"),
        ("failed", "failed", "both_failed"),
        ("passed", "skipped", "skipped"),
        ("skipped", "skipped", "skipped"),
    ],
)
def test_column_of(before, after, column):
    assert suites.column_of(before, after) == column


def test_compared_counts_tests_that_used_pages():
    stock = {f"T::{name}": {"outcome": "passed"} for name in "xyz"}
    ours = {
        "T::x": {"outcome": "passed", "made": 1, "pages": 4},
        "T::y": {"outcome": "passed", "pages": 0},
        "T::z": {"outcome": "failed", "made": 1, "pages": 9},
        "T::new": {"outcome": "passed", "made": 1, "pages": 2},
    }
    found = suites.compared(stock, ours)
    assert (found["passed"], found["only_ours_failed"]) == (2, 1)
    assert found["names"] == {"only_ours_failed": ["T::z"]}
    assert (found["passed_with_pages"], found["pages_sealed"]) == (1, 4)


def test_suites_are_the_general_ones_and_those_of_every_family(tmp_path, monkeypatch):
    for name in ("gemma4", "minimax_m3_vl", "git", "t5", "whisper", "llava", "vit"):
        folder = tmp_path / "tests" / "models" / name
        folder.mkdir(parents=True)
        (folder / f"test_modeling_{name}.py").touch()
    for name in suites.GENERAL:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setenv(suites.CHECKOUT, str(tmp_path))
    found = suites.suites()
    assert tuple(found[:2]) == suites.GENERAL
    names = {Path(name).parent.name for name in found[2:]}
    known = {model_type_to_module_name(name) for role in ROLES for name in families(role)}
    assert names == known & {"git", "t5", "whisper", "llava", "gemma4", "minimax_m3_vl"}
    assert {"git", "t5"} <= names  # vit does not generate


def test_the_run_on_dynamic_cache_imports_nothing_of_kv_hf():
    """Importing it patches generate(), which would no longer be transformers' own."""
    code = (
        "import sys, measure.suites_plugin as own; own.pytest_configure(); "
        "sys.exit('kv_hf' in sys.modules)"
    )
    environment = {**os.environ, "KV_HF_SUITE": json.dumps({"cache": "dynamic"})}
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, cwd=SCRIPTS, env=environment, timeout=120).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("passes", [True, False])
def test_run_on_a_checkout(passes, tmp_path, monkeypatch):
    """A suite gives a row, or says which tests fail with pages alone."""
    (tmp_path / "tests").mkdir()
    text = MADE_UP.replace("OR_NOT", "or True" if passes else "")
    (tmp_path / "tests" / "test_made_up.py").write_text(text)
    monkeypatch.setenv(suites.CHECKOUT, str(tmp_path))
    todo = [{"suite": "tests/test_made_up.py", "seq_length": 40, "new_tokens": 12}]
    out = tmp_path / "rows.jsonl"
    found = run(WORKLOADS["transformers_suites"], todo, out=out, isolated=False, say=str)
    (row,) = read_rows(out)
    if not passes:
        assert (
            "1 tests fail with pages alone: TestCaches::test_cache_class: assert" in row["failed"]
        )
        assert found.failed
        return
    assert [row[name] for name in suites.COLUMNS] == [2, 0, 0, 1, 1]
    assert row["names"] == {"both_failed": ["TestCaches::test_cache_broken"]}
    assert (row["passed_with_pages"], row["pages_sealed"]) == (2, 3)  # 40 + 11 tokens, no sinks


def test_a_run_asks_for_a_checkout(monkeypatch):
    monkeypatch.delenv(suites.CHECKOUT, raising=False)
    with pytest.raises(ValueError, match="set .TRANSFORMERS_CHECKOUT to a source checkout"):
        suites.tested("tests/test_made_up.py", suites.PAGED)
