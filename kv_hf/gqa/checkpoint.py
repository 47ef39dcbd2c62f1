"""A checkpoint on disk: its config and its safetensors, opened without reading a weight.

Refuses what cannot be converted tensor by tensor (quantized weights, adapters, pickles, remote code) with the reason.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..config_numbers import check_numbers
from ..errors import ConversionError, InputFileError, reason
from ..files.reading import CONFIG_BYTES, INDEX_BYTES, read_json_object
from ..hub import why_not_model
from ..printable import in_a_line
from .beside import check_inside
from .tensor_file import Stamp, StoredTensor, TensorFile, stamp_of

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# what else of a repository belongs to a checkpoint
WANTED = [
    "*.json",
    "*.model",
    "*.txt",
    "*.jinja",
    "*.tiktoken",
    "*.md",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
]
# parts of tensor names that only quantized checkpoints have
QUANTIZED = (
    "weight_scale",
    "qweight",
    "qzeros",
    "absmax",
    "quant_map",
    "weight_packed",
    "input_scale",
)


@dataclass(frozen=True)
class Checkpoint:
    """A folder with config.json and safetensors files.

    Attributes:
        folder: where it lies.
        config: config.json.
        index: model.safetensors.index.json, or None where one file holds everything.
        opened: its files by name.
        tensors: all tensors by name, in the order of files and of their bytes.
        name: what the user called it.
        stamps: of config and index.
    """

    folder: Path
    config: dict[str, Any]
    index: dict[str, Any] | None
    opened: dict[str, TensorFile]
    tensors: dict[str, StoredTensor]
    name: str
    stamps: dict[str, Stamp]

    @classmethod
    def open(cls, source: str | Path) -> "Checkpoint":
        """Open a folder, or a model of the hub (downloaded first: its config, and its weights if that can be converted).

        Raises: ConversionError naming the file and what is wrong with it.
        """
        folder = find_folder(source, WANTED)
        config = read_json(folder / "config.json")
        _check_config(config, folder)
        if not Path(source).is_dir():
            folder = find_folder(source, [*WANTED, *listed_files(folder)])
            config = read_json(folder / "config.json")
        index, files = _files(folder)
        stamps = {
            name: stamp_of(folder / name)
            for name in ("config.json", *([] if index is None else [INDEX]))
        }
        for file in files:
            check_inside(folder / file, folder)
        opened = {file: TensorFile.open(folder / file) for file in files}
        tensors: dict[str, StoredTensor] = {}
        for file, found in opened.items():
            twice = sorted(set(found.tensors) & set(tensors))
            if twice:
                raise ConversionError(
                    f"{folder / file} holds {twice[0]!r}, which {tensors[twice[0]].file} holds too"
                )
            tensors.update(found.tensors)
        if not tensors:
            raise ConversionError(f"{folder} holds no tensor")
        if index is not None:
            _check_index(index, tensors, folder)
        marked = [name for name in tensors if any(part in name for part in QUANTIZED)]
        if marked:
            raise ConversionError(
                f"{folder} is quantized: it holds {marked[0]!r}; convert the unquantized checkpoint"
            )
        return cls(folder, config, index, opened, tensors, str(source), stamps)

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor, [shape and dtype of the file], in memory of its own.

        Raises: ConversionError where its file cannot be read.
        """
        return self.opened[self.tensors[name].file].read(name)

    def check_unchanged(self) -> None:
        """Raise ConversionError if a file of weights, the config or the index was changed since it was opened."""
        for file in self.opened.values():
            file.check()
        for name, stamp in self.stamps.items():
            try:
                now = stamp_of(self.folder / name)
            except OSError as error:
                raise ConversionError(f"{self.folder / name} is gone: {reason(error)}") from error
            if now != stamp:
                raise ConversionError(f"{self.folder / name} was changed while it was read")

    @property
    def files(self) -> dict[str, list[str]]:
        """File -> names of its tensors."""
        found: dict[str, list[str]] = {}
        for name, tensor in self.tensors.items():
            found.setdefault(tensor.file, []).append(name)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object from a file. Raises ConversionError naming the file."""
    check_inside(path, path.parent)
    try:
        return read_json_object(path, INDEX_BYTES if path.name == INDEX else CONFIG_BYTES, "file")
    except InputFileError as error:
        raise ConversionError(str(error)) from None
    except OSError as error:
        raise ConversionError(f"{path} cannot be read: {reason(error)}") from None


def find_folder(source: str | Path, patterns: list[str]) -> Path:
    """Return the folder of a checkpoint; files of a hub model that match `patterns` are downloaded."""
    folder = Path(source)
    if folder.is_dir():
        return folder
    name = str(source)
    if folder.is_file():
        raise ConversionError(
            f"source must be a folder with config.json and safetensors, got the file {name!r}"
        )
    missing = why_not_model(name)
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


def listed_files(folder: Path) -> list[str]:
    """Return the files of weights that an index lists, or the only one where there is no index."""
    if not (folder / INDEX).is_file():
        return [SINGLE]
    listed = read_json(folder / INDEX).get("weight_map")
    files = listed.values() if isinstance(listed, dict) else ()
    return sorted({file for file in files if isinstance(file, str)})


def _check_config(config: dict[str, Any], folder: Path) -> None:
    if (folder / "adapter_config.json").is_file():
        raise ConversionError(
            f"{folder} holds an adapter (PEFT): merge it into its model first, and save that"
        )
    for part in (config, *(part for part in config.values() if isinstance(part, dict))):
        for name in ("quantization_config", "compression_config"):
            method = part.get(name)
            if method:
                kind = method.get("quant_method") if isinstance(method, dict) else method
                raise ConversionError(
                    f"{folder / 'config.json'} has a {name} ({kind}): convert the unquantized checkpoint"
                )
    check_numbers(config, str(folder / "config.json"), ConversionError)
    if config.get("auto_map"):
        raise ConversionError(
            f"{folder / 'config.json'} has an auto_map: the model needs code of its own, whose tensors are not known"
        )
    if not isinstance(config.get("model_type"), str):
        raise ConversionError(f"{folder / 'config.json'} names no model_type")


def _files(folder: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the index (None without one) and the names of the files that it lists."""
    if (folder / INDEX).is_file() and not (folder / SINGLE).is_file():
        index = read_json(folder / INDEX)
        listed = index.get("weight_map")
        if (
            not isinstance(listed, dict)
            or not listed
            or not all(isinstance(f, str) for f in listed.values())
        ):
            raise ConversionError(f"{folder / INDEX} has no weight_map of tensors and files")
        files = sorted(set(listed.values()))
        strange = [file for file in files if Path(file).name != file]
        if strange:
            raise ConversionError(
                f"{folder / INDEX} names a file outside of its folder: {strange[0]!r}"
            )
        missing = [file for file in files if not (folder / file).is_file()]
        if missing:
            raise ConversionError(f"{folder / INDEX} lists {missing[0]}, which is not there")
        parts = sorted(path.name for path in folder.glob("model-*-of-*.safetensors"))
        unlisted = [file for file in parts if file not in files]
        if unlisted:
            raise ConversionError(
                f"{folder} holds {unlisted[0]}, which {INDEX} does not list: is the index an old one?"
            )
        return index, files
    if (folder / SINGLE).is_file():
        return None, [SINGLE]
    others = sorted(
        path.name
        for pattern in ("*.bin", "*.gguf", "*.pt", "*.pth", "*.h5", "*.msgpack")
        for path in folder.glob(pattern)
    )
    if others:
        raise ConversionError(
            f"{folder} holds {others[0]} and no safetensors: load it with transformers and save_pretrained() it first"
        )
    raise ConversionError(f"{folder} holds neither {SINGLE} nor {INDEX}")


def _check_index(index: dict[str, Any], tensors: dict[str, StoredTensor], folder: Path) -> None:
    listed = index["weight_map"]
    for name, file in listed.items():
        if name not in tensors:
            raise ConversionError(
                f"{folder / INDEX} lists {name!r} in {file}, which does not hold it"
            )
        if tensors[name].file != file:
            raise ConversionError(
                f"{folder / INDEX} lists {name!r} in {file}, and {tensors[name].file} holds it"
            )
    unlisted = [name for name in tensors if name not in listed]
    if unlisted:
        raise ConversionError(
            f"{folder / tensors[unlisted[0]].file} holds {unlisted[0]!r}, which {INDEX} does not list"
        )
