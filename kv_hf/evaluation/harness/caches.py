"""The cache of `cache_implementation` and `cache_config` as they come from a command line. Knows no model."""

import json
from collections.abc import Mapping
from typing import Any

from ...cache.paged_cache import PagedCache
from ...cache_names import all_cache_names, parse_cache_name
from ...config import CacheConfig
from ...errors import CacheOptionError
from ...files.json_text import parse_json
from ...formats import ATTENTION_NAME, is_cache_name
from ...printable import short
from ..cache_kinds import CacheKind, cache_kind


def harness_cache(
    cache_implementation: str | None, cache_config: str | Mapping[str, Any] | None = None
) -> CacheKind:
    """Return the cache that is to be measured.

    Args:
        cache_implementation: what `cache_kind` takes, such as "paged_int4", "hqq_int4" or "paged_int4:keys=int8".
        cache_config: options of it: a mapping, JSON, or "keys=int8;recent_tokens=32" (see `read_config`).
    Raises: ValueError (or CacheOptionError, which is one) for an unknown cache and for options that it does not take.
    """
    if not isinstance(cache_implementation, str) or not cache_implementation:
        raise ValueError(
            "cache_implementation must name the cache to measure, one of "
            f"{', '.join(all_cache_names())}; got {cache_implementation!r}"
        )
    options = read_config(cache_config)
    if not options:
        return cache_kind(cache_implementation)
    base, named = parse_cache_name(cache_implementation)
    if is_cache_name(base):
        merged = {**named, **options}
        CacheConfig.from_options(base, merged)
        return CacheKind(
            _name(base, merged),
            ATTENTION_NAME,
            lambda config, _: PagedCache.from_implementation(config, base, merged),
        )
    return cache_kind(_name(base, {**named, **options}))


def read_config(given: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options of `cache_config`.

    lm-eval splits --model_args at commas, so that options stand behind each other with semicolons there:
    "keys=int8;recent_tokens=32;layers={"0": "int8"}". Values are read as JSON where they are JSON, else as words.

    Raises: CacheOptionError for anything that is neither a mapping nor such a text.
    """
    if given is None or given == "":
        return {}
    if isinstance(given, Mapping):
        return dict(given)
    if not isinstance(given, str):
        raise CacheOptionError(
            f"cache_config must be a mapping, JSON or NAME=VALUE;NAME=VALUE, got {given!r}"
        )
    if given.lstrip().startswith("{"):
        try:
            return dict(parse_json(given))
        except ValueError as error:
            raise CacheOptionError(
                f"cache_config is no valid JSON ({error}): {short(given)}"
            ) from error
    options: dict[str, Any] = {}
    for item in given.split(";"):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not (name and equals and value):
            raise CacheOptionError(
                f"cache_config must be a mapping, JSON or NAME=VALUE;NAME=VALUE, got {item!r} in {given!r}"
            )
        options[name] = _value(value)
    return options


def _value(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)


def _name(base: str, options: Mapping[str, Any]) -> str:
    """Return the name that `cache_kind` reads, options included."""
    words = (
        f"{name}={value if isinstance(value, str) else json.dumps(value, default=str)}"
        for name, value in options.items()
    )
    return f"{base}:{','.join(words)}"
