"""A model's config, wherever it is, turned into an Inventory by a forward of the model without weights."""

import copy
import difflib
import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.utils import cached_file

from ..cache.model_shape import decoder_config, is_encoder_decoder, latent_rank
from ..errors import InputFileError, KVCacheError, PlanError, UnsupportedModelError, reason
from ..files import CONFIG_BYTES, INDEX_BYTES, read_json_object
from ..hub import CONFIG, cached_config, looks_like_path, why_not_model
from ..model_fields import HEADS, KV_HEADS, POSITIONS, check_numbers, first, read
from ..notices import say_once
from ..printable import in_a_line, short
from .inventory import Inventory
from .meta_model import look, quiet

DEFAULT_DTYPE = "bfloat16"
_INDEX, _ONE = "model.safetensors.index.json", "model.safetensors"
_MODEL_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class _Found:
    """A config, as JSON or as an object of transformers, and where it comes from; `folder` may hold the weights."""

    config: Any
    name: str
    source: str
    folder: Path | None = None
    notes: tuple[str, ...] = ()


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
    if isinstance(model, Inventory):
        if kv_heads is not None:
            raise PlanError("kv_heads changes a model's config; an Inventory has none any more")
        return replace(model, dtype=named_dtype(None, dtype) or model.dtype)
    try:
        return _inventory(_find(model), dtype, kv_heads)
    except (KVCacheError, MemoryError):
        raise
    except Exception as error:  # a config's fields reach code of transformers that trusts them
        raise PlanError(
            f"{short(getattr(model, 'name_or_path', model))} cannot be planned: its config breaks the code that reads it "
            f"({type(error).__name__}: {in_a_line(error)})"
        ) from error


def _find(model: Any) -> _Found:
    """Return the config of whatever names a model: what is on the disk, else a preset, else the hub's."""
    if isinstance(model, PreTrainedConfig):
        return _Found(model, model.name_or_path or model.model_type, "a config object")
    if not isinstance(model, (str, os.PathLike)):
        raise PlanError(
            f"model must be a path, a hub id, a preset, a config or an Inventory, got {type(model).__name__}"
        )
    name = str(model)
    if not name:
        raise PlanError("model must be a path, a hub id or a preset, got an empty name")
    try:
        path = Path(model).expanduser()
        is_there, is_folder = path.exists(), path.is_dir()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a zero byte, no such user
        raise PlanError(f"model {short(name)} is no name of a file: {reason(error)}") from None
    if is_there:
        config = _read_json(path / CONFIG if is_folder else path)
        at = path if is_folder else path.parent
        return _Found(config, at.resolve().name or str(at), str(path), path if is_folder else None)
    preset = name if is_preset(name) else preset_of_model(name)
    config_path = None if is_preset(name) else cached_config(name)
    if config_path is None and preset is not None:
        if not is_preset(name):
            say_once(
                f"planner preset {name}",
                f"kv_hf: {name} is not in the local hub cache; the preset {preset} is taken",
            )
        own = read_preset(preset)
        source, notes = f"the preset of {own['model']}", tuple(own.get("notes", ()))
        return _Found(own["config"], own["name"], source, notes=notes)
    config_path = config_path or _fetched(name)
    return _Found(_read_json(config_path), name, f"hub: {name}", config_path.parent)


def _fetched(model: str) -> Path:
    """Return the path of a hub model's config.json, fetched. Raises PlanError where there is none."""
    hint = near_presets(model)
    if looks_like_path(model):
        raise PlanError(f"there is no file or folder {model!r}{hint}")
    why, path = why_not_model(model), None
    if why is None:
        try:
            path = cached_file(model, CONFIG)
        except (OSError, ValueError) as error:
            why = in_a_line(error).rstrip(".")
    if why is not None:
        raise PlanError(
            f"{model!r} is no folder, file or preset, and its config could not be had from the hub ({why}){hint}"
        )
    if path is None:
        raise PlanError(f"the hub's {model!r} has no {CONFIG}{hint}")
    return Path(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path, CONFIG_BYTES, "config")
    except FileNotFoundError:
        raise PlanError(f"{path.parent} has no {path.name}") from None
    except InputFileError as error:
        raise PlanError(str(error)) from None
    except OSError as error:
        raise PlanError(f"config {str(path)!r} cannot be read: {reason(error)}") from error


