"""Encode whole pages of keys or values and decode them, by the format of the side.

What a code means is the format's own (kv_hf/formats), where it lies in a page is packing's; here is what holds for all
formats, and what schemes ask for around them: rotated values, and keys with their wide channels in front. Decoding is the
definition that kernels are tested against.
"""

import torch

from ..formats.encoded import check_decoded, check_encoded
from ..formats.linear import SCALE_MAX
from ..spec import SideSpec, order_dtype
from .channel_order import choose, reorder, restore
from .packing import lay_out, pick_up
from .rotation import rotate, unrotate


def encode(tokens: torch.Tensor, spec: SideSpec) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Encode full pages.

    Args:
        tokens: [pages, num_kv_heads, page_size, head_dim], the model's dtype.
        spec: the side to encode for.
    Returns: the tensors of `spec.fields` with a leading [pages], and a bool scalar tensor: True when some
        number was not finite or beyond float16's range. Such a number is stored as the nearest finite one
        (nan as 0): the numbers that share its scale stay finite, but an inf leaves them little precision.
    Raises: CacheOptionError where a registered format returns something else than Format.encode promises.
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
    order = None
    if scheme.rotated:
        finite = rotate(finite) + 0.0
    if scheme.wide_channels:
        order = choose(finite, scheme.wide_channels)
        finite = reorder(finite, order)
    encoded = scheme.format.encode(finite, scheme)
    if scheme.format.native_number is None:  # another package's arithmetic
        check_encoded(encoded, finite.shape, scheme)
    codes, scale, offset = encoded
    fields = {"codes": lay_out(codes, spec)}
    if scale is not None:
        fields["scale"] = scale
    if offset is not None:
        fields["offset"] = offset
    if order is not None:
        fields["order"] = order.to(order_dtype(spec.head_dim))
    return fields, damaged


def decode(fields: dict[str, torch.Tensor], spec: SideSpec, dtype: torch.dtype) -> torch.Tensor:
    """Decode pages to [pages, num_kv_heads, page_size, head_dim] in `dtype` (computed in fp32)."""
    scheme, codes = spec.scheme, pick_up(fields["codes"], spec)
    if scheme.is_exact:
        return codes.to(dtype)
    x = scheme.format.decode(codes, fields.get("scale"), fields.get("offset"), scheme)
    if scheme.format.native_number is None:
        check_decoded(x, codes.shape, scheme)
    if scheme.wide_channels:
        x = restore(x, fields["order"])
    if scheme.rotated:
        x = unrotate(x)
    if dtype == torch.float16:
        # a scale rounded up may push the largest code just past float16's range
        x = x.clamp(-SCALE_MAX, SCALE_MAX)
    return x.to(dtype)
