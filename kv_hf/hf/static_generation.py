"""What a preallocated cache cannot do is said before generate() runs its first forward."""

from typing import Any

from ..cache.static_cache import StaticPagedCache
from ..cache.static_layer import refused
from ..errors import CacheOptionError
from ..formats import ATTENTION_NAME
from .models import why_not_pages


def check_static_generation(
    model: Any,
    cache: StaticPagedCache,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    generation_mode: Any,
    batch_size: int,
    max_cache_length: int,
) -> None:
    """Raise CacheOptionError where this generation does not fit `cache`; change nothing.

    Args:
        generation_config .. max_cache_length: as transformers hands them to _prepare_cache_for_generation (5.17 to
            5.23); max_cache_length is the length of prompt and new tokens, less the last one.
    """
    length = max_cache_length + 1
    if length > cache.max_length:
        raise CacheOptionError(
            f"prompt and new tokens are up to {length} long, and cache_config max_length is {cache.max_length}: raise "
            "max_length or generate fewer tokens (max_new_tokens)"
        )
    if "assisted" in str(getattr(generation_mode, "value", generation_mode)) or getattr(
        generation_config, "is_assistant", False
    ):
        raise refused("roll tokens back (assisted decoding, prompt lookup)")
    if not model._valid_auto_compile_criteria(
        {**model_kwargs, "past_key_values": cache}, generation_config
    ):
        return
    reason = why_not_pages(model)
    if reason is None and cache.options.attention == "keep":
        current = model.config.get_text_config(decoder=True)._attn_implementation
        reason = (
            None if current == ATTENTION_NAME else "attention='keep' leaves its attention alone"
        )
    if reason is not None:
        raise CacheOptionError(
            f"generate() would compile the decode step, which reads pages through the attention 'kv_hf' only, and "
            f"{type(model).__name__} does not use it: {reason}. Pass disable_compile=True, or leave max_length out"
        )
    if generation_config.prefill_chunk_size is not None and not cache.is_initialized:
        raise CacheOptionError(
            f"prefill_chunk_size={generation_config.prefill_chunk_size}: transformers compiles each chunk, and the first "
            "forward of a cache with max_length allocates. Call cache.early_initialization(..) and pass it as "
            "past_key_values, or pass disable_compile=True, or leave prefill_chunk_size out"
        )
