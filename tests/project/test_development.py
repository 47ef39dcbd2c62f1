"""What tests and budgets rest on: the environment of a test, the environments that tests run in, and the sizes of rooms."""

import os
import socket
import subprocess
import sys

import check_kernels
import environments
import pytest
import size
from paths import ROOT, TESTS

from kv_hf.backends.cpu import library


def test_rows_hold_every_instruction_set_and_files_that_exist():
    rows = list(environments.rows())
    assert len({name for name, _, _ in rows}) == len(rows)
    isas = [variables.get(library.ISA_VARIABLE) for _, variables, _ in rows]
    own = [] if library.missing() else [str(isa) for isa in range(library.isa() + 1)]
    assert [isa for isa in isas if isa] == [*own, "none"]
    files = {TESTS / name for _, _, names in rows for name in names}
    for sanitizer in check_kernels.SANITIZERS.values():
        files |= {(TESTS / name).with_suffix("") for name in sanitizer.tests.split()}
    assert not [one for one in files if not one.is_dir() and not one.with_suffix(".py").is_file()]


def test_a_test_sees_nothing_of_the_shell_and_no_network():
    names = ["HF_HUB_OFFLINE", "PYTHONWARNINGS"]
    code = "import known_environment as known, os, sys; print({*sys.argv[1:]} & {*os.environ}); known.leave()"
    given = {**os.environ, **dict.fromkeys(names, "error"), "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-c", code, *names]
    assert subprocess.check_output(command, env=given, cwd=ROOT, text=True) == "set()\n"
    assert not {*names} & {*os.environ} and "kv_hf-home-" in os.environ["HOME"]
    with pytest.raises(OSError, match="tests have no network"):
        socket.create_connection(("huggingface.co", 443))


def test_sizes_count_code_and_name_the_room_that_grew(tmp_path, monkeypatch, capsys):
    python = '"""Say what."""\n\nimport os  # why\n\n\ndef f(\n    a,\n):\n    return """a\nb"""\n'
    native = "/* what\n   it does */\nint a = 1; // why\n\n#define B (2)\n"
    (tmp_path / "room").mkdir()
    for name, text in (("a.py", python), ("b.c", native), ("c.md", "text")):
        (tmp_path / "room" / name).write_text(text)
    monkeypatch.setattr(size, "ROOT", tmp_path)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "room"], cwd=tmp_path, check=True)
    for budget, over in (([8, 2, 2.8], 0), ([7, 2, 2.8], 1), ([8, 1, 2.8], 1), ([8, 2, 2.7], 1)):
        (tmp_path / "pyproject.toml").write_text(f"[tool.kv_hf.size]\nroom = {budget}\n")
        assert size.main() == over
        printed = capsys.readouterr().out  # 6 lines of 11 tokens, and 2 of 11
        assert '"room" = [8, 2, 2.8]' in printed and ("its budget is" in printed) == bool(over)
