"""int4_mixed: keys of 4 bits, but 8 in the channels whose range is largest."""

from .base import WHOLE_PAGE, Scheme
from .linear import RangeFormat


class Int4Mixed(RangeFormat):
    """Integers with a scale and an offset per channel and group of tokens: 8 bits in a quarter of the channels, else 4.

    Which channels are wide is chosen anew for each page and head (see int2_mixed).
    """

    name = "int4_mixed"
    bits = 4
    sides = ("keys",)
    group_options = {"keys": "key_group_size"}
    native_number = 4
    native_wide = 7

    def scheme(self, side: str, group_size: int | None = None) -> Scheme:
        """Return groups of whole pages; `group_size`: tokens that share a scale."""
        group = (WHOLE_PAGE if group_size is None else group_size, 1)
        return self.made(group, group, wide_bits=8, wide_part=1 / 4)
