"""The tensors that change with a model's number of kv heads, the places of heads in them, and the mean of a group of heads.

The class is built twice without memory. Tensors whose shapes differ between the two models are the ones to convert, all others
must be the same, and a tensor whose rows are not known by its name is refused.

Source of the mean: Grouped-query attention (Ainslie et al., arXiv 2305.13245).
"""

import copy
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

# read in transformers 5.17 and 5.23: names of its own, which a later release may move
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from ..errors import ConversionError, first_line
from .source import Source

FIELD = "num_key_value_heads"
KINDS: dict[str, tuple[str, ...]] = {
    "k_proj": ("key",),
    "v_proj": ("value",),
    "k_norm": ("key_norm",),
    "qkv_proj": ("query", "key", "value"),
}
# class that knows all heads or one -> its fused projection, in which query, key and value rows of a head lie together
INTERLEAVED = {"falcon": "query_key_value", "gpt_bigcode": "c_attn"}
# name of a tensor of the result -> (names on disk, what makes it of them; None copies the only one)
Made = dict[str, tuple[tuple[str, ...], Any]]
CAN = (
    "classes with num_key_value_heads (llama, qwen, gemma, ..), falcon, gpt_bigcode, gpt_neox, gpt2"
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
class Part:
    """A stretch of rows of a tensor: all heads of one kind, one behind the other.

    Attributes:
        kind: "query", "key", "value" or "key_norm".
        heads: heads in it.
        rows: rows of each head.
        interleaved: the parts of this tensor lie head by head: [query, key, value] of the first, of the second, ..
    """

    kind: str
    heads: int
    rows: int
    interleaved: bool = False


@dataclass(frozen=True)
class Structure:
    """A conversion, ready to run.

    Attributes:
        config: of the source.
        new_json: config.json of the result, without the record of the conversion.
        num_heads, num_kv_heads, new_kv_heads, head_dim: of the text model.
        parts: tensors (names on disk) whose shape changes within the class -> the parts of their rows.
        names: of the checkpoint's tensors.
        made: tensors of the result by name -> (names on disk, what makes it of them; None copies the only one).
        kv_numbers: in one token's keys and values, of all layers.
        note: what the user should know of this model; "" for nothing.
        new_class: class of the result where it is another one.
    """

    config: Any
    new_json: dict[str, Any]
    num_heads: int
    num_kv_heads: int
    new_kv_heads: int
    head_dim: int
    parts: dict[str, tuple[Part, ...]]
    names: Names
    made: Made
    kv_numbers: int
    note: str
    new_class: str = ""

    def changed(self) -> tuple[str, ...]:
        """Return the names of the tensors that are not copied."""
        made = self.made.items()
        return tuple(name for name, (_, how) in made if how is not None)

    def make(self, name: str, read: Callable[[str], Tensor]) -> Tensor:
        """Return one tensor of the result [any shape], of what `read` returns for names on disk, in its own dtype or float64."""
        names, how = self.made[name]
        found: Tensor = read(names[0]) if how is None else how(*map(read, names))
        return found


def find_structure(source: Source, new_kv_heads: int) -> Structure:
    """Return what changes when the model of `source` gets `new_kv_heads` kv heads.

    Raises: ConversionError for models that cannot be converted, with the reason.
    """
    config = config_of(source.config, source)
    text, kind = config.get_text_config(decoder=True), config.model_type
    new_json: dict[str, Any] = copy.deepcopy(source.config)
    new_json.pop("_name_or_path", None)
    part = _text_part(new_json, config)
    heads, kv_heads, head_dim = head_counts(text)
    if kind in INTERLEAVED:
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
    if rare := sorted(before.keys() ^ after.keys()):
        raise ConversionError(
            f"{kind}: {rare[0]!r} exists with one number of kv heads only, and no rule says where its numbers go"
        )
    changed = [name for name in before if after[name] != before[name]]
    if not changed:
        raise ConversionError(
            f"{kind}: no tensor of {type(old_model).__name__} changes with {FIELD} alone: the class has no grouped kv heads. "
            f"What can be converted: {CAN}"
        )
    names = find_names(source, old_model, changed)
    parts: dict[str, tuple[Part, ...]] = {}
    made: Made = {name: ((name,), None) for name in source.tensors}
    numbers = 0
    for own in changed:
        name = names.on_disk[own]
        parts[name] = _parts(own, before[own], after[own], text, new_kv_heads)
        made[name] = (name,), partial(_pool_parts, parts=parts[name], groups=new_kv_heads)
        if own.endswith("weight"):
            cached = [part for part in parts[name] if part.kind in ("key", "value")]
            numbers += sum(part.heads * part.rows for part in cached)
    odd = names.unknown
    return Structure(
        config=config,
        new_json=new_json,
        num_heads=heads,
        num_kv_heads=kv_heads,
        new_kv_heads=new_kv_heads,
        head_dim=head_dim,
        parts=parts,
        names=names,
        made=made,
        kv_numbers=numbers,
        note=f"{len(odd)} tensors unknown to the class are copied: {odd[0]!r}, .." if odd else "",
    )


def _parts(
    name: str, old: tuple[int, ...], new: tuple[int, ...], text: Any, new_heads: int
) -> tuple[Part, ...]:
    """Return what the rows of a tensor that changes from shape `old` to `new` are made of.

    Raises: ConversionError for a tensor whose place in attention is not known.
    """
    heads, kv_heads, dim = head_counts(text)
    module = name.split(".")[-2]
    interleaved = module == INTERLEAVED.get(text.model_type) and heads == kv_heads
    kinds = KINDS["qkv_proj"] if interleaved else KINDS.get(module, ())
    queries = kinds.count("query") * heads
    others = len(kinds) - kinds.count("query")
    sizes = [dim]  # of a head: other tensors belong to layers with a different number of heads
    if module == "v_proj":
        sizes.append(getattr(text, "v_head_dim", None) or dim)
    if module == "k_norm":
        sizes.append(1)
    for rows in sizes:
        before, after = (rows * (queries + others * number) for number in (kv_heads, new_heads))
        if kinds and old[0] == before and new == (after, *old[1:]):
            counts = [heads if kind == "query" else kv_heads for kind in kinds]
            every = zip(kinds, counts, strict=True)
            return tuple(Part(kind, count, rows, interleaved) for kind, count in every)
    raise ConversionError(
        f"{text.model_type}: {name!r} changes from {list(old)} to {list(new)} with the number of kv heads, and the places of its "
        "heads are not known"
    )


def pool_heads(heads: Tensor, groups: int) -> Tensor:
    """Return the means of groups of neighbouring heads, summed in float64 and rounded once.

    Args:
        heads: [kv heads, rows, ..], any float dtype.
        groups: heads that remain; divides the first dimension.
    Returns: [groups, rows, ..] in the dtype of `heads`.
    """
    return heads.reshape(groups, -1, *heads.shape[1:]).double().mean(1).to(heads.dtype)


def _pool_parts(tensor: Tensor, *, parts: tuple[Part, ...], groups: int) -> Tensor:
    """Pool the heads of keys and values in one tensor [rows of all heads, ..] of a checkpoint."""
    found = split(tensor, parts)
    for kind, heads in found.items():
        if kind != "query":
            found[kind] = pool_heads(heads, groups)
    return join(found, parts)


def split(tensor: Tensor, parts: tuple[Part, ...]) -> dict[str, Tensor]:
    """Return kind -> [heads, rows, ..] of a tensor [rows of all parts, ..]."""
    kinds = [part.kind for part in parts]
    first, rest = parts[0], tensor.shape[1:]
    if first.interleaved:
        by_head = tensor.reshape(first.heads, len(parts), first.rows, *rest)
        return dict(zip(kinds, by_head.unbind(1), strict=True))
    pieces = tensor.split([part.heads * part.rows for part in parts])
    found = {}
    for part, piece in zip(parts, pieces, strict=True):
        found[part.kind] = piece.reshape(part.heads, part.rows, *rest)
    return found


def join(found: Mapping[str, Tensor], parts: tuple[Part, ...]) -> Tensor:
    """Undo `split`, with as many heads as there are now; what was interleaved becomes [all queries, keys, values]."""
    return torch.cat([found[part.kind].flatten(0, 1) for part in parts])


def config_of(found: Mapping[str, Any], source: Source) -> Any:
    """Return the config object of a config.json. Raises ConversionError for one that transformers does not know."""
    try:
        with tempfile.TemporaryDirectory() as folder:  # files say some values in a way of their own
            (Path(folder) / "config.json").write_text(json.dumps(found), "utf-8")
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        config.get_text_config(decoder=True)  # raises where a model has several text parts
    except Exception as error:  # whatever the validators of a config class raise
        raise ConversionError(
            f"{source.folder}: {type(error).__name__} {first_line(error)}"
        ) from error
    if getattr(config, "is_encoder_decoder", False):
        raise ConversionError(
            f"{config.model_type} is an encoder-decoder model; decoders only can be converted"
        )
    return config


def _text_part(found: dict[str, Any], config: Any) -> dict[str, Any]:
    """Return the part of config.json that holds the text model's numbers: old files of some models keep them at the top."""
    text = config.get_text_config(decoder=True)
    for name in type(config).sub_configs:
        if getattr(config, name, None) is text:
            part: dict[str, Any] = found.get(name, found)
            return part
    return found


def head_counts(text: Any) -> tuple[int, int, int]:
    """Return (num_heads, num_kv_heads, head_dim) of a text config. Raises ConversionError where there are no kv heads to merge."""
    # configs with per_layer_attributes raise for what differs between layers
    heads = kv_heads = None
    if not getattr(text, "per_layer_attributes", None):
        heads = getattr(text, "num_attention_heads", None)
        kv_heads = getattr(text, FIELD, None)
    if text.model_type in INTERLEAVED:
        kv_heads = 1 if text.multi_query else heads
    if not isinstance(heads, int) or not isinstance(kv_heads, int):
        raise ConversionError(
            f"{text.model_type} has no {FIELD}, one number for all layers. What can be converted: {CAN}"
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
    found: Any = getattr(transformers, str(name), None)
    own = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    if own and isinstance(config, found.config_class or ()):
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
        kv_heads = getattr(config.get_text_config(decoder=True), FIELD, None)
        raise ConversionError(
            f"{kind.__name__} cannot be built with {FIELD}={kv_heads}: {first_line(error)}"
        ) from error


def shapes_of(model: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of a model."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def find_names(source: Source, model: Any, needed: Iterable[str] = ()) -> Names:
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
            if tuple(stored.shape) != shapes[own] or stored.dtype.itemsize == 1:
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
    dropped = [r"rotary_emb\.inv_freq"]
    dropped += model._keys_to_ignore_on_load_unexpected or ()
    unknown = [name for name in unknown if not any(re.search(p, name) for p in dropped)]
    return Names(on_disk, rebuilt, unknown)
