"""Tensor parallelism: the part of a model's cache and weights that one of several devices holds.

transformers cuts a model by the plan of its config class. Where that plan cuts the projections of keys and values by
heads, a device caches its heads; where the plan gathers them again, or leaves attention alone, every device caches all.
Latents, indexer keys and states of linear attention are whole on every device in every plan of transformers.
"""

import functools
import math
from dataclasses import replace
from typing import Any

from transformers import CONFIG_MAPPING

from ..checks import check_int
from ..errors import CacheOptionError
from .inventory import CachedLayer, Inventory

SPLIT = "split"
WHOLE = "whole"
UNKNOWN = "unknown"
_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value", "c_attn", "Wqkv")


@functools.cache
def heads_in_plan(model_type: str) -> str:
    """Return what transformers' tensor parallel plan does with the kv heads of a family.

    SPLIT: every device has its heads. WHOLE: every device has all of them. UNKNOWN: there is no plan.
    """
    plan = _plan_of(model_type)
    if not plan:
        return UNKNOWN
    styles = {style for name, style in plan.items() if name.split(".")[-1] in _PROJECTIONS}
    return SPLIT if styles & {"colwise", "packed_colwise"} else WHOLE


def _plan_of(model_type: str) -> dict[str, str]:
    try:
        found: Any = CONFIG_MAPPING[model_type]
    except KeyError:
        return {}
    text = (getattr(found, "sub_configs", None) or {}).get("text_config")
    for config_class in (found, text):
        plan = getattr(config_class, "base_model_tp_plan", None)
        if plan:
            return dict(plan)
    return {}


def device_share(inventory: Inventory, degree: int) -> tuple[Inventory, list[str]]:
    """Return what one of `degree` devices holds, as an inventory of its own, and notes about what was assumed.

    Raises: CacheOptionError where kv heads do not divide.
    """
    check_int("tensor_parallel", degree, 1)
    if degree == 1:
        return inventory, []
    heads = sorted({layer.kv_heads for layer in inventory.layers if _has_heads(layer)})
    how = heads_in_plan(inventory.model_type)
    notes = []
    layers = inventory.layers
    if heads and how != WHOLE:
        if any(count % degree for count in heads):
            common = math.gcd(*heads)
            fits = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
            counts = " and ".join(str(count) for count in heads)
            raise CacheOptionError(
                f"tensor_parallel={degree} does not divide the {counts} kv heads of {inventory.name}; these do: {fits}"
            )
        layers = tuple(_share(layer, degree) for layer in layers)
        notes.append(f"a device holds 1/{degree} of the kv heads")
        if how == UNKNOWN:
            notes.append(
                f"transformers has no tensor parallel plan for {inventory.model_type}: that heads are cut is an assumption"
            )
    elif heads:
        notes.append(
            f"every device holds all kv heads: transformers' tensor parallel plan of {inventory.model_type} does not cut them"
        )
    whole = [
        name
        for name, there in (
            ("latents", any(layer.latent for layer in layers)),
            ("indexer keys", any(layer.index_dim for layer in layers)),
            ("states of linear attention", any(layer.states for layer in layers)),
        )
        if there
    ]
    if whole:
        notes.append(f"{' and '.join(whole)} are whole on every device")
    if inventory.stored_bytes is not None:
        notes.append(
            f"weights are taken as 1/{degree}; transformers keeps embeddings and norms whole, and attention where its plan "
            "leaves it alone"
        )
    return replace(
        inventory,
        layers=layers,
        parameters=_part(inventory.parameters, degree),
        expert_parameters=_part(inventory.expert_parameters, degree) or 0,
        weight_bytes=_part(inventory.weight_bytes, degree),
    ), notes


def _has_heads(layer: CachedLayer) -> bool:
    return layer.kv_heads > 0 and not layer.latent


def _share(layer: CachedLayer, degree: int) -> CachedLayer:
    if not _has_heads(layer):
        return layer
    return replace(
        layer, kv_heads=layer.kv_heads // degree, query_heads=layer.query_heads // degree
    )


def _part(count: int | None, degree: int) -> int | None:
    return None if count is None else -(-count // degree)
