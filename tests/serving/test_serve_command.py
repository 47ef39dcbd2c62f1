"""`kv-hf serve`: its options, its errors before a model is loaded, the check of transformers' server, and what a request may ask for."""

import os
import signal
import subprocess
import sys
import urllib.request
from unittest.mock import MagicMock

import pytest
from harness import ROOT
from tiny_models import make_model, shared_model, tokens
from tiny_server import WAIT_S, Running, free_port, save_model
from transformers import GenerationConfig

import kv_hf
import kv_hf_cli
from kv_hf.serving import serve_command, server
from kv_hf.serving.server import check_packages
from kv_hf.serving.server_model import ServedModel, ServerOptions


def refused(capsys, *argv):
    """The exit code and the error of a command line."""
    try:
        code = kv_hf_cli.main(["serve", *argv])
    except SystemExit as stopped:
        code = stopped.code
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--cache", "dynamic"], "--cache must be a paged cache (paged_exact"),
        (["--cache", "paged_int4:recent=1"], "cache_config option must be one of"),
        (["--cache-config", "{"], "--cache-config must be a JSON object of cache options"),
        (["--cache-config", '{"prefix_store": 1}'], "--prefix-store 1GiB"),
        (["--cache-config", '{"max_pages": 8}'], "--prefix-store 0 serves without a store"),
        (
            ["--cache-config", '{"max_bytes": "1MiB"}'],
            "max_bytes bounds the cache of --continuous-batching",
        ),
        (["--prefix-store", "1G"], "--prefix-store must be a size of at least 0 bytes"),
        (["--prefix-store", "1GiB", "--continuous-batching"], "shares prefixes in its own pool"),
        (["--prefix-folder", "f", "--prefix-store", "0"], "--prefix-store 0 makes none"),
        (["--port", "70000"], "--port must be 1 to 65535, got 70000"),
        (["--log-level", "loud"], "--log-level must be one of"),
        (["--device", "cuda:99"], "device 'cuda:99' cannot be used here"),
        (["--compile"], "--compile gives requests transformers' static cache"),
        (["--chat-template-kwargs", "1"], "--chat-template-kwargs must be a JSON object"),
        (["--prefix", "1GiB"], "unrecognized arguments: --prefix"),
        ([], "MODEL '/no/model': there is no such folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_argument_is_named_before_a_model_is_loaded(capsys, argv, words):
    code, said = refused(capsys, "/no/model", *argv)
    assert code == 2
    assert "kv-hf serve: error: " in said and words in said


def all_options():
    asked = kv_hf_cli.command_parser("serve", "p")
    serve_command.add_transformers_options(asked)
    return asked


def test_options_of_transformers_reach_its_server_as_they_are_given():
    argv = "m --host 0.0.0.0 --port 80 --no-compile --cb-max-memory-percent 0.5 --reasoning off"
    found = vars(all_options().parse_args([*argv.split(), "--continuous-batching"]))
    ours = {"model", "cache", "cache_config", "prefix_store", "prefix_folder"}
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
    for batching in (False, True):
        store = ServerOptions.parse("paged_int4", None, None, batching, "kept").make_store()
        assert store.folder.path.name == "kept" and store.max_bytes == 2**30


def test_batches_end_with_the_server(monkeypatch):
    """Their thread, which transformers leaves running, kept a server alive behind Ctrl-C."""
    theirs = pytest.importorskip("transformers.cli.serving.server")
    monkeypatch.setattr(theirs, "build_server", own := MagicMock())
    models, state = MagicMock(loaded_models={}), MagicMock()
    with server.paged_server(ServerOptions.parse("paged_int4")):
        theirs.build_server(models, generation_state=state)
        assert not state.shutdown.called
    assert state.shutdown.called and theirs.build_server is own


@pytest.mark.parametrize("package", ["fastapi", "uvicorn", "openai"])
def test_missing_package_is_named_with_its_extra(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    for other in {"fastapi", "uvicorn", "openai"} - {package}:
        if other not in sys.modules:
            pytest.importorskip(other)
    with pytest.raises(ImportError, match=rf"needs {package}: pip install -e '\.\[serving\]'"):
        check_packages()


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


# -- a served model ------------------------------------------------------------------------------------------


def served(model, config=None, store="0", cache="paged_int8"):
    return ServedModel(model, ServerOptions.parse(cache, config, store))


def prepared(one, prompt_tokens=10, **asked):
    config = GenerationConfig(**{"max_new_tokens": 1000, **asked})
    one.prepare(config, prompt_tokens)
    return config


def generate(model, prompt_tokens, new, config):
    return model.generate(
        tokens(1, prompt_tokens),
        max_new_tokens=new,
        do_sample=False,
        cache_implementation=config.cache_implementation,
        cache_config=config.cache_config,
    )


@pytest.mark.parametrize("prompt", [10, 83, 84, 99])
@pytest.mark.parametrize("recent", [0, 20])
def test_max_new_tokens_is_all_that_max_pages_has_room_for(prompt, recent):
    model = shared_model("llama")
    options = f'{{"max_pages": 5, "page_size": 16, "recent_tokens": {recent}}}'
    config = prepared(served(model, options), prompt)
    new = config.max_new_tokens
    assert prompt + new == 4 + recent + 6 * 16
    assert generate(model, prompt, new, config).shape == (1, prompt + new)
    with pytest.raises(kv_hf.PagePoolExhaustedError):
        generate(model, prompt, new + 1, config)


def test_sliding_layers_give_pages_back_and_bound_no_prompt():
    model = make_model("mistral", sliding_window=32, max_position_embeddings=2048)
    one = served(model, '{"max_pages": 8, "page_size": 16}')
    config = prepared(one, 300)
    assert config.max_new_tokens == 1000
    assert generate(model, 300, 4, config).shape == (1, 304)


def test_cache_of_the_models_own_file_gives_way_to_the_servers():
    model = make_model("llama")
    model.generation_config.cache_implementation = "paged_int8"
    one = served(model, cache="paged_int4")
    config = prepared(one, cache_implementation="paged_int8")
    assert config.cache_implementation == "paged_int4"


def test_request_has_the_servers_cache_and_ends_with_the_context():
    model = shared_model("llama")
    one = served(model, '{"recent_tokens": 2}')
    most = model.config.max_position_embeddings
    for asked in ({"max_new_tokens": 10**30}, {"max_new_tokens": None, "max_length": 10**30}):
        assert prepared(one, **asked).max_new_tokens == most - 10
    same = {"cache_implementation": "paged_int8", "cache_config": {"recent_tokens": 2}}
    assert prepared(one, **same).cache_config == same["cache_config"]
    for argument, asked in (("cache_implementation", "dynamic"), ("cache_config", {"read": 64})):
        with pytest.raises(kv_hf.CacheOptionError, match=f"{argument} of a request must be left"):
            prepared(one, **{argument: asked})


def test_what_a_prompt_took_from_the_store_is_logged_at_info(caplog):
    model = shared_model("llama")
    one = served(model, '{"page_size": 16}', "1MiB")
    caplog.set_level("INFO", "transformers.kv_hf")
    for _ in range(2):
        generate(model, 60, 2, prepared(one))
    said = [one.getMessage() for one in caplog.records if "prefix store" in one.getMessage()]
    assert said == [f"kv_hf: {n} of 60 columns were in the prefix store" for n in (0, 52)]
