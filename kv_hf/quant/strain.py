"""How much of a page a number format loses beyond what it loses of any page: measured by quantizing it and back.

The damage of a channel is the mean square of its rounding errors over the channel's own mean square. A model that multiplies
a channel in one projection and divides it out again in the next changes neither. One channel that is a hundred times larger
than the others of its group leaves them hardly any codes, and their damage grows by four orders of magnitude.
Knows neither caches nor what is done about it.
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from ..formats import Scheme
from ..formats.linear import SCALE_MAX
from ..spec import ROWS, PageSpec, SideSpec
from .codec import decode, dequantize, quantize

CAP = 100.0  # of a channel's damage, so that no single channel decides
DEAD = 1e-10  # of the largest channel's power: channels below it hold nothing that could be damaged
FLOOR = 2.0**-20  # of a key channel's squared mean: fp16 offsets keep no more of a constant
VARIED = 3.0  # different tokens that a page must hold to count
SMALLEST_SCALE = torch.finfo(torch.float16).smallest_normal  # below it scales lose digits
SMALLEST_SHARE = 1e-12  # of a token's power: errors below it are those of fp32
NORMAL_PAGES = 64  # pages of random numbers, for the damage that a format does to any page


@dataclass(frozen=True)
class Strain:
    """The damage that a format does to one side of some pages, of the kv head that has the most of it.

    Attributes:
        level: mean damage of a head's channels while the pages have numbers of ordinary size.
        shrinkage: errors of the pages as they are over those while their numbers are of ordinary size, token by token
            relative to the token. Above 1 numbers are so small that 16-bit scales lose digits, or become zero. Tokens with
            small keys or values do first; attention may well be on those.
    """

    level: float
    shrinkage: float

    @property
    def damage(self) -> float:
        """Damage of the pages as they are."""
        return self.level * max(1.0, self.shrinkage)


NONE = Strain(0.0, 1.0)


class Sample:
    """Some pages of a layer, for the question how formats would damage them.

    Args:
        keys, values: [n, num_kv_heads, page_size, head_dim], any floating dtype.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._given = keys.float(), values.float()

    def most_damage(self, fields: dict[str, torch.Tensor], side: SideSpec) -> float:
        """Return the largest damage of a head in one page as it was sealed: at least the level of `strain`, without quantizing once more.

        Args:
            fields: of these pages as they were sealed, [n, ..].
            side: of keys or of values.
        Returns: inf where scales are so small that they may have lost digits, nan where a number is; waits for the device.
        """
        if side.scheme.is_exact:
            return 0.0
        pages = self._given[side.side == "values"]
        noise = (decode(fields, side, torch.float32) - pages).square()
        most, smallest = _of_channels(noise, pages, side).amax(), _smallest_scale(fields, pages)
        damage, least = torch.stack([most, smallest]).tolist()
        return damage if least >= SMALLEST_SCALE else math.inf

    @cached_property
    def _finite(self) -> torch.Tensor:
        """[n], bool: which pages hold numbers within float16's range alone."""
        sizes = [one.abs().amax((1, 2, 3)) for one in self._given]
        return (sizes[0] <= SCALE_MAX) & (sizes[1] <= SCALE_MAX)  # not where one is nan

    @cached_property
    def pages(self) -> tuple[torch.Tensor, ...]:
        """Keys and values, [n, num_kv_heads, page_size, head_dim] fp32; zero in pages that are not finite."""
        here = self._finite[:, None, None, None]
        return tuple(one.where(here, 0.0) for one in self._given)

    @cached_property
    def counts(self) -> torch.Tensor:
        """[n], bool: which pages count."""
        return self._finite & (_different_tokens(self.pages[1]) >= VARIED)

    @property
    def says_something(self) -> bool:
        """Whether any page counts; waits for the device.

        Pages do not count where numbers are not finite or beyond float16's range, and where few tokens differ: a text of
        one repeated token shows no channel's own size.
        """
        return bool(self.counts.any())

    def strain(self, spec: PageSpec, side: int) -> Strain:
        """Return the damage that the format of a side of `spec` (0: keys, 1: values) does; waits for the device."""
        one = spec.sides[side]
        if one.scheme.is_exact:
            return NONE
        pages = self.pages[side]
        fields, _ = quantize(pages, one)
        noise = _noise(fields, pages, one)
        own, smallest = self._mean(_of_channels(noise, pages, one)), _smallest_scale(fields, pages)
        found, least = torch.stack([own.amax(), smallest]).tolist()  # one wait for both
        if least >= SMALLEST_SCALE:
            return Strain(found, 1.0)
        # a power of two changes no digit; the largest number becomes one of 16 to 32
        sizes = pages.abs().amax((1, 2, 3), keepdim=True)
        ordinary = pages * torch.exp2(4 - sizes.where(sizes > 0, 1.0).log2().floor())
        usual = _noise(quantize(ordinary, one)[0], ordinary, one)
        level = self._mean(_of_channels(usual, ordinary, one))
        shares = (self._mean(_of_tokens(*pair)) for pair in ((noise, pages), (usual, ordinary)))
        small, large = (share.clamp(min=SMALLEST_SHARE) for share in shares)
        return Strain(*torch.stack([level.amax(), (small / large).amax()]).tolist())

    def _mean(self, damage: torch.Tensor) -> torch.Tensor:
        """Return the mean over the pages that count, [num_kv_heads]."""
        return (damage * self.counts[:, None]).sum(0) / self.counts.sum().clamp(min=1)


