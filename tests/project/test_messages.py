"""Messages name the argument, its value and the remedy, and are said once; the command's help and version import nothing heavy."""

import logging
import runpy
import subprocess
import sys
import warnings
from unittest.mock import Mock

import pytest
import rounding
from harness import ROOT
from tiny_models import make_model, shared_model, tokens
from tiny_tokenizer import make_tokenizer
from transformers import TextStreamer
from transformers.utils import logging as transformers_logging

import kv_hf
import kv_hf_cli
from kv_hf import notices, texts
from kv_hf.cache_names import all_cache_names
from kv_hf.files import made_once, user_dir

# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"max_length": 64}], ids=["growing", "preallocated"])
def test_a_forward_of_a_larger_model_is_refused_with_a_reason(options):
    """It was an IndexError, and the cache went on with the other model's tokens in its layers."""
    small, large = shared_model("llama"), make_model("llama", num_hidden_layers=3)
    cache = kv_hf.PagedCache(small.config, **options)
    with pytest.raises(kv_hf.CacheMismatchError) as error:
        large(tokens(1, 9), past_key_values=cache)
    for part in ("layer_idx=2", "a model of 2 layers (model_type='llama')", "cache.reset()"):
        assert part in str(error.value)
    with pytest.raises(kv_hf.InterruptedForwardError, match="reset"):
        small(tokens(1, 9), past_key_values=cache)
    cache.reset()
    found = small(tokens(1, 9), past_key_values=cache).logits
    rounding.assert_close(found, small(tokens(1, 9)).logits)


def generate(**options):
    shared_model("llama").generate(tokens(1, 4), **{"max_new_tokens": 1, **options})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cache_implementation": "4bit"}, "got '4bit' .did you mean 'paged_int4'"),
        ({"cache_implementation": "Paged_INT4"}, "'Paged_INT4' .did you mean 'paged_int4'"),
        ({"cache_implementation": "statc"}, "got 'statc' .did you mean 'static'"),
        ({"past_key_values": "paged_int4"}, "a name goes into cache_implementation"),
        (
            {"past_key_values": kv_hf.CacheConfig()},
            "must be a cache.*and options into cache_config",
        ),
        (
            {"past_key_values": kv_hf.PagedCache},
            "must be a cache, as kv_hf.PagedCache.model.config",
        ),
    ],
    ids=str,
)
def test_errors_name_the_cache_that_was_meant(options, says):
    with pytest.raises(kv_hf.CacheOptionError, match=says):
        generate(**options)


def test_errors_of_others_stay_as_they_are_and_texts_name_the_nearest():
    with pytest.raises(ValueError, match="max_new_tokens") as error:
        generate(max_new_tokens=-1)
    assert type(error.value) is ValueError
    with pytest.raises(ValueError, match="got 'nove' .did you mean 'novel'"):
        kv_hf.texts.load_text("nove")


