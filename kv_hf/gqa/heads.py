"""The places of heads in the tensors of attention, and the mean of a group of them.

A layout turns the tensors that change into parts with one row per head and back. Which tensors those are is
structure.py's to say; a layout refuses names that it does not know.

Source of the mean: Grouped-query attention (Ainslie et al., arXiv 2305.13245).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..errors import ConversionError
from .source import Source
from .structure import Structure, text_config

SEPARATE = ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias", "k_norm.weight")
FUSED = ("qkv_proj.weight", "qkv_proj.bias")
# class -> its fused projection, in which query, key and value rows of a head lie together until there is one kv head
INTERLEAVED = {"falcon": "query_key_value", "gpt_bigcode": "c_attn"}
# name of a tensor of the result -> (names on disk, what makes it of them; None copies the only one)
Made = dict[str, tuple[tuple[str, ...], Any]]


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


def pool_heads(heads: torch.Tensor, groups: int) -> torch.Tensor:
    """Return the means of groups of neighbouring heads, summed in float64 and rounded once.

    Args:
        heads: [kv heads, rows, ..], any float dtype.
        groups: heads that remain; divides the first dimension.
    Returns: [groups, rows, ..] in the dtype of `heads`.
    """
    grouped = heads.reshape(groups, -1, *heads.shape[1:])
    total = grouped[:, 0].double()
    for member in range(1, grouped.shape[1]):  # one head's float64 at a time
        total += grouped[:, member]
    return total.div_(grouped.shape[1]).to(heads.dtype)


def merged_tensors(source: Source, structure: Structure) -> Made:
    """Return what the tensors of a conversion within a class are made of: changed ones are pooled, others copied."""
    made: Made = {name: ((name,), None) for name in source.tensors if name not in structure.removed}
    for name in structure.changed:
        parts = parts_of(name, structure)
        made[name] = ((name,), partial(pool_parts, parts=parts, groups=structure.new_kv_heads))
    return made | _norms_of_heads(structure)


def pool_parts(tensor: torch.Tensor, *, parts: tuple[Part, ...], groups: int) -> torch.Tensor:
    """Pool the heads of keys and values in one tensor [rows of all heads, ..] of a checkpoint."""
    found = {
        kind: part if kind == "query" else pool_heads(part, groups)
        for kind, part in split(tensor, parts).items()
    }
    return join(found, parts)


def parts_of(name: str, structure: Structure) -> tuple[Part, ...]:
    """Return what the rows of a tensor that changes are made of.

    Raises: ConversionError for a tensor whose place in attention is not known.
    """
    old, new = structure.changed[name]
    *_, module, leaf = name.split(".")
    heads, kv_heads, new_heads = structure.num_heads, structure.num_kv_heads, structure.new_kv_heads
    dim, text = structure.head_dim, text_config(structure.config)
    shape = (old[0], new[0]) if old[1:] == new[1:] else None
    kind = {"k": "key", "v": "value"}.get(module[0], "")
    kind = "key_norm" if module == "k_norm" else kind
    # how many rows a head may have: other tensors belong to layers with a different number of heads
    rows = {"value": (dim, getattr(text, "v_head_dim", None)), "key_norm": (dim, 1)}.get(
        kind, (dim,)
    )
    if f"{module}.{leaf}" in SEPARATE:
        for each in rows:
            if each and shape == (kv_heads * each, new_heads * each):
                return (Part(kind, kv_heads, each),)
    both = ((heads + 2 * kv_heads) * dim, (heads + 2 * new_heads) * dim)
    if f"{module}.{leaf}" in FUSED and shape == both:
        return Part("query", heads, dim), Part("key", kv_heads, dim), Part("value", kv_heads, dim)
    if (
        module == INTERLEAVED.get(structure.config.model_type)
        and heads == kv_heads
        and shape == both
    ):
        return tuple(Part(kind, heads, dim, True) for kind in ("query", "key", "value"))
    raise ConversionError(
        f"{structure.config.model_type}: {name!r} changes from {list(old)} to {list(new)} with the number of kv heads, and the "
        "places of its heads are not known"
    )


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


def _norms_of_heads(structure: Structure) -> Made:
    """Return what norms that are kept as one tensor per kv head are made of.

    Raises: ConversionError for a tensor that the new model lacks and that is no such norm.
    """
    made: Made = {}
    size = structure.num_kv_heads // structure.new_kv_heads
    for name in structure.removed:
        begin, norms, end = name.partition(".k_layernorm.norms.")
        leaf = end.partition(".")[2]
        if not norms:
            raise ConversionError(
                f"{structure.config.model_type}: {name!r} does not exist with fewer kv heads, and no rule says where its numbers go"
            )
        every = [f"{begin}{norms}{head}.{leaf}" for head in range(structure.num_kv_heads)]
        for group in range(structure.new_kv_heads):
            members = tuple(every[group * size : (group + 1) * size])
            made[every[group]] = (members, lambda *each: pool_heads(torch.stack(each), 1)[0])
    return made
