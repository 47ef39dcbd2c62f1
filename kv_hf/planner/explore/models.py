"""The models that the page offers: all presets, and what the user named."""

import re
from collections.abc import Sequence

from ..presets import preset_names, read_preset
from ..source import inventory_of_preset, load_inventory
from .page import Model

_NOT_IN_LINKS = re.compile(r"[^A-Za-z0-9._-]+")


def offered(own: Sequence[str]) -> list[Model]:
    """Return the presets, and in front of them the models named `own`.

    Raises: KVCacheError for a model that there is not, or that cannot be planned.
    """
    given: list[Model] = []
    taken = set(preset_names())
    for name in own:
        inventory = load_inventory(name)
        base = _NOT_IN_LINKS.sub("-", inventory.name).strip("-") or "model"
        link = next(one for one in _numbered(base) if one not in taken)
        taken.add(link)
        given.append(Model(link, inventory.name, inventory, inventory.source, given=True))
    return given + [_preset(name) for name in preset_names()]


def _numbered(base: str) -> list[str]:
    return [base, *(f"{base}-{number}" for number in range(2, 1000))]


def _preset(name: str) -> Model:
    found = read_preset(name)
    label = found["model"].rpartition("/")[2]
    return Model(name, label, inventory_of_preset(found), found["source"])
