"""Launch the kernel that writes one side of a layer out densely."""

from functools import cache
from typing import Any

import torch

from ...spec import SideSpec
from ..inputs import PagedKV
from . import device
from .dense import dense_kernel
from .meta_params import MAX_TILE, MIN_SIZE, power_of_two
from .side_layout import side_layout

TILE_NUMBERS = 8192  # numbers of one tile: 64 of each thread of four warps


@cache
def dense_constants(spec: SideSpec) -> dict[str, Any]:
    """Return the dense kernel's compile-time arguments."""
    side = side_layout(spec)
    scale_tokens, scale_channels = side.scale_tokens, side.scale_channels
    tile = min(side.page, MAX_TILE)
    if tile > scale_tokens >= MIN_SIZE:
        tile = scale_tokens  # one scale per channel of a tile in place of one per number
    widest = TILE_NUMBERS // tile
    if side.rotated:  # whole tokens at once
        tile = min(tile, TILE_NUMBERS // power_of_two(side.dim))
    width = max((section[1] for section in side.sections), default=side.width)
    wide = min(power_of_two(width), widest // (1 if side.token_words else side.runs))
    groups_fit = side.width % scale_channels == 0 and power_of_two(scale_channels) == scale_channels
    if scale_tokens < tile and groups_fit and scale_channels >= MIN_SIZE:
        wide = min(wide, scale_channels)  # one scale per token of a tile
    return {"SIDE": side, "WIDE": wide, "W_WIDE": min(power_of_two(side.dim), widest), "TILE": tile}


def dense_side(kv: PagedKV, side: str) -> torch.Tensor:
    """Write a side out as `reference.dense.dense_side` does, with equal bits, in one launch and without waiting.

    Returns: [rows, num_kv_heads, seen, head_dim] in the model's dtype.
    """
    spec: SideSpec = getattr(kv.spec, side)
    pages = kv.key_pages if side == "keys" else kv.value_pages
    window = kv.residual_keys if side == "keys" else kv.residual_values
    window = window if window.stride(-1) == 1 else window.contiguous()
    out = window.new_empty((kv.rows, spec.num_kv_heads, kv.seen, spec.head_dim))
    if not out.numel():
        return out
    plain = dense_constants(spec)
    with kv.hold(), device.on_device(out):
        codes = pages["codes"]
        if codes.dtype.itemsize == 1:
            codes = codes.view(torch.uint8)
        dense_kernel[(-(-kv.seen // plain["TILE"]), spec.num_kv_heads, kv.rows)](
            out, kv.seen, codes, pages.get("scale", out), pages.get("offset", out), pages.get("order", out),
            kv.block_table, kv.block_table.stride(0), kv.num_pages, window, *window.stride()[:3],
            kv.exact_lens, kv.padding, kv.sink_tokens, **plain, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out
