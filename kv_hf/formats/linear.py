"""The shipped formats: rows of one table, of exact numbers and of codes on a straight line, `x = code * scale + offset`.

Every step is elementwise, a minimum or a maximum, so the bytes of a page depend on its numbers alone and not on how
many pages are encoded together. The compiled kernels do the same, bit by bit.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from .base import SIDES, WHOLE_HEAD, WHOLE_PAGE, Encoded, Format, Groups, Scheme

SCALE_MAX = torch.finfo(torch.float16).max  # 65504: scales and offsets must stay finite
E4M3 = torch.finfo(torch.float8_e4m3fn)


def split(numbers: torch.Tensor, group: tuple[int, int] | None) -> torch.Tensor:
    """Cut [.., tokens, channels] into groups: [.., token groups, group tokens, channel groups, group channels].

    The extremes of each group are `split(numbers, group).amin((-3, -1))`, [.., token groups, channel groups].

    Args:
        group: (tokens, channels) of a group, which divide the sizes.
    """
    assert group is not None
    *lead, tokens, channels = numbers.shape
    return numbers.reshape(*lead, tokens // group[0], group[0], channels // group[1], group[1])


def join(groups: torch.Tensor) -> torch.Tensor:
    """Undo `split`: [.., token groups, group tokens, channel groups, group channels] to [.., tokens, channels]."""
    return groups.flatten(-2).flatten(-3, -2)


def over_groups(per_group: torch.Tensor) -> torch.Tensor:
    """Return [.., token groups, channel groups] as fp32, broadcastable against what `split` returns."""
    return per_group.float()[..., :, None, :, None]


def divisor(scale: torch.Tensor) -> torch.Tensor:
    """Return scales [any shape] to divide by, fp32: 1 where a scale is 0.

    The numbers of a group with scale 0 are all the same, and so are its codes.
    """
    scale = scale.float()
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def divided(numbers: torch.Tensor, by: float) -> torch.Tensor:
    """Return numbers [any shape] / by in their dtype, rounded once.

    On a GPU torch multiplies by the reciprocal of a plain number, which rounds twice.
    """
    return numbers / torch.full_like(numbers, by)


class Exact(Format):
    """Numbers as they are, in the model's dtype, without scales."""

    name = "exact"
    bits = 0
    sides = SIDES
    k_rope = "exact"
    code = "none"

    def scheme(self, side: str, group_size: int | None = None) -> Scheme:
        """Return the scheme of any side: there is nothing to choose."""
        return self.made()

    def encode(self, numbers: torch.Tensor, scheme: Scheme) -> Encoded:
        """Return the numbers [.., page_size, head_dim] as their own codes, without scale or offset."""
        return numbers, None, None

    def decode(
        self,
        codes: torch.Tensor,
        scale: torch.Tensor | None,
        offset: torch.Tensor | None,
        scheme: Scheme,
    ) -> torch.Tensor:
        """Return the codes [.., page_size, head_dim], which are the numbers, in their own dtype."""
        return codes


class LinearFormat(Format):
    """A format that decodes to `code * scale + offset`: a row of the table below, or one that a user registers.

    A subclass with an arithmetic of its own is read in torch: compiled kernels know these very classes.

    Args:
        groups: side -> how its numbers are grouped.
        name, bits, k_rope: as in Format.
    """

    arithmetic: str  # what compiled kernels call the codes of exactly this class

    def __init__(
        self, name: str, bits: int, groups: Mapping[str, Groups], k_rope: str = "int8"
    ) -> None:
        self.name, self.bits, self.k_rope = name, bits, k_rope
        self.groups, self.sides = groups, tuple(groups)
        self.sized_sides = tuple(side for side, one in groups.items() if one.axis)

    @property
    def code(self) -> str:
        """Return the arithmetic of the class, or the format's name for a subclass of another package."""
        return self.arithmetic if type(self) in ARITHMETICS else self.name

    def scheme(self, side: str, group_size: int | None = None) -> Scheme:
        """Return how numbers of one side are stored, in groups of `group_size` where an option sets their size."""
        return self.made(**vars(self.groups[side].sized(group_size)))

    def decode(
        self,
        codes: torch.Tensor,
        scale: torch.Tensor | None,
        offset: torch.Tensor | None,
        scheme: Scheme,
    ) -> torch.Tensor:
        """Return code * scale + offset, fp32, [.., page_size, head_dim].

        Args:
            codes: [.., page_size, head_dim], uint8 or int8.
            scale, offset: [.., token groups, channel groups], the scheme's scale_dtype; offset may be None.
        """
        assert scale is not None
        numbers = self.numbers_of(codes, scheme)
        numbers = join(split(numbers, scheme.scale_group) * over_groups(scale))
        if offset is None:
            return numbers
        return join(split(numbers, scheme.offset_group) + over_groups(offset))

    def numbers_of(self, codes: torch.Tensor, scheme: Scheme) -> torch.Tensor:
        """Return the numbers that codes [any shape] stand for, fp32."""
        return codes.float()


