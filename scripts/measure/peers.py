"""Caches of others at their best, by names that every command of the evaluation then takes.

    quanto_int4_channel, quanto_int2_channel    transformers' QuantizedCache, keys grouped per channel (ChannelKeys)
    kivi_int4, kivi_int2, and .._window         KIVI's codes in pages of ours (KIVI)
    turboquant_int4, turboquant_int2            TurboQuant's codes in pages of ours (TurboQuant)

A row of a cache in pages of ours shows what the codes lose: sinks and exact tails are ours.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, QuantizedCache
from transformers.cache_utils import QuantoQuantizedLayer

from kv_hf import PagedCache, register_format, unregister_format
from kv_hf.cache_names import PEERS
from kv_hf.evaluation import register_peer, unregister_peer
from kv_hf.formats import (
    WHOLE_HEAD,
    Format,
    RangeFormat,
    Scheme,
    format_names,
    per_channel,
    per_token,
)
from kv_hf.formats.base import Encoded

Make = Callable[[Any, Mapping[str, Any]], Cache]  # of a model's config and options
GROUP, RESIDUAL = 32, 128  # of KIVI
SEED = 42  # of TurboQuant's rotation
# bits -> levels of least mean squared error for a normal number of variance 1, those above 0
# Source: Max, "Quantizing for minimum distortion" (1960), table 1
LEVELS = {
    2: [0.4528, 1.510],
    4: [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733],
}


# KIVI's codes (arXiv 2402.02750): keys per channel, values per token, groups of 32, no clipping, no sinks.
#
# KIVI keeps a residual of R = 128 tokens. Its keys are quantized 128 at a time, so that 0 to 127 of them are exact; of
# its values the newest 128 are. Pages hold keys and values of the same tokens, so that two names enclose KIVI:
#
#     kivi_intN          pages of 128: the keys' rule to the token, and as many exact values (KIVI: always 128)
#     kivi_intN_window   pages of 32 behind the newest 128: at least KIVI's exact tokens on both sides (128 to 159)
KIVI = {"keys": per_channel(GROUP), "values": per_token(GROUP)}


@functools.cache
def rotation(dim: int) -> Tensor:
    """Return a random orthogonal matrix [dim, dim], fp64, the same at every call and shared by all heads."""
    numbers = torch.Generator().manual_seed(SEED)
    q, r = torch.linalg.qr(torch.randn(dim, dim, generator=numbers, dtype=torch.float64))
    return q * torch.sign(torch.diagonal(r))


def levels(dim: int, bits: int) -> Tensor:
    """Return the 2^bits levels of a coordinate of a random unit vector, ascending, fp64: nearly normal from 64 channels on."""
    above = torch.tensor(LEVELS[bits], dtype=torch.float64)
    return torch.cat([-above.flip(0), above]) / dim**0.5


class TurboQuant(Format):
    """TurboQuant's codes (arXiv 2504.19874, algorithm 1): the norm of a token is the scale, its rotated direction the levels.

    The paper's outlier channels (2.5 and 3.5 bits) are left out, and 3-bit codes.
    """

    def __init__(self, bits: int) -> None:
        self.name, self.bits = f"turboquant_int{bits}", bits

    def scheme(self, side: str, group_size: int | None = None) -> Scheme:
        """Return a norm per token and head."""
        return self.made((1, WHOLE_HEAD))

    def encode(self, numbers: Tensor, scheme: Scheme) -> Encoded:
        """Return the numbers of the nearest levels, and norms [pages, heads, tokens, 1]; those beyond the range are cut."""
        norm = numbers.norm(dim=-1, keepdim=True)
        # fp64: its rounding does not depend on how many rows there are
        direction = (numbers / norm.clamp(min=torch.finfo(torch.float32).tiny)).double()
        dim = numbers.shape[-1]
        found = levels(dim, self.bits).to(direction)
        rotated = direction @ rotation(dim).T.to(direction)
        codes = torch.bucketize(rotated, (found[1:] + found[:-1]) / 2).to(torch.uint8)
        most = torch.finfo(scheme.scale_dtype).max
        return codes, norm.clamp(max=most).to(scheme.scale_dtype), None

    def decode(self, codes: Tensor, scale: Any, offset: Any, scheme: Scheme) -> Tensor:
        """Look the levels up, rotate them back, and give them the norm."""
        dim = codes.shape[-1]
        found = levels(dim, self.bits).to(codes.device, torch.float32)[codes.int()]
        return found @ rotation(dim).to(found) * scale.float()


class ChannelKeys(QuantoQuantizedLayer):
    """Keys are handed to quanto as [.., channels, tokens], so that its groups along the last axis are a channel's tokens.

    Values keep the library's groups of a token's channels. The rule of the residual, and that a flush encodes everything
    anew, are the library's. What its own axis_key=-1 gives instead (transformers 5.17 to 5.23, optimum-quanto 0.2.7): groups
    of q_group_size rows of [batch x heads x tokens]. Where the tokens of a flush are no multiple of q_group_size, groups
    reach into the next head, or quanto raises. Here a flush leaves the tokens behind the last whole group exact.
    """

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append new tokens and return all: what a flush has encoded as it is read, the others exactly."""
        self.cumulative_length += key_states.shape[-2]
        first = not self.is_initialized
        if first:
            self.lazy_initialization(key_states, value_states)
            self._quantized_keys = self._quantized_values = None
            self.keys, self.values = key_states[..., :0, :], value_states[..., :0, :]
        assert self.keys is not None and self.values is not None
        keys = torch.cat([self.keys, key_states], -2)
        values = torch.cat([self.values, value_states], -2)
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
                stored_values = values[..., :whole, :].contiguous()
                self._quantized_keys = self._quantize(turned, axis=self.axis_key)
                self._quantized_values = self._quantize(stored_values, axis=self.axis_value)
        # copies: a view would keep all tokens
        self.keys, self.values = keys[..., whole:, :].clone(), values[..., whole:, :].clone()
        return keys, values


