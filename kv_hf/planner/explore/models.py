"""The models that the page offers: all presets, and what the user named."""

import re
from collections.abc import Sequence

from ...errors import KVCacheError
from ...notices import say_once
from ..presets import preset_names, read_preset
from ..source import inventory_of_preset, load_inventory
from .page import Model

_NOT_IN_LINKS = re.compile(r"[^A-Za-z0-9._-]+")


def offered(own: Sequence[str]) -> list[Model]:
    """Return the presets, and in front of them the models named `own`.

    A preset that the installed transformers cannot have is left out, and said.

    Raises: KVCacheError for a named model that there is not, or that cannot be planned.
    """
    given: list[Model] = []
    taken = set(preset_names())
    for name in own:
        inventory = load_inventory(name)
        base = _NOT_IN_LINKS.sub("-", inventory.name).strip("-") or "model"
        link = next(one for one in _numbered(base) if one not in taken)
        taken.add(link)
        given.append(Model(link, inventory.name, inventory, inventory.source, given=True))
    return given + [model for model in map(_preset, preset_names()) if model is not None]


def _numbered(base: str) -> list[str]:
    return [base, *(f"{base}-{number}" for number in range(2, 1000))]


def _preset(name: str) -> Model | None:
    found = read_preset(name)
    try:
        inventory = inventory_of_preset(found)
    except KVCacheError as error:
        say_once(f"page without {name}", f"kv_hf: the page does not offer {name}: {error}")
        return None
    return Model(name, found["model"].rpartition("/")[2], inventory, found["source"])
