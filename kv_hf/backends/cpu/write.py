"""A step's new tokens by the compiled CPU kernel: one call appends and seals both sides. Knows no rows or plans."""

from typing import Any

import torch

from ...errors import CacheMismatchError
from ...spec import PageWrite
from ..base import Pair, contiguous_pair
from .abi import DTYPES, WRITE
from .library import Block, isa, library, pack_sides, raise_for, take_block, with_room

_SIDES, _SHAPES, _POINTERS = WRITE.parts["sides"], WRITE.parts["shapes"], WRITE.parts["pointers"]
_PACK_POINTERS, _AT_POINTERS = _POINTERS.pack_into, _POINTERS.at
_NAME = "c write"
NOTHING = (0, 0, 0, 0)


def write(call: PageWrite) -> None:
    """Append and seal as `reference.pages.write` does, into storage in layout "lanes", in one call.

    Raises: CacheMismatchError where a slot or a page does not exist, before anything is written; MemoryError, after
        which the pages of `jobs` may hold anything.
    """
    windows, new, jobs = call.windows, call.new, call.jobs
    if new is None:
        windows = contiguous_pair(windows)
        block = Block(WRITE.count)  # called seldom, with other shapes each time
        _pack_shapes(block, call, windows, 0, (NOTHING, NOTHING))
        pointers = NOTHING
    else:
        starts, skips = call.starts, call.skips
        assert starts is not None
        assert skips is not None
        new_keys, new_values = new = contiguous_pair(new)
        strides = new_keys.stride(), new_values.stride()
        block = take_block(call.launches, _NAME, WRITE.count)
        kept = *windows, call.spec
        key = (
            *map(id, kept), new_keys.shape, new_values.shape, strides, new_keys.dtype, new_values.dtype
        )  # fmt: skip
        if block.key != key:
            block.key = ()
            _check(windows, new, starts, skips)
            _pack_shapes(block, call, windows, new_keys.shape[2], strides)
            block.key, block.kept = key, kept
        pointers = new_keys.data_ptr(), new_values.data_ptr(), starts.data_ptr(), skips.data_ptr()
    capacity, sealing = 0, NOTHING
    if jobs is not None:
        # the fields may have grown since the block was packed
        pack_sides(block, _SIDES, call.spec, call.fields, windows)
        jobs, capacity = jobs.contiguous(), min(one.room for one in with_room(call.fields))
        sealing = jobs.data_ptr(), jobs.shape[0], capacity, call.damaged.data_ptr()
    _PACK_POINTERS(block.memory, _AT_POINTERS, *pointers, *sealing, torch.get_num_threads())
    status = block.call(block.address)
    if status:
        raise_for(status, "jobs", capacity, min(window.shape[2] for window in windows))
    if new is not None:
        call.launches[_NAME] = block


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
    block: Block, call: PageWrite, windows: Pair, q_len: int, strides: tuple[Any, ...]
) -> None:
    """Pack what shapes and strides decide."""
    rows, heads, slots, _ = windows[0].shape
    spec = call.spec
    numbers = {
        "rows": rows, "heads": heads, "q_len": q_len, "slots": min(slots, windows[1].shape[2]),
        "page_size": spec.keys.page_size, "isa": isa(),
    }  # fmt: skip
    names = "new_keys", "new_values"
    for name, side, (row, head, at, _) in zip(names, spec.sides, strides, strict=True):
        new = {"is_keys": side.side == "keys", "row": row, "head": head, "at": at}
        new["clip"] = side.scheme.clip
        numbers.update({f"{name}.{field}": number for field, number in new.items()})
    pack_sides(block, _SIDES, spec, call.fields, windows)
    _SHAPES.pack_names(block.memory, numbers)
    block.call = library().kv_hf_write
