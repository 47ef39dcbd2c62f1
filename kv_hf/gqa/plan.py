"""What a conversion writes: for every tensor of the result its file, its shape and what it is made of."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ..errors import ConversionError
from .checkpoint import Checkpoint
from .layouts import Part, join, norms_of_heads, parts_of, split
from .pooling import pool_heads
from .structure import Structure


@dataclass(frozen=True)
class Recipe:
    """How one tensor of the result is made.

    Attributes:
        file: name of the file that it goes into.
        shape, dtype: of the result.
        sources: names on disk of what it is made of.
        build: makes it of the tensors of `sources`, in any float dtype; None copies the only one.
    """

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sources: tuple[str, ...]
    build: Callable[..., torch.Tensor] | None = None

    @property
    def numel(self) -> int:
        """Numbers in the tensor."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Plan:
    """A conversion, ready to run.

    Attributes:
        recipes: tensors of the result by name.
        structure: of a conversion within a class; None where the class changes.
        config: config.json of the result, without the record of the conversion.
        counts: (heads, kv heads, kv heads of the result) of a layer.
        kv_bytes: of one token's keys and values in all layers in bf16, (before, after).
        new_class: name of the class of the result where it is another one, else "".
        exact: whether nothing is merged.
        notes: what the user should know.
    """

    recipes: dict[str, Recipe]
    structure: Structure | None
    config: dict[str, Any]
    counts: tuple[int, int, int]
    kv_bytes: tuple[int, int]
    new_class: str = ""
    exact: bool = False
    notes: tuple[str, ...] = field(default=())

    @property
    def changed(self) -> tuple[str, ...]:
        """Names of the tensors that are not copied."""
        return tuple(name for name, recipe in self.recipes.items() if recipe.build is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the result."""
        return sum(recipe.nbytes for recipe in self.recipes.values())

    def make(self, checkpoint: Checkpoint, name: str) -> torch.Tensor:
        """Return one tensor [any shape] of the result."""
        recipe = self.recipes[name]
        tensors = [checkpoint.read(source) for source in recipe.sources]
        if recipe.build is None:
            return cast(name, tensors[0], recipe.dtype)
        return cast(name, recipe.build(*tensors), recipe.dtype)


def cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor [any shape] in another dtype. Raises ConversionError where finite numbers would become infinite."""
    if tensor.dtype == dtype:
        return tensor
    found = tensor.to(dtype)
    if int(found.isinf().sum()) > int(tensor.isinf().sum()):
        lost = tensor[found.isinf() & tensor.isfinite()].abs().min().item()
        raise ConversionError(
            f"{name!r} holds {lost:.3g}, which {str(dtype).removeprefix('torch.')} cannot hold"
        )
    return found


def plan_merging(
    checkpoint: Checkpoint,
    structure: Structure,
    method: str,
    dtype: torch.dtype | None,
    config: dict[str, Any],
) -> Plan:
    """Return the plan of a conversion within a class: tensors that change are pooled, all others are copied."""
    layout = {name: parts_of(name, structure) for name in structure.changed}
    norms = norms_of_heads(structure)
    recipes = {}
    for name, tensor in checkpoint.tensors.items():
        sources: tuple[str, ...] = (name,)
        build: Callable[..., torch.Tensor] | None = None
        shape = tensor.shape
        if name in layout:
            shape = structure.changed[name][1]
            build = partial(
                pool_parts, parts=layout[name], groups=structure.new_kv_heads, method=method
            )
        elif name in norms:
            sources, build = norms[name], partial(pool_norms, method=method)
        elif name in structure.removed:
            continue
        recipes[name] = Recipe(tensor.file, shape, kept(tensor.dtype, dtype), sources, build)
    rows = sum(
        part.heads * part.rows
        for name, parts in layout.items()
        if len(structure.changed[name][0]) == 2
        for part in parts
        if part.kind in ("key", "value")
    )
    size = structure.num_kv_heads // structure.new_kv_heads
    return Plan(
        recipes,
        structure,
        config,
        (structure.num_heads, structure.num_kv_heads, structure.new_kv_heads),
        (2 * rows, 2 * rows // size),
        notes=(unknown_note(structure.unknown),) if structure.unknown else (),
    )


def unknown_note(unknown: list[str]) -> str:
    """Return what to say about tensors that the class does not have."""
    more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
    return (
        f"the class does not have {unknown[0]!r}{more}: copied as they are, with all their kv heads"
    )


def kept(own: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a tensor of the result: the one that was asked for, if it is of a float dtype."""
    return own if asked is None or not own.is_floating_point else asked


def pool_parts(
    tensor: torch.Tensor, *, parts: tuple[Part, ...], groups: int, method: str
) -> torch.Tensor:
    """Pool the heads of keys and values in one tensor [rows of all heads, ..] of a checkpoint."""
    found = {
        kind: part if kind == "query" else pool_heads(part, groups, method)
        for kind, part in split(tensor, parts).items()
    }
    return join(found, parts)


def pool_norms(*norms: torch.Tensor, method: str) -> torch.Tensor:
    """Pool the norms [head_dim] of a group of heads into one [head_dim]."""
    return pool_heads(torch.stack(norms), 1, method)[0]
