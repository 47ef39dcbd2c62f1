"""TurboQuant's codes (arXiv 2504.19874): a norm per token and head, a random rotation, and Lloyd-Max levels.

The codes lie in kv_hf's pages, behind its sinks and its exact tail. So a row shows what the codes lose; the paper's
outlier channels (2.5 and 3.5 bits) are left out, and 3-bit codes, which no page of ours packs.
"""

import functools
import math
from typing import Any

import torch

from kv_hf.formats import WHOLE_HEAD, Format, Scheme
from kv_hf.formats.base import Encoded

SEED = 42
GRID = 1 << 14  # cells over which the density of a coordinate is integrated
ROUNDS = 1000  # of Lloyd's iteration, which ends earlier where it has settled


@functools.cache
def rotation(dim: int) -> torch.Tensor:
    """Return a random orthogonal matrix [dim, dim], fp64, the same at every call and shared by all heads."""
    numbers = torch.Generator().manual_seed(SEED)
    gaussian = torch.randn(dim, dim, generator=numbers, dtype=torch.float64)
    q, r = torch.linalg.qr(gaussian)
    return q * torch.sign(torch.diagonal(r))


@functools.cache
def projection(dim: int) -> torch.Tensor:
    """Return the Gaussian matrix [dim, dim] whose signs QJL keeps, fp64."""
    numbers = torch.Generator().manual_seed(SEED + 1)
    return torch.randn(dim, dim, generator=numbers, dtype=torch.float64)


@functools.cache
def levels(dim: int, bits: int) -> torch.Tensor:
    """Return the 2^bits levels of least mean squared error for a coordinate of a random unit vector, ascending, fp64.

    Lloyd's iteration (k-means of one dimension) over the density (1 - x^2)^((dim - 3) / 2).
    """
    edge = min(1.0, 8 / math.sqrt(dim))  # nothing that counts lies beyond eight standard deviations
    x = torch.linspace(-edge, edge, GRID, dtype=torch.float64)
    density = (1 - x * x).clamp(min=0) ** ((dim - 3) / 2)
    count = 1 << bits
    part = density.cumsum(0) / density.sum()
    found = x[torch.searchsorted(part, (torch.arange(count, dtype=torch.float64) + 0.5) / count)]
    for _ in range(ROUNDS):
        nearest = torch.bucketize(x, (found[1:] + found[:-1]) / 2)
        mass = torch.zeros(count, dtype=torch.float64).index_add_(0, nearest, density)
        moved = torch.zeros(count, dtype=torch.float64).index_add_(0, nearest, density * x) / mass
        if (moved - found).abs().max() < 1e-7:
            break
        found = moved
    return found


def turned(numbers: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return each row of [.., dim] times a matrix, in the rows' dtype.

    Codes are made of fp64 rows: their rounding must not depend on how many rows there are.
    """
    return numbers @ matrix.to(numbers.device, numbers.dtype)


class TurboQuant(Format):
    """Nearest levels of a token's rotated direction; its norm is the scale ("TurboQuant_mse", algorithm 1)."""

    def scheme(self, side: str, group_size: int | None = None) -> Scheme:
        """Return a norm per token and head."""
        return self.made((1, WHOLE_HEAD))

    def encode(self, numbers: torch.Tensor, scheme: Scheme) -> Encoded:
        """Return the numbers of the levels, and norms [pages, heads, tokens, 1]."""
        norm = numbers.norm(dim=-1, keepdim=True)
        direction = (numbers / norm.clamp(min=torch.finfo(torch.float32).tiny)).double()
        return nearest(turned(direction, rotation(numbers.shape[-1]).T), self.bits), *_stored(
            norm, scheme
        )

    def decode(
        self,
        codes: torch.Tensor,
        scale: torch.Tensor | None,
        offset: torch.Tensor | None,
        scheme: Scheme,
    ) -> torch.Tensor:
        """Look the levels up, rotate them back, and give them the norm."""
        assert scale is not None
        return direction_of(codes, self.bits) * scale.float()


def _stored(norm: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, None]:
    return norm.clamp(max=torch.finfo(scheme.scale_dtype).max).to(scheme.scale_dtype), None


def nearest(rotated: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the numbers of the nearest levels, uint8."""
    found = levels(rotated.shape[-1], bits).to(rotated.device)
    return torch.bucketize(rotated, (found[1:] + found[:-1]) / 2).to(torch.uint8)


def direction_of(
    codes: torch.Tensor, bits: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return the levels of codes [.., dim], rotated back."""
    dim = codes.shape[-1]
    found = levels(dim, bits).to(codes.device, dtype)[codes.int()]
    return turned(found, rotation(dim))


class TurboQuant4(TurboQuant):
    """16 levels."""

    name = "turboquant_int4"
    bits = 4


class TurboQuant2(TurboQuant):
    """4 levels."""

    name = "turboquant_int2"
    bits = 2


class TurboQuantProd4(Format):
    """8 levels, and a sign of each projection of what they leave ("TurboQuant_prod", algorithm 2); for keys.

    The sign (QJL) is a code's highest bit. The offset is the norm of the rest: dot products become unbiased, with more variance.
    """

    name = "turboquant_prod_int4"
    bits = 4
    sides = ("keys",)

    def scheme(self, side: str, group_size: int | None = None) -> Scheme:
        """Return a norm per token and head, and one of what the levels leave."""
        return self.made((1, WHOLE_HEAD), (1, WHOLE_HEAD))

    def encode(self, numbers: torch.Tensor, scheme: Scheme) -> Encoded:
        """Return levels + 8 x signs, norms and norms of the rest [pages, heads, tokens, 1]."""
        dim = numbers.shape[-1]
        norm = numbers.norm(dim=-1, keepdim=True)
        direction = (numbers / norm.clamp(min=torch.finfo(torch.float32).tiny)).double()
        codes = nearest(turned(direction, rotation(dim).T), self.bits - 1)
        rest = direction - direction_of(codes, self.bits - 1, torch.float64)
        signs = (turned(rest, projection(dim).T) >= 0).to(torch.uint8)
        scale, _ = _stored(norm, scheme)
        left, _ = _stored(norm * rest.norm(dim=-1, keepdim=True).float(), scheme)
        return codes + 8 * signs, scale, left

    def decode(
        self,
        codes: torch.Tensor,
        scale: torch.Tensor | None,
        offset: torch.Tensor | None,
        scheme: Scheme,
    ) -> torch.Tensor:
        """Add the expectation of the rest, given its signs, to the levels."""
        assert scale is not None and offset is not None
        dim = codes.shape[-1]
        levels_part = direction_of(codes % 8, self.bits - 1) * scale.float()
        signs = 2.0 * (codes // 8).float() - 1.0
        rest = turned(signs, projection(dim)) * (math.sqrt(math.pi / 2) / dim)
        return levels_part + rest * offset.float()


FORMATS = (TurboQuant4, TurboQuant2, TurboQuantProd4)
CACHES: dict[str, dict[str, Any]] = {
    "turboquant_int4": {"keys": "turboquant_int4", "values": "turboquant_int4"},
    "turboquant_int2": {"keys": "turboquant_int2", "values": "turboquant_int2"},
    "turboquant_prod_int4": {"keys": "turboquant_prod_int4", "values": "turboquant_int4"},
}
