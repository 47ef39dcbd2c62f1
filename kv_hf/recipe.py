"""Recipes: formats per layer and side in a small JSON file, which `cache_config={"recipe": path}` takes.

Knows no model and no tensor. `kv_hf.recommend` writes recipes; they may be written by hand as well: the format marker,
the version, `keys` and `values` are all that is needed.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from .errors import CacheOptionError, InputFileError, reason
from .files.reading import RECIPE_BYTES, read_json
from .files.writing import replace_text
from .formats import format_names

FORMAT = "kv_hf recipe"
VERSION = 1

# options that a recipe decides alone, and those that belong to what was measured
FORMAT_OPTIONS = ("keys", "values", "layers")
MEASURED_OPTIONS = (
    "page_size",
    "key_group_size",
    "value_group_size",
    "sink_tokens",
    "recent_tokens",
)
# sizes by which a recipe is told from one of another model
MODEL_SIZES = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
_OWN = ("format", "version", "model", *MEASURED_OPTIONS, "keys", "values")


@dataclass(frozen=True)
class Recipe:
    """Formats of every layer, and how they came about.

    Attributes:
        keys, values: one format per layer; None for layers that transformers keeps (linear attention, for one).
        options: those of MEASURED_OPTIONS that are not the default.
        model: sizes of the model it was made for (MODEL_SIZES; absent ones are not checked), and its name.
        facts: everything else in the file: budget, bits_per_element, predicted_kl, versions, date, .. They are for
            people; nothing is decided by them.
        name: for messages: the file's path, or "a dict".
    """

    keys: tuple[str | None, ...]
    values: tuple[str | None, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    name: str = "a dict"

    @classmethod
    def read(cls, source: Any) -> "Recipe":
        """Read a recipe from a file, or from what json.loads made of one; a Recipe is returned as it is.

        Raises: CacheOptionError that names the file and what is wrong with it.
        """
        if isinstance(source, Recipe):
            return source
        if isinstance(source, Mapping):
            return cls.parse(source, "a dict")
        if not isinstance(source, (str, os.PathLike)):
            raise CacheOptionError(
                f"recipe must be the path of a JSON file or a dict, got {type(source).__name__}"
            )
        path = Path(source)
        try:
            found = read_json(path, RECIPE_BYTES, "recipe")
        except InputFileError as error:
            raise CacheOptionError(str(error)) from None
        except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
            raise CacheOptionError(
                f"recipe {str(path)!r} cannot be read: {reason(error)}"
            ) from None
        return cls.parse(found, repr(str(path)))

    @classmethod
    def parse(cls, found: Any, name: str) -> "Recipe":
        """Check the contents of a recipe. Raises CacheOptionError, naming `name`."""
        if not isinstance(found, Mapping) or found.get("format") != FORMAT:
            raise CacheOptionError(f'recipe {name} is none: it has no "format": "{FORMAT}"')
        if found.get("version") != VERSION:
            raise CacheOptionError(
                f"recipe {name} is of version {found.get('version')!r}; this kv_hf reads version {VERSION}"
            )
        sides = {side: _formats(found.get(side), side, name) for side in ("keys", "values")}
        if [one is None for one in sides["keys"]] != [one is None for one in sides["values"]]:
            raise CacheOptionError(
                f"recipe {name}: keys and values must name formats for the same layers, got {len(sides['keys'])} and "
                f"{len(sides['values'])} entries"
            )
        model = found.get("model", {})
        if not isinstance(model, Mapping):
            raise CacheOptionError(f"recipe {name}: model must be an object, got {model!r}")
        options = {option: found[option] for option in MEASURED_OPTIONS if option in found}
        facts = {key: value for key, value in found.items() if key not in _OWN}
        return cls(**sides, options=options, model=dict(model), facts=facts, name=name)

    def as_options(self) -> dict[str, Any]:
        """Return the options of CacheConfig that say the same: keys, values, layers, and `options`."""
        base = {side: _most_common(getattr(self, side), side) for side in ("keys", "values")}
        layers: dict[str, dict[str, str]] = {}
        pairs = list(zip(self.keys, self.values, strict=True))
        for pair, run in groupby(range(len(pairs)), key=lambda index: pairs[index]):
            first, *rest = run
            sides = zip(base, pair, strict=True)
            own = {side: one for side, one in sides if one is not None and one != base[side]}
            if own:
                layers[f"{first}-{rest[-1]}" if rest else str(first)] = own
        return {**base, "layers": layers or None, **self.options}

    def layers(self) -> dict[str, dict[str, str]]:
        """Return CacheConfig.layers that name both formats of every paged layer."""
        return {
            str(index): {"keys": keys, "values": values}
            for index, (keys, values) in enumerate(zip(self.keys, self.values, strict=True))
            if keys is not None and values is not None
        }

    def check_model(self, sizes: Mapping[str, Any], num_layers: int, paged: set[int]) -> None:
        """Raise CacheOptionError unless this recipe fits a model.

        Args:
            sizes: the model's MODEL_SIZES, None where it has none; what is not a plain number or word is not compared.
            num_layers: its layers.
            paged: those that live in pages.
        """
        if len(self.keys) != num_layers:
            raise CacheOptionError(
                f"recipe {self.name} has formats for {len(self.keys)} layers, the model has {num_layers}: it was made for another "
                "model, and kv_hf.recommend makes one for this model"
            )
        for name in MODEL_SIZES:
            wanted, own = self.model.get(name), sizes.get(name)
            if wanted is not None and own is not None and wanted != own:
                raise CacheOptionError(
                    f"recipe {self.name} was made for a model of {name}={wanted!r}, this one has {name}={own!r}; "
                    "kv_hf.recommend makes one for this model"
                )
        for index, stored in enumerate(self.keys):
            if (stored is not None) != (index in paged):
                raise CacheOptionError(
                    f"recipe {self.name} has {'a' if stored else 'no'} format for layer {index}, which "
                    f"{'is' if index in paged else 'is not'} in pages"
                )

    def to_json(self) -> dict[str, Any]:
        """Return what the file holds."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "model": dict(self.model),
            **self.options,
            **self.facts,
            "keys": list(self.keys),
            "values": list(self.values),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the recipe aside and move it to `path` when it is complete. Raises OSError where the disk refuses."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(self.to_json(), indent=1) + "\n")


