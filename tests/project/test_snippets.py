"""The code of README and docs/ runs as it is printed: Python on tiny models, commands as far as their arguments."""

import argparse
import importlib
import re
import sys
import tomllib

import doc_snippets
import pytest
import torch
from paths import ROOT
from transformers import HfArgumentParser

import kv_hf
import kv_hf_cli

# a line of a block -> why it is not run; it still has to compile
NOT_RUN = {
    "# tensor_parallel.py": "torchrun starts two processes of it",
    "# data_parallel.py": "accelerate starts two processes of it",
    "openai.OpenAI(": "asks a server; tests/serving/ starts one",
}
PYTHON = doc_snippets.with_language("python")
COMMANDS = list(doc_snippets.commands())
# programs of others; what they are given is not ours to read
FOREIGN = ("cd", "git", "npm", ".venv/bin/pre-commit")


class Parsed(BaseException):
    """The arguments of a command were read, and it ends here."""


def given(page: str) -> dict[str, object]:
    """Return the names that pages take for granted. README and the pages that make a model of their own say everything."""
    if page == "README.md" or any("from_pretrained(" in one.code for one in PYTHON[page][:1]):
        return {}
    names = ("kv_hf", "model", "tokenizer", "inputs")
    return doc_snippets.given_names(*names, *(("latent",) if "mla" in page else ()))


def run_page(page: str) -> None:
    """Execute the Python of a page in one namespace, as a reader would who pastes block after block."""
    namespace = {"__name__": "__main__", **given(page)}
    for snippet in PYTHON[page]:
        padded = "\n" * snippet.line + snippet.code  # so that errors name the line of the page
        code = compile(padded, page, "exec")
        if not any(line in snippet.code for line in NOT_RUN):
            exec(code, namespace)


@pytest.mark.parametrize("page", PYTHON)
def test_python_of_the_page_runs(page, tmp_path, monkeypatch):
    doc_snippets.make_world(page, tmp_path, monkeypatch)
    trace = torch.compile

    def traced(call=None, **options):  # inductor would take half a minute
        return trace(call, **{**options, "backend": "eager"})

    monkeypatch.setattr(torch, "compile", traced)
    names = kv_hf.cache_names()
    run_page(page)
    assert kv_hf.cache_names() == names


# -- commands ------------------------------------------------------------------------------------------------


@pytest.fixture
def parsing(monkeypatch):
    """Let every command end when it has read its arguments; the parsers are handed to the test."""
    parsers, parse = [], argparse.ArgumentParser.parse_args

    def stop(self, args=None, namespace=None):
        parsers.append(self)
        raise Parsed(parse(self, args, namespace))

    into = HfArgumentParser.parse_args_into_dataclasses

    def stop_too(self, args=None):
        raise Parsed(into(self, args))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(HfArgumentParser, "parse_args_into_dataclasses", stop_too)
    return parsers


def read_arguments(words, monkeypatch):
    """Let the command's own parser read its words; a wrong one is an error of the page."""
    if words[0] in ("accelerate", "torchrun"):  # behind the launcher's own
        first = next(i for i, word in enumerate(words) if word == "-m" or word.endswith(".py"))
        words = ["python", *words[first:]]
    if words[0].endswith("python"):
        words = ["kv-hf", *words[3:]] if words[1:3] == ["-m", "kv_hf"] else words[1:]
    if words[0] == "lm_eval":
        words = ["kv-hf", "lm-eval", *words[1:]]
    if words[1:] in (["--version"], ["--help"]):
        return
    if words[2:] == ["..."]:
        assert words[1] in kv_hf_cli.COMMANDS
        return
    monkeypatch.setattr(sys, "argv", [word for word in words if word != "..."])
    main = kv_hf_cli.main if words[0] == "kv-hf" else importlib.import_module(words[0][8:-3]).main
    with pytest.raises(Parsed):
        main()


@pytest.mark.parametrize(
    ("page", "line", "words"), COMMANDS, ids=[f"{page}:{line}" for page, line, _ in COMMANDS]
)
def test_commands_of_the_page_are_understood(page, line, words, parsing, monkeypatch):
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    if words[0] == "make":
        assert words[1] in re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif words[0] == "pip" or words[1:3] == ["-m", "pip"]:
        asked = [name for word in words for name in re.findall(r"\[(.+)\]", word)]
        extras = settings["project"]["optional-dependencies"]
        assert set(",".join(asked).split(",")) <= {*extras, ""}
    elif words[1:3] == ["-m", "pytest"]:
        assert (ROOT / words[-1]).exists()
    elif words[:2] == ["git", "clone"]:  # in whose parent folder Python would import the clone
        assert not words[-1].isidentifier()
    elif words[0] not in FOREIGN:
        read_arguments(words, monkeypatch)


def test_commands_named_in_prose_have_the_options_named_with_them(parsing):
    named: dict[str, set[str]] = {}
    for _, command, options in doc_snippets.options_in_prose():
        named.setdefault(command, set()).update(options)
    assert {"doctor", "eval"} <= set(named) <= {*kv_hf_cli.COMMANDS, "--help"}
    named.pop("lm-eval", None)  # lm-eval's own
    for command, options in named.items():
        with pytest.raises((Parsed, SystemExit)):
            kv_hf_cli.main([command, "--help"])
        known = set(parsing[-1]._option_string_actions)
        assert options <= known, (command, options - known)
