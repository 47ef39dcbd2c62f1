"""int2_mixed: keys of 2 bits, but 4 in the channels whose pairs have the largest range."""

from .base import WHOLE_PAGE, Scheme
from .linear import RangeFormat


class Int2Mixed(RangeFormat):
    """Integers with a scale and an offset per channel and group of tokens: 4 bits in at most 3/8 of the channels, else 2.

    An error of a key counts by its size, and a few channels have most of the range: with RoPE those of slow rotation. Which
    channels are wide is chosen anew for each page and head. Figures: docs/formats.md.
    """

    name = "int2_mixed"
    bits = 2
    sides = ("keys",)
    group_options = {"keys": "key_group_size"}
    native_number = 5
    native_wide = 4

    def scheme(self, side: str, group_size: int | None = None) -> Scheme:
        """Return groups of whole pages; `group_size`: tokens that share a scale."""
        group = (WHOLE_PAGE if group_size is None else group_size, 1)
        return self.made(group, group, clip=0.9, wide_bits=4, wide_part=3 / 8)