def beside_recipe(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given` with its recipe read, ready for CacheConfig.

    Raises: CacheOptionError where an option says what the recipe decides: formats at all, or another size than was
        measured.
    """
    recipe = Recipe.read(given["recipe"])
    decided = recipe.as_options()
    for name in decided:
        if name not in given or given[name] is None:
            continue
        if name in FORMAT_OPTIONS or given[name] != decided[name]:
            raise CacheOptionError(
                f"{name}={given[name]!r} does not go with recipe {recipe.name}, which decides {name}; leave one of "
                "them out"
            )
    kept = {name: value for name, value in given.items() if name not in decided}
    return {**kept, "recipe": recipe}


def _formats(found: Any, side: str, name: str) -> tuple[str | None, ...]:
    if not isinstance(found, Sequence) or isinstance(found, str) or not found:
        raise CacheOptionError(
            f"recipe {name}: {side} must be a list with one format per layer, got {found!r}"
        )
    known = format_names(side)
    for layer, one in enumerate(found):
        if one is not None and one not in known:
            raise CacheOptionError(
                f"recipe {name}: {side} of layer {layer} must be one of {', '.join(known)}, got {one!r}"
            )
    if all(one is None for one in found):
        raise CacheOptionError(f"recipe {name}: {side} name no format at all")
    return tuple(found)


def _most_common(names: Sequence[str | None], side: str) -> str:
    given = [name for name in names if name is not None]
    return max(format_names(side), key=given.count)
