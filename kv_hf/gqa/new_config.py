"""config.json of a converted checkpoint: that of the source with the new numbers, checked by reading it again."""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from ..errors import ConversionError
from ..records import CONVERSION
from .checkpoint import Checkpoint
from .heads import FIELD, text_config
from .structure import Structure, load_config, sets_head_dim

# of what transformers writes by itself
IGNORED = (CONVERSION, "dtype", "torch_dtype", "transformers_version", "_name_or_path", "head_dim")


def merged_config(checkpoint: Checkpoint, structure: Structure) -> dict[str, Any]:
    """Return config.json of a conversion within a class.

    Raises: ConversionError where the source's file does not say in its own words how many kv heads there are.
    """
    config: dict[str, Any] = json.loads(json.dumps(checkpoint.config))
    config.pop("_name_or_path", None)
    old, new = text_config(structure.old), text_config(structure.new)
    part = text_part(config, structure.old, old)
    if FIELD in type(new).attribute_map:
        part[type(new).attribute_map[FIELD]] = structure.new_kv_heads
    elif getattr(old, "multi_query", None) is False and getattr(new, "multi_query", None) is True:
        part["multi_query"] = True
        if FIELD in part:
            part[FIELD] = 1
        if "num_kv_heads" in part:
            part["num_kv_heads"] = 1
    else:
        part[FIELD] = structure.new_kv_heads
        if sets_head_dim(old, structure.head_dim):
            part["head_dim"] = structure.head_dim
    verify(checkpoint, config, structure)
    return config


def text_part(config: dict[str, Any], whole: Any, text: Any) -> dict[str, Any]:
    """Return the part of config.json that holds the text model's numbers."""
    path = find_path(whole, text)
    part = config
    for name in path:
        if name not in part and FIELD in part:
            return part  # old files of some models keep the text model's numbers at the top
        part = part.setdefault(name, {})
        if not isinstance(part, dict):
            raise ConversionError(f"config.json: {name} must be an object, got {part!r}")
    return part


def find_path(whole: Any, text: Any) -> list[str]:
    """Return the names that lead from a config to its text part."""
    if whole is text:
        return []
    for name in getattr(type(whole), "sub_configs", {}):
        part = getattr(whole, name, None)
        if part is text:
            return [name]
        if part is not None and part is not whole and getattr(type(part), "sub_configs", None):
            try:
                return [name, *find_path(part, text)]
            except ConversionError:
                continue
    raise ConversionError(f"{whole.model_type}: its text model's config is not a part of it")


def verify(checkpoint: Checkpoint, config: dict[str, Any], structure: Structure) -> None:
    """Raise ConversionError unless the class reads the new config.json as the old one with fewer kv heads."""
    with tempfile.TemporaryDirectory() as folder:  # files say some values in a way of their own
        (Path(folder) / "config.json").write_text(json.dumps(config), "utf-8")
        read = load_config(Path(folder))
    found, wanted = _plain(read.to_dict()), _plain(structure.new.to_dict())
    if found != wanted:
        names = [
            name for name in {**found, **wanted} if found.get(name, name) != wanted.get(name, name)
        ]
        raise ConversionError(
            f"{checkpoint.folder / 'config.json'}: with the new number of kv heads it reads otherwise than expected ({names})"
        )


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items() if name not in IGNORED}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return value


def set_dtype(config: dict[str, Any], dtype: torch.dtype) -> None:
    """Write the dtype of all weights into a config.json, and into its parts that have one."""
    for part in (config, *(part for part in config.values() if isinstance(part, dict))):
        if part is config or "dtype" in part or "torch_dtype" in part:
            part.pop("torch_dtype", None)
            part["dtype"] = str(dtype).removeprefix("torch.")