def usual_damage(side: SideSpec) -> float:
    """Return the damage that the format of `side` does to standard normal numbers."""
    if side.scheme.is_exact:
        return 0.0
    return _usual_damage(side.side, side.scheme, side.head_dim, side.page_size)


@lru_cache(maxsize=256)
def _usual_damage(name: str, scheme: Scheme, head_dim: int, page_size: int) -> float:
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        generator = torch.Generator().manual_seed(0)
        sizes = (NORMAL_PAGES, 1, page_size, head_dim)
        numbers = torch.randn(sizes, generator=generator, dtype=torch.float32)
        side = SideSpec(name, scheme, 1, head_dim, page_size, torch.float32, ROWS)
        noise = _noise(quantize(numbers, side)[0], numbers, side)
        return _of_channels(noise, numbers, side).mean().item()


def _noise(fields: dict[str, torch.Tensor], pages: torch.Tensor, side: SideSpec) -> torch.Tensor:
    """Return the squares of the errors of quantized pages, [n, num_kv_heads, page_size, head_dim]."""
    return (dequantize(fields, side) - pages).square()


def _smallest_scale(fields: dict[str, torch.Tensor], pages: torch.Tensor) -> torch.Tensor:
    """Return the smallest scale of quantized pages, [], fp32; 1 where they have none."""
    scale = fields.get("scale")
    return pages.new_ones(()) if scale is None else scale.abs().amin().float()


def _of_tokens(noise: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Return the mean over tokens of their noise over their power, [n, num_kv_heads]."""
    power = pages.square().mean(3)
    return (noise.mean(3) / power.where(power > 0, 1.0)).clamp(max=CAP).mean(2)


def _of_channels(noise: torch.Tensor, pages: torch.Tensor, side: SideSpec) -> torch.Tensor:
    """Return the mean damage of a head's channels, [n, num_kv_heads]."""
    noise = noise.mean(2)
    if side.side == "keys":  # a constant of all keys shifts all scores alike
        spread, shared = torch.var_mean(pages, 2, correction=0)
        power = spread + FLOOR * shared.square()
    else:
        power = pages.square().mean(2)
    alive = power > DEAD * power.amax(-1, keepdim=True)
    damage = (noise / power.where(alive, 1.0)).clamp(max=CAP) * alive
    return damage.sum(-1) / alive.sum(-1).clamp(min=1)


def _different_tokens(pages: torch.Tensor) -> torch.Tensor:
    """Return how many different tokens the pages [n, ..] amount to, [n]: n_eff of the tokens' correlations.

    (sum of eigenvalues)^2 / (sum of their squares) of the Gram matrix, the channels brought to one size: 1 where all tokens
    are alike, and the number of tokens where no two have anything in common.
    """
    tokens = pages.transpose(1, 2).flatten(2)
    power = tokens.square().mean(1, keepdim=True)
    tokens = tokens / power.sqrt().clamp(min=torch.finfo(torch.float32).tiny)
    gram = tokens @ tokens.transpose(1, 2)
    total = gram.diagonal(dim1=1, dim2=2).sum(1).square()
    return total / gram.square().sum((1, 2)).clamp(min=torch.finfo(torch.float32).tiny)
