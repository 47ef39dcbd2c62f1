"""exact: numbers as they are, in the model's dtype."""

import torch

from .base import SIDES, Encoded, Format, Scheme


class Exact(Format):
    """Numbers as they are, in the model's dtype, without scales."""

    name = "exact"
    bits = 0
    sides = SIDES
    k_rope = "exact"
    native_number = 0  # the kernels' numbers 0 to 2 are those of the model's dtype
    native_code = "none"

    def scheme(self, side: str, group_size: int | None = None) -> Scheme:
        """Return the scheme of any side: there is nothing to choose."""
        return self.made()

    def encode(self, numbers: torch.Tensor, scheme: Scheme) -> Encoded:
        """Return the numbers [.., page_size, head_dim] as their own codes, without scale or offset."""
        return numbers, None, None

    def decode(
        self,
        codes: torch.Tensor,
        scale: torch.Tensor | None,
        offset: torch.Tensor | None,
        scheme: Scheme,
    ) -> torch.Tensor:
        """Return the codes [.., page_size, head_dim], which are the numbers, in their own dtype."""
        return codes
