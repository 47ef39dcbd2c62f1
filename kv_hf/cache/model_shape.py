"""Facts about a model's cache from its config, and from the version of transformers, before any key is seen."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from ..errors import UnsupportedModelError
from ..notices import warn_once

VERSION = Version(transformers.__version__)

# 5.24: generate() and models know their cache by another name
CACHE = "past_key_values" if Version("5.24.dev0") > VERSION else "cache"

_FITS = f"found {transformers.__version__}: pip install 'transformers>=5.17,<5.25'"
if Version("5.17") > VERSION:
    raise ImportError(f"kv_hf needs transformers 5.17 to 5.24, {_FITS}")
if Version("5.25.dev0") <= VERSION:
    warn_once(
        "newer transformers",
        "kv_hf replaces functions inside transformers, was tested with those of 5.17 to 5.24, and may fail or give other tokens "
        f"with later ones; {_FITS}",
    )

# 5.17 cache_utils: crop(n > 0) means "keep n tokens"; from 5.18 on a positive number raises
CROP_TAKES_LENGTHS = Version("5.18.0.dev0") > VERSION

# 5.17 generation/utils.py: _prefill counts the columns of its chunks from 0, whatever the cache holds (5.23: from there on)
CHUNKS_BEHIND_A_CACHE = Version("5.23.0.dev0") <= VERSION


def removed_by_crop(tokens_to_remove: int, seen: int) -> int:
    """Return how many of the newest tokens `crop(tokens_to_remove)` removes of `seen`: n for -n.

    Before 5.18 a positive number says how many are kept instead. Raises ValueError for one from there on.
    """
    count = int(tokens_to_remove)
    if count <= 0:
        return -count
    if not CROP_TAKES_LENGTHS:
        raise ValueError(
            f"tokens_to_remove must be 0 or negative (-n removes the last n tokens), got {count}"
        )
    return max(0, seen - count)


def forget_tokens(layer: Any) -> None:
    """Drop the tensors of a layer of transformers that was reset.

    5.17 zeroes them, so that the next update would append to zeros (cache_utils, DynamicLayer.reset), and states keep the
    rows that they had (LinearAttentionLayer). Past recording stays as it is.
    """
    if isinstance(layer, DynamicLayer):
        layer.keys = layer.values = None
        layer.is_initialized = False
    if isinstance(layer, LinearAttentionLayer):
        recording = layer.record_past
        LinearAttentionLayer.__init__(layer, layer.number_of_states)
        layer.record_past = recording


def is_dummy(layer: Any) -> bool:
    """Say whether a layer of a cache holds nothing; the class came after 5.17 (read in 5.23 cache_utils)."""
    return type(layer).__name__ == "DummyLayer"


def modules_of(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield all modules of a model as `model.modules()` does, in another order and in a tenth of its time."""
    found: list[torch.nn.Module | None] = [model]
    seen = set()
    while found:
        module = found.pop()
        if module is not None and module not in seen:
            seen.add(module)
            yield module
            found += module._modules.values()


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
    """Return the decoder's config of `config`: a part of it, itself, or a copy (flat encoder-decoder configs).

    Raises: UnsupportedModelError for things that are no model config.
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
    decoder = config.get_text_config(decoder=True)
    layers = getattr(config, "num_decoder_layers", None)  # T5; 5.23 leaves it out of its copy
    if decoder is not config and is_encoder_decoder(decoder) and isinstance(layers, int):
        # ProphetNet, whose num_hidden_layers reads this one
        if hasattr(decoder, "num_encoder_layers"):
            decoder.num_encoder_layers = layers
        else:
            decoder.num_hidden_layers = layers
    return decoder


def cross_config(config: Any) -> Any:
    """Return a copy of the decoder's config for a cache of cross-attention: a step looks at the whole encoder.

    A decoder's sliding windows are about its own tokens.
    """
    decoder = copy.deepcopy(decoder_config(config))
    if getattr(decoder, "layer_types", None) is not None:
        decoder.layer_types = ["full_attention"] * len(decoder.layer_types)
    if getattr(decoder, "sliding_window", None) is not None:
        decoder.sliding_window = None
    return decoder


def attention_config(config: Any) -> Any:
    """Return the config that `set_attn_implementation` changes for the decoder, never a copy."""
    decoder = decoder_config(config)
    return decoder if decoder_config(config) is decoder else config


def is_encoder_decoder(config: Any) -> bool:
    """Say whether a model of this config has cross-attention to an encoder, and two caches."""
    return bool(getattr(config, "is_encoder_decoder", False))


def kept_layers(config: Any) -> dict[int, str]:
    """Return the layers of a decoder's config that look full, but do not hold the text's tokens, with the reason."""
    cross = _read(config, "cross_attention_layers")
    if config.model_type != "mllama_text_model" or not isinstance(cross, list):
        return {}
    reason = (
        "it attends to images, whose tokens are not the text's; transformers' DynamicLayer is kept"
    )
    return dict.fromkeys(cross, reason)


def signature(config: Any) -> dict[str, Any]:
    """Return the sizes by which caches of different models are told apart."""
    return {name: _read(config, name) for name in _SIGNATURE}


def _read(config: Any, name: str) -> Any:
    """Return an attribute, None where the config has none, or VARIES where layers differ in it."""
    try:
        return getattr(config, name, None)
    # 5.23: AmbiguousGlobalPerLayerAttributeError of heterogeneous configs
    except Exception as error:
        if type(error).__name__ == "AmbiguousGlobalPerLayerAttributeError":
            return VARIES
        raise


def is_chunked(config: Any) -> bool:
    """Say whether layers attend within chunks of the text (llama4): a pattern that only a mask describes."""
    return getattr(config, "attention_chunk_size", None) is not None


def latent_rank(config: Any) -> int | None:
    """Return kv_lora_rank of a decoder's config: not None where its attention caches latents (MLA)."""
    rank = _read(config, "kv_lora_rank")
    return rank if isinstance(rank, int) else None


