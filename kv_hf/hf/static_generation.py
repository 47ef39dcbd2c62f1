"""What a cache with max_length cannot do is said before generate() runs its first forward."""

from typing import Any

from ..backends.dispatch import MAX_DECODE_QUERIES
from ..cache.paged_cache import PagedCache
from ..errors import CacheOptionError
from .models import why_other_tokens


def is_assisted(generation_mode: Any) -> bool:
    """Say whether a transformers GenerationMode drafts tokens (draft model, prompt lookup, early exit)."""
    return "assisted" in str(getattr(generation_mode, "value", generation_mode))


def check_length(
    model: Any,
    cache: PagedCache,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    generation_mode: Any,
    batch_size: int,
    max_cache_length: int,
) -> None:
    """Raise CacheOptionError where this generation does not fit a cache with max_length; change nothing.

    Args:
        generation_config .. max_cache_length: as transformers hands them to _prepare_cache_for_generation (5.17 to
            5.23); max_cache_length is the length of prompt and new tokens, less the last one.
    """
    reason = why_other_tokens(model)
    if cache.max_length is not None and reason is not None:
        raise CacheOptionError(
            f"max_length={cache.max_length}: {type(model).__name__} cannot use it: {reason}. Leave max_length out"
        )
    length = max_cache_length + 1
    if cache.max_length is not None and length > cache.max_length:
        raise CacheOptionError(
            f"prompt and new tokens are up to {length} long, and cache_config max_length is {cache.max_length}: raise "
            "max_length or generate fewer tokens (max_new_tokens)"
        )
    chunk = generation_config.prefill_chunk_size
    if chunk is None or chunk <= MAX_DECODE_QUERIES:
        return
    given = {**model_kwargs, "past_key_values": cache}
    if model._valid_auto_compile_criteria(given, generation_config):
        raise CacheOptionError(
            f"prefill_chunk_size={chunk}: transformers compiles each chunk, which takes chunks of at most "
            f"{MAX_DECODE_QUERIES} tokens on a cache with max_length. Pass disable_compile=True, or leave prefill_chunk_size out"
        )
