"""Cross-attention in pages: an encoder's keys and values, written once and read by every decoder step."""

import copy
from dataclasses import replace
from typing import Any

import torch

from ..config import CacheConfig
from ..pages.step import Step
from .handle import KVHandle, KVView, warn_dense
from .layer import PagedLayer
from .model_shape import attention_config, decoder_config
from .paged_cache import PagedCache


class CrossLayer(PagedLayer):
    """A layer of encoder keys and values. Attention reads `keys` and `values`, which are handles here.

    Models call `update()` once, in the first forward of a text, and from then on read the two attributes. The
    first forward attends to the exact tensors that it gave, as with every paged layer.
    """

    attention_of: Any = None  # the config that names the model's attention
    _view: KVView | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the view out: it refers to tensors and a kernel of this process."""
        return {name: value for name, value in vars(self).items() if name != "_view"}

    @property
    def keys(self) -> torch.Tensor | None:
        """All keys [batch, num_kv_heads, encoder columns, key_dim] as a handle, or None when empty."""
        return self._read("keys")

    @keys.setter
    def keys(self, value: Any) -> None:
        self._refuse(value)

    @property
    def values(self) -> torch.Tensor | None:
        """All values [batch, num_kv_heads, encoder columns, value_dim] as a handle, or None when empty."""
        return self._read("values")

    @values.setter
    def values(self, value: Any) -> None:
        self._refuse(value)

    def offload(self) -> None:
        """Move this layer's tensors to the CPU."""
        self._view = None
        super().offload()

    def prefetch(self) -> None:
        """Move this layer's tensors back to the layer's device."""
        self._view = None
        super().prefetch()

    def _read(self, side: str) -> torch.Tensor | None:
        if self.store is None or not self._seen:
            return None
        if self._view is None:  # one view for both sides: attention takes a pair of one view only
            self._view = KVView(self.current_kv(), self, self.revision, self.store.kernel)
        if getattr(self.attention_of, "_attn_implementation", None) == "flex_attention":
            warn_dense("flex_attention")
            return self._view.dense(side)
        return KVHandle(self._view, side)

    def _joined(self, step: Step) -> None:
        super()._joined(step)
        self._view = None

    def _forget(self) -> None:
        super()._forget()
        self._view = None


class CrossCache(PagedCache):
    """The cross-attention half of an encoder-decoder cache, in pages of the formats of the self-attention half.

        EncoderDecoderCache(kv_hf.PagedCache(config, keys="int4"), kv_hf.CrossCache(config, keys="int4"))

    Every column of the encoder is stored, its padding too, which the model masks. Arguments and errors are those
    of PagedCache; `reserve_tokens` and `recent_tokens`, which are about text that grows, are not used.
    """

    def _build(self, config: Any, options: CacheConfig) -> None:
        decoder = copy.deepcopy(decoder_config(config))
        if getattr(decoder, "layer_types", None) is not None:
            # a decoder's sliding window is about its own tokens: a step looks at the whole encoder
            decoder.layer_types = ["full_attention"] * len(decoder.layer_types)
        if getattr(decoder, "sliding_window", None) is not None:
            decoder.sliding_window = None
        super()._build(decoder, replace(options, reserve_tokens=0, recent_tokens=0))
        self._attention_config = attention_config(config)
        for index, layer in enumerate(self.layers):
            if isinstance(layer, PagedLayer):
                self.layers[index] = cross = CrossLayer(
                    index, layer.group, *layer.schemes, layer.kernel
                )
                cross.attention_of = self._attention_config
