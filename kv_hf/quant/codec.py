"""Encode whole pages of keys or values and decode them: `x = code * scale + offset`.

Every step is elementwise, a minimum or a maximum, so the bytes of a page depend on its numbers alone and
not on how many pages are encoded together. Decoding is the definition that kernels are tested against.
"""

import torch

from ..formats import Scheme
from ..spec import SCALE_DTYPES, SideSpec
from .packing import lay_out, pick_up

FLOAT8_MAX = 448.0  # largest e4m3 number
SCALE_MAX = 65504.0  # largest float16: scales and offsets must stay finite


def encode(tokens: torch.Tensor, spec: SideSpec) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Encode full pages.

    Args:
        tokens: [pages, num_kv_heads, page_size, head_dim], the model's dtype.
        spec: the side to encode for.
    Returns: the tensors of `spec.fields` with a leading [pages], and a bool scalar tensor: True when some
        number was not finite or beyond float16's range. Such a number is stored as the nearest finite one
        (nan as 0): the numbers that share its scale stay finite, but an inf leaves them little precision.
    """
    scheme = spec.scheme
    if scheme.is_exact:
        return {"codes": lay_out(tokens, spec)}, torch.zeros(
            (), dtype=torch.bool, device=tokens.device
        )
    x = tokens.float()
    finite = x.nan_to_num(nan=0.0).clamp(-SCALE_MAX, SCALE_MAX)
    damaged = (finite != x).any()
    finite = finite + 0.0  # -0 becomes 0, so that a minimum has one bit pattern
    offset: torch.Tensor | None
    if scheme.code == "unsigned":
        codes, scale, offset = _encode_unsigned(finite, scheme)
    else:
        codes, scale, offset = _encode_around_offset(finite, scheme)
    fields = {"codes": lay_out(codes, spec), "scale": scale}
    if offset is not None:
        fields["offset"] = offset
    return fields, damaged


def decode(fields: dict[str, torch.Tensor], spec: SideSpec, dtype: torch.dtype) -> torch.Tensor:
    """Decode pages to [pages, num_kv_heads, page_size, head_dim] in `dtype` (computed in fp32)."""
    scheme, codes = spec.scheme, pick_up(fields["codes"], spec)
    if scheme.is_exact:
        return codes.to(dtype)
    if scheme.code == "float8":
        codes = codes.contiguous().view(torch.float8_e4m3fn)
    x = _split(codes.float(), scheme.scale_group) * _over_group(fields["scale"])
    x = x.flatten(-2).flatten(-3, -2)
    if "offset" in fields:
        x = _split(x, scheme.offset_group) + _over_group(fields["offset"])
        x = x.flatten(-2).flatten(-3, -2)
    if (
        dtype == torch.float16
    ):  # a scale rounded up may push the largest code just past float16's range
        x = x.clamp(-SCALE_MAX, SCALE_MAX)
    return x.to(dtype)


def _split(x: torch.Tensor, group: tuple[int, int] | None) -> torch.Tensor:
    """[.., tokens, channels] -> [.., token groups, group tokens, channel groups, group channels]."""
    assert group is not None
    *lead, tokens, channels = x.shape
    return x.reshape(*lead, tokens // group[0], group[0], channels // group[1], group[1])


def _over_group(per_group: torch.Tensor) -> torch.Tensor:
    """[.., token groups, channel groups] -> broadcastable against `_split`, fp32."""
    return per_group.float()[..., :, None, :, None]


def _safe(scale: torch.Tensor) -> torch.Tensor:
    """Scale to divide by: 1 where the group is constant (its codes are then all the same)."""
    scale = scale.float()
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def _divided(x: torch.Tensor, by: float) -> torch.Tensor:
    """x / by, rounded once: on a GPU torch multiplies by the reciprocal of a plain number instead."""
    return x / torch.full_like(x, by)


def _encode_unsigned(
    x: torch.Tensor, scheme: Scheme
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    groups = _split(x, scheme.scale_group)
    low, high = groups.amin((-3, -1)), groups.amax((-3, -1))
    top = float((1 << scheme.bits) - 1)
    cut = (high - low) * (0.5 * (1.0 - scheme.clip))
    low, high = low + cut, high - cut
    scale = _divided(high - low, top).clamp(max=SCALE_MAX).to(SCALE_DTYPES[scheme.scale_bits])
    offset = low.to(SCALE_DTYPES[scheme.scale_bits])
    steps = (groups - _over_group(offset)) / _over_group(_safe(scale))
    codes = steps.round().clamp(0.0, top).to(torch.uint8)
    return codes.flatten(-2).flatten(-3, -2), scale, offset


def _encode_around_offset(
    x: torch.Tensor, scheme: Scheme
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    offset = None
    if scheme.offset_group is not None:
        groups = _split(x, scheme.offset_group)
        middle = 0.5 * groups.amin((-3, -1)) + 0.5 * groups.amax((-3, -1))
        offset = middle.to(SCALE_DTYPES[scheme.scale_bits])
        x = (groups - _over_group(offset)).flatten(-2).flatten(-3, -2)
    groups = _split(x, scheme.scale_group)
    top = FLOAT8_MAX if scheme.code == "float8" else float((1 << (scheme.bits - 1)) - 1)
    scale = (
        _divided(groups.abs().amax((-3, -1)), top)
        .clamp(max=SCALE_MAX)
        .to(SCALE_DTYPES[scheme.scale_bits])
    )
    steps = (groups / _over_group(_safe(scale))).clamp(-top, top)
    if scheme.code == "float8":
        codes = steps.to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        codes = steps.round().to(torch.int8)
    return codes.flatten(-2).flatten(-3, -2), scale, offset
