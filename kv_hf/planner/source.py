"""Find a model's config, wherever it is, and turn it into an Inventory."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers import __version__ as transformers_version

from ..cache.compat import SPARSE_MODELS_CACHE_LATENTS
from ..config_numbers import check_numbers
from ..errors import InputFileError, KVCacheError, PlanError, UnsupportedModelError, reason
from ..field_names import POSITIONS, first
from ..files.reading import CONFIG_BYTES, read_json_object
from ..hub import cached_config
from ..notices import say_once
from ..printable import in_a_line, short
from .fields import inventory_of_fields, language_part
from .hub import fetch_config
from .inventory import Inventory
from .kv_heads import replace_kv_heads, replace_named_kv_heads
from .meta_model import quiet
from .presets import is_preset, preset_of_model, read_preset
from .probe import named_dtype, probe, resolve_dtype
from .weight_files import StoredWeights, read_weights

_CONFIG = "config.json"


def load_inventory(
    model: Any, *, dtype: torch.dtype | str | None = None, kv_heads: int | None = None
) -> Inventory:
    """Return what a model keeps in its cache and what its weights take. No code from the hub is run.

    Args:
        model: a folder with a config.json, a path to one, a preset's name, a hub id (in the local hub cache, or
            fetched), a transformers model config, or an Inventory, which is returned.
        dtype: of weights and cache, as torch.bfloat16 or "bfloat16"; None: what the config says, else bfloat16.
        kv_heads: count the cache and the weights as if the model had so many key/value heads.

    Raises:
        PlanError: there is no such file, model or preset, or kv_heads does not divide the query heads.
        UnsupportedModelError: the model keeps its keys and values in ways that a plan does not know.
    """
    try:
        return _load(model, dtype, kv_heads)
    except (KVCacheError, MemoryError):
        raise
    except Exception as error:  # a config's fields reach code of transformers that trusts them
        raise PlanError(
            f"{short(getattr(model, 'name_or_path', model))} cannot be planned: its config breaks the code that reads it "
            f"({type(error).__name__}: {in_a_line(error)})"
        ) from error


def _load(model: Any, dtype: torch.dtype | str | None, kv_heads: int | None) -> Inventory:
    if isinstance(model, Inventory):
        if kv_heads is not None:
            raise PlanError("kv_heads changes a model's config; an Inventory has none any more")
        return _with_dtype(model, dtype)
    if isinstance(model, PreTrainedConfig):
        name = model.name_or_path or model.model_type
        check_numbers(model.to_dict(), name)
        found = _of_config(model, name, "a config object", dtype, kv_heads)
        quantized = getattr(model, "quantization_config", None)
        if quantized is not None and not isinstance(quantized, Mapping):
            quantized = quantized.to_dict()
        return _with_files(found, {"quantization_config": quantized}, None, kv_heads)
    if not isinstance(model, (str, os.PathLike)):
        raise PlanError(
            f"model must be a path, a hub id, a preset, a config or an Inventory, got {type(model).__name__}"
        )
    name = str(model)
    if not name:
        raise PlanError("model must be a path, a hub id or a preset, got an empty name")
    try:
        path = Path(model).expanduser()
        is_there = path.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a zero byte, no such user
        raise PlanError(f"model {short(name)} is no name of a file: {reason(error)}") from None
    if is_there:
        return _of_path(path, name, dtype, kv_heads)
    if is_preset(name):
        return inventory_of_preset(read_preset(name), dtype=dtype, kv_heads=kv_heads)
    return _of_hub(name, dtype, kv_heads)


def _of_path(
    path: Path, name: str, dtype: torch.dtype | str | None, kv_heads: int | None
) -> Inventory:
    """Return the Inventory of a folder or a config.json, and say where it takes the name of a preset or its model."""
    hidden = name.lower() if is_preset(name) else preset_of_model(name)
    folder = path if path.is_dir() else None
    try:
        given = _read_json(path if folder is None else path / _CONFIG)
    except PlanError as error:
        if hidden is None:
            raise
        raise PlanError(
            f"{error}; this {'file' if folder is None else 'folder'} hides the preset {hidden}: plan from another folder"
        ) from error
    known_as = _folder_name(path.parent if folder is None else path)
    found = _of_dict(given, known_as, str(path), dtype, kv_heads, folder)
    if hidden is None:
        return found
    return found.with_note(f"{str(path)!r} was read from here, not the preset {hidden}")


def inventory_of_preset(
    preset: Mapping[str, Any],
    *,
    dtype: torch.dtype | str | None = None,
    kv_heads: int | None = None,
    again: bool = False,
) -> Inventory:
    """Return the Inventory that a preset carries; with kv_heads or `again`, read its config in place of that."""
    if "inventory" in preset and kv_heads is None and not again:
        inventory = Inventory.from_dict(preset["inventory"])
        if SPARSE_MODELS_CACHE_LATENTS or not any(layer.index_dim for layer in inventory.layers):
            return _with_dtype(inventory, dtype)
    source = f"the preset of {preset['model']}"
    found = _of_dict(preset["config"], preset["name"], source, dtype, kv_heads)
    return found.with_note(*preset.get("notes", ()))


def _with_dtype(inventory: Inventory, dtype: torch.dtype | str | None) -> Inventory:
    if dtype is None:
        return inventory
    return replace(inventory, dtype=resolve_dtype({}, dtype)[0])


def _of_hub(model: str, dtype: torch.dtype | str | None, kv_heads: int | None) -> Inventory:
    path = cached_config(model)
    preset = preset_of_model(model)
    if path is None and preset is not None:
        say_once(
            f"planner preset {model}",
            f"kv_hf: {model} is not in the local hub cache; the preset {preset} is taken",
        )
        return inventory_of_preset(read_preset(preset), dtype=dtype, kv_heads=kv_heads)
    path = path or fetch_config(model)
    return _of_dict(_read_json(path), model, f"hub: {model}", dtype, kv_heads, path.parent)


def _folder_name(folder: Path) -> str:
    return folder.resolve().name or str(folder)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path, CONFIG_BYTES, "config")
    except FileNotFoundError:
        raise PlanError(f"{path.parent} has no {path.name}") from None
    except InputFileError as error:
        raise PlanError(str(error)) from None
    except OSError as error:
        raise PlanError(f"config {str(path)!r} cannot be read: {reason(error)}") from error


def _of_dict(
    given: Mapping[str, Any],
    name: str,
    source: str,
    dtype: torch.dtype | str | None,
    kv_heads: int | None,
    folder: Path | None = None,
) -> Inventory:
    """Return the Inventory of a config.json, by its names where transformers does not know the model."""
    check_numbers(given, source)
    kind = given.get("model_type")
    stored = None if folder is None else read_weights(folder)
    notes = []
    if stored is not None and stored.dtype is not None and named_dtype(given, dtype) is None:
        dtype = stored.dtype
        notes.append(f"its config names no dtype: {dtype} is that of its files")
    if isinstance(kind, str) and kind in CONFIG_MAPPING:
        try:
            with quiet():
                config = CONFIG_MAPPING[kind].from_dict(dict(given))
        except Exception as error:  # transformers validates some configs with errors of its own
            why = f"transformers cannot read it: {in_a_line(error)}"
        else:
            found = _of_config(config, name, source, dtype, kv_heads)
            return _with_files(found, given, stored, kv_heads).with_note(*notes)
    else:
        why = f"transformers {transformers_version} does not know model_type {short(kind)}, and other code is not run"
    if kv_heads is not None:
        given = replace_named_kv_heads(given, kv_heads, name)
    own, assumed = resolve_dtype(given, dtype)
    found = inventory_of_fields(
        given,
        name=name,
        model_type=str(kind)[:80],
        dtype=own,
        max_positions=first(language_part(given), POSITIONS),
        source=source,
    )
    say_once(f"planner names {name}", f"kv_hf: {name}: {why}; the names of its config were read")
    found = _checked_heads(found).with_note(why, *assumed, *notes)
    return _with_files(found, given, stored, kv_heads)


def _of_config(
    config: Any,
    name: str,
    source: str,
    dtype: torch.dtype | str | None,
    kv_heads: int | None,
) -> Inventory:
    if kv_heads is not None:
        config = replace_kv_heads(config, kv_heads, name)
    found = _checked_heads(probe(config, name=name, source=source, dtype=dtype))
    wrong = {layer.kv_heads for layer in found.layers if layer.elements} - {kv_heads}
    if kv_heads is not None and wrong:
        raise UnsupportedModelError(
            f"kv_heads={kv_heads}: layers of {name} ({config.model_type}) have {sorted(wrong)} kv heads whatever its "
            "config's number"
        )
    return found


def _checked_heads(found: Inventory) -> Inventory:
    """Return it. Raises PlanError for query heads that the kv heads of their layer do not divide."""
    for index, layer in enumerate(found.layers):
        if layer.elements and layer.query_heads % layer.kv_heads:
            raise PlanError(
                f"{found.name}: {layer.kv_heads} key/value heads do not divide the {layer.query_heads} query heads of "
                f"layer {index}: no model runs with this config"
            )
    return found


def _with_files(
    found: Inventory,
    given: Mapping[str, Any],
    stored: StoredWeights | None,
    kv_heads: int | None,
) -> Inventory:
    """Count weights as they are stored where they are quantized, or the model's code did not say how many there are."""
    quantized = given.get("quantization_config") or language_part(given).get("quantization_config")
    if quantized is None:
        if found.parameters is not None or stored is None:
            return found
        size = stored.nbytes if stored.packed or stored.numbers is None else None
        return replace(found, parameters=stored.numbers, weight_bytes=size)
    method = quantized.get("quant_method") if isinstance(quantized, Mapping) else None
    note = f"its weights are stored as {method or 'quantized'}"
    # with other kv heads the weights are others than those in the files
    if stored is None or stored.nbytes is None or kv_heads is not None:
        return found.with_note(f"{note}; they are counted as {found.dtype}")
    return replace(found, weight_bytes=stored.nbytes).with_note(
        f"{note}: the {stored.nbytes:,} bytes of its files are counted"
    )