class RangeFormat(LinearFormat):
    """Codes 0 .. 2^bits - 1 over the range of a group, or around 0 where the scheme has no offset."""

    arithmetic = "unsigned"

    def numbers_of(self, codes: torch.Tensor, scheme: Scheme) -> torch.Tensor:
        """Return the codes [any shape], fp32, from 0 or around 0."""
        middle = 0.0 if scheme.offset_group is not None else 0.5 * _top(scheme.bits)
        return codes.float() - middle

    def encode(self, numbers: torch.Tensor, scheme: Scheme) -> Encoded:
        """Return codes of equal steps from the minimum to the maximum of each group, less what `clip` cuts off.

        Args:
            numbers: [.., page_size, head_dim], fp32 and finite.
        Returns: codes like numbers, uint8; scale and offset [.., token groups, channel groups], the scheme's scale_dtype.
        """
        if scheme.wide:
            return self._of_runs(numbers, scheme)
        groups = split(numbers, scheme.scale_group)
        if scheme.offset_group is None:
            return self._around_zero(groups, scheme)
        low, high = groups.amin((-3, -1)), groups.amax((-3, -1))
        top = _top(scheme.bits)
        cut = (high - low) * (0.5 * (1.0 - scheme.clip))
        low, high = low + cut, high - cut
        scale = divided(high - low, top).clamp(max=SCALE_MAX).to(scheme.scale_dtype)
        offset = low.to(scheme.scale_dtype)
        steps = (groups - over_groups(offset)) / over_groups(divisor(scale))
        return join(steps.round().clamp(0.0, top).to(torch.uint8)), scale, offset

    def _around_zero(self, groups: torch.Tensor, scheme: Scheme) -> Encoded:
        top = _top(scheme.bits)
        largest = groups.abs().amax((-3, -1)) * scheme.clip
        scale = divided(largest, 0.5 * top).clamp(max=SCALE_MAX).to(scheme.scale_dtype)
        steps = groups / over_groups(divisor(scale)) + 0.5 * top
        return join(steps.round().clamp(0.0, top).to(torch.uint8)), scale, None

    def _of_runs(self, numbers: torch.Tensor, scheme: Scheme) -> Encoded:
        """Encode the wide channels, which come first, over all of their range, and the others as `scheme` says."""
        plain = replace(scheme, widths=(), wide=())
        parts, first = [], 0
        for bits, channels in scheme.wide:
            run = numbers[..., first : first + channels]
            parts.append(self.encode(run, replace(plain, bits=bits, clip=1.0)))
            first += channels
        parts.append(self.encode(numbers[..., first:], plain))
        codes, scale, offset = (torch.cat(each, -1) for each in zip(*parts, strict=True))
        return codes, scale, offset


def _top(bits: int) -> float:
    """Return the largest unsigned code of so many bits."""
    return float((1 << bits) - 1)


class CenteredFormat(LinearFormat):
    """Codes -top .. top around the middle of a group's range, or around 0 where the scheme has no offset."""

    top: float  # the largest code

    def encode(self, numbers: torch.Tensor, scheme: Scheme) -> Encoded:
        """Return codes of the distances from each group's middle, in units of the largest of them over `top`.

        Args:
            numbers: [.., page_size, head_dim], fp32 and finite.
        Returns: codes like numbers; scale and offset [.., token groups, channel groups], the scheme's scale_dtype; the offset
            is None where the scheme has no offset_group.
        """
        offset = None
        if scheme.offset_group is not None:
            groups = split(numbers, scheme.offset_group)
            middle = 0.5 * groups.amin((-3, -1)) + 0.5 * groups.amax((-3, -1))
            offset = middle.to(scheme.scale_dtype)
            numbers = join(groups - over_groups(offset))
        groups = split(numbers, scheme.scale_group)
        largest = divided(groups.abs().amax((-3, -1)), self.top)
        scale = largest.clamp(max=SCALE_MAX).to(scheme.scale_dtype)
        steps = (groups / over_groups(divisor(scale))).clamp(-self.top, self.top)
        return join(self.codes_of(steps)), scale, offset

    def codes_of(self, steps: torch.Tensor) -> torch.Tensor:
        """Return the codes nearest to numbers [any shape] within -top .. top."""
        raise NotImplementedError


