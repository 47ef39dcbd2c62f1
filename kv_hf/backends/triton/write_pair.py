"""Append and seal both sides of a layer at once: one launch each, directly; refuses to look into device tensors."""

from typing import Any

import torch

from ...spec import PageSpec
from .direct import Kernel, kept
from .meta_params import power_of_two
from .seal import append_pair_kernel, pair_constants, seal_pair_kernel

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
    new = _contiguous(new)
    window, token = windows[0], new[0]
    rows, heads, q_len, _ = token.shape
    strides = _strides(windows, spec), _strides(new, spec)
    tokens = 1 if q_len == 1 else APPENDED
    index = window.get_device()
    kernel = kept(
        launches,
        ("append", id(spec), tokens, strides, index),
        lambda: Kernel(
            spec,
            append_pair_kernel,
            append_constants(spec.keys.head_dim, spec.values.head_dim, tokens),
            **OPTIONS,
        ),
    )
    tensors = window, token, windows[1], new[1], starts, skips
    numbers = *strides[0], *strides[1], window.shape[2], windows[1].shape[2], q_len
    kernel.launch(
        rows, heads, -(-q_len // tokens) * _sides(spec), index, lambda at: (*map(at, tensors), *numbers)
    )  # fmt: skip
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
    tokens = _contiguous(tokens)
    strides, index = _strides(tokens, spec), tokens[0].get_device()
    kernel = kept(
        launches,
        ("seal", id(spec), strides, index),
        lambda: Kernel(spec, seal_pair_kernel, pair_constants(spec), **OPTIONS),
    )
    pages = [
        (side, of["codes"], of.get("scale", of["codes"]), of.get("offset", of["codes"]))
        for side, of in zip(tokens, fields, strict=True)
    ]
    tensors = *pages[0], *pages[1], jobs, damaged, fields[0].get("order", fields[0]["codes"])
    heads = tokens[0].shape[1]
    kernel.launch(
        jobs.shape[0], heads, _sides(spec), index, lambda at: (*map(at, tensors), *strides)
    )


def _sides(spec: PageSpec) -> int:
    """Sides of a grid: 2, or 1 where the other one holds no numbers."""
    return 2 if spec.values.head_dim else 1


def _contiguous(pair: Pair) -> Pair:
    """Return both with contiguous channels."""
    keys, values = pair
    if keys.stride(3) == 1 == values.stride(3):
        return pair
    return keys.contiguous(), values.contiguous()


def _strides(pair: Pair, spec: PageSpec) -> tuple[int, ...]:
    """Return the strides of rows, heads and tokens of keys and of values, 0 of a side without numbers."""
    keys, values = pair
    return (*keys.stride()[:3], *(values.stride()[:3] if spec.values.head_dim else NOTHING))


def append_constants(dim: int, value_dim: int, tokens: int) -> dict[str, int]:
    """Return the compile-time arguments of the kernel that appends; tokens: new ones of one program."""
    return {
        "DIM": dim, "WIDE": power_of_two(dim), "VALUE_DIM": value_dim, "VALUE_WIDE": power_of_two(value_dim),
        "TOKENS": tokens,
    }  # fmt: skip
