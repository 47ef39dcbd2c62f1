"""How the heads of an attention layer lie in the tensors of a checkpoint, family by family.

A layout turns the tensors that change into parts with one row per head and back. Which tensors those are is
structure.py's to say; a layout refuses names that it does not know.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..errors import ConversionError
from .structure import Structure

SEPARATE = ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias", "k_norm.weight")
FUSED = ("qkv_proj.weight", "qkv_proj.bias")


@dataclass(frozen=True)
class Part:
    """A stretch of rows of a tensor: all heads of one kind, one behind the other.

    Attributes:
        kind: "query", "key", "value" or "key_norm".
        heads: heads in it.
        rows: rows of each head.
    """

    kind: str
    heads: int
    rows: int


def parts_of(name: str, structure: Structure) -> tuple[Part, ...]:
    """Return what the rows of a tensor that changes are made of.

    Raises: ConversionError for a tensor whose place in attention is not known.
    """
    old, new = structure.changed[name]
    leaf = ".".join(name.split(".")[-2:])
    heads, kv_heads = structure.num_heads, structure.num_kv_heads
    if old[1:] == new[1:] and leaf in SEPARATE and old[0] % kv_heads == 0:
        rows = old[0] // kv_heads
        if rows * structure.new_kv_heads == new[0]:
            kind = "key_norm" if leaf.startswith("k_norm") else "key" if leaf[0] == "k" else "value"
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
    raise ConversionError(
        f"{structure.old.model_type}: {name!r} changes from {list(old)} to {list(new)} with the number of kv heads, and how "
        "its heads lie in it is not known"
    )


def split(tensor: torch.Tensor, parts: tuple[Part, ...]) -> dict[str, torch.Tensor]:
    """Return kind -> [heads, rows, ..] of a tensor [rows of all parts, ..]."""
    pieces = tensor.split([part.heads * part.rows for part in parts])
    return {
        part.kind: piece.reshape(part.heads, part.rows, *tensor.shape[1:])
        for part, piece in zip(parts, pieces, strict=True)
    }


def join(found: Mapping[str, torch.Tensor], parts: tuple[Part, ...]) -> torch.Tensor:
    """Undo `split`, with as many heads as there are now."""
    return torch.cat([found[part.kind].flatten(0, 1) for part in parts])
