"""One HTML file out of a template, a style, scripts and data. Decides no figure: planner.js works them out.

The file asks the network for nothing, and a policy in its head forbids it: only its own script and style are let run,
by their digests.
"""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from ...config import CacheConfig
from ...formats import cache_names, cache_options, format_names, get_format
from ...version import __version__
from ..devices import DEVICES
from ..inventory import Inventory
from ..shares import heads_in_plan

SCRIPTS = (
    "planner.js",
    "fit.js",
    "state.js",
    "words.js",
    "model.js",
    "charts.js",
    "controls.js",
    "accuracy.js",
    "ui.js",
)
PAGE_SIZES = (16, 32, 64, 128, 256, 512)
DEFAULTS = {
    "model": "llama-3.1-8b",
    "batch": 4,
    "context": 16384,
    "keys": "int8",
    "values": "int4",
    "latent": "int8",
    "device": "rtx4090",
}
_KINDS = (
    "Grouped-query attention",
    "Multi-head attention",
    "Multi-query attention",
    "Sliding windows",
    "Latents (MLA)",
    "Hybrids with linear attention or convolutions",
)
_GIVEN = "Given"
_OPTIONS = ("page_size", "sink_tokens", "recent_tokens")
_SUPERSEDED = ("paged_int2_v1",)
_PLACE = re.compile(r"\{\{(\w+)\}\}")


@dataclass(frozen=True)
class Model:
    """A model that the page offers.

    Attributes:
        id: what a link calls it, without spaces.
        label: for people.
        inventory: what it keeps.
        source: where the figures come from.
        given: whether the user named it, in which case it comes first.
    """

    id: str
    label: str
    inventory: Inventory
    source: str = ""
    given: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return what the page reads."""
        return {
            "id": self.id,
            "label": self.label,
            "group": _GIVEN if self.given else kind_of(self.inventory),
            "source": self.source,
            "cut": heads_in_plan(self.inventory.model_type),
            "inventory": self.inventory.as_dict(),
        }


def kind_of(inventory: Inventory) -> str:
    """Return the kind of attention by which the page sorts its models."""
    layers = inventory.layers
    heads = [layer for layer in layers if layer.kv_heads and not layer.latent]
    if any(layer.latent for layer in layers):
        return "Latents (MLA)"
    if any(layer.states for layer in layers):
        return "Hybrids with linear attention or convolutions"
    if any(layer.window is not None for layer in layers):
        return "Sliding windows"
    if all(layer.kv_heads == 1 for layer in heads):
        return "Multi-query attention"
    if all(layer.kv_heads == layer.query_heads for layer in heads):
        return "Multi-head attention"
    return "Grouped-query attention"


def build_page(models: Sequence[Model]) -> str:
    """Return the page that offers `models`, the first of them where the usual one is not among them."""
    data = json.dumps(page_data(models), separators=(",", ":"), ensure_ascii=False)
    script = "\n".join(_read(name) for name in SCRIPTS)
    style = _read("style.css")
    parts = {
        "policy": policy(script, style),
        "style": style,
        "version": __version__,
        "data": data.replace("<", "\\u003c"),  # no text of a model ends the element
        "script": script,
    }
    return _PLACE.sub(lambda found: parts[found[1]], _read("template.html"))


def policy(script: str, style: str) -> str:
    """Return a content security policy that lets this script and this style run, and nothing be fetched."""
    allowed = {"script-src": _digest(script), "style-src": _digest(style), "img-src": "data:"}
    nothing = dict.fromkeys(("default-src", "base-uri", "form-action"), "'none'")
    return "; ".join(f"{name} {value}" for name, value in {**nothing, **allowed}.items())


def page_data(models: Sequence[Model]) -> dict[str, Any]:
    """Return all that the scripts read: models, formats, devices, defaults and measured accuracy."""
    listed = [model.as_dict() for model in sorted(models, key=_order)]
    devices = [
        {
            "id": device.name,
            "label": f"{device.name}: {device.memory / 2**30:.4g} GiB, {device.bandwidth / 1e9:,.0f} GB/s",
            "bytes": device.memory,
            "gib": round(device.memory / 2**30, 2),
            "gbs": device.bandwidth / 1e9,
        }
        for device in DEVICES.values()
        if device.memory is not None
    ]
    names = [model["id"] for model in listed]
    options = {name: getattr(CacheConfig, name) for name in _OPTIONS}
    defaults = {**DEFAULTS, **options}
    if defaults["model"] not in names or any(model.given for model in models):
        defaults["model"] = names[0] if names else "custom"
    default = next(one for one in devices if one["id"] == defaults["device"])
    return {
        "models": listed,
        "formats": formats(),
        "caches": _caches(),
        "latent_format_names": list(format_names("latent")),
        "page_sizes": list(PAGE_SIZES),
        "labels": {"dynamic": "DynamicCache", "static": "StaticCache"},
        "devices": devices,
        "defaults": {**defaults, "memory": default["gib"], "bandwidth": default["gbs"]},
        "accuracy": json.loads(_read("accuracy.json")),
    }


def formats() -> dict[str, dict[str, Any]]:
    """Return every format of keys, values and latents with its groups, as formats.Scheme describes them, and the format of RoPE keys beside it."""
    return {side: _schemes(side) for side in ("keys", "values", "latent")}


def _caches() -> list[dict[str, Any]]:
    """Return the cache names that stand for formats alone, with the format of latents: null where latents have none.

    Superseded names are for what was stored under them: the page does not offer them.
    """
    found = [
        {"name": name, "latent": None, **cache_options(name)}
        for name in cache_names()
        if set(cache_options(name)) <= {"keys", "values", "latent"} and name not in _SUPERSEDED
    ]
    latents = format_names("latent")
    for one in found:
        if one["latent"] is None and one["keys"] == one["values"] and one["keys"] in latents:
            one["latent"] = one["keys"]
    return found


def _schemes(side: str) -> dict[str, Any]:
    found = {name: get_format(name) for name in format_names(side)}
    return {
        name: {**one.scheme(side).as_dict(), "k_rope": one.k_rope} for name, one in found.items()
    }


def _order(model: Model) -> tuple[int, str]:
    return (-1, "") if model.given else (_KINDS.index(kind_of(model.inventory)), model.id)


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
