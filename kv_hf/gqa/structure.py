"""Which tensors of a model change with its number of kv heads: found by building both models without memory.

Names are never guessed. The class of the checkpoint is built twice on the meta device, with the old and the new number
of kv heads; tensors whose shapes differ are the ones to convert, and all others must be the same.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from ..errors import ConversionError
from .checkpoint import Checkpoint

FIELD = "num_key_value_heads"
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Structure:
    """What a conversion changes.

    Attributes:
        old, new: configs of the whole model.
        num_heads, num_kv_heads, new_kv_heads, head_dim: of the text model.
        changed: tensors (names on disk) whose shape changes -> (old shape, new shape).
        removed: tensors (names on disk) that the new model does not have.
        prefix: what names on disk have in front of (or lack from) those of the class; (added, left out).
    """

    old: Any
    new: Any
    num_heads: int
    num_kv_heads: int
    new_kv_heads: int
    head_dim: int
    changed: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    removed: list[str]
    prefix: tuple[str, str]


def text_config(config: Any) -> Any:
    """Return the text model's part of a config, never a copy."""
    found = config.get_text_config(decoder=True)
    return found


def find_structure(checkpoint: Checkpoint, new_kv_heads: int) -> Structure:
    """Return what changes when the model of `checkpoint` gets `new_kv_heads` kv heads.

    Raises: ConversionError for models that cannot be converted, with the reason.
    """
    config = load_config(checkpoint)
    text = text_config(config)
    heads, kv_heads, head_dim = head_counts(text)
    check_heads(kv_heads, new_kv_heads)
    new = with_kv_heads(config, new_kv_heads, head_dim)
    before, after = shapes_of(checkpoint, config), shapes_of(checkpoint, new)
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
            f"{config.model_type}: no tensor of {class_name(config)} changes with {FIELD}: the class has no grouped kv heads"
        )
    prefix = find_prefix(checkpoint, before)
    on_disk = {disk_name(name, prefix): name for name in (*changed, *removed)}
    for name, own in on_disk.items():
        if name not in checkpoint.tensors:
            raise ConversionError(
                f"{checkpoint.folder} lacks {name!r}, which {class_name(config)} has"
            )
        if checkpoint.tensors[name].shape != before[own]:
            raise ConversionError(
                f"{checkpoint.folder}: {name!r} is {list(checkpoint.tensors[name].shape)}, and the config says "
                f"{list(before[own])}"
            )
    return Structure(
        config,
        new,
        heads,
        kv_heads,
        new_kv_heads,
        head_dim,
        {name: changed[own] for name, own in on_disk.items() if own in changed},
        [name for name, own in on_disk.items() if own not in changed],
        prefix,
    )


def load_config(checkpoint: Checkpoint) -> Any:
    """Return the config of a checkpoint. Raises ConversionError for one that transformers does not know."""
    try:
        config = transformers.AutoConfig.from_pretrained(checkpoint.folder)
    except (OSError, ValueError, KeyError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConversionError(f"{checkpoint.folder / 'config.json'}: {first}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise ConversionError(
            f"{config.model_type} is an encoder-decoder model; decoders only can be converted"
        )
    return config


def head_counts(text: Any) -> tuple[int, int, int]:
    """Return (num_heads, num_kv_heads, head_dim) of a text config."""
    try:
        heads, kv_heads = text.num_attention_heads, getattr(text, FIELD, None)
    except Exception as error:  # heterogeneous configs (5.23) raise where layers differ
        raise ConversionError(
            f"{text.model_type} has layers with different numbers of heads"
        ) from error
    if isinstance(kv_heads, (list, tuple)) or isinstance(heads, (list, tuple)):
        raise ConversionError(
            f"{text.model_type} has layers with different numbers of heads: {FIELD}={kv_heads}"
        )
    if getattr(text, "kv_lora_rank", None) is not None:
        raise ConversionError(
            f"{text.model_type} caches latents (MLA), which all heads share: there are no kv heads to merge"
        )
    if kv_heads is None:
        raise ConversionError(
            f"{text.model_type} has no {FIELD}: its class knows no grouped kv heads"
        )
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return int(heads), int(kv_heads), int(head_dim)


def check_heads(kv_heads: int, asked: int) -> None:
    """Raise ConversionError unless `kv_heads` heads can be merged into `asked`; the message lists what can be."""
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < 1:
        raise ConversionError(f"num_kv_heads must be an integer of at least 1, got {asked!r}")
    if asked == kv_heads:
        raise ConversionError(
            f"num_kv_heads={asked}: the model has {kv_heads} kv heads already, there is nothing to do"
        )
    divisors = [n for n in range(1, kv_heads) if kv_heads % n == 0]
    if asked not in divisors:
        able = ", ".join(map(str, divisors)) or "none (it has one already)"
        raise ConversionError(
            f"num_kv_heads must divide the model's {kv_heads}: one of {able}; got {asked}"
        )


def with_kv_heads(config: Any, kv_heads: int, head_dim: int) -> Any:
    """Return a copy of `config` whose text model has `kv_heads` kv heads of `head_dim`."""
    new = copy.deepcopy(config)
    text = text_config(new)
    setattr(text, FIELD, kv_heads)
    if getattr(text, "head_dim", head_dim) in (None, head_dim):
        text.head_dim = head_dim
    return new


def class_name(config: Any) -> str:
    """Return the name of the class that a checkpoint of this config is for."""
    names = getattr(config, "architectures", None) or []
    return str(names[0]) if names else f"the model of {config.model_type}"


def model_class(config: Any) -> Any:
    """Return the class of a checkpoint. Raises ConversionError where transformers has none."""
    names = getattr(config, "architectures", None) or []
    found = getattr(transformers, names[0], None) if names else None
    if found is not None:
        return found
    try:
        return transformers.AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        raise ConversionError(f"transformers has no class {class_name(config)!r}") from None


def shapes_of(checkpoint: Checkpoint, config: Any) -> Shapes:
    """Return the shapes of all tensors of a model, built on the meta device."""
    kind = model_class(config)
    try:
        with torch.device("meta"):
            model = kind(copy.deepcopy(config))
    except Exception as error:  # whatever a model's constructor thinks of these numbers
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        kv_heads = getattr(text_config(config), FIELD, None)
        raise ConversionError(
            f"{kind.__name__} cannot be built with {FIELD}={kv_heads}: {first}"
        ) from error
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def find_prefix(checkpoint: Checkpoint, shapes: Mapping[str, Any]) -> tuple[str, str]:
    """Return (added, left out): what names on disk have in front of, and lack from, those of the class."""
    stored = checkpoint.tensors
    candidates = [("", "")]
    heads = {name.split(".")[0] + "." for name in (*shapes, *stored)}
    candidates += [(head, "") for head in sorted(heads)] + [("", head) for head in sorted(heads)]

    def known(prefix: tuple[str, str]) -> int:
        return sum(disk_name(name, prefix) in stored for name in shapes)

    return max(candidates, key=known)


def disk_name(name: str, prefix: tuple[str, str]) -> str:
    """Return the name on disk of a tensor of the class."""
    added, left_out = prefix
    return added + (name.removeprefix(left_out) if left_out else name)
