"""Messages name the argument, its value and the remedy, and are said once; the command's help and version import nothing heavy."""

import inspect
import logging
import runpy
import subprocess
import sys
import warnings
from importlib import import_module

import pytest
import rounding
import transformers
from paths import ROOT
from tiny_models import make_model, shared_model, tokens
from tiny_tokenizer import make_tokenizer
from transformers import TextStreamer
from transformers.utils import logging as transformers_logging

import kv_hf
import kv_hf_cli
from kv_hf import notices
from kv_hf.files import made_once, user_dir
from kv_hf.text_table import table_lines, wrap

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
    ("call", "options", "says"),
    [
        (kv_hf.CacheConfig, {"kernel": "cuda"}, "one of auto, .*'cuda' .did you mean 'triton'"),
        (kv_hf.CacheConfig, {"kernel": "cpu"}, "got 'cpu' .did you mean 'c'"),
        (kv_hf.CacheConfig, {"keys": "int3"}, "'int3'; the cache paged_int3 is keys='int2_mixed'"),
        (kv_hf.CacheConfig, {"values": "paged_int4"}, "is keys='int4', values='int4'"),
        (generate, {"cache_implementation": "paged_in4"}, "'paged_in4' .did you mean 'paged_int4'"),
        (generate, {"cache_implementation": "statc"}, "got 'statc' .did you mean 'static'"),
        (generate, {"past_key_values": "paged_int4"}, "a name goes into cache_implementation"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_errors_name_the_option_that_was_meant(call, options, says):
    """ "cuda" was answered with 'c', and keys="int3" with 'int8', which takes more than twice the bytes."""
    with pytest.raises(kv_hf.CacheOptionError, match=says):
        call(**options)


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


def test_a_user_without_a_home_folder_is_told_of_the_variable(monkeypatch):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("pathlib.Path.home", nowhere)
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
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2)
    model = transformers.AutoModelForCausalLM.from_config(config)
    say = "kv_hf.hf.dispatch.register"  # what generate() calls in front of its first forward
    monkeypatch.setattr(say, lambda: notices.say_once("a test", "something"))
    given = [*[None] * 6, Terminal(shown)] if positional else []
    options = {} if positional else {"streamer": Terminal(shown)}
    options |= {"max_new_tokens": 5, "cache_implementation": "paged_int4"}
    model.generate(tokens(1, 9), *given, **options)
    assert shown.count("notice") == 1 and "text" in shown
    assert shown[-2:] == ["end", "notice"]


# -- the terminal ------------------------------------------------------------------------------------------------------


def test_table_lines_folds_a_long_name_and_wrap_keeps_words():
    name = "paged_int4:key_group_size=32,value_group_size=32,offload=cpu,device_bytes=1073741824"
    columns = [("cache", ["dynamic", name]), ("n", ["0.0", "0.5"]), ("figure 1", ["1.0", "1.5"])]
    assert table_lines(columns, 73) == [
        "cache                                 n  figure 1",
        "dynamic                             0.0       1.0",
        "paged_int4:key_group_size=32,",
        "  value_group_size=32,offload=cpu,",
        "  device_bytes=1073741824           0.5       1.5",
    ]
    lines = wrap("note: what fits with an offload is what the device holds", 30, 6)
    assert lines == ["note: what fits with an", "      offload is what the", "      device holds"]
    assert wrap("a " + "b" * 99, 30) == ["a", "  " + "b" * 99]


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