class SignedFormat(CenteredFormat):
    """Integer codes of 8 bits with a sign."""

    arithmetic = "signed"
    code_dtype = torch.int8
    top = 127.0

    def codes_of(self, steps: torch.Tensor) -> torch.Tensor:
        """Return the integers nearest to numbers [any shape], int8."""
        return steps.round().to(torch.int8)


class Float8Format(CenteredFormat):
    """e4m3 codes, kept in uint8 tensors because torch cannot index float8 tensors on every device.

    Attributes:
        mantissa_bits, exponent_bias: of a code (3 and 7), for kernels that work on bits.
    """

    arithmetic = "float8"
    top = E4M3.max  # 448
    mantissa_bits = int(-math.log2(E4M3.eps))
    exponent_bias = 1 - int(math.log2(E4M3.smallest_normal))

    def codes_of(self, steps: torch.Tensor) -> torch.Tensor:
        """Return the e4m3 numbers nearest to numbers [any shape], as bytes in uint8."""
        return steps.to(torch.float8_e4m3fn).view(torch.uint8)

    def numbers_of(self, codes: torch.Tensor, scheme: Scheme) -> torch.Tensor:
        """Return the e4m3 numbers of bytes [any shape], fp32."""
        return codes.contiguous().view(torch.float8_e4m3fn).float()


ARITHMETICS = (RangeFormat, SignedFormat, Float8Format)


def per_channel(tokens: int = WHOLE_PAGE, **rest: Any) -> Groups:
    """Return groups of `tokens` tokens of a channel, with a scale and an offset each; `rest`: fields of Groups."""
    return Groups((tokens, 1), (tokens, 1), "tokens", **rest)


def per_token(channels: int = WHOLE_HEAD, **rest: Any) -> Groups:
    """Return groups of `channels` channels of a token, with a scale and an offset each; `rest`: fields of Groups."""
    return Groups((1, channels), (1, channels), "channels", **rest)


# A scale per page and head, and an offset per channel: it removes the large constant that some models add to some channels
_CENTERED = Groups((WHOLE_PAGE, WHOLE_HEAD), (WHOLE_PAGE, 1))
_TOKEN = Groups((1, WHOLE_HEAD))
_BLOCKS = Groups((1, -128), axis="channels")
_OF_8_BITS = {"keys": _CENTERED, "values": _TOKEN, "latent": _BLOCKS}
# Four codes have to cover everything, so the outer parts of a range saturate: 10 % to 20 %
_LATENTS_OF_2_BITS = per_channel(-32, clip=0.8)
_KEYS_OF_3_BITS = per_channel(clip=0.9, widths=((4, 3 / 8), (2, 5 / 8)))
# Rotated values lie about 0, so that an offset would not improve them
_AROUND_0 = Groups((1, WHOLE_HEAD), axis="channels", rotated=True)

# In this order everywhere. Latents are grouped as keys are: on latents made of real keys and values, groups along the rank
# lose four times as much and more, unless all channels are alike (docs/mla.md). The channels that get more bits than others
# are chosen anew for each page and head. fp8_ds_mla is the record of DeepSeek's kernels, 656 bytes for a rank of 512 and
# 64 bf16 RoPE channels (FlashMLA).
SHIPPED: tuple[Format, ...] = (
    Exact(),
    Float8Format("fp8", 8, _OF_8_BITS),
    SignedFormat("int8", 8, {**_OF_8_BITS, "k_rope": _CENTERED}),
    RangeFormat("int6", 6, {"keys": per_channel(), "values": per_token()}),
    RangeFormat(
        "int4",
        4,
        {
            "keys": per_channel(widths=((6, 1 / 4), (4, 1 / 4), (3, 1 / 2))),
            "values": _AROUND_0,
            "latent": per_channel(),
        },
    ),
    RangeFormat("int3", 3, {"keys": _KEYS_OF_3_BITS, "values": replace(_AROUND_0, clip=0.9)}),
    RangeFormat(
        "int2",
        2,
        {
            "keys": _KEYS_OF_3_BITS,
            "values": per_token(clip=0.8, rotated=True),
            "latent": _LATENTS_OF_2_BITS,
        },
    ),
    Float8Format("fp8_ds_mla", 8, {"latent": Groups((1, 128), scale_bits=32)}, k_rope="exact"),
)
