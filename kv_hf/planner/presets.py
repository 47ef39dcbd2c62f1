"""Well-known models, shipped as small files: their configs, and what these say about memory."""

import difflib
import json
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from ..errors import PlanError

_FOLDER = "presets"


@cache
def _files() -> dict[str, Traversable]:
    folder = files(__package__) / _FOLDER
    if not folder.is_dir():
        return {}
    found = (file for file in folder.iterdir() if file.name.endswith(".json"))
    return {
        file.name.removesuffix(".json"): file for file in sorted(found, key=lambda file: file.name)
    }


def preset_names() -> tuple[str, ...]:
    """Return the names of all presets, sorted."""
    return tuple(_files())


def is_preset(name: str) -> bool:
    """Say whether there is a preset of this name; upper and lower case are alike."""
    return name.lower() in _files()


def read_preset(name: str) -> dict[str, Any]:
    """Return a preset: "name", "model" (hub id), "source", "config", "inventory" (see
    Inventory.from_dict), and "notes" for it where there are any.

    Raises: PlanError for other names, with those that are near.
    """
    if not is_preset(name):
        raise PlanError(f"there is no preset {name!r}{near_presets(name)}")
    return dict(json.loads(_files()[name.lower()].read_text(encoding="utf-8")))


def preset_of_model(model: str) -> str | None:
    """Return the name of the preset made from this hub id, None where there is none."""
    wanted = model.lower()
    return next((name for name in _files() if read_preset(name)["model"].lower() == wanted), None)


def near_presets(name: str) -> str:
    """Return the end of a sentence: presets with names like this one, or where to find them."""
    short = name.lower().rsplit("/", 1)[-1]
    near = difflib.get_close_matches(short, _files(), n=4, cutoff=0.5)
    if near:
        return f"; did you mean {' or '.join(near)}?"
    return "; `kv-hf memory --list-presets` lists the presets" if _files() else ""
