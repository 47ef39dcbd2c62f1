"""The tensors that change with a model's number of kv heads, found by building its class twice without memory.

Names are never guessed: tensors whose shapes differ between the two models are the ones to convert, and all others must be
the same.
"""

import copy
import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

# read in transformers 5.17 and 5.23: names of its own, which a later release may move
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from ..errors import ConversionError, first_line
from .source import Source

FIELD = "num_key_value_heads"
# of configs whose layers differ: other numbers of heads for some of the layers
OTHER_FIELDS = (
    "num_global_key_value_heads", "swa_num_key_value_heads", "num_key_value_heads_per_layer", "num_kv_heads_per_layer",
    "cross_num_key_value_heads", "attention_other_setting",
)  # fmt: skip
OF_HEADS = {FIELD, "num_attention_heads", "head_dim", "hidden_size"}
ALL_OR_ONE = ("falcon", "gpt_bigcode")  # classes that know all heads or one
CAN = (
    "classes with num_key_value_heads (llama, mistral, qwen, gemma, phi, ...), falcon and gpt_bigcode to one kv head, "
    "gpt_neox (as phi) and gpt2 (as gpt_bigcode)"
)


@dataclass(frozen=True)
class Names:
    """The names of a checkpoint's tensors.

    Attributes:
        on_disk: name in the class -> name on disk, for tensors that are only renamed.
        rebuilt: names on disk of tensors that loading cuts up, stacks or permutes.
        unknown: names on disk that the class does not have, and does not drop without a word either.
    """

    on_disk: dict[str, str]
    rebuilt: list[str]
    unknown: list[str]


@dataclass(frozen=True)
class Structure:
    """The changes that a conversion within a class makes.

    Attributes:
        config: of the source.
        new_json: config.json of the result, without the record of the conversion.
        num_heads, num_kv_heads, new_kv_heads, head_dim: of the text model.
        changed: tensors (names on disk) whose shape changes -> (old shape, new shape).
        removed: tensors (names on disk) that the new model does not have.
        names: of the checkpoint's tensors.
    """

    config: Any
    new_json: dict[str, Any]
    num_heads: int
    num_kv_heads: int
    new_kv_heads: int
    head_dim: int
    changed: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    removed: list[str]
    names: Names


def find_structure(source: Source, new_kv_heads: int) -> Structure:
    """Return what changes when the model of `source` gets `new_kv_heads` kv heads.

    Raises: ConversionError for models that cannot be converted, with the reason.
    """
    config = config_of(source.config, source)
    text, kind = text_config(config), config.model_type
    new_json: dict[str, Any] = copy.deepcopy(source.config)
    new_json.pop("_name_or_path", None)
    part = _text_part(new_json, config)
    heads, kv_heads, head_dim = head_counts(text)
    if kind in ALL_OR_ONE:
        able = [] if config.multi_query else [1]
        check_heads(kv_heads, new_kv_heads, able, f", and {kind} knows all heads or one")
        part |= {"multi_query": True}
        part |= {name: 1 for name in (FIELD, "num_kv_heads") if name in part}
    else:
        check_heads(kv_heads, new_kv_heads, divisors(kv_heads)[:-1])
        part[type(text).attribute_map.get(FIELD, FIELD)] = new_kv_heads
        own_head_dim = not isinstance(getattr(type(text), "head_dim", None), property)
        if own_head_dim and getattr(text, "head_dim", None) in (None, head_dim):
            part["head_dim"] = head_dim  # it must not follow from fewer heads
    old_model, new_model = build(config), build(config_of(new_json, source))
    before, after = shapes_of(old_model), shapes_of(new_model)
    changed = {n: (s, after[n]) for n, s in before.items() if n in after and after[n] != s}
    removed = [name for name in before if name not in after]
    if not changed or set(after) - set(before):
        raise ConversionError(
            f"{kind}: no tensor of {type(old_model).__name__} changes with {FIELD} alone: the class has no grouped kv heads. "
            f"What can be converted: {CAN}"
        )
    names = find_names(source, old_model, (*changed, *removed))
    return Structure(
        config=config,
        new_json=new_json,
        num_heads=heads,
        num_kv_heads=kv_heads,
        new_kv_heads=new_kv_heads,
        head_dim=head_dim,
        changed={names.on_disk[own]: shapes for own, shapes in changed.items()},
        removed=[names.on_disk[own] for own in removed],
        names=names,
    )


def config_of(found: Mapping[str, Any], source: Source) -> Any:
    """Return the config object of a config.json. Raises ConversionError for one that transformers does not know."""
    where = source.folder / "config.json"
    try:
        with tempfile.TemporaryDirectory() as folder:  # files say some values in a way of their own
            (Path(folder) / "config.json").write_text(json.dumps(found), "utf-8")
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # whatever the validators of a config class raise
        raise ConversionError(f"{where}: {type(error).__name__} {first_line(error)}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise ConversionError(
            f"{config.model_type} is an encoder-decoder model; decoders only can be converted"
        )
    return config


def text_config(config: Any) -> Any:
    """Return the text model's part of a config, never a copy. Raises ConversionError where it has several."""
    try:
        return config.get_text_config(decoder=True)
    except ValueError as error:
        raise ConversionError(f"{config.model_type}: {error}") from error


