"""What an operator of torch is given of a page: its tensors one by one, from which fields and specs are rebuilt."""

import torch

from ..formats import Scheme, format_of_code
from ..spec import ROWS, SideSpec


def stored_fields(
    codes: torch.Tensor, scale: torch.Tensor | None, offset: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Return the tensors of SideSpec.fields that are there, by name."""
    found = {"codes": codes, "scale": scale, "offset": offset}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def stored_side(
    side: str,
    fields: dict[str, torch.Tensor],
    page_size: int,
    exact: torch.Tensor,
    code: str,
    bits: int,
    clip: float = 1.0,
    layout: str = ROWS,
) -> SideSpec:
    """Rebuild the spec of stored tensors; `exact` holds the same side's tokens in the model's dtype."""
    heads, dim = exact.shape[1], exact.shape[-1]
    groups = {
        name: (page_size // tensor.shape[2], dim // tensor.shape[3])
        for name, tensor in fields.items()
        if name != "codes"
    }
    own = format_of_code(code, bits)
    scheme = Scheme(own.name, code, bits, groups.get("scale"), groups.get("offset"), clip, 16, own)
    return SideSpec(side, scheme, heads, dim, page_size, exact.dtype, layout)
