"""The runs of the kernels' tests: one for each instruction set, of files that exist."""

import os
import subprocess
import sys

import pytest
from paths import ROOT

from kv_hf.backends.cpu import library


@pytest.fixture
def runs(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import processor_tests

    return processor_tests


def test_settings_name_every_instruction_set_once(runs):
    found = [(variable, value) for variable, value, _ in runs.settings()]
    assert len(found) == len(set(found))
    isas = [value for variable, value in found if variable == library.ISA_VARIABLE]
    own = [] if library.missing() else [str(isa) for isa in range(library.isa() + 1)]
    assert isas == [*own, "none"]
    assert ("ATEN_CPU_CAPABILITY", "default") in found
    assert ("KV_HF_TEST_THREADS", "2") in found


def test_settings_name_files_that_exist(runs):
    names = {name for _, _, files in runs.settings() for name in files}
    assert [name for name in names if not (ROOT / "tests" / f"{name}.py").is_file()] == []


def test_main_runs_pytest_with_each_setting_and_counts_failures(runs, monkeypatch, capsys):
    seen = []

    def run(command, cwd, env):
        seen.append(env.get("KV_HF_TEST_THREADS"))
        assert command[:3] == [sys.executable, "-m", "pytest"] and "-x" in command
        return subprocess.CompletedProcess(command, int(env.get("KV_HF_TEST_THREADS") == "2"))

    monkeypatch.delitem(os.environ, "KV_HF_TEST_THREADS", raising=False)
    monkeypatch.setattr(subprocess, "run", run)
    assert runs.main(["-x"]) == 1
    assert len(seen) == len(list(runs.settings())) and seen[-2:] == ["1", "2"]
    assert "failed with KV_HF_TEST_THREADS=2" in capsys.readouterr().out
