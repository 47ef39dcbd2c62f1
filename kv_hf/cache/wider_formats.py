"""When a format is too narrow for a layer's numbers, and which one the layer gets instead. Writes no page, keeps nothing."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..backends.registry import layout_for, why_not
from ..errors import CacheOptionError
from ..formats import format_names
from ..pages.widened import Wider
from ..quant.strain import Sample, Strain, usual_damage
from ..spec import PageSpec, SideSpec
from .layer_formats import LayerFormats

SIDES = ("keys", "values")
HEALTHY = 8.0  # times the usual damage of the format that is too narrow: what a wider one may do
LOST = 0.5  # damage of a rotated format: errors lie evenly in all channels then, and lose 1 of those that are drowned
SHRUNK = 2.0  # times the damage at an ordinary size: numbers too small for 16-bit scales


def limit(side: SideSpec) -> float:
    """Return the damage from which a format is too narrow: 2 bits and a quarter of its own lost beside the usual.

    Each bit that is lost multiplies the damage by 4. Behind a rotation LOST is a limit as well: few bits lose all of a small
    channel before they lose 2 more. docs/formats.md has the figures of a real model.
    """
    bits = usual_damage(side) * 4.0 ** (2 + side.scheme.bits / 4)
    return min(bits, LOST) if side.scheme.rotated else bits


def complaint(found: Strain, side: SideSpec) -> str | None:
    """Return why the format of `side` is too narrow for numbers of this strain, or None."""
    if found.shrinkage > SHRUNK:
        return "numbers so small that 16-bit scales lose digits, or become zero"
    if found.level > limit(side):
        times = found.level / usual_damage(side)
        return f"channels far larger than others of their group, which multiply the usual damage of rounding by {times:,.0f}"
    return None


@dataclass(frozen=True)
class WiderFormats:
    """The choice of formats for one layer.

    Attributes:
        asked: formats of the layer by its options.
        kernel: name of the backend that reads the pages, and shall read wider ones.
        device: where they lie.
    """

    asked: LayerFormats
    kernel: str
    device: torch.device

    def choose(self, sample: Sample, spec: PageSpec, before: Wider | None) -> Wider | None:
        """Return the formats that pages of `spec` need in place of theirs, or None; waits for the device.

        Args:
            sample: pages of the layer.
            before: the formats of `spec` that are others than those asked for.
        """
        found = start = before or Wider()
        for side, name in enumerate(SIDES):
            why = complaint(sample.strain(spec, side), spec.sides[side])
            if why is not None:
                chosen = self._first_that_fits(sample, spec, side, found)
                asked = self.asked.names[side]
                found = found.and_also(name, chosen, f"{name} {asked} -> {chosen}: {why}")
        return None if found is start else found

    def spec(self, wider: Wider, like: PageSpec) -> PageSpec:
        """Return what pages of these formats are like, for keys and values of the sizes of `like`."""
        return self.asked.widened_spec(wider.formats, like, layout_for(self.device))

    def _first_that_fits(self, sample: Sample, spec: PageSpec, side: int, before: Wider) -> str:
        """Return the narrowest wider format whose damage is near the usual one of the format that is too narrow."""
        most = HEALTHY * usual_damage(spec.sides[side])
        pairs = self._candidates(spec, side, before)
        for name, made in sorted(pairs, key=lambda pair: pair[1].sides[side].bits_per_element):
            found = sample.strain(made, side)
            if found.damage <= most and complaint(found, made.sides[side]) is None:
                return name
        return "exact"

    def _candidates(
        self, spec: PageSpec, side: int, before: Wider
    ) -> Iterator[tuple[str, PageSpec]]:
        """Yield (format, pages with it) for all wider formats that the kernel reads, but exact."""
        bits = spec.sides[side].bits_per_element
        for name in format_names(SIDES[side]):
            if name == "exact":
                continue
            try:
                made = self.spec(before.and_also(SIDES[side], name, ""), spec)
            except CacheOptionError:  # its groups do not fit these sizes
                continue
            found = made.sides[side]
            wide = found.scheme.native_number is not None and found.bits_per_element > bits
            if wide and why_not(self.kernel, self.device, made) is None:
                yield name, made
