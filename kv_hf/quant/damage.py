"""How much of a page a number format loses beyond what it loses of any page: measured by quantizing it and back.

The damage of a channel is the mean square of its rounding errors over the channel's own mean square. A model that multiplies
a channel in one projection and divides it out again in the next changes neither. One channel that is a hundred times larger
than the others of its group leaves them hardly any codes, and their damage grows by four orders of magnitude.
Knows neither caches nor what is done about it.
"""

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
NORMAL_PAGES = 64  # pages of random numbers, for the damage that a format does to any page


class Sample:
    """Some pages of a layer, for the question how formats would damage them.

    Args:
        keys, values: [n, num_kv_heads, page_size, head_dim], any floating dtype.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._given = keys.float(), values.float()

    def most_damage(self, fields: dict[str, torch.Tensor], side: SideSpec) -> float:
        """Return the largest damage of a head in one page as it was sealed: at least `damage`, without quantizing once more.

        Args:
            fields: of these pages as they were sealed, [n, ..].
            side: of keys or of values.
        Returns: nan where a number is; waits for the device.
        """
        if side.scheme.is_exact:
            return 0.0
        pages = self._given[side.side == "values"]
        noise = (decode(fields, side, torch.float32) - pages).square()
        return float(_of_channels(noise, pages, side).amax())

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

    def damage(self, spec: PageSpec, side: int) -> float:
        """Return the mean damage that the format of a side of `spec` (0: keys, 1: values) does, of the kv head with the most.

        Waits for the device.
        """
        one, pages = spec.sides[side], self.pages[side]
        if one.scheme.is_exact:
            return 0.0
        each = _of_channels(_noise(quantize(pages, one)[0], pages, one), pages, one)
        return float(((each * self.counts[:, None]).sum(0) / self.counts.sum().clamp(min=1)).amax())


def usual_damage(side: SideSpec) -> float:
    """Return the damage that the format of `side` does to standard normal numbers."""
    if side.scheme.is_exact:
        return 0.0
    return _usual_damage(side.side, side.scheme, side.head_dim, side.page_size)


@lru_cache(maxsize=256)
def _usual_damage(name: str, scheme: Scheme, head_dim: int, page_size: int) -> float:
    with torch.inference_mode(False), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        sizes = (NORMAL_PAGES, 1, page_size, head_dim)
        numbers = torch.randn(sizes, generator=generator, dtype=torch.float32, device="cpu")
        side = SideSpec(name, scheme, 1, head_dim, page_size, torch.float32, ROWS)
        noise = _noise(quantize(numbers, side)[0], numbers, side)
        return _of_channels(noise, numbers, side).mean().item()


def _noise(fields: dict[str, torch.Tensor], pages: torch.Tensor, side: SideSpec) -> torch.Tensor:
    """Return the squares of the errors of quantized pages, [n, num_kv_heads, page_size, head_dim]."""
    return (dequantize(fields, side) - pages).square()


def _of_channels(noise: torch.Tensor, pages: torch.Tensor, side: SideSpec) -> torch.Tensor:
    """Return the mean damage of a head's channels, [n, num_kv_heads]."""
    noise = noise.mean(2)
    if side.side == "keys":  # a constant of all keys shifts all scores alike
        shared = pages.mean(2, keepdim=True)  # var_mean takes as long as all the rest here
        power = (pages - shared).square().mean(2) + FLOOR * shared[:, :, 0].square()
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
