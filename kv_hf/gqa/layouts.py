"""The places of an attention layer's heads in the tensors of a checkpoint, family by family.

A layout turns the tensors that change into parts with one row per head and back. Which tensors those are is
structure.py's to say; a layout refuses names that it does not know.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ConversionError
from .heads import text_config
from .structure import Structure

SEPARATE = ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias", "k_norm.weight")
FUSED = ("qkv_proj.weight", "qkv_proj.bias")
# class -> its fused projection, in which query, key and value rows of a head lie together until there is one kv head
INTERLEAVED = {"falcon": "query_key_value", "gpt_bigcode": "c_attn"}


@dataclass(frozen=True)
class Part:
    """A stretch of rows of a tensor: all heads of one kind, one behind the other.

    Attributes:
        kind: "query", "key", "value" or "key_norm".
        heads: heads in it.
        rows: rows of each head.
        interleaved: the parts of this tensor lie head by head: [query, key, value] of the first, of the second, ..
    """

    kind: str
    heads: int
    rows: int
    interleaved: bool = False


def parts_of(name: str, structure: Structure) -> tuple[Part, ...]:
    """Return what the rows of a tensor that changes are made of.

    Raises: ConversionError for a tensor whose place in attention is not known.
    """
    old, new = structure.changed[name]
    leaf = ".".join(name.split(".")[-2:])
    heads, kv_heads = structure.num_heads, structure.num_kv_heads
    if old[1:] == new[1:] and leaf in SEPARATE and old[0] % kv_heads == 0:
        rows = old[0] // kv_heads
        kind = "key_norm" if leaf.startswith("k_norm") else "key" if leaf[0] == "k" else "value"
        if rows * structure.new_kv_heads == new[0] and rows in rows_of_a_head(kind, structure):
            return (Part(kind, kv_heads, rows),)
    if old[1:] == new[1:] and leaf in FUSED:
        dim = structure.head_dim
        lost = 2 * (kv_heads - structure.new_kv_heads) * dim
        if old[0] == (heads + 2 * kv_heads) * dim and old[0] - new[0] == lost:
            return (
                Part("query", heads, dim),
                Part("key", kv_heads, dim),
                Part("value", kv_heads, dim),
            )
    fused = INTERLEAVED.get(structure.old.model_type)
    if old[1:] == new[1:] and fused is not None and name.split(".")[-2] == fused:
        dim = structure.head_dim
        if (
            heads == kv_heads
            and old[0] == 3 * heads * dim
            and new[0] == (heads + 2 * structure.new_kv_heads) * dim
        ):
            return tuple(Part(kind, heads, dim, True) for kind in ("query", "key", "value"))
    raise ConversionError(
        f"{structure.old.model_type}: {name!r} changes from {list(old)} to {list(new)} with the number of kv heads, and the "
        "places of its heads are not known"
    )


def rows_of_a_head(kind: str, structure: Structure) -> tuple[Any, ...]:
    """Return how many rows a head may have: other tensors belong to layers with a different number of heads."""
    if kind == "value":
        return structure.head_dim, getattr(text_config(structure.old), "v_head_dim", None)
    return (structure.head_dim,) if kind == "key" else (structure.head_dim, 1)


def split(tensor: torch.Tensor, parts: tuple[Part, ...]) -> dict[str, torch.Tensor]:
    """Return kind -> [heads, rows, ..] of a tensor [rows of all parts, ..]."""
    if parts[0].interleaved:
        by_head = tensor.reshape(parts[0].heads, len(parts), parts[0].rows, *tensor.shape[1:])
        return {part.kind: by_head[:, i] for i, part in enumerate(parts)}
    pieces = tensor.split([part.heads * part.rows for part in parts])
    return {
        part.kind: piece.reshape(part.heads, part.rows, *tensor.shape[1:])
        for part, piece in zip(parts, pieces, strict=True)
    }


def join(found: Mapping[str, torch.Tensor], parts: tuple[Part, ...]) -> torch.Tensor:
    """Undo `split`, with as many heads as there are now; what was interleaved becomes [all queries, keys, values]."""
    return torch.cat([found[part.kind].flatten(0, 1) for part in parts])


def norms_of_heads(structure: Structure) -> dict[str, tuple[str, ...]]:
    """Return name on disk -> names of the group that it is made of, for norms that are kept as one tensor per kv head.

    Raises: ConversionError for a tensor that the new model lacks and that is no such norm.
    """
    found: dict[str, tuple[str, ...]] = {}
    size = structure.num_kv_heads // structure.new_kv_heads
    removed = set(structure.removed)
    for name in structure.removed:
        begin, _, end = name.partition(".k_layernorm.norms.")
        leaf = end.partition(".")[2]
        every = [
            f"{begin}.k_layernorm.norms.{head}.{leaf}" for head in range(structure.num_kv_heads)
        ]
        if name not in every or not removed.issuperset(every[structure.new_kv_heads :]):
            raise ConversionError(
                f"{structure.old.model_type}: {name!r} does not exist with fewer kv heads, and no rule says where its numbers go"
            )
        for group in range(structure.new_kv_heads):
            found[every[group]] = tuple(every[group * size : (group + 1) * size])
    return found
