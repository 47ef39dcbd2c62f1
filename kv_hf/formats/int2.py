"""int2: codes 0 .. 3 over most of the range of a channel's 32 tokens (keys, latents) or a token's 32 channels (values)."""

from .base import Scheme
from .linear import RangeFormat


class Int2(RangeFormat):
    """2-bit integers with a scale and an offset per group of at most 32; groups lie as those of int4.

    Four codes have to cover everything, so the outer 20 % of a key's range and 10 % of a value's saturate.
    """

    name = "int2"
    bits = 2
    sides = ("keys", "values", "latent")
    group_options = {
        "keys": "key_group_size",
        "values": "value_group_size",
        "latent": "key_group_size",
    }
    native_number = 5

    def scheme(self, side: str, group_size: int | None = None) -> Scheme:
        """Return groups by side; `group_size`: channels of a value, or tokens of others, that share a scale."""
        size = -32 if group_size is None else group_size
        if side == "values":
            return self.made((1, size), (1, size), clip=0.9)
        return self.made((size, 1), (size, 1), clip=0.8)
