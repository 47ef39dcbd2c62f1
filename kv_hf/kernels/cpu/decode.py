"""Paged attention by the compiled CPU kernel; `reference.paged_attention` defines the result."""

import struct
from collections.abc import Mapping
from typing import Any

import torch

from ...spec import PageFields
from ..inputs import PagedKV
from .arguments import (
    DTYPES,
    SIDE,
    Block,
    capacity_of,
    pointer_of,
    raise_for,
    side_fields,
    take_block,
)
from .library import isa, library

_SIDES = struct.Struct(f"={2 * SIDE}q")
_SHAPES = struct.Struct("=20q2d")
_POINTERS = struct.Struct("=11q")
_AT_SHAPES = _SIDES.size
_AT_POINTERS = _AT_SHAPES + _SHAPES.size
_FIELDS = (_AT_POINTERS + _POINTERS.size) // 8
_NAME = "c attend"


def paged_attention(
    query: torch.Tensor,
    kv: PagedKV,
    *,
    softmax_scale: float,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Attend to pages in layout "lanes" without writing any of them out; see `reference.paged_attention`.

    Sums are kept in fp32. For bf16 and fp16 queries a processor with AVX-512 VNNI multiplies 4- and 8-bit codes as
    integers, with queries and probabilities rounded to 16 bits of the largest number of a head (page), where the error
    of that is bounded by the rounding of the output. Pages of latents are written out as fp32, a few dozen tokens at a
    time, and multiplied as such.

    Args:
        query: [rows, num_heads, q_len, query_dim], fp32, bf16 or fp16.
        kv: its `launches` keep the packed arguments for the next call.
    Returns: [rows, num_heads, q_len, out_dim], a view of a [rows, q_len, num_heads, out_dim] tensor.
    Raises: CacheMismatchError where a page that is read does not exist; MemoryError.
    """
    spec, keys, values = kv.spec, kv.key_pages, kv.value_pages
    window_keys, window_values, table = kv.window_keys, kv.window_values, kv.block_table
    if type(keys) is not PageFields:
        keys, values = dict(keys), dict(values)  # asked for once: staged pages are fetched then
    strides = query.stride()
    if strides[3] != 1:
        query = query.contiguous()
        strides = query.stride()
    rows, num_heads, q_len, _ = shape = query.shape
    dim = spec.out_dim
    out_strides = (q_len * num_heads * dim, dim, num_heads * dim, 1)
    out = query.new_empty_strided((rows, num_heads, q_len, dim), out_strides)
    if sink_logits is not None:
        sink_logits = sink_logits.float().contiguous()
    if mask is not None:
        if mask.dtype not in (torch.bool, *DTYPES):
            mask = mask.float()
        if mask.stride(3) != 1:
            mask = mask.contiguous()
    layout = (
        *map(pointer_of, keys.values()),
        *map(pointer_of, values.values()),
        window_keys.data_ptr(),
        window_values.data_ptr(),
        window_keys.stride(),
        window_values.stride(),
        shape,
        strides,
        query.dtype,
        None if mask is None else (mask.shape, mask.stride(), mask.dtype),
        kv.sink_tokens,
        softmax_scale,
        softcap,
        sliding_window,
        isa(),
        spec,
    )
    block = take_block(kv.launches, _NAME, _FIELDS)
    if block.layout != layout:
        _pack_sides(block, kv, (keys, values))
        options = softmax_scale, softcap or 0.0
        _pack_shapes(block, kv, query, out_strides, mask, sliding_window or 0, options)
        block.layout = layout
    if type(keys) is PageFields and type(values) is PageFields:
        room, other = keys.room, values.room
        capacity = room if room < other else other
    else:
        capacity = capacity_of(keys, values)
    _POINTERS.pack_into(
        block.memory,
        _AT_POINTERS,
        table.data_ptr(),
        table.stride()[0],
        kv.num_pages.data_ptr(),
        kv.exact_lens.data_ptr(),
        kv.padding.data_ptr(),
        capacity,
        query.data_ptr(),
        out.data_ptr(),
        0 if mask is None else mask.data_ptr(),
        0 if sink_logits is None else sink_logits.data_ptr(),
        torch.get_num_threads(),
    )
    functions = library()
    decode = functions.kv_hf_decode_latent if spec.is_latent else functions.kv_hf_decode
    status = decode(block.address)
    if status:
        raise_for(status, "block_table", capacity)
    kv.launches[_NAME] = block
    return out


def _pack_sides(block: Block, kv: PagedKV, fields: tuple[Mapping[str, torch.Tensor], ...]) -> None:
    sides = zip(kv.spec.sides, fields, (kv.window_keys, kv.window_values), strict=True)
    _SIDES.pack_into(block.memory, 0, *[number for side in sides for number in side_fields(*side)])


def _pack_shapes(
    block: Block,
    kv: PagedKV,
    query: torch.Tensor,
    out_strides: tuple[int, ...],
    mask: torch.Tensor | None,
    sliding_window: int,
    options: tuple[float, float],
) -> None:
    """Pack what shapes, strides and options decide."""
    rows, num_heads, q_len, _ = query.shape
    heads = kv.spec.keys.num_kv_heads
    shapes = rows, heads, num_heads // heads, q_len, kv.page_size, kv.sink_tokens
    strides = DTYPES[query.dtype], *query.stride()[:3], *out_strides[:3]
    numbers = *shapes, *strides, sliding_window, *_mask_fields(mask), isa()
    _SHAPES.pack_into(block.memory, _AT_SHAPES, *numbers, *options)


def _mask_fields(mask: torch.Tensor | None) -> tuple[Any, ...]:
    """Return kind, dtype and strides of a mask; strides of dimensions that it repeats are 0."""
    if mask is None:
        return 0, 0, 0, 0, 0
    is_bool = mask.dtype == torch.bool
    strides = [
        0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True)
    ]
    return 1 if is_bool else 2, 0 if is_bool else DTYPES[mask.dtype], *strides[:3]
