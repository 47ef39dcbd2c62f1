"""What a preallocated cache cannot do is said before generate() runs its first forward."""

from typing import Any

from ..backends.dispatch import MAX_DECODE_QUERIES
from ..cache.static_cache import StaticPagedCache, refused
from ..errors import CacheOptionError
from .models import why_not_pages


def is_assisted(generation_mode: Any) -> bool:
    """Say whether a transformers GenerationMode drafts tokens (draft model, prompt lookup, early exit)."""
    return "assisted" in str(getattr(generation_mode, "value", generation_mode))


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
    if is_assisted(generation_mode) or getattr(generation_config, "is_assistant", False):
        raise refused("roll tokens back (assisted decoding, prompt lookup)")
    reason = why_not_pages(model)
    if reason is not None:
        raise CacheOptionError(
            f"a cache with max_length is read by attention over pages only, which {type(model).__name__} does not get: "
            f"{reason}. Leave max_length out"
        )
    chunk = generation_config.prefill_chunk_size
    if chunk is None or (cache.is_initialized and chunk <= MAX_DECODE_QUERIES):
        return
    given = {**model_kwargs, "past_key_values": cache}
    if model._valid_auto_compile_criteria(given, generation_config):
        raise CacheOptionError(
            f"prefill_chunk_size={chunk}: transformers compiles each chunk, for which a cache with max_length must have its "
            f"tensors (cache.early_initialization(..)) and chunks of at most {MAX_DECODE_QUERIES} tokens. Pass "
            "disable_compile=True, or leave prefill_chunk_size out"
        )
