"""int4_rotated: values of 4 bits behind a Hadamard transform of each head."""

from .base import WHOLE_HEAD, Scheme
from .linear import RangeFormat


class Int4Rotated(RangeFormat):
    """4-bit integers of rotated values, with a scale and an offset per token and head."""

    name = "int4_rotated"
    bits = 4
    sides = ("values",)
    group_options = {"values": "value_group_size"}
    native_number = 4

    def scheme(self, side: str, group_size: int | None = None) -> Scheme:
        """Return groups of a token's channels; `group_size`: how many share a scale."""
        group = (1, WHOLE_HEAD if group_size is None else group_size)
        return self.made(group, group, rotated=True)
