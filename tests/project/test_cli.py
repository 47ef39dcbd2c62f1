"""kv-hf: its help and version import nothing heavy, and every command has a home."""

import inspect
import subprocess
import sys
from importlib import import_module

import pytest
from paths import ROOT

import kv_hf
import kv_hf_cli

HEAVY = ("torch", "transformers", "kv_hf", "numpy", "huggingface_hub")


def run(code, *, folder=ROOT, **options):
    return subprocess.run(
        [sys.executable, "-W", "ignore", *code],
        capture_output=True,
        text=True,
        cwd=folder,
        **options,
    )


@pytest.mark.parametrize("argument", ["--help", "--version", ""])
def test_help_and_version_import_neither_torch_nor_the_package(argument):
    """They took 3 seconds of processor time, all of it spent on importing torch and transformers."""
    code = f"""
import sys
import kv_hf_cli
try:
    kv_hf_cli.main({[argument] if argument else []})
except SystemExit as done:
    assert done.code == 0
assert not {{name.partition(".")[0] for name in sys.modules}} & set({HEAVY})
"""
    done = run(["-c", code])
    assert done.returncode == 0, done.stderr
    assert ("doctor" in done.stdout) == (argument != "--version")
    if argument == "--version":
        assert done.stdout.strip() == f"kv-hf {kv_hf.__version__}"


def test_python_m_runs_the_command():
    done = run(["-m", "kv_hf", "--version"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"kv-hf {kv_hf.__version__}"


@pytest.mark.parametrize("command", kv_hf_cli.COMMANDS)
def test_commands_have_a_home_and_one_style(command):
    module, text = kv_hf_cli.COMMANDS[command]
    arguments = list(inspect.signature(import_module(module).main).parameters.values())
    assert [argument.name for argument in arguments[:2]] == ["argv", "prog"]
    assert arguments[1].default == f"kv-hf {command}"
    assert len(f"  {text}") <= 67  # beside the names


@pytest.mark.parametrize("command", sorted(set(kv_hf_cli.COMMANDS) - {"lm-eval", "serve"}))
def test_parsers_take_no_shortened_arguments(command):
    """`kv-hf memory --contex` was taken; serve has a parser from transformers, lm-eval one of its own."""
    assert not import_module(kv_hf_cli.COMMANDS[command][0]).parser("kv-hf").allow_abbrev


@pytest.mark.parametrize("flag", ["--cache", "--caches"])
def test_memory_and_eval_take_both_names_of_caches(flag):
    given = [flag, "dynamic", "paged_int4"]
    asked = [
        import_module(kv_hf_cli.COMMANDS["memory"][0]).parser("").parse_args(["m", *given]).cache,
        import_module(kv_hf_cli.COMMANDS["eval"][0])
        .parser("")
        .parse_args(["--model", "m", *given])
        .caches,
    ]
    assert asked == [["dynamic", "paged_int4"]] * 2


def test_main_names_the_nearest_command(capsys):
    with pytest.raises(SystemExit) as stopped:
        kv_hf_cli.main(["memroy", "--device", "h100"])
    assert stopped.value.code == 2
    assert "got 'memroy'; did you mean memory?" in capsys.readouterr().err


def test_a_folder_that_is_no_package_is_told(tmp_path):
    """In the parent folder of a clone named kv_hf, Python without kv_hf imports the clone: an empty package."""
    (tmp_path / "kv_hf").mkdir()
    code = f"""
import sys
sys.path = [{str(tmp_path)!r}, *(path for path in sys.path if not path.startswith({str(ROOT)!r}))]
import importlib.util
spec = importlib.util.spec_from_file_location("kv_hf_cli", {str(ROOT / "kv_hf_cli.py")!r})
cli = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cli)
sys.exit(cli.main(["memory", "llama-3.1-8b"]))
"""
    done = run(["-S", "-c", code], folder=tmp_path, env={})
    assert done.returncode == 2, done.stderr
    assert f"only the folder {tmp_path / 'kv_hf'}" in done.stderr
    assert "rename the clone" in done.stderr
