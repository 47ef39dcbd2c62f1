"""The environments that tests are run in: each once, of files that exist; and what a test sees of the shell's."""

import os
import subprocess
import sys

import environments
import pytest
from paths import ROOT, TESTS

from kv_hf.backends.cpu import library


def test_rows_hold_every_instruction_set_and_files_that_exist():
    rows = list(environments.rows())
    assert len({name for name, _, _ in rows}) == len(rows)
    isas = [variables.get(library.ISA_VARIABLE) for _, variables, _ in rows]
    own = [] if library.missing() else [str(isa) for isa in range(library.isa() + 1)]
    assert [isa for isa in isas if isa] == [*own, "none"]
    names = {name for _, _, names in rows for name in names}
    assert [
        n for n in names if not any((TESTS / f"{n}{end}").exists() for end in ("", ".py"))
    ] == []


def test_main_runs_pytest_with_each_row_and_counts_failures(monkeypatch, capsys):
    seen = []

    def run(command, cwd, env):
        seen.append(env)
        assert command[:3] == [sys.executable, "-m", "pytest"] and "-x" in command
        return subprocess.CompletedProcess(command, int("HOME" not in env))

    monkeypatch.setattr(subprocess, "run", run)
    assert environments.main(["--only", "home", "-x"]) == 1
    assert [env.get("HOME") for env in seen] == [None, environments.NOWHERE]
    assert "failed with no home" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "PYTHONWARNINGS"])
def test_a_test_sees_nothing_of_the_shells_variables(name):
    code = "import known_environment, os, sys; print(os.environ.get(sys.argv[1])); known_environment.leave()"
    given = {**os.environ, name: "error", "PYTHONPATH": str(TESTS)}
    done = subprocess.run(
        [sys.executable, "-c", code, name], env=given, cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout == "None\n" and name not in os.environ


def test_a_test_has_no_network_and_an_empty_home():
    import socket

    with pytest.raises(OSError, match="tests have no network"):
        socket.create_connection(("huggingface.co", 443))
    assert "kv_hf-home-" in os.environ["HOME"]