@pytest.mark.parametrize("variable", ["KV_HF_HOME", "HOME"])
def test_a_home_that_cannot_be_written_to_names_its_variable(variable, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    home = str(tmp_path / "file" / "home")
    monkeypatch.setenv(variable, home)
    with pytest.raises(kv_hf.KVCacheError, match="KV_HF_HOME must be .*Not a dir.*set") as error:
        made_once(user_dir() / "models" / "a", "config.json", lambda *given: pytest.fail("made"))
    assert home in str(error.value)
    assert ("(the default)" in str(error.value)) == (variable == "HOME")
    monkeypatch.delenv("KV_HF_HOME", raising=False)
    monkeypatch.setattr("pathlib.Path.home", Mock(side_effect=RuntimeError("Could not determine")))
    with pytest.raises(kv_hf.KVCacheError, match="no home folder; set KV_HF_HOME"):
        user_dir()


# -- notices -----------------------------------------------------------------------------------------------------------


def said(caplog):
    """Return what is said: a log line and a warning."""
    caplog.clear()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        notices.say_once("line", "line")
        notices.warn_once("warning", "warning")
    return [*caplog.messages, *(str(one.message) for one in found)]


def test_notices_are_said_once_and_not_where_they_are_turned_down(monkeypatch, caplog):
    monkeypatch.setattr(notices.logger, "level", logging.NOTSET)
    verbosity, own = transformers_logging.get_verbosity(), logging.getLogger("kv_hf")
    try:
        transformers_logging.set_verbosity(logging.ERROR)
        assert said(caplog) == []
        transformers_logging.set_verbosity(logging.WARNING)
        monkeypatch.setattr(own, "level", logging.ERROR)
        assert said(caplog) == []
        monkeypatch.setattr(own, "level", logging.NOTSET)
        with notices.silenced():
            assert said(caplog) == []
        assert said(caplog) == ["line", "warning"]  # what was not heard was not said
        assert said(caplog) == []
    finally:
        transformers_logging.set_verbosity(verbosity)


class Terminal(TextStreamer):
    """A streamer that writes to the same list as notices do."""

    def __init__(self, shown):
        super().__init__(make_tokenizer())
        self.shown = shown

    def on_finalized_text(self, text, stream_end=False):
        self.shown.append("end" if stream_end else "text")


@pytest.mark.parametrize("positional", [False, True])
def test_generate_says_nothing_while_it_streams(positional, monkeypatch):
    shown = []
    handler = logging.Handler()
    handler.emit = lambda record: shown.append("notice")
    monkeypatch.setattr(notices.logger, "handlers", [*notices.logger.handlers, handler])
    model = make_model("llama", num_hidden_layers=1)
    say = "kv_hf.hf.dispatch.register"  # what generate() calls in front of its first forward
    monkeypatch.setattr(say, lambda: notices.say_once("a test", "something"))
    given = [*[None] * 6, Terminal(shown)] if positional else []
    options = {} if positional else {"streamer": Terminal(shown)}
    options |= {"max_new_tokens": 5, "cache_implementation": "paged_int4"}
    model.generate(tokens(1, 9), *given, **options)
    assert shown.count("notice") == 1 and "text" in shown
    assert shown[-2:] == ["end", "notice"]


@pytest.mark.parametrize("there", ["nothing", "cut off", "made meanwhile"])
def test_a_folder_that_another_process_finished_is_never_taken_away(tmp_path, there):
    target = tmp_path / "models" / "a"

    def fill(folder, whose):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / whose).write_text("")
        (folder / "config.json").write_text("{}")

    def make(folder, scratch):
        if there == "made meanwhile":
            fill(target, "theirs")
        fill(folder, "mine")

    if there == "cut off":
        target.mkdir(parents=True)
        (target / "half").write_text("")
    assert made_once(target, "config.json", make) == target
    whose = "theirs" if there == "made meanwhile" else "mine"
    assert sorted(path.name for path in target.iterdir()) == ["config.json", whose]
    assert [path.name for path in target.parent.iterdir()] == ["a"]


# -- the command ---------------------------------------------------------------------------------------------

LIGHT = """
import sys
import kv_hf_cli
try:
    sys.exit(kv_hf_cli.main(sys.argv[1:]))
finally:
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


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("--help", 0, "doctor"),
        ("--version", 0, VERSION),
        *((f"{command} --help", 0, f"usage: kv-hf {command}") for command in kv_hf_cli.COMMANDS),
        ("memroy --device h100", 2, "got 'memroy'; did you mean memory?"),
        ("memory a --list-presets", 2, "--list-presets: not allowed with argument CONFIG_OR_MODEL"),
        ("memory a --contex 8k", 2, "memory: error: unrecognized arguments: --contex 8k"),
    ],
)
def test_help_and_wrong_usage_import_neither_torch_nor_the_package(words, code, says):
    """They took 5 seconds of processor time, all of it spent on importing torch and transformers."""
    done = run("-c", LIGHT, *words.split())
    assert done.returncode == code, done.stderr
    assert says in (done.stderr if code else done.stdout)


def test_help_names_the_caches_and_texts_that_the_package_has():
    named = f"{kv_hf_cli.OTHER_CACHES}, {kv_hf_cli.CACHES}"
    assert named.split(", ") == list(all_cache_names())
    assert kv_hf_cli.CACHES.split(", ") == list(kv_hf.cache_names())
    assert kv_hf_cli.TEXTS.split(", ") == list(texts.BUNDLED)
    assert kv_hf_cli.SETS.split(", ") == list(texts.SETS)


def test_python_m_runs_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kv_hf", "--version"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("kv_hf", run_name="__main__")
    assert capsys.readouterr().out == VERSION


def test_ctrl_c_ends_a_command_with_one_line(capsys, monkeypatch):
    def stopped(home):
        raise KeyboardInterrupt

    monkeypatch.setattr(kv_hf_cli, "resolve_name", stopped)
    assert kv_hf_cli.main(["memory", "a"]) == 130
    assert capsys.readouterr().err == "kv-hf memory: stopped\n"


def test_a_folder_that_is_no_package_is_told(tmp_path):
    """In the parent folder of a clone named kv_hf, Python without kv_hf imports the clone: an empty package."""
    (tmp_path / "kv_hf").mkdir()
    done = run("-S", "-c", SHADOWED, str(tmp_path), folder=tmp_path, env={})
    assert done.returncode == 2, done.stderr
    assert f"only the folder {tmp_path / 'kv_hf'}" in done.stderr
    assert "rename the clone" in done.stderr
