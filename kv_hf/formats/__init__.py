"""Number formats of stored keys and values, and the names of caches that store in them: a registry, not a list.

A format is a row of linear.py, or a class of another package (docs/formats.md, "Add a format"). Knows no page and no cache.
"""

from ..errors import CacheOptionError
from .base import SIDES, WHOLE_HEAD, WHOLE_PAGE, Format, Groups, Scheme, get_format
from .linear import Float8Format, RangeFormat, SignedFormat, per_channel, per_token
from .named import cache_names, cache_options, is_cache_name
from .registry import (
    check_format,
    format_names,
    is_shipped,
    readers_of,
    register_format,
    unregister_format,
)

__all__ = [
    "SIDES",
    "WHOLE_HEAD",
    "WHOLE_PAGE",
    "Float8Format",
    "Format",
    "Groups",
    "RangeFormat",
    "Scheme",
    "SignedFormat",
    "cache_names",
    "cache_options",
    "check_format",
    "format_names",
    "get_format",
    "is_cache_name",
    "is_shipped",
    "k_rope_name",
    "k_rope_scheme",
    "key_scheme",
    "latent_scheme",
    "per_channel",
    "per_token",
    "readers_of",
    "register_format",
    "unregister_format",
    "value_scheme",
]


def key_scheme(name: str, group_size: int | None = None) -> Scheme:
    """Describe how keys are stored in format `name`; `group_size` as in `_scheme`."""
    return _scheme(name, "keys", group_size)


def value_scheme(name: str, group_size: int | None = None) -> Scheme:
    """Describe how values are stored in format `name`; `group_size` as in `_scheme`."""
    return _scheme(name, "values", group_size)


def latent_scheme(name: str, group_size: int | None = None) -> Scheme:
    """Describe how latents of multi-head latent attention are stored in format `name`; `group_size` as in `_scheme`."""
    return _scheme(name, "latent", group_size)


def k_rope_name(asked: str | None, latent: Scheme) -> str:
    """Return the format of the RoPE keys beside latents: `asked`, or what goes with the format of the latents."""
    return latent.format.k_rope if asked is None else asked


def k_rope_scheme(name: str, rope_dim: int) -> Scheme:
    """Describe how the RoPE keys beside latents are stored; models without RoPE have none, and store nothing exactly."""
    return _scheme(name if rope_dim else "exact", "k_rope", None)


def _scheme(name: str, side: str, group_size: int | None) -> Scheme:
    """Describe how one side is stored in format `name`.

    Args:
        group_size: what the option says, read by formats that have groups to set on this side; None takes the format's default.
    Raises: CacheOptionError where there is no format of that name, or none for that side.
    """
    found = get_format(name)
    if side not in found.sides:
        raise CacheOptionError(
            f"format {name!r} is for {', '.join(found.sides)}, not for {side}; use one of {', '.join(format_names(side))}"
        )
    return found.scheme(side, group_size if side in found.sized_sides else None)
