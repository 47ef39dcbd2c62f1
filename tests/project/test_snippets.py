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
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from paths import ROOT
from tiny_latent import make_model as make_latent_model
from tiny_tokenizer import SPECIAL, make_tokenizer, make_word_tokenizer
from transformers import HfArgumentParser

import kv_hf
import kv_hf_cli
from kv_hf.serving.batch_manager import fits_transformers
from kv_hf.serving.serve_command import add_transformers_options
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


def with_language(language: str) -> dict[str, list[Snippet]]:
    """Return page -> its blocks in a language, of all pages that have one."""
    found = {
        str(page.relative_to(ROOT)): [one for one in snippets(page) if one.language == language]
        for page in PAGES
    }
    return {page: ours for page, ours in found.items() if ours}


def tiny_model(dtype: torch.dtype | str | None = None) -> Any:
    """Return a random Llama with WORDS tokens, which never ends a text and never says a special token."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,  # a multiple of the groups of transformers' quantized caches
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    wanted = torch.float32 if dtype in (None, "auto") else dtype
    wanted = getattr(torch, wanted) if isinstance(wanted, str) else wanted
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=wanted).eval()
    model.generation_config.suppress_tokens = list(range(len(SPECIAL) + 1))
    return model


def save_tiny_model(folder: Path) -> Path:
    """Write that model and its tokenizer into a folder, as from_pretrained reads it."""
    tiny_model().save_pretrained(folder)
    make_tokenizer(WORDS, chat=True).save_pretrained(folder)
    return folder


class Pretrained:
    """`from_pretrained` of an Auto class: a folder is read, any other name gives the tiny model or tokenizer."""

    def __init__(self, own: Callable[..., Any], other: Callable[..., Any]) -> None:
        self.own, self.other = own, other

    def __call__(self, name: Any, **options: Any) -> Any:
        """Load or make it; `options` as from_pretrained takes them."""
        if (Path(name) / "config.json").is_file():
            return self.own(name, **options)
        return self.other(**options)


def load_model(**options: Any) -> Any:
    """Stand in for AutoModelForCausalLM.from_pretrained of a hub id: takes the options that pages use, and no others."""
    assert not set(options) - {"dtype", "device_map", "distributed_config"}, options
    return tiny_model(options.get("dtype"))


def tokenizer_of(page: str) -> Callable[..., Any]:
    """Return what stands in for AutoTokenizer.from_pretrained of a hub id on a page."""

    def load_tokenizer(**options: Any) -> Any:
        # a chat goes on with the answers of a model, see `make_word_tokenizer`
        chats = "apply_chat_template" in (ROOT / page).read_text("utf-8")
        made = make_word_tokenizer(WORDS) if chats else make_tokenizer(WORDS, chat=True)
        made.padding_side = options.pop("padding_side", "right")
        assert not options, options
        return made

    return load_tokenizer


def make_world(page: str, folder: Path, monkeypatch: Any) -> None:
    """Let the snippets of a page run in a folder with the files that pages name, and find tiny models under all names."""
    for name, text in TEXTS.items():
        (folder / name).write_text(load_text(text)[:40_000], "utf-8")
    for name in FOLDERS:
        save_tiny_model(folder / name)
    stand_ins = {"AutoModelForCausalLM": load_model, "AutoTokenizer": tokenizer_of(page)}
    for auto, make in stand_ins.items():
        owner = getattr(transformers, auto)
        monkeypatch.setattr(owner, "from_pretrained", Pretrained(owner.from_pretrained, make))
    monkeypatch.setenv("KV_HF_HOME", str(folder / "home"))
    monkeypatch.chdir(folder)


def given_names(*names: str) -> dict[str, Any]:
    """Return what a page takes for granted: "kv_hf", "model", "tokenizer", "inputs"; with "latent" a model with latents."""
    model = make_latent_model("deepseek_v3") if "latent" in names else tiny_model()
    ids = torch.randint(3, 97, (1, 200))
    tokenizer = make_tokenizer(WORDS)
    known = {"kv_hf": kv_hf, "model": model, "tokenizer": tokenizer, "inputs": {"input_ids": ids}}
    return {name: known[name] for name in known if name in names}


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


def options_in_prose() -> Iterator[tuple[str, str, set[str]]]:
    """Yield page, command of `kv-hf` and options, for each that pages name within a sentence or in an indented line."""
    for page in PAGES:
        text = FENCE.sub("", page.read_text("utf-8"))
        found = re.findall(r"`kv-hf ([a-z-]+)([^`\n]*)`", text)
        found += re.findall(r"^    kv-hf ([a-z-]+)(.*)$", text, re.MULTILINE)
        for command, rest in found:
            yield str(page.relative_to(ROOT)), command, set(re.findall(r"(?<!\S)--[a-z-]+", rest))


# a line of a block -> why it is not run; it still has to compile
NOT_RUN = {
    "# tensor_parallel.py": "torchrun starts two processes of it",
    "# data_parallel.py": "accelerate starts two processes of it",
    "openai.OpenAI(": "asks a server; tests/serving/ starts one",
}
PYTHON = with_language("python")
COMMANDS = list(commands())
# programs of others; what they are given is not ours to read
FOREIGN = ("cd", "git", "npm", ".venv/bin/pre-commit")


class Parsed(BaseException):
    """The arguments of a command were read, and it ends here."""


def given(page: str) -> dict[str, Any]:
    """Return the names that pages take for granted. README and the pages that make a model of their own say everything."""
    if page == "README.md" or any("from_pretrained(" in one.code for one in PYTHON[page][:1]):
        return {}
    names = ("kv_hf", "model", "tokenizer", "inputs")
    return given_names(*names, *(("latent",) if "mla" in page else ()))


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
    run_page(page)
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


def test_commands_named_in_prose_have_the_options_named_with_them():
    named: dict[str, set[str]] = {}
    for _, command, options in options_in_prose():
        named.setdefault(command, set()).update(options)
    assert {"doctor", "eval"} <= set(named) <= {*kv_hf_cli.COMMANDS, "--help"}
    named.pop("lm-eval", None)  # lm-eval's own
    for command, options in named.items():
        asked = kv_hf_cli.command_parser(command, "kv-hf")
        if command == "serve":
            add_transformers_options(asked)
        known = set(asked._option_string_actions)
        assert options <= known, (command, options - known)
