"""fp8: e4m3 codes around a channel's middle (keys) or around 0 (values, latents)."""

from .base import WHOLE_HEAD, WHOLE_PAGE, Scheme
from .linear import Float8Format


class Fp8(Float8Format):
    """8-bit floating-point numbers (e4m3), in the groups of int8."""

    name = "fp8"
    sides = ("keys", "values", "latent")
    group_options = {"latent": "latent_group_size"}
    native_number = 6

    def scheme(self, side: str, group_size: int | None = None) -> Scheme:
        """Return groups by side; `group_size`: numbers of a latent that share a scale."""
        if side == "values":
            return self.made((1, WHOLE_HEAD))
        if side == "latent":
            return self.made((1, -128 if group_size is None else group_size))
        return self.made((WHOLE_PAGE, WHOLE_HEAD), (WHOLE_PAGE, 1))
