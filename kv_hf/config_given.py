"""The options that a user gave: by name, as a mapping, or as a CacheConfig. Knows no option by itself."""

from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass
from typing import Any

from .checks import check_choice
from .errors import CacheOptionError
from .formats import cache_names, format_names
from .printable import short

# fields that name formats: a CacheConfig that sets one of them has chosen all of them
_FORMATS = ("keys", "values", "layers", "latent", "k_rope")


def given_options(cache_config: Any, config_class: type) -> dict[str, Any]:
    """Return the options that `cache_config` gives, as a new dict.

    A field of a CacheConfig counts as given where it is not at its default. Its formats count together: with
    `CacheConfig(values="int4")` keys are given too, as exact.

    Args:
        cache_config: a CacheConfig, a mapping of options, or None.
        config_class: CacheConfig.
    Raises: CacheOptionError for anything else, and for names that are no options.
    """
    if cache_config is None:
        return {}
    known: dict[str, Field[Any]] = {field.name: field for field in fields(config_class)}
    if isinstance(cache_config, config_class) and is_dataclass(cache_config):
        values = {name: getattr(cache_config, name) for name in known}
        given = {name: one for name, one in values.items() if one != known[name].default}
        if given.keys() & set(_FORMATS):
            given |= {side: values[side] for side in ("keys", "values")}
        return given
    if not isinstance(cache_config, Mapping):
        raise CacheOptionError(_no_config(cache_config))
    for name in cache_config:
        check_choice("cache_config option", name, known)
    return dict(cache_config)


def json_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options in JSON types, as `cache_config` takes them again; a prefix store, which is none, is left out."""
    found = {name: value for name, value in given.items() if name != "prefix_store"}
    if found.get("layers") is not None:
        found["layers"] = {str(span): formats for span, formats in found["layers"].items()}
    if found.get("offload_dir") is not None:
        found["offload_dir"] = str(found["offload_dir"])
    return found


def _no_config(given: Any) -> str:
    """Return what to write in place of something that is no cache_config."""
    rule = (
        "cache_config must be a kv_hf.CacheConfig or a dict of options such as {'page_size': 32}, got "
        f"{short(given) if isinstance(given, str) else type(given).__name__}"
    )
    if isinstance(given, str) and given in format_names("keys"):
        return f"{rule}; a format is given by name: keys={given!r}"
    if isinstance(given, str) and given in cache_names():
        return (
            f"{rule}; the name of a cache goes to generate(cache_implementation={given!r}) or "
            f"PagedCache.from_implementation(config, {given!r})"
        )
    return f"{rule}; formats are given by name, such as keys='int8', values='int4'"
