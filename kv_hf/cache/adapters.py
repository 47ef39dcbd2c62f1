"""The adapters that take part in a model's forwards, with their settings. Reads peft's layers without importing peft.

peft's tuner layers say it themselves: their class lists under `adapter_layer_names` the containers of an adapter's
tensors and under `other_param_names` those of its settings, each of them keyed by the adapter's name.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Adapters:
    """The state of a model's adapters at one moment.

    Attributes:
        active: names of the adapters that forwards add, sorted; without those that are merged or disabled.
        merged: names of the adapters that are merged into the weights.
        disabled: whether layers with adapters leave them out.
        scaling: scaling factors of the active adapters, for people.
        settings: hexadecimal digest of all settings of the active adapters in all layers; "" without any.
        virtual: kind and name of the virtual tokens in front of each prompt, "" without.
        by_call: whether hooks choose adapters for each row or token of the current call.
    """

    active: tuple[str, ...] = ()
    merged: tuple[str, ...] = ()
    disabled: bool = False
    scaling: str = ""
    settings: str = ""
    virtual: str = ""
    by_call: bool = False

    def effective(self) -> "Adapters":
        """Return what keys and values depend on beside the weights: that adapters are merged, the weights say."""
        return Adapters(self.active, (), False, self.scaling, self.settings, self.virtual, self.by_call)  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Return the attributes as plain JSON."""
        return {**asdict(self), "active": list(self.active), "merged": list(self.merged)}

    @classmethod
    def from_json(cls, given: Any) -> "Adapters | None":
        """Return what `to_json` returned, or None for anything else."""
        default = cls().to_json()
        if not isinstance(given, dict) or set(given) != set(default):
            return None
        if any(type(given[name]) is not type(value) for name, value in default.items()):
            return None
        names = [*given["active"], *given["merged"]]
        if not all(isinstance(name, str) for name in names):
            return None
        return cls(**{**given, "active": tuple(given["active"]), "merged": tuple(given["merged"])})

    def __str__(self) -> str:
        found = []
        if self.active:
            found.append(f"{_named(self.active)} active")
            found[-1] += f" (scaling {self.scaling})" if self.scaling else ""
        if self.by_call:
            found.append("adapters chosen for each row")
        if self.virtual:
            found.append(f"virtual tokens of {self.virtual}")
        if self.disabled:
            found.append("adapters disabled")
        if self.merged:
            found.append(f"{_named(self.merged)} merged")
        return ", ".join(found) or "no adapter"


def _named(names: tuple[str, ...]) -> str:
    return f"adapter{'s' if len(names) > 1 else ''} {' + '.join(map(repr, names))}"


def without_adapters(model: Any) -> Any:
    """Return the transformers model inside of a peft one, or `model` itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def adapters_of(model: Any) -> Adapters:
    """Return what adapters do in `model`, a transformers model or a peft one around it, right now."""
    names: set[str] = set()
    merged: set[str] = set()
    disabled = by_call = False
    scaling: set[float] = set()
    digest = hashlib.sha256()
    for place, layer in enumerate(tuner_layers(model)):
        merged.update(layer.merged_adapters)
        disabled |= bool(layer.disable_adapters)
        by_call |= bool(layer._forward_pre_hooks)
        for name in active_in(layer):
            names.add(name)
            settings = _settings(layer, name)
            factor = settings.get("scaling")
            scaling |= {factor} if isinstance(factor, float | int) else set()
            digest.update(json.dumps([place, name, settings], sort_keys=True).encode())
    ends = sorted({min(scaling), max(scaling)}) if scaling else []
    owner = virtual_owner(model)
    return Adapters(
        tuple(sorted(names)),
        tuple(sorted(merged)),
        disabled,
        " to ".join(f"{end:.6g}" for end in ends),
        digest.hexdigest() if names else "",
        "" if owner is None else _virtual(owner),
        by_call,
    )


def tuner_layers(model: Any) -> Iterator[Any]:
    """Yield the layers of `model` that peft has put adapters into."""
    if "peft" not in sys.modules:  # these layers are of its classes: nothing to look for
        return
    for module in without_adapters(model).modules():
        if hasattr(type(module), "adapter_layer_names"):
            yield module


def active_in(layer: Any) -> list[str]:
    """Return the adapters that a forward of one tuner layer adds to the layer's own weights."""
    if layer.disable_adapters:
        return []
    held = {name for container in _containers(layer) for name in container}
    given = layer.active_adapters
    return [name for name in given if name in held and name not in layer.merged_adapters]


def idle_parts(model: Any) -> tuple[set[int], set[tuple[int, str]]]:
    """Return what belongs to adapters that forwards leave out: ids of modules, and (id of module, tensor's name)."""
    modules: set[int] = set()
    tensors: set[tuple[int, str]] = set()
    for layer in tuner_layers(model):
        used = active_in(layer)
        for container in _containers(layer):
            for name in container:
                part = container[name]
                if name in used:
                    continue
                if isinstance(part, torch.nn.Module):
                    modules.update(map(id, part.modules()))
                else:
                    tensors.add((id(container), name))
    return modules, tensors


def virtual_owner(model: Any) -> Any:
    """Return the peft model that puts virtual tokens in front of each prompt of `model`; None without one.

    While generate() runs, `model` is the transformers model, and its inputs are prepared by the peft one.
    """
    prepare = vars(model).get("prepare_inputs_for_generation")
    for owner in (getattr(prepare, "__self__", None), model):
        config = getattr(owner, "active_peft_config", None)
        if getattr(config, "is_prompt_learning", False):
            return None if getattr(owner, "_adapters_disabled", False) else owner
    return None


def virtual_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that the virtual tokens of a peft model are computed from, by their names.

    Returns: parameters of the active adapter's prompt encoder, of its own shapes (for prompt tuning one table
        [virtual tokens, hidden]); empty where the model has no virtual tokens.
    """
    owner = virtual_owner(model)
    encoder = None if owner is None else getattr(owner, "prompt_encoder", {})
    if not encoder or owner.active_adapter not in encoder:
        return {}
    found = encoder[owner.active_adapter].named_parameters()
    return {f"prompt_encoder.{owner.active_adapter}.{name}": tensor for name, tensor in found}


def _virtual(owner: Any) -> str:
    kind = str(owner.active_peft_config.peft_type).rpartition(".")[2].lower().replace("_", " ")
    return f"{kind} {owner.active_adapter!r} ({owner.active_peft_config.num_virtual_tokens})"


def _containers(layer: Any) -> Iterator[Any]:
    """Yield what a tuner layer keeps by adapter's name and that holds tensors."""
    for attribute in (*layer.adapter_layer_names, *layer.other_param_names):
        found = getattr(layer, attribute, None)
        if isinstance(found, torch.nn.Module) and hasattr(found, "keys"):
            yield found


def _settings(layer: Any, name: str) -> dict[str, Any]:
    """Return the settings of one adapter in one layer: plain values alone."""
    found = {}
    for attribute in layer.other_param_names:
        kept = getattr(layer, attribute, None)
        value = kept.get(name) if isinstance(kept, dict) else None
        if isinstance(value, bool | int | float | str):
            found[attribute] = value
    return found
