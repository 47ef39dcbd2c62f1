"""The cache that a call of generate() asks for: by name, by a CacheConfig, or by options that nobody reads."""

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformers.generation import configuration_utils

from ..checks import check_choice
from ..config import CacheConfig
from ..errors import CacheOptionError, UnsupportedModelError
from ..formats import cache_names, is_cache_name
from ..notices import warn_once
from ..printable import short

WITHOUT_NAME = "paged_exact"  # brings no option of its own: a CacheConfig says the rest
_OPTIONS = frozenset(field.name for field in fields(CacheConfig))
# how GenerationConfig.validate() begins where it does not know a name (generation/configuration_utils.py, 5.17 to 5.23)
_REFUSED = re.compile(r"Invalid `cache_implementation` \((.*?)\)\.")


def asked_name(generation_config: Any, given: Any) -> str | None:
    """Return the name of the cache that is asked for, or None; options that transformers passes over are said once.

    A kv_hf.CacheConfig without a name asks for a paged cache of its formats.

    Args:
        generation_config: of this call.
        given: the cache that the user passes (`past_key_values`), or None.
    Raises: CacheOptionError for a CacheConfig beside the name of a cache that is not paged, and a name in place of a cache.
    """
    if isinstance(given, str):
        raise CacheOptionError(
            f"past_key_values must be a cache, as kv_hf.PagedCache(model.config, ..) makes one, got {given!r}: a name goes into "
            "cache_implementation"
        )
    name: str | None = generation_config.cache_implementation
    options = generation_config.cache_config
    if options is None or is_cache_name(name) or getattr(generation_config, "is_assistant", False):
        return name
    if isinstance(options, CacheConfig):
        if name is not None:
            raise CacheOptionError(
                f"cache_config=kv_hf.CacheConfig(..) is for paged caches, got cache_implementation={name!r}; name one of "
                f"{', '.join(cache_names())}, or leave cache_implementation out"
            )
        if given is None:
            return WITHOUT_NAME
    elif name is not None or not _names_ours(options):
        return name
    _say_unread(options, given)
    return name


def check_made(model: Any, generation_config: Any, cache: Any) -> None:
    """Raise UnsupportedModelError where a model's own generate() (MusicGen) reaches its prefill without the cache that was named."""
    name = generation_config.cache_implementation
    if cache is None and generation_config.use_cache is not False and is_cache_name(name):
        raise UnsupportedModelError(
            f"cache_implementation={name!r}: generate() of {type(model).__name__} makes no cache by its name; leave "
            "cache_implementation out, and pass past_key_values=kv_hf.PagedEncoderDecoderCache(model.config, ..)"
        )


def with_hint(error: ValueError) -> ValueError:
    """Return the error to raise: with the nearest name where transformers refused an unknown one, else `error` itself."""
    found = _REFUSED.match(str(error))
    if found is None:
        return error
    try:
        check_choice(
            "cache_implementation", found[1], configuration_utils.ALL_CACHE_IMPLEMENTATIONS
        )
    except CacheOptionError as ours:
        return ours
    return error


def _names_ours(options: Any) -> bool:
    return isinstance(options, Mapping) and bool(options) and set(options) <= _OPTIONS


def _say_unread(options: Any, given: Any) -> None:
    shown = options if isinstance(options, CacheConfig) else dict(options)
    if given is None:
        remedy = (
            "transformers reads it beside a cache_implementation, and none was given. Pass one of "
            f"{', '.join(cache_names())}, or cache_config=kv_hf.CacheConfig(..), which needs no name"
        )
    else:
        remedy = f"the {type(given).__name__} that was passed has options of its own. Give them where it is made"
    warn_once("cache_config unread", f"cache_config={short(shown)} is not read: {remedy}")
