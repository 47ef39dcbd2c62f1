"""Count a model's weights: all of them, and those of its routed experts."""

import re
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..cache.model_shape import decoder_config
from ..field_names import EXPERTS, EXPERTS_PER_TOKEN, first

_IN_EXPERTS = re.compile(r"(^|\.)experts\.")


@dataclass(frozen=True)
class Weights:
    """Numbers of weights; tied ones count once.

    Attributes:
        parameters: all.
        expert_parameters: those of routed experts.
        experts, experts_per_token: routed experts of a layer, and how many a token takes; 0 without experts.
        notes: parts beside the language model, with their numbers.
    """

    parameters: int
    expert_parameters: int
    experts: int
    experts_per_token: int
    notes: tuple[str, ...]


def count_weights(model: Any) -> Weights:
    """Count the parameters of a model, which may be on the meta device."""
    config = decoder_config(model.config)
    named = list(model.named_parameters())
    stated = first(config, EXPERTS) or 0
    inside = {id(p): p for name, p in named if _IN_EXPERTS.search(name)}
    stacked = {id(p): p for _, p in named if p.ndim == 3 and p.shape[0] == stated > 1}
    experts = inside | stacked
    count = max((len(m) for n, m in model.named_modules() if _is_list_of_experts(n, m)), default=0)
    count = count or max((p.shape[0] for p in experts.values() if p.ndim == 3), default=stated)
    return Weights(
        parameters=sum(p.numel() for _, p in named),
        expert_parameters=sum(p.numel() for p in experts.values()),
        experts=count if experts else 0,
        experts_per_token=(first(config, EXPERTS_PER_TOKEN) or 0) if experts else 0,
        notes=_towers(model),
    )


def _is_list_of_experts(name: str, module: Any) -> bool:
    return name.endswith(".experts") and isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _towers(model: Any) -> tuple[str, ...]:
    """Say which parts beside the language model the weights include."""
    text = decoder_config(model.config)
    notes = []
    for name in model.config.sub_configs:
        config = getattr(model.config, name, None)
        if config is None or config is text:
            continue
        parts = (m for m in model.modules() if isinstance(m, PreTrainedModel))
        part = next((m for m in parts if m.config is config), None)
        if part is not None:
            size = sum(p.numel() for p in part.parameters())
            notes.append(f"weights include {name.removesuffix('_config')}: {size:,} parameters")
    return tuple(notes)
