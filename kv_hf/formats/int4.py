"""int4: codes 0 .. 15 over the range of a channel's page (keys, latents) or of a token (values)."""

from .base import WHOLE_HEAD, WHOLE_PAGE, Scheme
from .linear import RangeFormat


class Int4(RangeFormat):
    """4-bit integers with a scale and an offset per group.

    Keys are grouped per channel because some models have channels with a large common offset, which per-token scales
    destroy (docs/formats.md). Latents are grouped as keys are: on latents made of real keys and values, groups along the
    rank lose four times as much and more, unless all channels are alike (docs/mla.md).
    """

    name = "int4"
    bits = 4
    sides = ("keys", "values", "latent")
    group_options = {
        "keys": "key_group_size",
        "values": "value_group_size",
        "latent": "key_group_size",
    }
    native_number = 4

    def scheme(self, side: str, group_size: int | None = None) -> Scheme:
        """Return groups by side; `group_size`: channels of a value, or tokens of others, that share a scale."""
        if side == "values":
            group = (1, WHOLE_HEAD if group_size is None else group_size)
        else:
            group = (WHOLE_PAGE if group_size is None else group_size, 1)
        return self.made(group, group)
