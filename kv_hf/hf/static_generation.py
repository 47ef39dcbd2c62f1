"""What a cache with max_length cannot do is said before generate() runs its first forward."""

from typing import Any

from ..backends.dispatch import MAX_DECODE_QUERIES
from ..cache.paged_cache import PagedCache
from ..errors import CacheOptionError
from .graph_choice import Generation
from .models import why_other_tokens


def is_assisted(generation_mode: Any) -> bool:
    """Say whether a transformers GenerationMode drafts tokens (draft model, prompt lookup, early exit)."""
    return "assisted" in str(getattr(generation_mode, "value", generation_mode))


def check_length(cache: PagedCache, asked: Generation, model_kwargs: dict[str, Any]) -> None:
    """Raise CacheOptionError where this generation does not fit a cache with max_length; change nothing."""
    model, length, most = asked.model, asked.length, cache.max_length
    assert most is not None
    reason = why_other_tokens(model)
    if reason is not None:
        raise CacheOptionError(
            f"max_length={most}: {type(model).__name__} cannot use it: {reason}. Leave max_length out"
        )
    if length > most:
        raise CacheOptionError(
            f"prompt and new tokens are up to {length} long, and cache_config max_length is {most}: raise "
            "max_length or generate fewer tokens (max_new_tokens)"
        )
    chunk = asked.config.prefill_chunk_size
    if chunk is None or chunk <= MAX_DECODE_QUERIES:
        return
    given = {**model_kwargs, "past_key_values": cache}
    if model._valid_auto_compile_criteria(given, asked.config):
        raise CacheOptionError(
            f"prefill_chunk_size={chunk}: transformers compiles each chunk, which takes chunks of at most "
            f"{MAX_DECODE_QUERIES} tokens on a cache with max_length. Pass disable_compile=True, or leave prefill_chunk_size out"
        )