def latent_ranks(config: Any, count: int) -> list[int | None]:
    """Return kv_lora_rank of each of `count` layers, None of those without latent attention."""
    if _read(config, "kv_lora_rank") != VARIES:
        return [latent_rank(config)] * count
    return [latent_rank(config.per_layer_config[index]) for index in range(count)]


def page_sizes(config: Any) -> dict[str, Any] | None:
    """Return the sizes of a page as LayerFormats.spec takes them, or None where `config` states no single ones."""
    if _read(config, "kv_lora_rank") is not None:
        rank, rope = latent_rank(config), _read(config, "qk_rope_head_dim")
        if rank is None or not isinstance(rope, int):
            return None
        return {"num_kv_heads": 1, "key_dim": rank, "value_dim": rope}
    num_heads, hidden = _read(config, "num_attention_heads"), _read(config, "hidden_size")
    own = (_read(config, "num_key_value_heads"), num_heads)
    kv_heads = next((count for count in own if isinstance(count, int)), None)
    # T5 and its kin have d_kv: heads need not add up to hidden_size
    dims = _read(config, "head_dim"), _read(config, "d_kv")
    head_dim = next((dim for dim in dims if isinstance(dim, int)), None)
    known = isinstance(num_heads, int) and isinstance(hidden, int) and VARIES not in dims
    if head_dim is None and known:
        head_dim = hidden // num_heads
    if dims[0] == VARIES or kv_heads is None or head_dim is None:
        return None
    return {"num_kv_heads": kv_heads, "key_dim": head_dim, "value_dim": head_dim}


def rotates_by_length(config: Any) -> bool:
    """Say whether keys depend on how long the text is that they are computed in (dynamic NTK, longrope)."""
    config = config.get_text_config(decoder=True)
    found = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    while found:
        given = found.pop()
        if isinstance(given, Mapping):
            if given.get("rope_type", given.get("type")) in ("dynamic", "longrope"):
                return True
            found += given.values()
    return False
