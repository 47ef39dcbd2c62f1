"""The four projections of an attention layer: found in a layer by what they do, read head by head, written back.

A converted layer is run as one with the old number of heads, in which the merged ones are repeated: that is the same
mathematics, and needs no second model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ..errors import ConversionError
from .layouts import Part, join, parts_of, split
from .structure import Structure
from .taps import Tap

Heads = dict[str, torch.Tensor]  # kind -> [heads, rows, ..]


@dataclass
class Projections:
    """Where queries, keys, values and outputs of one attention layer come from.

    Attributes:
        attention: path of the attention module in the model.
        tensors: names in the model of the tensors with query, key, value and norm rows -> their parts.
        output: path of the linear layer behind attention, or None where something lies between.
    """

    attention: str
    tensors: dict[str, tuple[Part, ...]]
    output: str | None = None
    structure: Structure = field(repr=False, default=None)  # type: ignore[assignment]

    def modules(self, kind: str) -> tuple[str, int]:
        """Return (path of the module, first row) of the rows of a kind."""
        for name, parts in self.tensors.items():
            row = 0
            for part in parts:
                if part.kind == kind and name.endswith(".weight"):
                    return name.removesuffix(".weight"), row
                row += part.heads * part.rows
        raise KeyError(kind)

    def read(self, model: nn.Module) -> dict[str, Heads]:
        """Return {"weight": kind -> [heads, rows, inputs], "bias": kind -> [heads, rows]} of a loaded layer, in float64."""
        found: dict[str, Heads] = {"weight": {}, "bias": {}}
        for name, parts in self.tensors.items():
            which = name.rpartition(".")[2]
            found[which].update(split(model.get_parameter(name).detach().double(), parts))
        return found

    def write(
        self,
        model: nn.Module,
        heads: Mapping[str, Heads],
        merged: Sequence[str],
        new_of: torch.Tensor,
    ) -> None:
        """Put heads into a loaded layer, each of the kinds `merged` repeated for the old heads that it stands for.

        Args:
            new_of: [num_kv_heads], the new kv head of each old one.
        """
        for name, parts in self.tensors.items():
            which = name.rpartition(".")[2]
            rows = {
                part.kind: heads[which][part.kind][new_of]
                if part.kind in merged
                else heads[which][part.kind]
                for part in parts
            }
            weight = model.get_parameter(name)
            weight.data = join(rows, parts).to(weight.dtype)

    def on_disk(self, merged: Mapping[str, Heads]) -> dict[str, torch.Tensor]:
        """Return names on disk -> tensors [rows of the new heads, ..]."""
        found = {}
        for name, parts in self.tensors.items():
            which = name.rpartition(".")[2]
            found[self.structure.names[name]] = join(merged[which], parts)
        return found


def find_projections(structure: Structure, model: nn.Module, layer: str) -> Projections:
    """Return the projections of a layer (its path), but for the output's, which `find_output` finds while it runs.

    Raises: ConversionError where the queries cannot be found.
    """
    tensors: dict[str, tuple[Part, ...]] = {}
    if structure.removed:
        raise ConversionError(
            f"{structure.old.model_type} has norms of its own for every kv head, so that it cannot be calibrated; use "
            'method="mean"'
        )
    for own, name in structure.names.items():
        if name in structure.changed and own.startswith(layer + "."):
            tensors[own] = parts_of(name, structure)
            if tensors[own][0].interleaved:
                raise ConversionError(
                    f"{structure.old.model_type} keeps a head's query, key and value together, and goes to one kv head only; "
                    'it cannot be calibrated, use method="mean"'
                )
    keys = [name for name, parts in tensors.items() if any(part.kind == "key" for part in parts)]
    if not keys:
        raise ConversionError(f"layer {layer!r} has no keys")
    attention = keys[0].rsplit(".", 2)[0]
    if not any(part.kind == "query" for parts in tensors.values() for part in parts):
        for leaf in ("weight", "bias"):
            name = f"{attention}.q_proj.{leaf}"
            if name in structure.names:
                rows = model.get_parameter(name).shape[0] // structure.num_heads
                tensors[name] = (Part("query", structure.num_heads, rows),)
        if f"{attention}.q_proj.weight" not in tensors:
            raise ConversionError(
                f"{structure.old.model_type}: the queries of {attention!r} cannot be found"
            )
    return Projections(attention, tensors, None, structure)


def find_output(model: nn.Module, attention: str, run: Callable[[], Tap]) -> str | None:
    """Return the path of the linear layer that gets what attention gives, unchanged; None where there is none.

    Args:
        run: runs the layer and returns what attention saw.
    """
    got: dict[str, torch.Tensor] = {}

    def hook(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        return lambda module, args: got.update({name: args[0]})

    linears = [
        (f"{attention}.{name}", module)
        for name, module in model.get_submodule(attention).named_modules()
        if isinstance(module, nn.Linear)
    ]
    handles = [module.register_forward_pre_hook(hook(name)) for name, module in linears]
    try:
        context = run().context.flatten(2)
    finally:
        for handle in handles:
            handle.remove()
    same = [n for n, t in got.items() if t.shape == context.shape and torch.equal(t, context)]
    return same[0] if same else None
