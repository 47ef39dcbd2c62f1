"""The cache of encoder-decoder models: a paged cache for self-attention beside the encoder's keys and values."""

from dataclasses import astuple, replace
from operator import add
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from ..config import CacheConfig
from ..errors import UnsupportedModelError
from ..spec import MemoryReport
from .build import MadeOfOptions
from .model_shape import cross_config, decoder_config, forget_tokens, is_encoder_decoder
from .paged_cache import CrossCache, PagedCache
from .report import LayerReport, report_layers, tensor_bytes


class PagedEncoderDecoderCache(MadeOfOptions, EncoderDecoderCache):
    """A PagedCache for self-attention beside the encoder's keys and values.

        cache = kv_hf.PagedEncoderDecoderCache(model.config, keys="int4", cross_attention="same")
        model.generate(**inputs, past_key_values=cache)

    Args:
        config: the model's config (`model.config`), of an encoder-decoder model.
        cache_config: as of PagedCache.
        keys, values: formats, as of PagedCache.
        **options: the other fields of `kv_hf.CacheConfig`; `cross_attention` is "exact" or "same". `max_pages`
            bounds each of the two pools.
    Raises: CacheOptionError for a bad option, UnsupportedModelError for a decoder-only model or one without
        full-attention layers.
    """

    self_attention_cache: PagedCache

    def _build(self, config: Any, options: CacheConfig) -> None:
        decoder_config(config)  # raises for things that are no config
        if not is_encoder_decoder(config):
            raise UnsupportedModelError(
                f"{config.model_type!r} is not an encoder-decoder model: use kv_hf.PagedCache"
            )
        options.refuse(
            "decoder",
            f"is for decoder-only models, whose keys depend on one text; not {config.model_type!r}",
        )
        each = replace(options, cross_attention="exact")
        own = PagedCache.from_options(config, each)
        cross: Cache
        if options.cross_attention == "same":
            cross = CrossCache.from_options(config, each)
        else:
            cross = DynamicCache(config=cross_config(config))
        self.options = options
        EncoderDecoderCache.__init__(self, own, cross)

    def reset(self) -> None:
        """Forget all tokens of both halves and give the memory back; afterwards any batch size fits."""
        super().reset()
        cross = self.cross_attention_cache
        for layer in () if isinstance(cross, PagedCache) else cross.layers:
            forget_tokens(layer)

    # -- what transformers does not ask for ----------------------------------------------------------------

    def observe_padding(self, decoder_attention_mask: torch.Tensor | None) -> None:
        """Learn the left padding of the decoder's prompts; see `PagedCache.observe_padding`.

        Args:
            decoder_attention_mask: [batch, columns], 0 or False = padding; None changes nothing.
        Raises: CacheMismatchError as there.
        """
        self.self_attention_cache.observe_padding(decoder_attention_mask)

    def memory(self) -> MemoryReport:
        """Return the bytes of both halves, by part; exact cross-attention counts as `other`.

        `tokens` counts the decoder's tokens and the encoder's columns. For one half alone ask
        `self_attention_cache.memory()`, and `cross_attention_cache.memory()` where that is paged.
        """
        own, cross = self.self_attention_cache.memory(), self.cross_attention_cache
        if isinstance(cross, PagedCache):
            return MemoryReport(*map(add, astuple(own), astuple(cross.memory())))
        held = (getattr(layer, "keys", None) for layer in cross.layers)
        columns = next((one.shape[0] * one.shape[2] for one in held if one is not None), 0)
        stored = sum(tensor_bytes(vars(layer)) for layer in cross.layers)
        return replace(own, other=own.other + stored, tokens=own.tokens + columns)

    def report(self) -> list[LayerReport]:
        """Return, for each layer of the decoder, how its self-attention is cached, then its cross-attention."""
        layers = self.cross_attention_cache.layers
        why = "the encoder's keys and values are written once and kept exact; cross_attention='same' stores them in pages"
        cross = report_layers(layers, dict.fromkeys(range(len(layers)), why))
        own = self.self_attention_cache.report()
        return own + [replace(row, kind=f"cross {row.kind}") for row in cross]

    def check_integrity(self) -> None:
        """Raise ValueError unless counts, lengths, storage and layers of each half agree."""
        for half in paged_halves(self):
            if half is not None:
                half.check_integrity()

    def __repr__(self) -> str:
        own, cross = self.self_attention_cache, self.cross_attention_cache
        return (
            f"{type(self).__name__}(self_attention_cache={own!r}, cross_attention_cache={cross!r})"
        )


def paged_halves(cache: Any) -> tuple[Any, Any]:
    """Return what is paged of `cache`: the cache of the text's own tokens, and that of cross-attention."""
    halves: Any = (cache, None)
    if isinstance(cache, EncoderDecoderCache):
        halves = (cache.self_attention_cache, cache.cross_attention_cache)
    own, cross = (half if isinstance(half, PagedCache) else None for half in halves)
    return own, cross