def channel_cache(nbits: int, config: Any, options: Mapping[str, Any]) -> QuantizedCache:
    """Return a QuantizedCache with keys per channel; options are q_group_size and residual_length."""
    sizes = {"q_group_size": 64, "residual_length": 128, **options}
    if len(sizes) > 2:
        raise ValueError(
            f"options of quanto_int{nbits}_channel are q_group_size and residual_length, got {sorted(options)}"
        )
    # axis 0 groups neighbours in memory
    given = {"nbits": nbits, "axis_key": 0, "axis_value": 0, **sizes}
    cache = QuantizedCache(backend="quanto", config=config, **given)
    cache.layers = [ChannelKeys(**given) for _ in cache.layers]
    return cache


def in_pages(codes: str, **sizes: int) -> Make:
    """Return what makes pages of a format; the options behind the colon of a cache's name win over these."""
    own = {"keys": codes, "values": codes, **sizes}
    return lambda config, given: PagedCache.from_implementation(
        config, "paged_exact", {**own, **given}
    )


FORMATS = (
    RangeFormat("kivi_int2", 2, KIVI),
    RangeFormat("kivi_int4", 4, KIVI),
    TurboQuant(4),
    TurboQuant(2),
)
RULE = {"page_size": RESIDUAL, "sink_tokens": 0}
WINDOW = {"page_size": GROUP, "recent_tokens": RESIDUAL, "sink_tokens": 0}
CACHES: dict[str, Make] = {
    "quanto_int4_channel": functools.partial(channel_cache, 4),
    "quanto_int2_channel": functools.partial(channel_cache, 2),
    "kivi_int4": in_pages("kivi_int4", **RULE),
    "kivi_int2": in_pages("kivi_int2", **RULE),
    "kivi_int4_window": in_pages("kivi_int4", **WINDOW),
    "kivi_int2_window": in_pages("kivi_int2", **WINDOW),
    "turboquant_int4": in_pages("turboquant_int4"),
    "turboquant_int2": in_pages("turboquant_int2"),
}


@contextmanager
def known_peers() -> Iterator[None]:
    """Make the formats and caches of this file known for a while; what is known already stays."""
    with ExitStack() as undo:
        for one in FORMATS:
            if one.name not in format_names():
                register_format(one)
                undo.callback(unregister_format, one.name)
        for name, make in CACHES.items():
            if name not in PEERS:
                register_peer(name, make)
                undo.callback(unregister_peer, name)
        yield