def load_config(model: Any) -> Any:
    """Return transformers' config of a model that is named as for `load_inventory`, and its errors."""
    return _config_object(_find(model))


def _config_object(found: _Found) -> Any:
    """Return transformers' config. Raises UnsupportedModelError where transformers does not know the model."""
    name, config = found.name, found.config
    if isinstance(config, PreTrainedConfig):
        check_numbers(config.to_dict(), name)
        return config
    check_numbers(config, found.source)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise UnsupportedModelError(
            f"{name}: transformers {transformers.__version__} does not know model_type {short(kind)}, and other code is not "
            "run; use a transformers that knows it"
        )
    try:
        with quiet():
            return CONFIG_MAPPING[kind].from_dict(dict(config))
    except Exception as error:  # transformers validates some configs with errors of its own
        raise PlanError(
            f"{name}: transformers cannot read its config: {in_a_line(error)}"
        ) from error


def _inventory(found: _Found, asked: torch.dtype | str | None, heads: int | None) -> Inventory:
    """Return the Inventory of a config.

    Raises: UnsupportedModelError for encoders, encoder-decoder models, models without a cache of transformers, models whose
        code cannot run without weights, and caches that an Inventory cannot describe.
    """
    name, config = found.name, _config_object(found)
    stored = None if found.folder is None else read_weights(found.folder)
    config = config if heads is None else _with_heads(config, heads, name)
    text, at = decoder_config(config), f"{name} ({config.model_type})"
    if is_encoder_decoder(config) or is_encoder_decoder(text):
        raise UnsupportedModelError(
            f"{at} is an encoder-decoder model, with a second cache for its encoder's output; plans are for decoders"
        )
    masked = type(config) in transformers.AutoModelForMaskedLM._model_mapping
    if masked and not getattr(config, "is_decoder", True):
        raise UnsupportedModelError(
            f"{at} is an encoder (its config has no is_decoder=true): it generates no text, and keeps no cache"
        )
    dtype, notes = named_dtype(config, asked), []
    if dtype is None:
        of_files = None if stored is None else stored.dtype
        dtype = of_files or DEFAULT_DTYPE
        how = "is that of its files" if of_files else "is taken for weights and cache"
        notes.append(f"its config names no dtype: {dtype} {how}")
    try:
        seen = look(config, name)
    except UnsupportedModelError:
        raise
    except Exception as error:  # a model's code was not written to run without weights
        raise UnsupportedModelError(
            f"{at} cannot be run without weights ({type(error).__name__}: {in_a_line(error)})"
        ) from error
    notes += seen.pop("notes")
    size, parts = None, (getattr(part, "quantization_config", None) for part in (config, text))
    quantized = next(filter(None, parts), None)
    if quantized is not None:
        settings = quantized if isinstance(quantized, Mapping) else quantized.to_dict()
        note = f"its weights are stored as {settings.get('quant_method') or 'quantized'}"
        # with other kv heads the weights are others than those in the files
        if stored is None or heads is not None:
            notes.append(f"{note}; they are counted as {dtype}")
        else:
            size = stored.nbytes
            notes.append(f"{note}: the {size:,} bytes of its files are counted")
    made = Inventory(
        **seen,
        name=name,
        model_type=config.model_type,
        dtype=dtype,
        max_positions=first(text, POSITIONS),
        source=found.source,
        weight_bytes=size,
        notes=(*notes, *found.notes),
        config=config,
    )
    wrong = {layer.kv_heads for layer in made.layers if layer.elements} - {heads}
    if heads is not None and wrong:
        raise UnsupportedModelError(
            f"kv_heads={heads}: layers of {at} have {sorted(wrong)} kv heads whatever its config's number"
        )
    return made


# -- the dtype -------------------------------------------------------------------------------------------------


def named_dtype(config: Any, dtype: torch.dtype | str | None) -> str | None:
    """Return `dtype`, else the one in a config, as "bfloat16"; None where neither names one.

    Raises: UnsupportedModelError for names of no floating-point dtype.
    """
    values = [dtype, *(read(part, "dtype") for part in (config, read(config, "text_config")))]
    found = next((value for value in values if value not in (None, "auto")), None)
    if found is None:
        return None
    own = getattr(torch, found.removeprefix("torch."), None) if isinstance(found, str) else found
    if not isinstance(own, torch.dtype) or not own.is_floating_point:
        raise UnsupportedModelError(
            f"dtype must be a floating-point dtype of torch, as 'bfloat16', got {short(found)}"
        )
    return str(own).removeprefix("torch.")


