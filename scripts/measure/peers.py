"""Caches of others at their best, by names that every command of the evaluation then takes.

    quanto_int4_channel, quanto_int2_channel    transformers' QuantizedCache, keys grouped per channel (ChannelKeys)
    hqq_int4_channel, hqq_int2_channel
    kivi_int4, kivi_int2, and .._window         KIVI's codes in pages of ours (Kivi)
    turboquant_int4, turboquant_int2            TurboQuant's codes in pages of ours (TurboQuant)
    turboquant_prod_int4                        keys with its unbiased codes (TurboQuantProd)

A row of a cache in pages of ours shows what the codes lose: sinks and exact tails are ours.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import Cache, QuantizedCache
from transformers.cache_utils import HQQQuantizedLayer, QuantizedLayer, QuantoQuantizedLayer

from kv_hf import PagedCache, register_format, unregister_format
from kv_hf.cache_names import PEERS
from kv_hf.evaluation import register_peer, unregister_peer
from kv_hf.formats import WHOLE_HEAD, Format, Scheme
from kv_hf.formats.base import Encoded
from kv_hf.formats.linear import RangeFormat
from kv_hf.formats.registry import is_registered

GROUP, RESIDUAL = 32, 128  # of KIVI
SEED = 42  # of TurboQuant's rotation
LLOYD_CELLS, LLOYD_ROUNDS = (
    1 << 14,
    1000,
)  # of a coordinate's density; iterations end where they have settled


class Kivi(RangeFormat):
    """KIVI's codes (arXiv 2402.02750): keys per channel, values per token, groups of 32, no clipping, no sinks.

    KIVI keeps a residual of R = 128 tokens. Its keys are quantized 128 at a time, so that 0 to 127 of them are exact; of
    its values the newest 128 are. Pages hold keys and values of the same tokens, so that two names enclose KIVI:

        kivi_intN          pages of 128: the keys' rule to the token, and as many exact values (KIVI: always 128)
        kivi_intN_window   pages of 32 behind the newest 128: at least KIVI's exact tokens on both sides (128 to 159)
    """

    group_options = {"keys": "key_group_size", "values": "value_group_size"}

    def scheme(self, side: str, group_size: int | None = None) -> Scheme:
        """Return groups of 32, or of `group_size`: tokens of a key's channel, channels of a value's token."""
        size = GROUP if group_size is None else group_size
        group = (1, size) if side == "values" else (size, 1)
        return self.made(group, group)


class Kivi2(Kivi):
    """Codes 0 .. 3, the arithmetic of int2, which the compiled kernels read."""

    name, bits, native_number = "kivi_int2", 2, 5


class Kivi4(Kivi):
    """Codes 0 .. 15, the arithmetic of int4."""

    name, bits, native_number = "kivi_int4", 4, 4


@functools.cache
def gaussian(dim: int, seed: int) -> torch.Tensor:
    """Return a Gaussian matrix [dim, dim], fp64, the same at every call: QJL keeps the signs of its products."""
    numbers = torch.Generator().manual_seed(seed)
    return torch.randn(dim, dim, generator=numbers, dtype=torch.float64)


@functools.cache
def rotation(dim: int) -> torch.Tensor:
    """Return a random orthogonal matrix [dim, dim], fp64, the same at every call and shared by all heads."""
    q, r = torch.linalg.qr(gaussian(dim, SEED))
    return q * torch.sign(torch.diagonal(r))


@functools.cache
def levels(dim: int, bits: int) -> torch.Tensor:
    """Return the 2^bits levels of least mean squared error for a coordinate of a random unit vector, ascending, fp64.

    Lloyd's iteration (k-means of one dimension) over the density (1 - x^2)^((dim - 3) / 2).
    """
    edge = min(1.0, 8 / math.sqrt(dim))  # nothing that counts lies beyond eight standard deviations
    x = torch.linspace(-edge, edge, LLOYD_CELLS, dtype=torch.float64)
    density = (1 - x * x).clamp(min=0) ** ((dim - 3) / 2)
    count = 1 << bits
    part = density.cumsum(0) / density.sum()
    found = x[torch.searchsorted(part, (torch.arange(count, dtype=torch.float64) + 0.5) / count)]
    for _ in range(LLOYD_ROUNDS):
        nearest = torch.bucketize(x, (found[1:] + found[:-1]) / 2)
        mass, sums = (
            torch.zeros(count, dtype=torch.float64).index_add_(0, nearest, one)
            for one in (density, density * x)
        )
        moved = sums / mass
        if (moved - found).abs().max() < 1e-7:
            break
        found = moved
    return found


class TurboQuant(Format):
    """TurboQuant's codes (arXiv 2504.19874, algorithm 1): the norm of a token is the scale, its rotated direction the levels.

    The paper's outlier channels (2.5 and 3.5 bits) are left out, and 3-bit codes.
    """

    def scheme(self, side: str, group_size: int | None = None) -> Scheme:
        """Return a norm per token and head."""
        return self.made((1, WHOLE_HEAD))

    def encode(self, numbers: torch.Tensor, scheme: Scheme) -> Encoded:
        """Return the numbers of the levels, and norms [pages, heads, tokens, 1]."""
        direction, norm = self.split(numbers)
        return self.codes_of(direction, self.bits), self.stored(norm, scheme), None

    def decode(self, codes: torch.Tensor, scale: Any, offset: Any, scheme: Scheme) -> torch.Tensor:
        """Look the levels up, rotate them back, and give them the norm."""
        return self.direction_of(codes, self.bits) * scale.float()

    @staticmethod
    def split(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return directions in fp64, whose rounding does not depend on how many rows there are, and norms [.., 1]."""
        norm = numbers.norm(dim=-1, keepdim=True)
        return (numbers / norm.clamp(min=torch.finfo(torch.float32).tiny)).double(), norm

    @staticmethod
    def stored(norm: torch.Tensor, scheme: Scheme) -> torch.Tensor:
        """Return norms as scales; those beyond the range are cut."""
        return norm.clamp(max=torch.finfo(scheme.scale_dtype).max).to(scheme.scale_dtype)

    @staticmethod
    def codes_of(direction: torch.Tensor, bits: int) -> torch.Tensor:
        """Return the numbers of the levels nearest to the rotated directions, uint8."""
        dim = direction.shape[-1]
        found = levels(dim, bits).to(direction.device)
        rotated = direction @ rotation(dim).T.to(direction)
        return torch.bucketize(rotated, (found[1:] + found[:-1]) / 2).to(torch.uint8)

    @staticmethod
    def direction_of(
        codes: torch.Tensor, bits: int, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Return the levels of codes [.., dim], rotated back."""
        dim = codes.shape[-1]
        found = levels(dim, bits).to(codes.device, dtype)[codes.int()]
        return found @ rotation(dim).to(found)


class TurboQuant4(TurboQuant):
    """16 levels."""

    name, bits = "turboquant_int4", 4


class TurboQuant2(TurboQuant):
    """4 levels."""

    name, bits = "turboquant_int2", 2


class TurboQuantProd(TurboQuant):
    """8 levels, and a sign of each projection of what they leave (algorithm 2); for keys.

    The sign (QJL) is a code's highest bit. The offset is the norm of the rest: dot products become unbiased, with more
    variance.
    """

    name, bits, sides = "turboquant_prod_int4", 4, ("keys",)

    def scheme(self, side: str, group_size: int | None = None) -> Scheme:
        """Return a norm per token and head, and one of what the levels leave."""
        return self.made((1, WHOLE_HEAD), (1, WHOLE_HEAD))

    def encode(self, numbers: torch.Tensor, scheme: Scheme) -> Encoded:
        """Return levels + 8 x signs, norms and norms of the rest [pages, heads, tokens, 1]."""
        direction, norm = self.split(numbers)
        codes = self.codes_of(direction, self.bits - 1)
        rest = direction - self.direction_of(codes, self.bits - 1, torch.float64)
        signs = rest @ gaussian(numbers.shape[-1], SEED + 1).T.to(rest) >= 0
        left = norm * rest.norm(dim=-1, keepdim=True).float()
        return (
            codes + 8 * signs.to(torch.uint8),
            self.stored(norm, scheme),
            self.stored(left, scheme),
        )

    def decode(self, codes: torch.Tensor, scale: Any, offset: Any, scheme: Scheme) -> torch.Tensor:
        """Add the expectation of the rest, given its signs, to the levels."""
        dim = codes.shape[-1]
        signs = 2.0 * (codes // 8).float() - 1.0
        rest = signs @ gaussian(dim, SEED + 1).to(signs) * (math.sqrt(math.pi / 2) / dim)
        return self.direction_of(codes % 8, self.bits - 1) * scale.float() + rest * offset.float()


class ChannelKeys(QuantizedLayer):
    """Keys are handed over as [.., channels, tokens], so that a backend's groups along the last axis are a channel's tokens.

    Values keep the library's groups of a token's channels. The rule of the residual, and that a flush encodes everything
    anew, are the library's. What its options give instead (transformers 5.17 to 5.23, optimum-quanto 0.2.7, hqq 0.2.8):
    - quanto, axis_key=-1: groups of q_group_size rows of [batch x heads x tokens]. Where the tokens of a flush are no
      multiple of q_group_size, groups reach into the next head, or quanto raises.
    - hqq, axis_key=0: element i x (size / q_group_size) + j belongs to group j. A group takes tokens of every row and head.
    Here a flush leaves the tokens behind the last whole group exact, so that groups are right for any prompt.
    """

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new tokens and return all: what a flush has encoded as it is read, the others exactly."""
        self.cumulative_length += key_states.shape[-2]
        first = not self.is_initialized
        if first:
            self.lazy_initialization(key_states, value_states)
            self._quantized_keys = self._quantized_values = None
            keys, values, exact = key_states, value_states, key_states.shape[-2]
        else:
            assert self.keys is not None and self.values is not None
            keys, values = (
                torch.cat([self.keys, key_states], -2),
                torch.cat([self.values, value_states], -2),
            )
            exact = keys.shape[-2]
            if self._quantized_keys is not None:
                stored = self._dequantize(self._quantized_keys).transpose(-1, -2)
                keys = torch.cat([stored, keys], -2)
                values = torch.cat([self._dequantize(self._quantized_values), values], -2)
        whole = keys.shape[-2] - exact
        if first or exact >= self.residual_length:
            whole = keys.shape[-2] // self.q_group_size * self.q_group_size
            if whole:
                turned = keys[..., :whole, :].transpose(-1, -2).contiguous()
                self._quantized_keys = self._quantize(turned, axis=self.axis_key)
                self._quantized_values = self._quantize(
                    values[..., :whole, :].contiguous(), axis=self.axis_value
                )
        # copies: a view would keep all tokens
        self.keys, self.values = keys[..., whole:, :].clone(), values[..., whole:, :].clone()
        return keys, values


class QuantoChannelKeys(ChannelKeys, QuantoQuantizedLayer):
    """quanto's codes; axis 0 groups neighbours in memory."""


class HqqChannelKeys(ChannelKeys, HQQQuantizedLayer):
    """hqq's codes; axis 1 groups neighbours in memory."""


def channel_cache(
    backend: str, nbits: int, config: Any, options: Mapping[str, Any]
) -> QuantizedCache:
    """Return a QuantizedCache with keys per channel; options are q_group_size and residual_length."""
    layer_class, axis = {"quanto": (QuantoChannelKeys, 0), "hqq": (HqqChannelKeys, 1)}[backend]
    sizes = {"q_group_size": 64, "residual_length": 128, **options}
    if len(sizes) > 2:
        raise ValueError(
            f"options of {backend}_int{nbits}_channel are q_group_size and residual_length, got {sorted(options)}"
        )
    given = {"nbits": nbits, "axis_key": axis, "axis_value": axis, **sizes}
    cache = QuantizedCache(backend=backend, config=config, **given)
    cache.layers = [layer_class(**given) for _ in cache.layers]
    return cache


def paged_cache(named: Mapping[str, Any], config: Any, options: Mapping[str, Any]) -> PagedCache:
    """Return pages with the options `named`; those behind the colon of a cache's name win over them."""
    return PagedCache.from_implementation(config, "paged_exact", {**named, **options})


FORMATS = (Kivi2, Kivi4, TurboQuant4, TurboQuant2, TurboQuantProd)
KIVI = {"": {"page_size": RESIDUAL}, "_window": {"page_size": GROUP, "recent_tokens": RESIDUAL}}
PAGED: dict[str, dict[str, Any]] = {
    **{
        f"{kind.name}{end}": {"keys": kind.name, "values": kind.name, "sink_tokens": 0, **sizes}
        for kind in (Kivi2, Kivi4)
        for end, sizes in KIVI.items()
    },
    **{kind.name: {"keys": kind.name, "values": kind.name} for kind in (TurboQuant4, TurboQuant2)},
    TurboQuantProd.name: {"keys": TurboQuantProd.name, "values": TurboQuant4.name},
}
# name -> (what makes a cache of (model config, options), the attention that reads it)
CACHES: dict[str, tuple[Callable[[Any, Mapping[str, Any]], Cache], str]] = {
    name: (functools.partial(paged_cache, options), "sdpa") for name, options in PAGED.items()
} | {
    f"{backend}_int{nbits}_channel": (functools.partial(channel_cache, backend, nbits), "sdpa")
    for backend in ("quanto", "hqq")
    for nbits in (4, 2)
}


@contextmanager
def known_peers() -> Iterator[None]:
    """Make all formats and caches of this file known for a while; what is known already stays."""
    with ExitStack() as undo:
        for kind in FORMATS:
            if not is_registered(kind):
                register_format(kind)
                undo.callback(unregister_format, kind.name)
        for name, (make, attention) in CACHES.items():
            if name not in PEERS:
                register_peer(name, make, attention)
                undo.callback(unregister_peer, name)
        yield
