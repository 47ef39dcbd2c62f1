"""Options about room: a length that all pages are made for at once, and a place for pages beside the device.

Checks them against each other. Knows no storage.
"""

import os
from typing import Any

from .checks import MOST_BYTES, check_choice, check_int
from .errors import CacheOptionError

OFFLOAD_CHOICES = ("cpu", "disk")


def check_max_length(config: Any) -> None:
    """Raise CacheOptionError for a bad `max_length`, or for options of a cache that grows beside it."""
    if config.max_length is None:
        return
    check_int("max_length", config.max_length, 1)
    for name, default in (
        ("recent_tokens", 0),
        ("reserve_tokens", 0),
        ("max_pages", None),
        ("prefix_store", None),
        ("offload", None),
    ):
        value = getattr(config, name)
        if value != default:
            raise CacheOptionError(
                f"{name}={value} does not go with max_length={config.max_length}, which allocates all pages at once "
                f"and keeps one page of exact tokens; leave out {name} or max_length"
            )


def check_offload(config: Any) -> None:
    """Raise CacheOptionError for bad options about pages that live outside of the device."""
    if config.offload is not None and config.prefix_store is not None:
        raise CacheOptionError(
            f"offload={config.offload!r} does not go with prefix_store, whose pages many caches read at once; leave out "
            "one of them"
        )
    if config.offload is not None:
        check_choice("offload", config.offload, OFFLOAD_CHOICES)
    budgets = {"device_bytes": config.device_bytes, "device_pages": config.device_pages}
    given = {name: value for name, value in budgets.items() if value is not None}
    for name, value in given.items():
        check_int(name, value, 1, MOST_BYTES)
    if len(given) > 1:
        raise CacheOptionError(
            f"device_bytes and device_pages are two ways to give one budget, got both ({given})"
        )
    if given and config.offload is None:
        name, value = given.popitem()
        raise CacheOptionError(
            f"{name}={value} needs offload='cpu' or 'disk': without it all pages stay on the device; use "
            "max_pages to bound them"
        )
    if config.offload_dir is not None:
        if config.offload != "disk":
            raise CacheOptionError(
                f"offload_dir is read with offload='disk' only, got offload={config.offload!r}"
            )
        folder = config.offload_dir
        if not isinstance(folder, (str, os.PathLike)) or not os.path.isdir(folder):
            raise CacheOptionError(f"offload_dir must be a folder that exists, got {folder!r}")
