"""kv-hf: its help and version import nothing heavy, and every command has a home."""

import inspect
import runpy
import subprocess
import sys
from importlib import import_module

import pytest
from paths import ROOT

import kv_hf
import kv_hf_cli

LIGHT = """
import sys
import kv_hf_cli
try:
    kv_hf_cli.main(sys.argv[1:])
except SystemExit as done:
    assert done.code == 0
heavy = {"torch", "transformers", "kv_hf", "numpy", "huggingface_hub"}
assert not {name.partition(".")[0] for name in sys.modules} & heavy
"""
SHADOWED = f"""
import importlib.util, sys
sys.path = [sys.argv[1], *(path for path in sys.path if not path.startswith({str(ROOT)!r}))]
spec = importlib.util.spec_from_file_location("kv_hf_cli", {str(ROOT / "kv_hf_cli.py")!r})
cli = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cli)
sys.exit(cli.main(["memory", "llama-3.1-8b"]))
"""
VERSION = f"kv-hf {kv_hf.__version__}\n"


def run(*words, folder=ROOT, **options):
    command = [sys.executable, "-W", "ignore", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, **options)


@pytest.mark.parametrize(("argument", "says"), [("--help", "doctor"), ("--version", VERSION)])
def test_help_and_version_import_neither_torch_nor_the_package(argument, says):
    """They took 3 seconds of processor time, all of it spent on importing torch and transformers."""
    done = run("-c", LIGHT, argument)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout


def test_python_m_runs_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kv_hf", "--version"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("kv_hf", run_name="__main__")
    assert capsys.readouterr().out == VERSION


@pytest.mark.parametrize("command", kv_hf_cli.COMMANDS)
def test_commands_have_a_home_and_one_style(command):
    name, text = kv_hf_cli.COMMANDS[command]
    module = import_module(name)
    argv, prog = list(inspect.signature(module.main).parameters.values())[:2]
    assert (argv.name, prog.name, prog.default) == ("argv", "prog", f"kv-hf {command}")
    assert len(f"  {text}") <= 67  # beside the names
    if command not in ("lm-eval", "serve"):  # whose parsers are lm-eval's and transformers'
        assert not module.parser("kv-hf").allow_abbrev  # `kv-hf memory --contex` was taken


def test_main_names_the_nearest_command(capsys):
    with pytest.raises(SystemExit, match="2"):
        kv_hf_cli.main(["memroy", "--device", "h100"])
    assert "got 'memroy'; did you mean memory?" in capsys.readouterr().err


def test_a_folder_that_is_no_package_is_told(tmp_path):
    """In the parent folder of a clone named kv_hf, Python without kv_hf imports the clone: an empty package."""
    (tmp_path / "kv_hf").mkdir()
    done = run("-S", "-c", SHADOWED, str(tmp_path), folder=tmp_path, env={})
    assert done.returncode == 2, done.stderr
    assert f"only the folder {tmp_path / 'kv_hf'}" in done.stderr
    assert "rename the clone" in done.stderr
