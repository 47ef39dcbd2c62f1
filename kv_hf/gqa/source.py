"""A checkpoint that is converted: its config, its tensors by name, the files beside them.

Four rules: no code of the checkpoint is run, no file is read through a link out of it, quantized weights are refused, and
nothing in it is ever changed.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import ConversionError, InputFileError
from ..files import (
    CARD_BYTES,
    CONFIG_BYTES,
    INDEX_BYTES,
    is_within,
    read_bytes,
    read_json_object,
)
from ..hub import why_not_model
from ..model_fields import check_numbers

SINGLE, INDEX, CARD = "model.safetensors", "model.safetensors.index.json", "README.md"
# files beside the weights that a model needs
OTHER_FILES = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates/*.jinja",
    "*.model",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)


@dataclass(frozen=True)
class Source:
    """A folder with config.json and safetensors files.

    Attributes:
        folder: where it lies.
        config: config.json.
        files: name -> the opened file of weights.
        tensors: all tensors by name, in the order of files and of their bytes, on the meta device.
        places: the file of each.
    """

    folder: Path
    config: dict[str, Any]
    files: dict[str, Any] = field(repr=False)
    tensors: dict[str, Tensor] = field(repr=False)
    places: dict[str, str] = field(repr=False)

    @classmethod
    def open(cls, source: str | Path) -> "Source":
        """Open a folder, or a model of the hub, of which weights are downloaded only if its config can be converted.

        Raises: ConversionError naming the file and the rule that it breaks.
        """
        folder = _folder(source, [])
        config = read_json(folder / "config.json", CONFIG_BYTES)
        _check_config(config, folder)
        listed = (folder / INDEX).is_file() and not (folder / SINGLE).is_file()
        names = _listed(folder) if listed else [SINGLE]
        if not Path(source).is_dir():
            folder = _folder(source, names)
        files: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        places: dict[str, str] = {}
        for file in names:
            files[file], found = _open_weights(folder / file)
            tensors |= found
            places |= dict.fromkeys(found, file)
        return cls(folder, config, files, tensors, places)

    def read(self, name: str) -> Tensor:
        """Return one tensor, [shape and dtype of the file]. Raises OSError or SafetensorError where it cannot be read."""
        return torch.as_tensor(self.files[self.places[name]].get_tensor(name), device="cpu")

    def others(self) -> list[Path]:
        """Return the files that go with the weights. Raises ConversionError for links out of the folder."""
        found = sorted({path for pattern in OTHER_FILES for path in self.folder.glob(pattern)})
        for path in found:
            check_inside(path, self.folder)
        return [path for path in found if path.is_file()]

    def card(self) -> str:
        """Return README.md, "" where there is none."""
        path = self.folder / CARD
        if not path.is_file():
            return ""
        check_inside(path, self.folder)
        return read_bytes(path, CARD_BYTES, "card").decode("utf-8", errors="replace")


def check_inside(path: Path, folder: Path) -> None:
    """Raise ConversionError for a file of a checkpoint that is a link out of its folder, or a link to nothing.

    A link is followed within the folder, and from a snapshot of the hub's cache to the blobs of the same model.
    """
    root = Path(os.path.realpath(folder))
    if path.is_symlink() and not path.exists():
        raise ConversionError(f"{path} is a link to a file that is not there")
    of_hub = root.parent.name == "snapshots"
    if not is_within(path, root) and not (of_hub and is_within(path, root.parent.parent / "blobs")):
        raise ConversionError(
            f"{path} leads out of the checkpoint, to {os.path.realpath(path)}: put the file itself there if it belongs to the model"
        )


def read_json(path: Path, limit: int) -> dict[str, Any]:
    """Return a JSON object of at most `limit` bytes. Raises ConversionError naming the file."""
    check_inside(path, path.parent)
    try:
        return read_json_object(path, limit, "file")
    except (InputFileError, OSError) as error:
        raise ConversionError(f"{path} cannot be read: {error}") from None


def _folder(source: str | Path, weights: list[str]) -> Path:
    """Return a folder; of a hub model what stands beside weights is downloaded, and `weights`."""
    folder, name = Path(source), str(source)
    if folder.is_dir():
        return folder
    if (missing := why_not_model(name)) is not None:
        raise ConversionError(
            f"source must be a folder or a model of the hub, got {name!r}: {missing}"
        )
    patterns = [*OTHER_FILES, "config.json", INDEX, CARD, *weights]
    return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))


def _check_config(config: dict[str, Any], folder: Path) -> None:
    """Raise ConversionError for quantized weights, remote code, and numbers that no model has."""
    for part in (config, *config.values()):
        if not isinstance(part, dict):
            continue
        if method := part.get("quantization_config") or part.get("compression_config"):
            kind = method.get("quant_method") if isinstance(method, dict) else method
            raise ConversionError(
                f"{folder / 'config.json'} has a quantization_config ({kind}): convert the unquantized checkpoint"
            )
    check_numbers(config, str(folder / "config.json"), ConversionError)
    if config.get("auto_map"):
        raise ConversionError(
            f"{folder / 'config.json'} has an auto_map: the model needs code of its own, which is never run"
        )


def _listed(folder: Path) -> list[str]:
    """Return the files that the index of a folder lists."""
    listed = read_json(folder / INDEX, INDEX_BYTES).get("weight_map")
    files = list(listed.values()) if isinstance(listed, dict) else []
    if not files or not all(isinstance(file, str) and Path(file).name == file for file in files):
        raise ConversionError(f"{folder / INDEX} has no weight_map of tensors and files beside it")
    return sorted(set(files))


def _open_weights(path: Path) -> tuple[Any, dict[str, Tensor]]:
    """Return an opened file and its tensors. Raises ConversionError for files that are missing or damaged."""
    if not path.is_symlink() and not path.is_file():
        raise ConversionError(
            f"{path} is not there: pickles and GGUF must be loaded with transformers and saved by save_pretrained() first"
        )
    check_inside(path, path.parent)
    tensors = {}
    try:
        # reads, where a mapped file that is cut off meanwhile would end the process
        reader: Any = safe_open(path, framework="pt", backend="pread")
        for name in reader.offset_keys():
            part = reader.get_slice(name)
            shape = part.get_shape()
            some = part[:0] if shape else reader.get_tensor(name)
            tensors[name] = some.new_empty(shape, device="meta")
    except (OSError, SafetensorError, MemoryError) as error:
        raise ConversionError(f"{path} is damaged or cut off: {error}") from error
    return reader, tensors
