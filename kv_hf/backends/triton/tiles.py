"""How tiles are cut, and what keys and values share.

Tiles are cut along the bytes of a token into `CHUNKS` ((start, size), ..), sizes being powers of two; the last
may reach past WIDTH and is masked there. Part c * RUNS + r is chunk c of run r: channels r * WIDTH + start + ...
Chunks of rotated values (start, size, places) hold fewer places than a product needs, and are masked behind them.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def chunk_start(CHUNKS, c):
    """Return the first place of chunk `c`."""
    return CHUNKS[c][0]


@triton.constexpr_function
def chunk_size(CHUNKS, c):
    """Return the places of chunk `c`, a power of two."""
    return CHUNKS[c][1]


@triton.constexpr_function
def chunk_end(CHUNKS, c, WIDTH):
    """Return the place behind chunk `c`: that where its own places end, or WIDTH."""
    return CHUNKS[c][0] + CHUNKS[c][2] if len(CHUNKS[c]) > 2 else WIDTH


@triton.constexpr_function
def reaches_past(CHUNKS, c, WIDTH):
    """Return whether chunk `c` reaches past `WIDTH`, or past its own places, and must be masked."""
    end = CHUNKS[c][0] + CHUNKS[c][2] if len(CHUNKS[c]) > 2 else WIDTH
    return CHUNKS[c][0] + CHUNKS[c][1] > end


@triton.constexpr_function
def group_of(p, WIDTH, RUNS, CHUNKS, GROUP):
    """Return which group of GROUP channels part `p` lies in."""
    return ((p % RUNS) * WIDTH + CHUNKS[p // RUNS][0]) // GROUP


@triton.jit
def load_query(
    pointers,
    held,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    scale,
    DTYPE: tl.constexpr,
):
    """Load the query columns part by part, times `scale` [columns], as [size, columns] in DTYPE."""
    parts = ()
    for c in tl.static_range(len(CHUNKS)):
        for r in tl.static_range(DIM // WIDTH):
            place = chunk_start(CHUNKS, c) + tl.arange(0, chunk_size(CHUNKS, c))
            inside = (place < WIDTH)[:, None] & held[None, :]
            part = tl.load(pointers[None, :] + (r * WIDTH + place)[:, None], mask=inside, other=0.0)
            parts = parts + ((part.to(tl.float32) * scale[None, :]).to(DTYPE),)
    return parts


@triton.jit
def load_parts(
    pointers, live, DIM: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr, GUARD: tl.constexpr
):  # fmt: skip
    """Load DIM numbers part by part, each [size]; where GUARD, zeros if `live` is 0 (else 1)."""
    parts = ()
    for c in tl.static_range(len(CHUNKS)):
        place = chunk_start(CHUNKS, c) + tl.arange(0, chunk_size(CHUNKS, c))
        for r in tl.static_range(DIM // WIDTH):
            at = pointers + r * WIDTH + place
            if GUARD:
                parts = parts + (tl.load(at, mask=place < WIDTH * live, other=0.0),)
            elif reaches_past(CHUNKS, c, WIDTH):
                parts = parts + (tl.load(at, mask=place < WIDTH, other=0.0),)
            else:
                parts = parts + (tl.load(at),)
    return parts


@triton.jit
def rescale(acc, keep):
    """Multiply every part of acc by keep [columns]."""
    new = ()
    for p in tl.static_range(len(acc)):
        new = new + (acc[p] * keep[None, :],)
    return new


@triton.jit
def store_parts(
    pointers, acc, norm, seen, held, WIDTH: tl.constexpr, RUNS: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    """Store the parts of acc [channels, columns] times norm [columns], zeros where not `seen`, where `held`."""
    for p in tl.static_range(len(acc)):
        place = chunk_start(CHUNKS, p // RUNS) + tl.arange(0, chunk_size(CHUNKS, p // RUNS))
        result = tl.where(seen[None, :], acc[p] * norm[None, :], 0.0)
        where = pointers[None, :] + ((p % RUNS) * WIDTH + place)[:, None]
        inside = (place < chunk_end(CHUNKS, p // RUNS, WIDTH))[:, None] & held[None, :]
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
