"""The code of README and docs/ runs as it is printed: Python on tiny models, commands as far as their arguments.

The fenced code runs in a small world: no download, tiny random models, files of its own.
"""

import argparse
import importlib
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from harness import ROOT
from tiny_latent import make_model as make_latent_model
from tiny_models import make_model
from tiny_tokenizer import SPECIAL, make_tokenizer, make_word_tokenizer
from transformers import HfArgumentParser

import kv_hf
import kv_hf_cli
from kv_hf.serving.batch_manager import fits_transformers
from kv_hf.texts import load_text

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")],
    key=lambda page: (page.parent != ROOT, page),
)
WORDS = 1000
# files and checkpoints that pages name as those of their reader
TEXTS = {
    "essays.txt": "moby_dick",
    "held.txt": "code",
    "my.txt": "lincoln_1862",
    "text.txt": "novel",
}
FOLDERS = ("SmolLM2-135M", "model", "model-2", "my-model")


@dataclass(frozen=True)
class Snippet:
    """One fenced block.

    Attributes:
        page: path below the repository.
        line: of the fence.
        language: behind the fence, "" where there is none.
    """

    page: str
    line: int
    language: str
    code: str


def snippets(page: Path) -> Iterator[Snippet]:
    """Yield the fenced blocks of a page."""
    text = page.read_text("utf-8")
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        yield Snippet(str(page.relative_to(ROOT)), line, found[1], found[2])


def tiny_model(dtype: torch.dtype | str | None = None) -> Any:
    """Return a random Llama with WORDS tokens, which never ends a text and never says a special token."""
    wanted = torch.float32 if dtype in (None, "auto") else dtype
    wanted = getattr(torch, wanted) if isinstance(wanted, str) else wanted
    # heads that are a multiple of the groups of transformers' quantized caches
    sizes = {"vocab_size": WORDS, "head_dim": 64, "max_position_embeddings": 8192}
    model = make_model("llama", wanted, **sizes)
    model.generation_config.eos_token_id = 2
    model.generation_config.suppress_tokens = list(range(len(SPECIAL) + 1))
    return model


def loading(own: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    """Return what stands in for `own`, the from_pretrained of an Auto class: other names than those of folders give `other`."""

    def load(name: Any, **options: Any) -> Any:
        if (Path(name) / "config.json").is_file():
            return own(name, **options)
        return other(**options)

    return load


def load_model(**options: Any) -> Any:
    """Stand in for AutoModelForCausalLM.from_pretrained of a hub id: takes the options that pages use, and no others."""
    assert not set(options) - {"dtype", "device_map", "distributed_config"}, options
    return tiny_model(options.get("dtype"))


def load_tokenizer(chats: bool, **options: Any) -> Any:
    """Stand in for AutoTokenizer.from_pretrained; a chat goes on with the answers of a model, see `make_word_tokenizer`."""
    made = make_word_tokenizer(WORDS) if chats else make_tokenizer(WORDS, chat=True)
    made.padding_side = options.pop("padding_side", "right")
    assert not options, options
    return made


def make_world(page: str, folder: Path, monkeypatch: Any) -> None:
    """Let the snippets of a page run in a folder with the files that pages name, and find tiny models under all names."""
    for name, text in TEXTS.items():
        (folder / name).write_text(load_text(text)[:40_000], "utf-8")
    for name in FOLDERS:
        tiny_model().save_pretrained(folder / name)
        make_tokenizer(WORDS, chat=True).save_pretrained(folder / name)
    chats = "apply_chat_template" in (ROOT / page).read_text("utf-8")
    stand_ins = {
        "AutoModelForCausalLM": load_model,
        "AutoTokenizer": partial(load_tokenizer, chats),
    }
    for auto, make in stand_ins.items():
        owner = getattr(transformers, auto)
        monkeypatch.setattr(owner, "from_pretrained", loading(owner.from_pretrained, make))
    monkeypatch.setenv("KV_HF_HOME", str(folder / "home"))
    monkeypatch.chdir(folder)


def commands() -> Iterator[tuple[str, int, list[str]]]:
    """Yield page, line and words of every shell command that pages print in blocks, comments and variables left out."""
    for page in PAGES:
        for snippet in snippets(page):
            if snippet.language in ("bash", "sh", ""):
                lines = snippet.code.replace("\\\n", " ").splitlines()
                wanted = (
                    "kv-hf " if not snippet.language else ""
                )  # a block of output has no language
                for number, line in enumerate(lines, snippet.line + 1):
                    for part in line.split(" && ") if line.startswith(wanted) else ():
                        words = shlex.split(part, comments=True)
                        while words and re.fullmatch(r"\w+=.*", words[0]):
                            words = words[1:]
                        if words:
                            yield snippet.page, number, words


# a line of a block -> why it is not run; it still has to compile
NOT_RUN = {
    "# tensor_parallel.py": "torchrun starts two processes of it",
    "# data_parallel.py": "accelerate starts two processes of it",
    "openai.OpenAI(": "asks a server; tests/serving/ starts one",
}
PYTHON = {
    str(page.relative_to(ROOT)): [one for one in snippets(page) if one.language == "python"]
    for page in PAGES
}
PYTHON = {page: ours for page, ours in PYTHON.items() if ours}
COMMANDS = list(commands())
# programs of others; what they are given is not ours to read
FOREIGN = ("cd", "git", "npm", ".venv/bin/pre-commit")


class Parsed(BaseException):
    """The arguments of a command were read, and it ends here."""


def given(page: str) -> dict[str, Any]:
    """Return the names that pages take for granted. README and the pages that make a model of their own say everything."""
    if page == "README.md" or any("from_pretrained(" in one.code for one in PYTHON[page][:1]):
        return {}
    return {
        "kv_hf": kv_hf,
        "model": make_latent_model("deepseek_v3") if "mla" in page else tiny_model(),
        "tokenizer": make_tokenizer(WORDS),
        "inputs": {"input_ids": torch.randint(3, 97, (1, 200))},
    }


@pytest.mark.parametrize("page", PYTHON)
def test_python_of_the_page_runs(page, tmp_path, monkeypatch):
    if page == "docs/serving.md" and not fits_transformers():
        pytest.skip("transformers before 5.18")
    make_world(page, tmp_path, monkeypatch)
    trace = torch.compile

    def traced(call=None, **options):  # inductor would take half a minute
        return trace(call, **{**options, "backend": "eager"})

    monkeypatch.setattr(torch, "compile", traced)
    in_thread = lambda workers, context: ThreadPoolExecutor(workers)  # noqa: E731
    monkeypatch.setattr("kv_hf.evaluation.memory.ProcessPoolExecutor", in_thread)
    names = kv_hf.cache_names()
    # in one namespace, as a reader would who pastes block after block
    namespace = {"__name__": "__main__", **given(page)}
    for snippet in PYTHON[page]:
        padded = "\n" * snippet.line + snippet.code  # so that errors name the line of the page
        code = compile(padded, page, "exec")
        if not any(line in snippet.code for line in NOT_RUN):
            exec(code, namespace)
    assert kv_hf.cache_names() == names


# -- commands ------------------------------------------------------------------------------------------------


@pytest.fixture
def parsing(monkeypatch):
    """Let every command end when it has read its arguments."""
    parse = argparse.ArgumentParser.parse_args

    def stop(self, args=None, namespace=None):
        raise Parsed(parse(self, args, namespace))

    into = HfArgumentParser.parse_args_into_dataclasses

    def stop_too(self, args=None):
        raise Parsed(into(self, args))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(HfArgumentParser, "parse_args_into_dataclasses", stop_too)


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