def _text_part(found: dict[str, Any], config: Any) -> dict[str, Any]:
    """Return the part of config.json that holds the text model's numbers."""
    text = text_config(config)
    while config is not text:
        parts = {name: getattr(config, name, None) for name in type(config).sub_configs}
        held = [
            n for n, p in parts.items() if p is text or (p is not None and text_config(p) is text)
        ]
        if not held or (held[0] not in found and FIELD in found):
            return found  # old files of some models keep the text model's numbers at the top
        found, config = found.setdefault(held[0], {}), parts[held[0]]
    return found


def head_counts(text: Any) -> tuple[int, int, int]:
    """Return (num_heads, num_kv_heads, head_dim) of a text config.

    Raises: ConversionError where layers differ, and where there are no kv heads to merge.
    """
    kind = text.model_type
    # configs with a per_layer_config raise for what differs between layers
    differ = sorted((getattr(text, "per_layer_attributes", None) or set()) & OF_HEADS)
    differ += [name for name in OTHER_FIELDS if getattr(text, name, None)]
    heads, kv_heads = (
        None if differ else getattr(text, name, None) for name in ("num_attention_heads", FIELD)
    )
    if kind in ALL_OR_ONE:
        kv_heads = 1 if text.multi_query else heads
    if differ or isinstance(kv_heads, (list, tuple)):
        raise ConversionError(
            f"{kind} has layers with different numbers of heads: {[*differ, FIELD][0]}"
        )
    if getattr(text, "new_decoder_architecture", False):
        raise ConversionError(
            "falcon with new_decoder_architecture: transformers repeats keys and values before it caches them, so that fewer kv "
            "heads would not make the cache smaller"
        )
    if kv_heads is None or heads is None:
        raise ConversionError(
            f"{kind} has no {FIELD}: its class has no grouped kv heads. What can be converted: {CAN}"
        )
    return heads, kv_heads, int(getattr(text, "head_dim", None) or text.hidden_size // heads)


def divisors(heads: int) -> list[int]:
    """Return the divisors of a number, in order."""
    return [n for n in range(1, heads + 1) if heads % n == 0]


def check_heads(kv_heads: int, asked: Any, able: list[int], why: str = "") -> None:
    """Raise ConversionError unless `kv_heads` heads can be merged into `asked`; the message lists what can be.

    Args:
        able: what can be asked for.
        why: said of the model, where that is less than all divisors.
    """
    if type(asked) is not int or asked not in able:
        choices = " or ".join(map(str, able)) or "left as it is"
        raise ConversionError(
            f"num_kv_heads must be {choices}: the model has {kv_heads} kv heads{why}; got {asked!r}"
        )


def model_class(config: Any) -> Any:
    """Return the class of a checkpoint: the one that its config names, if that is a class for such configs.

    Nothing else of transformers is ever called by the name that a file gives it.
    """
    names = getattr(config, "architectures", None)
    name = names[0] if isinstance(names, list) and names else None
    found: Any = getattr(transformers, name, None) if isinstance(name, str) else None
    own = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    if own and isinstance(found.config_class, type) and isinstance(config, found.config_class):
        return found
    try:
        return transformers.AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        raise ConversionError(
            f"transformers has no class {name!r} of a {config.model_type} model"
        ) from None


def build(config: Any) -> Any:
    """Return the model of a config on the meta device. Raises ConversionError where its class refuses the config."""
    kind, own = model_class(config), copy.deepcopy(config)
    # a config may name a kernel of the hub, which would be fetched and run
    own._attn_implementation = "eager"
    try:
        with torch.device("meta"):
            return kind(own).eval()
    except Exception as error:  # whatever a model's constructor thinks of these numbers
        kv_heads = getattr(text_config(config), FIELD, None)
        raise ConversionError(
            f"{kind.__name__} cannot be built with {FIELD}={kv_heads}: {first_line(error)}"
        ) from error


def shapes_of(model: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of a model."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def find_names(source: Source, model: Any, needed: tuple[str, ...] = ()) -> Names:
    """Return what transformers makes of the names on disk when it loads them into `model` (on the meta device).

    Args:
        needed: names in the class that must be on disk as they are.
    Raises: ConversionError unless the files hold every tensor of the model, of its shape.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    shapes = shapes_of(model)
    around = {"base_model_prefix": model.base_model_prefix, "meta_state_dict": model.state_dict()}
    on_disk: dict[str, str] = {}
    rebuilt, unknown, made = [], [], set()
    for name in source.tensors:
        own, converted = rename_source_key(name, renamings, converters, **around)
        if own not in shapes and name in shapes:
            own, converted = rename_source_key(name, [], [], **around)
        if own not in shapes:
            unknown.append(name)
        elif converted is not None:
            rebuilt.append(name)
            made.add(own)
        else:
            on_disk[own] = name
            stored = source.tensors[name]
            if stored.shape != shapes[own] or stored.dtype.itemsize == 1:
                raise ConversionError(
                    f"{source.folder}: {name!r} is {list(stored.shape)} of {stored.dtype}, and the config says "
                    f"{list(shapes[own])}; if it is quantized, convert the unquantized checkpoint"
                )
    tied = getattr(model, "all_tied_weights_keys", None) or {}  # name -> the one it is tied to
    there = {tied.get(own, own) for own in (*made, *on_disk)}
    optional = [re.compile(p) for p in (model._keys_to_ignore_on_load_missing or ())]
    for own in shapes:
        given = tied.get(own, own) in there or any(p.search(own) for p in optional)
        if not given or (own in needed and own not in on_disk):
            raise ConversionError(
                f"{source.folder} lacks {own!r}, which {type(model).__name__} has"
            )
    dropped = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"]
    return Names(
        on_disk, rebuilt, [n for n in unknown if not any(re.search(p, n) for p in dropped)]
    )
