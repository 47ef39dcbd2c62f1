"""How tiles are cut, and what keys and values share.

A meta_params.Cut says what is loaded and multiplied at once: chunks of a token's bytes, and parts of its channels. Sizes are powers
of two; what does not exist is masked.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Fields(NamedTuple):
    """Pointers to the tensors of one side of the pages; see decode_kernel. order: of keys of two widths."""

    codes: Any
    scale: Any
    offset: Any
    order: Any


@triton.constexpr_function
def dtype_of(NAME):
    """Return the dtype of a name."""
    return {"fp32": tl.float32, "fp16": tl.float16, "bf16": tl.bfloat16}[NAME]


@triton.jit
def zeros(CUT: tl.constexpr, COLUMNS: tl.constexpr):
    """Return zeros for every part, [size, columns] fp32."""
    parts = ()
    for p in tl.static_range(len(CUT.parts)):
        parts = parts + (_zeros(CUT.parts[p].size, COLUMNS),)
    return parts


@triton.jit
def _zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.zeros([ROWS, COLUMNS], tl.float32)  # whose shape takes no field in Triton 3.6 and 3.7


@triton.jit
def load_query(pointers, held, scale, channels, CUT: tl.constexpr, DTYPE: tl.constexpr):
    """Load the query columns part by part, times `scale` [columns], as [size, columns] in DTYPE.

    channels: part by part, in the order of a page, or () for their own order.
    """
    parts = ()
    for p in tl.static_range(len(CUT.parts)):
        lane = tl.arange(0, CUT.parts[p].size)
        channel = CUT.parts[p].place + lane
        if len(channels) > 0:
            channel = channels[p].to(tl.int32)
        inside = (lane < CUT.parts[p].held)[:, None] & held[None, :]
        part = tl.load(pointers[None, :] + channel[:, None], mask=inside, other=0.0)
        parts = parts + ((part.to(tl.float32) * scale[None, :]).to(DTYPE),)
    return parts


@triton.jit
def load_parts(pointers, live, CUT: tl.constexpr, GUARD: tl.constexpr):
    """Load a number per channel part by part, each [size], zeros behind a part; where GUARD, zeros if `live` is 0 (else 1)."""
    parts = ()
    for p in tl.static_range(len(CUT.parts)):
        lane = tl.arange(0, CUT.parts[p].size)
        at = pointers + CUT.parts[p].place + lane
        if GUARD:
            x = tl.load(at, mask=lane < CUT.parts[p].held * live, other=0)
        else:
            x = load_held(at, lane, CUT.parts[p].held)
        parts = parts + (x,)
    return parts


@triton.jit
def load_held(pointers, lane, HELD: tl.constexpr):
    """Load what lies at `pointers`, zeros where `lane`, 0 to a power of two along one of their axes, reaches HELD."""
    if lane.numel > HELD:
        x = tl.load(pointers, mask=lane < HELD, other=0)
    else:
        x = tl.load(pointers)
    return x


@triton.jit
def rescale(acc, keep):
    """Multiply every part of acc by keep [columns]."""
    new = ()
    for p in tl.static_range(len(acc)):
        new = new + (acc[p] * keep[None, :],)
    return new


@triton.jit
def store_parts(pointers, acc, norm, seen, held, CUT: tl.constexpr):
    """Store the parts of acc [channels, columns] times norm [columns], zeros where not `seen`, where `held`."""
    for p in tl.static_range(len(acc)):
        lane = tl.arange(0, CUT.parts[p].size)
        result = tl.where(seen[None, :], acc[p] * norm[None, :], 0.0)
        where = pointers[None, :] + (CUT.parts[p].place + lane)[:, None]
        inside = (lane < CUT.parts[p].held)[:, None] & held[None, :]
        tl.store(where, result.to(pointers.dtype.element_ty), mask=inside)


@triton.jit
def move_to_block(codes, scale, offset, block, SIDE: tl.constexpr):
    """Move pointers to page 0 of head 0 on to number `block` (page * heads + head, int64) of pages and heads."""
    codes += block * (SIDE.page * SIDE.size // (SIDE.runs if SIDE.token_words else 1))
    if SIDE.code != "none":
        scale += block * ((SIDE.page // SIDE.scale_tokens) * (SIDE.dim // SIDE.scale_channels))
        if SIDE.offset_tokens > 0:
            offset += block * (
                (SIDE.page // SIDE.offset_tokens) * (SIDE.dim // SIDE.offset_channels)
            )
    return codes, scale, offset
