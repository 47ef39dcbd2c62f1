"""A step's new tokens by the compiled CPU kernel: one call appends and seals both sides. Knows no rows or plans."""

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from ...errors import CacheMismatchError
from ...spec import PageSpec
from .abi import DTYPES, WRITE
from .library import Block, capacity_of, isa, library, pack_sides, raise_for, take_block

Pair = tuple[torch.Tensor, torch.Tensor]
Fields = tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]

_SIDES, _SHAPES, _POINTERS = WRITE.parts["sides"], WRITE.parts["shapes"], WRITE.parts["pointers"]
_PACK_POINTERS, _AT_POINTERS = _POINTERS.pack_into, _POINTERS.at
_FIELDS = WRITE.count
_NAME = "c write"


def write_pair(
    windows: Pair,
    new: Pair,
    starts: torch.Tensor,
    skips: torch.Tensor,
    jobs: torch.Tensor | None,
    fields: Fields,
    spec: PageSpec,
    damaged: torch.Tensor,
    launches: MutableMapping[Any, Any],
) -> None:
    """Append the new tokens of a step to both windows, then seal the pages of `jobs` from there.

    window[b, :, starts[b] + i] = new[b, :, skips[b] + i], then as `reference.pages.seal_pages`.

    Args:
        windows: keys and values, [rows, num_kv_heads, slots, head_dim], written in place.
        new: keys and values, [rows, num_kv_heads, q_len, head_dim], with padding in front, in the windows' dtypes.
        starts, skips: [rows], int32: first slot to write, and columns of padding that are not stored.
        jobs: [n, 3], int32: (row, first of page_size slots, page id), each page id at most once; a job with a
            negative page id is skipped. None: nothing is sealed.
        fields: the storage of both sides, in place: tensors of spec.fields with a leading [pages].
        spec: both sides, in layout "lanes".
        damaged: uint8 scalar, set to 1 where a number had to be made finite.
        launches: where the packed arguments are kept for the next call.
    Raises: CacheMismatchError where a slot or a page does not exist, before anything is written; MemoryError, after
        which the pages of `jobs` may hold anything.
    """
    keys, values = windows
    new_keys, new_values = new
    if new_keys.stride()[3] != 1 or new_values.stride()[3] != 1:
        new_keys, new_values = new_keys.contiguous(), new_values.contiguous()
    strides = new_keys.stride(), new_values.stride()
    block = take_block(launches, _NAME, _FIELDS)
    kept = keys, values, spec
    key = (
        *map(id, kept), new_keys.shape, new_values.shape, strides, new_keys.dtype, new_values.dtype
    )  # fmt: skip
    if block.key != key:
        block.key = ()
        _check(windows, (new_keys, new_values), starts, skips)
        _pack_shapes(block, windows, new_keys.shape[2], strides, fields, spec)
        block.key, block.kept = key, kept
    pointers = new_keys.data_ptr(), new_values.data_ptr(), starts.data_ptr(), skips.data_ptr()
    if jobs is None:
        threads = torch.get_num_threads()
        _PACK_POINTERS(block.memory, _AT_POINTERS, *pointers, 0, 0, 0, 0, threads)
        status = block.call(block.address)
        if status:
            raise_for(status, "jobs", 0, min(keys.shape[2], values.shape[2]))
    else:
        _seal(block, windows, pointers, jobs, fields, spec, damaged)
    launches[_NAME] = block


def seal_pair(
    tokens: Pair,
    jobs: torch.Tensor,
    fields: Fields,
    spec: PageSpec,
    damaged: torch.Tensor,
    launches: MutableMapping[Any, Any],
) -> None:
    """Encode full pages of both sides into storage in layout "lanes", in place; see `write_pair`.

    Args:
        tokens: keys and values, [rows, num_kv_heads, slots, head_dim].
    Raises: CacheMismatchError where a slot or a page does not exist, before anything is written; MemoryError.
    """
    keys, values = (one if one.stride(3) == 1 else one.contiguous() for one in tokens)
    block = Block(_FIELDS)  # called seldom, with other shapes each time
    _pack_shapes(block, (keys, values), 0, ((0,) * 4, (0,) * 4), fields, spec)
    _seal(block, (keys, values), (0, 0, 0, 0), jobs, fields, spec, damaged)


def _check(windows: Pair, new: Pair, starts: torch.Tensor, skips: torch.Tensor) -> None:
    """Raise CacheMismatchError where C would read or write something else than numbers of these tensors."""
    for name, window, one in zip(("keys", "values"), windows, new, strict=True):
        rows, heads, _, dim = window.shape
        if window.stride(3) != 1 or window.dtype not in DTYPES:
            raise CacheMismatchError(
                f"windows of {name} must hold contiguous numbers of {', '.join(map(str, DTYPES))}, got "
                f"{window.dtype} with strides {window.stride()}"
            )
        if one.dtype != window.dtype or one.shape != (rows, heads, new[0].shape[2], dim):
            raise CacheMismatchError(
                f"new {name} must be {window.dtype} [{rows}, {heads}, {new[0].shape[2]}, {dim}] as the window is, got "
                f"{one.dtype} {tuple(one.shape)}"
            )
        for what, numbers in (("starts", starts), ("skips", skips)):
            if numbers.dtype != torch.int32 or numbers.shape != (rows,):
                raise CacheMismatchError(
                    f"{what} must be torch.int32 [{rows}], got {numbers.dtype} {tuple(numbers.shape)}"
                )


def _pack_shapes(
    block: Block,
    windows: Pair,
    q_len: int,
    strides: tuple[Any, ...],
    fields: Fields,
    spec: PageSpec,
) -> None:
    """Pack what shapes and strides decide."""
    rows, heads, slots, _ = windows[0].shape
    numbers = {
        "rows": rows, "heads": heads, "q_len": q_len, "slots": min(slots, windows[1].shape[2]),
        "page_size": spec.keys.page_size, "isa": isa(),
    }  # fmt: skip
    names = "new_keys", "new_values"
    for name, side, (row, head, at, _) in zip(names, spec.sides, strides, strict=True):
        new = {"is_keys": side.side == "keys", "row": row, "head": head, "at": at}
        new["clip"] = side.scheme.clip
        numbers.update({f"{name}.{field}": number for field, number in new.items()})
    pack_sides(block, _SIDES, spec, fields, windows)
    _SHAPES.pack_names(block.memory, numbers)
    block.call = library().kv_hf_write


def _seal(
    block: Block,
    windows: Pair,
    new: tuple[int, int, int, int],
    jobs: torch.Tensor,
    fields: Fields,
    spec: PageSpec,
    damaged: torch.Tensor,
) -> None:
    """Run a block with jobs: the fields may have grown since it was packed."""
    pack_sides(block, _SIDES, spec, fields, windows)
    jobs = jobs.contiguous()
    capacity = capacity_of(*fields)
    sealing = jobs.data_ptr(), jobs.shape[0], capacity, damaged.data_ptr()
    _PACK_POINTERS(block.memory, _AT_POINTERS, *new, *sealing, torch.get_num_threads())
    status = block.call(block.address)
    if status:
        raise_for(status, "jobs", capacity, min(one.shape[2] for one in windows))
