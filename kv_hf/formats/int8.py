"""int8: codes -127 .. 127 around a channel's middle (keys) or around 0 (values, latents)."""

from .base import SIDES, WHOLE_HEAD, WHOLE_PAGE, Scheme
from .linear import SignedFormat


class Int8(SignedFormat):
    """8-bit integers.

    Keys have one scale per page and head, and an offset per channel, which removes the large constant that some models add
    to some channels (docs/formats.md). Values have one scale per token and head, latents one per token and at most 128
    numbers.
    """

    name = "int8"
    sides = SIDES
    group_options = {"latent": "latent_group_size"}
    native_number = 3

    def scheme(self, side: str, group_size: int | None = None) -> Scheme:
        """Return groups by side; `group_size`: numbers of a latent that share a scale."""
        if side == "values":
            return self.made((1, WHOLE_HEAD))
        if side == "latent":
            return self.made((1, -128 if group_size is None else group_size))
        return self.made((WHOLE_PAGE, WHOLE_HEAD), (WHOLE_PAGE, 1))
