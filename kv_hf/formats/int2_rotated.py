"""int2_rotated: values of 2 bits behind a Hadamard transform of each head."""

from .base import WHOLE_HEAD, Scheme
from .linear import RangeFormat


class Int2Rotated(RangeFormat):
    """2-bit integers of rotated values, with a scale and an offset per token and head.

    Behind the rotation all channels of a token are alike, so that one group holds them all, and the outer 20 % of its
    range saturate.
    """

    name = "int2_rotated"
    bits = 2
    sides = ("values",)
    group_options = {"values": "value_group_size"}
    native_number = 5

    def scheme(self, side: str, group_size: int | None = None) -> Scheme:
        """Return groups of a token's channels; `group_size`: how many share a scale."""
        group = (1, WHOLE_HEAD if group_size is None else group_size)
        return self.made(group, group, clip=0.8, rotated=True)