# -- another number of key/value heads ----------------------------------------------------------------------------


def _with_heads(config: Any, kv_heads: Any, name: str) -> Any:
    """Return a copy of a transformers config with `kv_heads` key/value heads in its decoder.

    Raises: PlanError where they do not divide the query heads, or there is no number of them to replace.
    """
    own = copy.deepcopy(config)
    text = decoder_config(own)
    key = next((key for key in KV_HEADS if read(text, key) is not None), None)
    heads = first(text, HEADS)
    if heads is None or key is None or latent_rank(text) is not None:
        raise PlanError(
            f"kv_heads={kv_heads}: the config of {name} has no number of key/value heads to replace"
        )
    divisors = [count for count in range(1, heads + 1) if not heads % count]
    if type(kv_heads) is not int or kv_heads not in divisors:
        raise PlanError(
            f"kv_heads must divide the {heads} query heads of {name} ({', '.join(map(str, divisors))}), got {kv_heads!r}"
        )
    setattr(text, key, kv_heads)
    return own


# -- the files of its weights -------------------------------------------------------------------------------------


class StoredWeights(NamedTuple):
    """Weights as they are stored.

    Attributes:
        nbytes: of all tensors.
        dtype: the dtype that most parameters have, as "float32"; None: no parameter has a dtype that a model can have.
    """

    nbytes: int
    dtype: str | None = None


def read_weights(folder: Path) -> StoredWeights | None:
    """Return what the weights of a folder take, None where it has no readable safetensors files.

    The file of the common name, else those of an index, as transformers loads them, else all that there are: a second copy in
    another layout is not counted.
    """
    one, index = folder / _ONE, folder / _INDEX
    try:
        if one.is_file():
            paths = [one]
        elif index.is_file():
            listed = read_json_object(index, INDEX_BYTES, "index").get("weight_map")
            names = listed.values() if isinstance(listed, dict) else ()
            # never a file of another folder
            paths = sorted({folder / Path(str(name)).name for name in names})
        else:
            paths = sorted(folder.glob("*.safetensors"))
        return _sum(paths) if paths else None
    except (OSError, InputFileError, SafetensorError):
        return None


def _sum(paths: list[Path]) -> StoredWeights:
    """Add up the tensors of files by their headers, which safetensors checks against the files' lengths."""
    numbers: Counter[str] = Counter()
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (a file is no mapping)
                entry = file.get_slice(name)
                numbers[entry.get_dtype()] += torch.Size(entry.get_shape()).numel()
    bits = {dtype: int((re.findall(r"\d+", dtype) or ["8"])[0]) for dtype in numbers}
    most = max(filter(_MODEL_DTYPES.get, numbers), key=numbers.__getitem__, default="")
    size = sum(count * bits[dtype] for dtype, count in numbers.items()) // 8
    return StoredWeights(size, _MODEL_DTYPES.get(most))


# -- presets: well-known models by name, with their hub ids and configs, shipped in presets.json, one a line -----------------


@cache
def _presets() -> dict[str, dict[str, Any]]:
    return dict(json.loads(files(__package__).joinpath("presets.json").read_text("utf-8")))


def preset_names() -> tuple[str, ...]:
    """Return the names of all presets, sorted."""
    return tuple(_presets())


def is_preset(name: str) -> bool:
    """Say whether there is a preset of this name; upper and lower case are alike."""
    return name.lower() in _presets()


def read_preset(name: str) -> dict[str, Any]:
    """Return a preset that there is: "name", "model" (hub id), "source", "config", and "notes" for a plan where there are any."""
    return {"name": name.lower(), **_presets()[name.lower()]}


def preset_of_model(model: str) -> str | None:
    """Return the name of the preset made from this hub id, None where there is none."""
    wanted = model.lower()
    return next((name for name, one in _presets().items() if one["model"].lower() == wanted), None)


def near_presets(name: str) -> str:
    """Return the end of a sentence: presets with names like this one, or where to find them."""
    short = name.lower().rsplit("/", 1)[-1]
    near = difflib.get_close_matches(short, _presets(), n=4, cutoff=0.5)
    if near:
        return f"; did you mean {' or '.join(near)}?"
    return "; `kv-hf memory --list-presets` lists the presets"
