"""Where the part of a page lies that belongs to one kv head: its codes, scales and offsets."""

import triton
import triton.language as tl


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
