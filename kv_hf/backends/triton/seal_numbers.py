"""The steps from numbers to scales, offsets and codes that every way of sealing shares; each rounds as the definition's.

SIDE is a SideLayout. Knows nothing of where pages and codes lie.
"""

import triton
import triton.language as tl

from .dequant import MAGIC, SCALE_MAX, float_to_float8


@triton.jit
def finite(x):
    """Replace nan by 0 and clamp to float16's range; -0 becomes 0, so that a minimum has one bit pattern."""
    return tl.where(x == x, tl.minimum(tl.maximum(x, -SCALE_MAX), SCALE_MAX), 0.0) + 0.0


@triton.jit
def spread(low, high, top, cut):
    """Return scale and offset (float16) that spread codes 0 .. top over ranges cut by a part of `cut` at both ends.

    Args:
        low, high, top: any shape, fp32; cut: the same, or a number.
    """
    less = (high - low) * cut
    low, high = low + less, high - less
    scale = tl.minimum(tl.math.div_rn(high - low, top), SCALE_MAX)
    return scale.to(tl.float16), low.to(tl.float16)


@triton.jit
def unsigned_range(low, high, TOP: tl.constexpr, CUT: tl.constexpr):
    """Return scale and offset (float16) that spread codes 0 .. TOP over a range cut by CUT at both ends."""
    return spread(low, high, tl.full(low.shape, TOP, tl.float32), CUT)


@triton.jit
def signed_scale(most, TOP: tl.constexpr):
    """Return the scale that spreads codes -TOP .. TOP over -most .. most, to be rounded to the stored dtype."""
    scale = tl.math.div_rn(most, tl.full(most.shape, TOP, tl.float32))
    return tl.minimum(scale, SCALE_MAX)


@triton.jit
def _group_of(token, channel, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, SIDE: tl.constexpr):
    """Return the numbers [tokens, channels] of the groups of TOKENS x CHANNELS in a page."""
    return ((token // TOKENS) * (SIDE.dim // CHANNELS))[:, None] + (channel // CHANNELS)[None, :]


@triton.jit
def nearest_code(steps, TOP: tl.constexpr):
    """Return the integers (int32) of 0 .. TOP nearest to fp32 numbers of any shape."""
    # clamped first: rounding by MAGIC needs small numbers, and the bounds are integers
    steps = tl.minimum(tl.maximum(steps, 0.0), TOP)
    return ((steps + MAGIC) - MAGIC).to(tl.int32)


@triton.jit
def encode(
    given, bad, token, channel, inside, scale, offset, SIDE: tl.constexpr, TOP: tl.constexpr
):  # fmt: skip
    """Return the codes (int32) of numbers [tokens, channels] fp32, and `bad` (int32) with those that had to be made finite."""
    S_TOKENS: tl.constexpr = SIDE.scale_tokens
    S_CHANNELS: tl.constexpr = SIDE.scale_channels
    O_TOKENS: tl.constexpr = SIDE.offset_tokens
    O_CHANNELS: tl.constexpr = SIDE.offset_channels
    x = finite(given)
    bad |= (x != given).to(tl.int32)
    at = _group_of(token, channel, S_TOKENS, S_CHANNELS, SIDE)
    s = tl.load(scale + at, mask=inside, other=1.0).to(tl.float32)
    s = tl.where(s == 0, 1.0, s)
    if O_TOKENS > 0:
        at = _group_of(token, channel, O_TOKENS, O_CHANNELS, SIDE)
        x = x - tl.load(offset + at, mask=inside, other=0.0).to(tl.float32)
    steps = tl.math.div_rn(x, s)
    if SIDE.code != "unsigned":
        steps = tl.minimum(tl.maximum(steps, -TOP), TOP)
    if SIDE.code == "unsigned":
        return nearest_code(steps, TOP), bad
    elif SIDE.code == "float8":
        return float_to_float8(steps), bad
    else:
        return ((steps + MAGIC) - MAGIC).to(tl.int32), bad
