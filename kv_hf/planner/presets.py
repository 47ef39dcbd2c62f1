"""Well-known models by name: their hub ids and configs, shipped in presets.json, one a line."""

import difflib
import json
from functools import cache
from importlib.resources import files
from typing import Any


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
