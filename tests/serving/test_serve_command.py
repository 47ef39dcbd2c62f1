"""`kv-hf serve`: its options, its errors before a model is loaded, and the check of transformers' server."""

import inspect
import os
import signal
import subprocess
import sys
import urllib.request

import pytest
from paths import ROOT
from tiny_server import WAIT_S, Running, free_port, save_model

from kv_hf.serving import serve_command, server
from kv_hf.serving.server import ServerInterfaceError, check_server, serve_class
from kv_hf.serving.server_model import ServerOptions


def refused(capsys, *argv):
    """The exit code and the error of a command line."""
    try:
        code = serve_command.main(list(argv))
    except SystemExit as stopped:
        code = stopped.code
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--cache", "paged_int5"], "cache must be one of"),
        (["--cache", "dynamic"], "--cache must be a paged cache (paged_exact"),
        (["--cache", "paged_int4:recent=1"], "cache_config option must be one of"),
        (["--cache-config", "{"], "--cache-config must be a JSON object of cache options"),
        (["--cache-config", "[1]"], "--cache-config must be a JSON object of cache options"),
        (
            ["--cache-config", '{"page_size": 3}'],
            "page_size must be an integer of at least 16, got 3",
        ),
        (["--cache-config", '{"prefix_store": 1}'], "--prefix-store 1GiB"),
        (["--cache-config", '{"max_pages": 8}'], "--prefix-store 0 serves without a store"),
        (
            ["--cache-config", '{"max_bytes": "1MiB"}'],
            "max_bytes bounds the cache of --continuous-batching",
        ),
        (["--prefix-store", "1G"], "--prefix-store must be a size of at least 0 bytes"),
        (["--prefix-store", "1GiB", "--continuous-batching"], "shares prefixes in its own pool"),
        (["--port", "70000"], "--port must be 1 to 65535, got 70000"),
        (["--port", "http"], "argument --port: invalid int value: 'http'"),
        (["--log-level", "loud"], "--log-level must be one of"),
        (["--reasoning", "maybe"], "argument --reasoning: invalid choice: 'maybe'"),
        (["--compile"], "--compile gives requests transformers' static cache"),
        (["--chat-template-kwargs", "1"], "--chat-template-kwargs must be a JSON object"),
        (["--decision-config", "/nowhere"], "--decision-config must be the path of a JSON file"),
        (["--prefix", "1GiB"], "unrecognized arguments: --prefix"),
        ([], "MODEL '/no/model': there is no such folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_argument_is_named_before_a_model_is_loaded(capsys, argv, words):
    if (
        "--decision-config" in argv
        and "decision_config" not in inspect.signature(serve_class()).parameters
    ):
        pytest.skip("this transformers has no --decision-config")
    code, said = refused(capsys, "/no/model", *argv)
    assert code == 2
    assert "kv-hf serve: error: " in said and words in said


def test_help_has_our_options_and_those_of_transformers(capsys):
    with pytest.raises(SystemExit) as stopped:
        serve_command.main(["--help"])
    assert stopped.value.code == 0
    said = capsys.readouterr().out
    for flag in ("--cache", "--cache-config", "--prefix-store"):
        assert flag in said
    for name in inspect.signature(serve_class()).parameters:
        hidden = name in ("force_model", "non_blocking")
        assert (f"--{name.replace('_', '-')}" in said) != hidden, name


def test_options_of_transformers_reach_its_server_as_they_are_given():
    argv = "m --host 0.0.0.0 --port 80 --no-compile --cb-max-memory-percent 0.5 --reasoning off"
    found = vars(serve_command.parser("p").parse_args([*argv.split(), "--continuous-batching"]))
    ours = {"model", "cache", "cache_config", "prefix_store"}
    assert {name: value for name, value in found.items() if name not in ours} == {
        "host": "0.0.0.0",
        "port": 80,
        "compile": False,
        "cb_max_memory_percent": 0.5,
        "reasoning": "off",
        "continuous_batching": True,
    }


def test_options_beside_a_name_and_in_json_are_one_config():
    found = ServerOptions.parse("paged_int4:recent_tokens=32", '{"sink_tokens": 8}', "2MiB")
    assert (found.name, found.store_bytes) == ("paged_int4", 2 * 2**20)
    assert found.options_of(None) == {"recent_tokens": 32, "sink_tokens": 8}
    store = found.make_store()
    assert store.max_bytes == 2 * 2**20 and store.keep_answers
    assert ServerOptions.parse("paged_int4", None, "0").make_store() is None
    assert ServerOptions.parse("paged_int4", batching=True).make_store() is None


@pytest.mark.parametrize("package", ["fastapi", "uvicorn", "openai"])
def test_missing_package_is_named_with_its_extra(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    for other in {"fastapi", "uvicorn", "openai"} - {package}:
        if other not in sys.modules:
            pytest.importorskip(other)
    with pytest.raises(ImportError, match=rf"needs {package}: pip install -e '\.\[serving\]'"):
        check_server()


def test_other_server_is_refused_with_the_versions_that_fit(monkeypatch):
    pytest.importorskip("openai")
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    check_server()
    gone = {**server._USED, "serving.utils.GenerateManager.run": ("model",)}
    monkeypatch.setattr(server, "_USED", gone)
    with pytest.raises(
        ServerInterfaceError, match="5.17 to 5.23, and transformers .* no transformers.cli"
    ):
        check_server()
    other = {"serving.utils.GenerationState.get_manager": ("model_id", "device")}
    monkeypatch.setattr(server, "_USED", other)
    with pytest.raises(ServerInterfaceError, match="get_manager has no parameter device"):
        check_server()


@pytest.mark.slow
def test_killed_server_starts_again_and_a_signal_ends_it(tmp_path):
    """The command as a process of its own: kill -9 with a client waiting, a second start on the same port, SIGTERM."""
    openai = pytest.importorskip("openai")
    folder, port = save_model(tmp_path / "model"), free_port()
    argv = [sys.executable, "-W", "ignore", str(ROOT / "kv_hf_cli.py"), "serve", folder]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    answers = []
    for end in (signal.SIGKILL, signal.SIGTERM):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            argv, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
        )
        try:
            assert any("running on" in line for line in process.stderr)
            server = Running(None, folder, f"http://127.0.0.1:{port}")
            answers.append(server.chat("Who is there?").choices[0].message.content)
            if end == signal.SIGKILL:
                stream = server.chat("Wait", max_tokens=5000, stream=True)
                next(iter(stream))
                process.kill()
                with pytest.raises(openai.APIConnectionError):
                    list(stream)
            else:
                with urllib.request.urlopen(server.address + "/kv_hf/stats", timeout=WAIT_S):
                    process.send_signal(end)
            said = process.stderr.read()
            assert ("Application shutdown complete" in said) == (end != signal.SIGKILL)
            assert process.wait(WAIT_S) == -end  # uvicorn hands a signal on when all is closed
        finally:
            process.kill()
            process.wait(WAIT_S)
            process.stderr.close()
    assert answers[0] == answers[1]
