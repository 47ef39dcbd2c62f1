"""The code of README and docs/ runs as it is printed: Python on tiny models, commands as far as their arguments."""

import argparse
import importlib
import re
import sys
import tomllib
from dataclasses import replace

import doc_snippets
import pytest
from doc_snippets import Snippet
from paths import ROOT
from tiny_tokenizer import make_word_tokenizer

import kv_hf
import kv_hf_cli
from kv_hf.backend_names import backend_names
from kv_hf.backends import unregister_backend

# names that a page takes from the page before it, or from its own text
GIVEN = {
    "CONTRIBUTING.md": ("model", "inputs"),
    "docs/mla.md": ("latent", "model", "inputs"),
    "docs/options.md": ("kv_hf", "model", "inputs"),
}
# page and a line of the block -> why it is not run; it still has to compile
NOT_RUN = {("docs/serving.md", "openai.OpenAI("): "asks a server; tests/serving/ starts one"}
# inductor, processes, thousands of measured tokens
SLOW = ("docs/long_context.md", "docs/speed_and_memory.md")
PYTHON = doc_snippets.with_language("python")


COMMANDS = list(doc_snippets.commands())
# programs of others; what they are given is not ours to read
FOREIGN = ("cd", "git", "npm", ".venv/bin/pre-commit")


class Parsed(BaseException):
    """The arguments of a command were read, and it ends here."""


def not_run(snippet: Snippet) -> str | None:
    """Return why a block is not run, or None."""
    return next(
        (
            why
            for (page, line), why in NOT_RUN.items()
            if page == snippet.page and line in snippet.code
        ),
        None,
    )


def run_page(page: str) -> None:
    """Execute the Python of a page in one namespace, as a reader would who pastes block after block."""
    namespace = {"__name__": "__main__", **doc_snippets.given_names(*GIVEN.get(page, ()))}
    for snippet in PYTHON[page]:
        padded = "\n" * snippet.line + snippet.code  # so that errors name the line of the page
        code = compile(padded, page, "exec")
        if not_run(snippet) is None:
            exec(code, namespace)


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] * (page in SLOW)) for page in PYTHON],
)
def test_python_of_the_page_runs(page, tmp_path, monkeypatch):
    doc_snippets.make_world(page, tmp_path, monkeypatch)
    names, known = kv_hf.cache_names(), backend_names()
    try:
        run_page(page)
    finally:
        for name in set(backend_names()) - set(known):  # CONTRIBUTING registers one
            unregister_backend(name)
    assert kv_hf.cache_names() == names


def test_exceptions_are_needed():
    """A page that changes takes its exception along."""
    assert set(GIVEN) <= set(PYTHON) and set(SLOW) <= set(PYTHON)
    for page, line in NOT_RUN:
        assert [one for one in PYTHON[page] if line in one.code], (page, line)


def test_a_broken_page_fails(tmp_path, monkeypatch):
    doc_snippets.make_world("README.md", tmp_path, monkeypatch)
    broken = Snippet("README.md", 7, "python", "import kv_hf\nkv_hf.plam('llama-3.1-8b')\n")
    monkeypatch.setitem(PYTHON, "README.md", [broken])
    with pytest.raises(AttributeError, match="plam"):
        run_page("README.md")


@pytest.mark.parametrize("goes_back", [True, False])
def test_chat_page_goes_on_where_a_template_strips_thoughts(goes_back, tmp_path, monkeypatch):
    """Here the first five words of an answer are its thoughts: later turns come without them."""

    def stripping(size):
        made = make_word_tokenizer(size)
        whole, rest = "{{ message['content'] }}", "{{ message['content'].split()[5:] | join(' ') }}"
        kept = (
            "{% if message['role'] == 'assistant' %}" + rest + "{% else %}" + whole + "{% endif %}"
        )
        made.chat_template = made.chat_template.replace(whole, kept)
        return made

    page = "docs/how_to.md"
    monkeypatch.setattr(doc_snippets, "make_word_tokenizer", stripping)
    doc_snippets.make_world(page, tmp_path, monkeypatch)
    if goes_back:
        run_page(page)
        return
    call = "    keep_common(cache, inputs.input_ids)\n"
    assert [one for one in PYTHON[page] if call in one.code]
    without = [replace(one, code=one.code.replace(call, "")) for one in PYTHON[page]]
    monkeypatch.setitem(PYTHON, page, without)
    with pytest.raises(kv_hf.CacheMismatchError, match=r"do not begin with|do not continue"):
        run_page(page)


# -- commands ------------------------------------------------------------------------------------------------


@pytest.fixture
def parsing(monkeypatch):
    """Let every command end when it has read its arguments; the parsers are handed to the test."""
    parsers, parse = [], argparse.ArgumentParser.parse_args

    def stop(self, args=None, namespace=None):
        parsers.append(self)
        raise Parsed(parse(self, args, namespace))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    return parsers


def behind_launcher(words):
    """Return the words from the program on that a launcher starts."""
    first = next(i for i, word in enumerate(words) if word == "-m" or word.endswith(".py"))
    return ["python", *words[first:]]


def read_arguments(words, monkeypatch):
    """Let the command's own parser read its words; a wrong one is an error of the page."""
    if words[0] in ("accelerate", "torchrun"):
        words = behind_launcher(words)
    if words[0].endswith("python"):
        words = ["kv-hf", *words[3:]] if words[1:3] == ["-m", "kv_hf"] else words[1:]
    if words[0] == "lm_eval":
        words = ["kv-hf", "lm-eval", *words[1:]]
    if words[1:] in (["--version"], ["--help"]):
        return
    if words[2:] == ["..."]:
        assert words[1] in kv_hf_cli.COMMANDS
        return
    words = [word for word in words if word != "..."]
    monkeypatch.setattr(sys, "argv", words)
    main = kv_hf_cli.main if words[0] == "kv-hf" else importlib.import_module(words[0][8:-3]).main
    with pytest.raises(Parsed):
        main()


@pytest.mark.parametrize(
    ("page", "line", "words"),
    COMMANDS,
    ids=[f"{page}:{line}" for page, line, _ in COMMANDS],
)
def test_commands_of_the_page_are_understood(page, line, words, parsing, monkeypatch):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    if words[0] == "make":
        assert words[1] in targets
    elif words[0] == "pip" or words[1:3] == ["-m", "pip"]:
        asked = [name for word in words for name in re.findall(r"\[(.+)\]", word)]
        assert set(",".join(asked).split(",")) <= {*extras, ""}
    elif words[1:3] == ["-m", "pytest"]:
        assert (ROOT / words[-1]).exists()
    elif words[0] not in FOREIGN:
        read_arguments(words, monkeypatch)


@pytest.mark.parametrize("words", [["kv-hf", "eval", "--modle", "x"], ["kv-hf", "evil"]])
def test_a_wrong_command_fails(words, parsing, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        read_arguments(words, monkeypatch)


def test_commands_named_in_prose_have_the_options_named_with_them(parsing, monkeypatch):
    named: dict[str, set[str]] = {}
    for _, command, options in doc_snippets.options_in_prose():
        named.setdefault(command, set()).update(options)
    assert {"doctor", "eval"} <= set(named) <= {*kv_hf_cli.COMMANDS, "--help"}
    named.pop("lm-eval")  # lm-eval's own
    for command, options in named.items():
        with pytest.raises((Parsed, SystemExit)):
            kv_hf_cli.main([command, "--help"])
        known = set(parsing[-1]._option_string_actions)
        assert options <= known, (command, options - known)
