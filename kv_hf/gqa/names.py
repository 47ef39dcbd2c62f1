"""Names of tensors on disk and in the class: transformers renames while it loads, and so do we, with its own functions."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# read in transformers 5.17 and 5.23: names of its own, which a later release may move
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key


@dataclass(frozen=True)
class Names:
    """The names of a checkpoint's tensors.

    Attributes:
        on_disk: name in the class -> name on disk, for tensors that are only renamed.
        rebuilt: names on disk of tensors that loading cuts up, stacks or permutes.
        made: names in the class of what it makes of them.
        unknown: names on disk that the class does not have.
        ignored: those of them that the class drops without a word, as masks of old checkpoints.
    """

    on_disk: dict[str, str]
    rebuilt: list[str]
    made: set[str]
    unknown: list[str]
    ignored: list[str]


def find_names(model: Any, stored: Iterable[str]) -> Names:
    """Return what transformers makes of the names on disk when it loads them into `model` (built on the meta device)."""
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    known = model.state_dict()
    around = {"base_model_prefix": model.base_model_prefix, "meta_state_dict": known}
    on_disk: dict[str, str] = {}
    rebuilt, unknown, made = [], [], set()
    for name in stored:
        own, converted = rename_source_key(name, renamings, converters, **around)
        if own not in known and name in known:
            own, converted = rename_source_key(name, [], [], **around)
        if converted is not None and own in known:
            rebuilt.append(name)
            made.add(own)
        elif own in known:
            on_disk[own] = name
        else:
            unknown.append(name)
    dropped = model._keys_to_ignore_on_load_unexpected
    patterns = [re.compile(pattern) for pattern in (dropped or ())]
    ignored = [
        name
        for name in unknown
        if any(pattern.search(name) for pattern in patterns) or "rotary_emb.inv_freq" in name
    ]
    return Names(on_disk, rebuilt, made, unknown, ignored)


def find_missing(model: Any, names: Names) -> list[str]:
    """Return the names in the class that nothing on disk gives values: neither by name nor rebuilt, tied or left out on purpose."""
    there = names.made | set(names.on_disk)
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    same: dict[str, set[str]] = {}  # names of one tensor
    for one, other in tied.items():
        joined = same.get(one, {one}) | same.get(other, {other})
        same.update(dict.fromkeys(joined, joined))
    patterns = [re.compile(p) for p in (model._keys_to_ignore_on_load_missing or ())]
    return [
        own
        for own in model.state_dict()
        if own not in there
        and not same.get(own, set()) & there
        and not any(pattern.search(own) for pattern in patterns)
    ]
