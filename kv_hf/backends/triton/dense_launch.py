"""Launch the kernel that writes one side of a layer out densely."""

from functools import cache
from typing import Any

import torch

from ...spec import SideSpec
from ..inputs import PagedKV
from . import device
from .dense import dense_kernel
from .meta_params import MAX_TILE, MIN_SIZE, power_of_two

TILE_NUMBERS = 8192  # numbers of one tile: 64 of each thread of four warps


@cache
def dense_constants(spec: SideSpec) -> dict[str, Any]:
    """Return the dense kernel's compile-time arguments."""
    scheme = spec.scheme
    runs = 16 // scheme.bits if spec.token_words else scheme.codes_per_byte
    width = spec.head_dim // (1 if spec.token_words else runs)
    scale = scheme.scale_group or (1, 1)
    offset = scheme.offset_group or (0, 0)
    tile = min(spec.page_size, MAX_TILE)
    if tile > scale[0] >= MIN_SIZE:
        tile = scale[0]  # one scale per channel of a tile in place of one per number
    widest = TILE_NUMBERS // tile
    wide = min(power_of_two(width), widest // (1 if spec.token_words else runs))
    if scale[0] < tile and width % scale[1] == 0 and power_of_two(scale[1]) == scale[1] >= MIN_SIZE:
        wide = min(wide, scale[1])  # one scale per token of a tile
    return {
        "HEADS": spec.num_kv_heads, "PAGE": spec.page_size, "DIM": spec.head_dim,
        "CODE": scheme.code, "BITS": scheme.bits,
        "S_TOKENS": scale[0], "S_CHANNELS": scale[1], "O_TOKENS": offset[0], "O_CHANNELS": offset[1],
        "TOKEN_CONTIGUOUS": spec.token_contiguous, "TOKEN_WORDS": spec.token_words,
        "RUNS": runs, "WIDTH": width, "WIDE": wide, "W_WIDE": min(power_of_two(spec.head_dim), widest), "TILE": tile,
    }  # fmt: skip


def dense_side(kv: PagedKV, side: str) -> torch.Tensor:
    """Write a side out as `reference.dense.dense_side` does, with equal bits, in one launch and without waiting.

    Args and returns: as there.
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
            out, kv.seen, codes, pages.get("scale", out), pages.get("offset", out),
            kv.block_table, kv.block_table.stride(0), kv.num_pages, window, *window.stride()[:3],
            kv.exact_lens, kv.padding, kv.sink_tokens, **plain, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out
