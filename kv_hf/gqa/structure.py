"""The tensors of a model that change with its number of kv heads: found by building both models without memory.

Names are never guessed. The class of the checkpoint is built twice on the meta device, with the old and the new number
of kv heads; tensors whose shapes differ are the ones to convert, and all others must be the same.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from ..errors import ConversionError
from ..printable import short
from .checkpoint import Checkpoint
from .heads import CAN, FIELD, check_heads, head_counts, text_config
from .names import Names, find_missing, find_names

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Structure:
    """The changes that a conversion makes.

    Attributes:
        old, new: configs of the whole model.
        num_heads, num_kv_heads, new_kv_heads, head_dim: of the text model.
        changed: tensors (names on disk) whose shape changes -> (old shape, new shape).
        removed: tensors (names on disk) that the new model does not have.
        names: names in the class -> names on disk.
        unknown: tensors (names on disk) that the class does not have, and does not drop without a word either.
        rebuilt: loading makes some tensors out of others on disk, so that layers cannot be read one by one.
    """

    old: Any
    new: Any
    num_heads: int
    num_kv_heads: int
    new_kv_heads: int
    head_dim: int
    changed: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    removed: list[str]
    names: Mapping[str, str]
    unknown: list[str]
    rebuilt: bool = False


def find_structure(checkpoint: Checkpoint, new_kv_heads: int) -> Structure:
    """Return what changes when the model of `checkpoint` gets `new_kv_heads` kv heads.

    Raises: ConversionError for models that cannot be converted, with the reason.
    """
    config = load_config(checkpoint.folder)
    if config.model_type in MULTI_QUERY:
        counts, change = MULTI_QUERY[config.model_type](config, new_kv_heads)
    else:
        counts = head_counts(text_config(config))
        check_heads(counts[1], new_kv_heads)
        change = {FIELD: new_kv_heads}
    return compare(checkpoint, config, counts, new_kv_heads, change)


def compare(
    checkpoint: Checkpoint,
    config: Any,
    counts: tuple[int, int, int],
    new_kv_heads: int,
    change: Mapping[str, Any],
) -> Structure:
    """Return the difference between the model of `config` and that with `change` (of the text part)."""
    heads, kv_heads, head_dim = counts
    new = with_changes(config, change, head_dim)
    old_model, new_model = build(config), build(new)
    before, after = shapes_of(old_model), shapes_of(new_model)
    changed = {
        name: (shape, after[name])
        for name, shape in before.items()
        if name in after and after[name] != shape
    }
    removed = [name for name in before if name not in after]
    added = [name for name in after if name not in before]
    if added:
        raise ConversionError(
            f"{config.model_type}: a model with fewer kv heads has a new tensor {added[0]!r}"
        )
    if not changed:
        raise ConversionError(
            f"{config.model_type}: no tensor of {class_name(config)} changes with {', '.join(change)}: the class has no grouped kv "
            f"heads. What can be converted: {CAN}"
        )
    names = find_names(old_model, checkpoint.tensors)
    for own in (*changed, *removed):
        if own not in names.on_disk:
            also = f"; {names.rebuilt[0]!r} is rebuilt while it is loaded" if names.rebuilt else ""
            raise ConversionError(
                f"{checkpoint.folder} lacks {own!r}, which {class_name(config)} has{also}"
            )
    check_complete(checkpoint, config, old_model, names)
    tied = getattr(old_model, "all_tied_weights_keys", None) or ()
    return Structure(
        config,
        new,
        heads,
        kv_heads,
        new_kv_heads,
        head_dim,
        {names.on_disk[own]: shapes for own, shapes in changed.items()},
        [names.on_disk[own] for own in removed],
        names.on_disk,
        [name for name in names.unknown if name not in names.ignored],
        any(own not in names.on_disk and own not in tied for own in before),
    )


def check_complete(checkpoint: Checkpoint, config: Any, model: Any, names: Names) -> None:
    """Raise ConversionError unless the files hold every tensor of a model (on the meta device), of its shape."""
    for own in find_missing(model, names):
        raise ConversionError(f"{checkpoint.folder} lacks {own!r}, which {class_name(config)} has")
    shapes = shapes_of(model)
    for own, name in names.on_disk.items():
        found = checkpoint.tensors[name].shape
        if found != shapes[own]:
            raise ConversionError(
                f"{checkpoint.folder}: {name!r} is {list(found)}, and the config says {list(shapes[own])}"
            )


def load_config(folder: Path) -> Any:
    """Return the config of a folder. Raises ConversionError for one that transformers does not know."""
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # whatever the validators of a config class raise
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConversionError(f"{folder / 'config.json'}: {first}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise ConversionError(
            f"{config.model_type} is an encoder-decoder model; decoders only can be converted"
        )
    return config


Counts = tuple[int, int, int]


def _falcon(config: Any, asked: int) -> tuple[Counts, dict[str, Any]]:
    if config.new_decoder_architecture:
        raise ConversionError(
            "falcon with new_decoder_architecture: transformers repeats keys and values before it caches them, so that fewer kv "
            "heads would not make the cache smaller"
        )
    return _multi_query(config, asked)


def _multi_query(config: Any, asked: int) -> tuple[Counts, dict[str, Any]]:
    heads = config.num_attention_heads
    why = f" ({config.model_type} knows all heads or one)"
    check_heads(
        1 if config.multi_query else heads, asked, able=[] if config.multi_query else [1], why=why
    )
    return (heads, heads, config.hidden_size // heads), {"multi_query": True}


# classes that know all heads or one
MULTI_QUERY: dict[str, Callable[[Any, int], tuple[Counts, dict[str, Any]]]] = {
    "falcon": _falcon,
    "gpt_bigcode": _multi_query,
}


def with_changes(config: Any, change: Mapping[str, Any], head_dim: int) -> Any:
    """Return a copy of `config` with other values in its text part."""
    new = copy.deepcopy(config)
    text = text_config(new)
    for name, value in change.items():
        setattr(text, name, value)
    if FIELD in change and sets_head_dim(text, head_dim):
        text.head_dim = head_dim
    for name in (FIELD, "num_kv_heads"):
        if FIELD not in change and hasattr(text, name):
            setattr(text, name, 1)
    return new


def sets_head_dim(text: Any, head_dim: int) -> bool:
    """Say whether the new config is to name its head_dim: not where it follows from others, or means something else."""
    if isinstance(getattr(type(text), "head_dim", None), property):
        return False
    return getattr(text, "head_dim", None) in (None, head_dim)


def class_name(config: Any) -> str:
    """Return the name of the class that a checkpoint of this config is for."""
    return architecture(config) or f"the model of {config.model_type}"


def architecture(config: Any) -> str | None:
    """Return the first class that a config names, None where it names none. Raises ConversionError for what is no name."""
    names = getattr(config, "architectures", None) or []
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise ConversionError(
            f"config.json: architectures must be a list of names of classes, got {short(names)}"
        )
    return names[0] if names else None


def model_class(config: Any) -> Any:
    """Return the class of a checkpoint.

    Raises: ConversionError where transformers has none of that name, or it is no model that such a config makes. Nothing
        else of transformers is ever called by the name that a file gives it.
    """
    name = architecture(config)
    found = None if name is None else _named(name)
    if found is not None:
        if is_model_class(found) and isinstance(config, found.config_class):
            return found
        raise ConversionError(
            f"config.json: architectures names {name!r}, which is no class of a {config.model_type} model"
        )
    try:
        return transformers.AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        raise ConversionError(f"transformers has no class {class_name(config)!r}") from None


def _named(name: str) -> Any:
    """Return what transformers calls `name`, None where it has nothing of that name or cannot load it."""
    try:
        return getattr(transformers, name, None)
    except (
        Exception
    ):  # it loads its modules when they are asked for, with whatever packages these want
        return None


def is_model_class(found: Any) -> bool:
    """Say whether an attribute of transformers is the class of a model, made from a config of its own kind."""
    return (
        isinstance(found, type)
        and issubclass(found, transformers.PreTrainedModel)
        and isinstance(found.config_class, type)
    )


def build(config: Any) -> Any:
    """Return the model of a config on the meta device. Raises ConversionError where its class refuses the config."""
    kind = model_class(config)
    own = copy.deepcopy(config)
    # a config may name a kernel of the hub, which would be fetched and run
    own._attn_implementation = "eager"
    try:
        with torch.device("meta"):
            return kind(own)
    except Exception as error:  # whatever a model's constructor thinks of these numbers
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        kv_heads = getattr(text_config(config), FIELD, None)
        raise ConversionError(
            f"{kind.__name__} cannot be built with {FIELD}={kv_heads}: {first}"
        ) from error


def shapes_of(model: Any) -> Shapes:
    """Return the shapes of all tensors of a model."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
