"""int3_rotated: values of 3 bits behind a Hadamard transform of each head."""

from .base import WHOLE_HEAD, Scheme
from .linear import RangeFormat


class Int3Rotated(RangeFormat):
    """3-bit integers of rotated values around 0, with a scale per token and head.

    Behind the rotation numbers lie about 0, which an offset would not improve. Two planes hold the codes: their low two
    bits, and the third.
    """

    name = "int3_rotated"
    bits = 3
    sides = ("values",)
    group_options = {"values": "value_group_size"}
    native_number = 8

    def scheme(self, side: str, group_size: int | None = None) -> Scheme:
        """Return groups of a token's channels; `group_size`: how many share a scale."""
        return self.made(
            (1, WHOLE_HEAD if group_size is None else group_size), clip=0.9, rotated=True
        )
