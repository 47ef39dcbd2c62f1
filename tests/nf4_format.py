"""A number format as another package would add it, in this one file: 4-bit normal floats (docs/formats.md).

The 16 codes are quantiles of a normal distribution, with the largest number of a group at 1. Source: QLoRA (arXiv
2305.14314), appendix E.
"""

import torch

import kv_hf
from kv_hf.formats import WHOLE_HEAD, WHOLE_PAGE
from kv_hf.formats.linear import divisor, join, over_groups, split

LEVELS = torch.tensor([
    -1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0,
])  # fmt: skip


class NF4(kv_hf.Format):
    """Codes of 16 levels between the largest number of a group and its negative."""

    name = "nf4"
    bits = 4
    sized_sides = ("keys", "values")

    def scheme(self, side, group_size=None):
        """Keys share a scale over the tokens of a channel, values over the channels of a token."""
        if side == "keys":
            return self.made(scale_group=(group_size or WHOLE_PAGE, 1))
        return self.made(scale_group=(1, group_size or WHOLE_HEAD))

    def encode(self, numbers, scheme):
        """Take the nearest level of each number over the largest of its group."""
        groups = split(numbers, scheme.scale_group)
        scale = groups.abs().amax((-3, -1)).to(scheme.scale_dtype)
        middles = ((LEVELS[1:] + LEVELS[:-1]) / 2).to(numbers.device)
        steps = groups / over_groups(divisor(scale))
        codes = torch.bucketize(steps.contiguous(), middles)
        return join(codes.to(torch.uint8)), scale, None

    def decode(self, codes, scale, offset, scheme):
        """Look the levels up."""
        levels = LEVELS.to(codes.device)[codes.int()]
        return join(split(levels, scheme.scale_group) * over_groups(scale))
