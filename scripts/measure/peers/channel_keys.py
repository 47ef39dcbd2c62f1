"""transformers' QuantizedCache with quanto or hqq, keys grouped per channel: a channel's neighbouring tokens share a scale.

What the library's options give instead (transformers 5.17 to 5.23, optimum-quanto 0.2.7, hqq 0.2.8):
- quanto, axis_key=-1: groups of q_group_size rows of [batch x heads x tokens]. Where the tokens of a flush are no
  multiple of q_group_size, groups reach into the next head, or quanto raises.
- hqq, axis_key=0: element i x (size / q_group_size) + j belongs to group j. A group takes tokens of every row and head;
  no setting keeps it within one.
A flush quantizes all tokens, however many there are: the prompt at once, then whenever residual_length exact ones have
gathered. Here a flush leaves the tokens behind the last whole group exact, so that groups are right for any prompt.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import QuantizedCache
from transformers.cache_utils import HQQQuantizedLayer, QuantizedLayer, QuantoQuantizedLayer


class ChannelKeys(QuantizedLayer):
    """Keys are handed over as [.., channels, tokens], so that a backend's groups along the last axis are a channel's tokens.

    Values keep the library's groups of a token's channels. The rule of the residual, and that a flush encodes everything anew,
    are the library's.
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
            keys, values, exact = self._read(key_states, value_states)
        if first or exact >= self.residual_length:
            whole = keys.shape[-2] // self.q_group_size * self.q_group_size
            self._flush(keys[..., :whole, :], values[..., :whole, :])
        else:
            whole = keys.shape[-2] - exact
        # copies: a view would keep all tokens
        self.keys, self.values = keys[..., whole:, :].clone(), values[..., whole:, :].clone()
        return keys, values

    def _read(
        self, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Return the keys and values that are held with the new ones behind them, and how many of them are exact."""
        assert self.keys is not None and self.values is not None
        exact = self.keys.shape[-2] + key_states.shape[-2]
        keys, values = [self.keys, key_states], [self.values, value_states]
        if self._quantized_keys is not None:
            keys.insert(0, self._dequantize(self._quantized_keys).transpose(-1, -2))
            values.insert(0, self._dequantize(self._quantized_values))
        return torch.cat(keys, -2), torch.cat(values, -2), exact

    def _flush(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Encode all tokens of whole groups."""
        if keys.shape[-2]:
            turned = keys.transpose(-1, -2).contiguous()
            self._quantized_keys = self._quantize(turned, axis=self.axis_key)
            self._quantized_values = self._quantize(values.contiguous(), axis=self.axis_value)


class QuantoChannelKeys(ChannelKeys, QuantoQuantizedLayer):
    """quanto's codes; axis 0 groups neighbours in memory."""


class HqqChannelKeys(ChannelKeys, HQQQuantizedLayer):
    """hqq's codes; axis 1 groups neighbours in memory."""


AXES = {"quanto": (QuantoChannelKeys, 0), "hqq": (HqqChannelKeys, 1)}


def channel_cache(backend: str, nbits: int) -> Callable[[Any, Mapping[str, Any]], QuantizedCache]:
    """Return what makes a QuantizedCache of these layers; options are q_group_size and residual_length.

    Raises: ImportError of transformers, which says what to install, when a cache is made.
    """
    layer_class, axis = AXES[backend]

    def make(config: Any, options: Mapping[str, Any]) -> QuantizedCache:
        sizes = {"q_group_size": 64, "residual_length": 128, **options}
        if not set(sizes) == {"q_group_size", "residual_length"}:
            raise ValueError(
                f"options of {backend}_int{nbits}_channel are q_group_size and residual_length, got {sorted(options)}"
            )
        given = {"nbits": nbits, "axis_key": axis, "axis_value": axis, **sizes}
        cache = QuantizedCache(backend=backend, config=config, **given)
        cache.layers = [layer_class(**given) for _ in cache.layers]
        return cache

    return make


CACHES = {
    f"{backend}_int{nbits}_channel": channel_cache(backend, nbits)
    for backend in AXES
    for nbits in (4, 2)
}
