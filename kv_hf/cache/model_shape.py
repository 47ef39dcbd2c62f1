"""What a model's config says about its cache, before any key is seen."""

from collections.abc import Iterator
from typing import Any

import torch

from ..errors import UnsupportedModelError
from ..formats import Scheme
from ..spec import ROWS, PageSpec

VARIES = "differs from layer to layer"
_SIGNATURE = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "kv_lora_rank",
    "vocab_size",
)


def decoder_config(config: Any) -> Any:
    """Return the decoder's config of `config`.

    Raises: UnsupportedModelError for encoder-decoder models and for things that are no model config.
    """
    if isinstance(config, Iterator):
        raise UnsupportedModelError(
            "a PagedCache cannot be put together from the keys and values of several devices, as nn.DataParallel "
            "gathers them; use one process and one cache per device (accelerate launch, DistributedDataParallel), "
            "or run the forward with use_cache=False"
        )
    if not hasattr(config, "get_text_config"):
        raise UnsupportedModelError(
            f"config must be a transformers model config (model.config), got {type(config).__name__}"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"paged caches hold decoder-only models so far; {config.model_type!r} is an encoder-decoder model: "
            "use cache_implementation='dynamic'"
        )
    return config.get_text_config(decoder=True)


def signature(config: Any) -> dict[str, Any]:
    """Return the sizes by which caches of different models are told apart."""
    return {name: _read(config, name) for name in _SIGNATURE}


def _read(config: Any, name: str) -> Any:
    """Return an attribute, None where the config has none, or VARIES where layers differ in it."""
    try:
        return getattr(config, name, None)
    except (
        Exception
    ) as error:  # 5.23: AmbiguousGlobalPerLayerAttributeError of heterogeneous configs
        if type(error).__name__ == "AmbiguousGlobalPerLayerAttributeError":
            return VARIES
        raise


def is_chunked(config: Any) -> bool:
    """Say whether layers attend within chunks of the text (llama4): a pattern that only a mask describes."""
    return getattr(config, "attention_chunk_size", None) is not None


def planned_specs(
    config: Any,
    schemes: list[tuple[Scheme, Scheme]],
    page_size: int,
    dtype: torch.dtype = torch.float32,
    layout: str = ROWS,
) -> list[PageSpec]:
    """Return what the pages of each layer will be like, as far as `config` states the size of a head.

    Models whose config states no single head size (latent attention, for one) give an empty list: they are
    checked on their first keys. Raises CacheOptionError where a format cannot store heads of that size.
    """
    num_heads = _read(config, "num_attention_heads")
    hidden = _read(config, "hidden_size")
    head_dim = _read(config, "head_dim")
    if head_dim == VARIES or _read(config, "kv_lora_rank") is not None:
        return []
    if not isinstance(head_dim, int):
        if not isinstance(num_heads, int) or not isinstance(hidden, int):
            return []
        head_dim = hidden // num_heads
    return [
        PageSpec.build(
            keys,
            values,
            num_kv_heads=1,
            key_dim=head_dim,
            value_dim=head_dim,
            page_size=page_size,
            dtype=dtype,
            layout=layout,
        )
        for keys, values in schemes
    ]
