"""Codes on a straight line, `x = code * scale + offset`: the arithmetic of all shipped formats but exact.

Every step is elementwise, a minimum or a maximum, so the bytes of a page depend on its numbers alone and not on how
many pages are encoded together. The compiled kernels do the same, bit by bit.
"""

import math
from dataclasses import replace

import torch

from .base import Encoded, Format, Scheme
from .grouping import divided, divisor, join, over_groups, split

SCALE_MAX = torch.finfo(torch.float16).max  # 65504: scales and offsets must stay finite
E4M3 = torch.finfo(torch.float8_e4m3fn)


class LinearFormat(Format):
    """A format that decodes to `code * scale + offset`."""

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
        numbers = self.numbers_of(codes)
        if scheme.code == "unsigned" and offset is None:
            numbers = numbers - 0.5 * _top(scheme.bits)
        numbers = join(split(numbers, scheme.scale_group) * over_groups(scale))
        if offset is None:
            return numbers
        return join(split(numbers, scheme.offset_group) + over_groups(offset))

    def numbers_of(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the numbers that codes [any shape] stand for, fp32."""
        return codes.float()


class RangeFormat(LinearFormat):
    """Codes 0 .. 2^bits - 1 over the range of a group: kernels call them "unsigned"."""

    native_code = "unsigned"

    def encode(self, numbers: torch.Tensor, scheme: Scheme) -> Encoded:
        """Return codes of equal steps from the minimum to the maximum of each group, less what `clip` cuts off.

        Args:
            numbers: [.., page_size, head_dim], fp32 and finite.
        Returns: codes like numbers, uint8; scale and offset [.., token groups, channel groups], the scheme's scale_dtype.
        """
        if scheme.wide_channels:
            return self._of_two_widths(numbers, scheme)
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

    def _of_two_widths(self, numbers: torch.Tensor, scheme: Scheme) -> Encoded:
        """Encode the wide channels, which come first, over all of their range, and the others as `scheme` says."""
        wide, plain = (
            replace(scheme, bits=bits, clip=clip, wide_bits=0, wide_channels=0)
            for bits, clip in ((scheme.wide_bits, 1.0), (scheme.bits, scheme.clip))
        )
        first, rest = numbers.split(
            [scheme.wide_channels, numbers.shape[-1] - scheme.wide_channels], -1
        )
        parts = [self.encode(first, wide)] + ([self.encode(rest, plain)] if rest.shape[-1] else [])
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
    """Integer codes of 8 bits with a sign: kernels call them "signed"."""

    native_code = "signed"
    bits = 8
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

    native_code = "float8"
    bits = 8
    top = E4M3.max  # 448
    mantissa_bits = int(-math.log2(E4M3.eps))
    exponent_bias = 1 - int(math.log2(E4M3.smallest_normal))

    def codes_of(self, steps: torch.Tensor) -> torch.Tensor:
        """Return the e4m3 numbers nearest to numbers [any shape], as bytes in uint8."""
        return steps.to(torch.float8_e4m3fn).view(torch.uint8)

    def numbers_of(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the e4m3 numbers of bytes [any shape], fp32."""
        return codes.contiguous().view(torch.float8_e4m3fn).float()
