"""Cross-attention in pages: an encoder's keys and values, written once and read by every decoder step."""

from dataclasses import replace
from typing import Any

from ..config import CacheConfig
from .growing import GrowingCache
from .handle_layer import HandleLayer
from .model_shape import attention_config, cross_config


class CrossCache(GrowingCache):
    """The cross-attention half of an encoder-decoder cache, in pages of the formats of the self-attention half.

        EncoderDecoderCache(kv_hf.PagedCache(config, keys="int4"), kv_hf.CrossCache(config, keys="int4"))

    Models call `update()` once per text, in its first forward, which attends to the exact tensors that it gave;
    later steps read the `keys` and `values` of a layer, which are handles here. Every column of the encoder is
    stored, its padding too, which the model masks. Arguments and errors are those of PagedCache;
    `reserve_tokens`, `recent_tokens` and what a step reads (`read_tokens` and its kin), which are about text that grows, are
    not used.
    """

    layer_class = HandleLayer

    def _build(self, config: Any, options: CacheConfig) -> None:
        exact = replace(options.reading_everything(), reserve_tokens=0, recent_tokens=0)
        super()._build(cross_config(config), exact)
        self._attention_config = attention_config(config)
        for layer in self.layers:
            if isinstance(layer, HandleLayer):
                layer.read_by(self._attention_config)
