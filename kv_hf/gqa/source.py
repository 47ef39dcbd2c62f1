"""A checkpoint that is converted: its config, its tensors by name, the files beside them.

Four rules: no code of the checkpoint is run, no file is read through a link out of it, quantized weights are refused, and
nothing in it is ever changed.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..config_numbers import check_numbers
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
from ..printable import in_a_line

SINGLE, INDEX, CARD = "model.safetensors", "model.safetensors.index.json", "README.md"
# files beside the weights that a model needs
BESIDE = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "*.tiktoken", "chat_template*", "additional_chat_templates/*.jinja", "*.model", "preprocessor_config.json",
    "processor_config.json", "video_preprocessor_config.json", "LICENSE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip
# files of a hub model that are downloaded beside its weights
WANTED = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.md", "LICENSE*", "NOTICE*", "USE_POLICY*")  # fmt: skip
# those of weights, and of what is copied beside them, such as causal masks in old checkpoints
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Source:
    """A folder with config.json and safetensors files.

    Attributes:
        folder: where it lies.
        config: config.json.
        files: name -> the opened file of weights.
        tensors: all tensors by name, in the order of files and of their bytes, on the meta device.
        places: the file of each.
        name: as the user gave it.
    """

    folder: Path
    config: dict[str, Any]
    files: dict[str, Any] = field(repr=False)
    tensors: dict[str, torch.Tensor] = field(repr=False)
    places: dict[str, str] = field(repr=False)
    name: str

    @classmethod
    def open(cls, source: str | Path) -> "Source":
        """Open a folder, or a model of the hub, of which weights are downloaded only if its config can be converted.

        Raises: ConversionError naming the file and the rule that it breaks.
        """
        folder = _folder(source, list(WANTED))
        config = read_json(folder / "config.json", CONFIG_BYTES)
        _check_config(config, folder)
        index = None
        if (folder / INDEX).is_file() and not (folder / SINGLE).is_file():
            index = read_json(folder / INDEX, INDEX_BYTES)
        names = [SINGLE] if index is None else _listed(index, folder)
        if not Path(source).is_dir():
            folder = _folder(source, [*WANTED, *names])
        files: dict[str, Any] = {}
        tensors: dict[str, torch.Tensor] = {}
        places: dict[str, str] = {}
        for file in names:
            files[file], found = _open_weights(folder / file)
            tensors |= found
            places |= dict.fromkeys(found, file)
        if index is not None and (odd := places.items() ^ index["weight_map"].items()):
            raise ConversionError(
                f"{folder / INDEX} and its files disagree about the place of {min(odd)[0]!r}"
            )
        return cls(folder, config, files, tensors, places, str(source))

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor, [shape and dtype of the file]. Raises ConversionError where its file cannot be read."""
        file = self.places[name]
        try:
            tensor: torch.Tensor = self.files[file].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ConversionError(
                f"{self.folder / file}: {name!r} cannot be read: {error}"
            ) from error
        return tensor

    def beside(self) -> list[Path]:
        """Return the files that go with the weights. Raises ConversionError for links out of the folder."""
        found = sorted({path for pattern in BESIDE for path in self.folder.glob(pattern)})
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
    home = Path(os.path.realpath(folder))
    if path.is_symlink() and not path.exists():
        raise ConversionError(f"{path} is a link to a file that is not there")
    of_hub = home.parent.name == "snapshots"
    if not is_within(path, home) and not (of_hub and is_within(path, home.parent.parent / "blobs")):
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


def _folder(source: str | Path, patterns: list[str]) -> Path:
    """Return a folder; files of a hub model that match `patterns` are downloaded."""
    folder, name = Path(source), str(source)
    if folder.is_dir():
        return folder
    missing = "a file" if folder.is_file() else why_not_model(name)
    if missing is not None:
        raise ConversionError(
            f"source must be a folder or a model of the hub, got {name!r}: {missing}"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        why = in_a_line(error)
        raise ConversionError(f"model {name!r} cannot be had from the hub: {why}") from error


def _check_config(config: dict[str, Any], folder: Path) -> None:
    """Raise ConversionError for adapters, quantized weights, remote code, and numbers that no model has."""
    if (folder / "adapter_config.json").is_file():
        raise ConversionError(
            f"{folder} holds an adapter (PEFT): merge it into its model first, and save that"
        )
    for part in (config, *(part for part in config.values() if isinstance(part, dict))):
        for name in ("quantization_config", "compression_config"):
            if method := part.get(name):
                kind = method.get("quant_method") if isinstance(method, dict) else method
                raise ConversionError(
                    f"{folder / 'config.json'} has a {name} ({kind}): convert the unquantized checkpoint"
                )
    check_numbers(config, str(folder / "config.json"), ConversionError)
    if config.get("auto_map"):
        raise ConversionError(
            f"{folder / 'config.json'} has an auto_map: the model needs code of its own, which is never run"
        )


def _listed(index: dict[str, Any], folder: Path) -> list[str]:
    """Return the files that an index lists."""
    listed = index.get("weight_map")
    files = list(listed.values()) if isinstance(listed, dict) else []
    if not files or not all(isinstance(file, str) and Path(file).name == file for file in files):
        raise ConversionError(f"{folder / INDEX} has no weight_map of tensors and files beside it")
    return sorted(set(files))


def _open_weights(path: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return an opened file and its tensors. Raises ConversionError for damaged files and quantized weights."""
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
            kind = part.get_dtype()
            if kind not in DTYPES:
                raise ConversionError(
                    f"{path}: {name!r} is of {kind}, as quantized checkpoints are; convert the unquantized one"
                )
            tensors[name] = torch.empty(part.get_shape(), dtype=DTYPES[kind], device="meta")
    except (OSError, SafetensorError, MemoryError) as error:
        raise ConversionError(f"{path} is damaged or cut off: {error}") from error
    return reader, tensors
