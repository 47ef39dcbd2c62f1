"""Append and seal both sides of a layer at once: one launch each, directly; refuses to look into device tensors."""

from typing import Any

import torch

from ...spec import PageSpec
from .append import append_pair_kernel
from .direct import Kernel, keep
from .meta_params import power_of_two
from .seal import pair_constants, seal_pair_kernel

Pair = tuple[torch.Tensor, torch.Tensor]
Fields = dict[str, torch.Tensor]

APPENDED = 16  # new tokens of one program, of a chunk
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
NOTHING = (0, 0, 0)  # strides of a side without numbers


def write_pair(
    windows: Pair,
    new: Pair,
    starts: torch.Tensor,
    skips: torch.Tensor,
    jobs: torch.Tensor | None,
    fields: tuple[Fields, Fields],
    spec: PageSpec,
    damaged: torch.Tensor,
    launches: dict[Any, Any],
) -> None:
    """Append new keys and values to their windows, then seal full pages from there, in place and without waiting.

    Args:
        windows: keys and values (or latents and RoPE keys), [rows, heads, slots, dim]; slots from starts[b] on are
            written with new[b, :, skips[b] :].
        new: [rows, heads, q_len, dim] each, in the windows' dtypes.
        starts, skips: [rows], int32: first free slots, and leading tokens of `new` that are padding.
        jobs, fields, damaged: as `seal_pair` takes them; jobs None: nothing to seal.
        launches: keeps compiled launches for the layer.
    """
    window, value_window = windows
    token, value_token = new
    index = window.get_device()
    shape, strides, value_strides = token.shape, token.stride(), value_token.stride()
    if strides[3] != 1 or value_strides[3] != 1:
        token, value_token, strides, value_strides = _contiguous(token, value_token)
    q_len = shape[2]
    to, value_to = window.stride(), value_window.stride()
    key = "append", id(spec), q_len > 1, strides, value_strides, to, value_to, index
    tokens = 1 if q_len == 1 else APPENDED
    kernel = launches.get(key)
    if kernel is None:
        constants = append_constants(spec.keys.head_dim, spec.values.head_dim, tokens)
        kernel = keep(launches, key, Kernel(spec, append_pair_kernel, constants, **OPTIONS))
    sides = _sides(spec)
    if sides == 1:
        value_strides = value_to = NOTHING
    tensors = window, token, value_window, value_token, starts, skips
    numbers = (
        *to[:3], *strides[:3], *value_to[:3], *value_strides[:3], window.shape[2], value_window.shape[2], q_len,
    )  # fmt: skip
    kernel.launch(
        shape[0],
        shape[1],
        -(-q_len // tokens) * sides,
        index,
        lambda at: (*map(at, tensors), *numbers),
    )
    if jobs is not None:
        seal_pair(windows, jobs, fields, spec, damaged, launches)


def seal_pair(
    tokens: Pair,
    jobs: torch.Tensor,
    fields: tuple[Fields, Fields],
    spec: PageSpec,
    damaged: torch.Tensor,
    launches: dict[Any, Any],
) -> None:
    """Encode full pages of both sides in place as `reference.pages.seal_pages` does, with equal bytes and without waiting.

    Args:
        tokens: keys and values (or latents and RoPE keys), [rows, heads, slots, dim].
        jobs: [n, 3], int32: row, first slot and page of each job; a negative page: nothing to do.
        fields: tensors of SideSpec.fields of each side with a leading [pages], contiguous.
        damaged: [], uint8, set to 1 where numbers had to be made finite, else left as it is.
        launches: keeps compiled launches for the layer.
    """
    if not jobs.shape[0]:
        return
    window, value_window = tokens
    index = window.get_device()
    strides, value_strides = window.stride(), value_window.stride()
    if strides[3] != 1 or value_strides[3] != 1:
        window, value_window, strides, value_strides = _contiguous(window, value_window)
    key = "seal", id(spec), strides, value_strides, index
    kernel = launches.get(key)
    if kernel is None:
        made = Kernel(spec, seal_pair_kernel, pair_constants(spec), **OPTIONS)
        kernel = keep(launches, key, made)
    sides = _sides(spec)
    if sides == 1:
        value_strides = NOTHING
    keys, values = fields
    codes, value_codes = keys["codes"], values["codes"]
    tensors = (
        window, codes, keys.get("scale", codes), keys.get("offset", codes),
        value_window, value_codes, values.get("scale", value_codes), values.get("offset", value_codes),
        jobs, damaged, keys.get("order", codes),
    )  # fmt: skip
    numbers = *strides[:3], *value_strides[:3]
    heads = window.shape[1]
    kernel.launch(jobs.shape[0], heads, sides, index, lambda at: (*map(at, tensors), *numbers))


def _sides(spec: PageSpec) -> int:
    """Sides of a grid: 2, or 1 where the other one holds no numbers."""
    return 2 if spec.values.head_dim else 1


def _contiguous(
    keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...], tuple[int, ...]]:
    """Return both with contiguous channels, and their strides."""
    keys, values = keys.contiguous(), values.contiguous()
    return keys, values, keys.stride(), values.stride()


def append_constants(dim: int, value_dim: int, tokens: int) -> dict[str, int]:
    """Return the compile-time arguments of the kernel that appends; tokens: new ones of one program."""
    return {
        "DIM": dim, "WIDE": power_of_two(dim), "VALUE_DIM": value_dim, "VALUE_WIDE": power_of_two(value_dim),
        "TOKENS": tokens,
    }  # fmt: skip
