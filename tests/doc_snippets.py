"""Fenced code of the documentation, and the small world in which it runs: no download, tiny random models, files of its own."""

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from paths import ROOT
from tiny_latent import make_model as make_latent_model
from tiny_tokenizer import SPECIAL, make_tokenizer, make_word_tokenizer

import kv_hf
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
