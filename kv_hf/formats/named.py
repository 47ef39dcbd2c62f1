"""Names of paged caches: `paged_int4` and others that `cache_implementation` takes, and the options that they stand for.

Options are held as they were given; kv_hf.cache_names.register_cache checks them before they come here.
"""

import copy
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import CacheOptionError

_NAME = re.compile(r"paged_[a-z0-9_]+")


_caches: dict[str, Mapping[str, Any]] = {}
_shipped: set[str] = set()
_watchers: list[Callable[[], None]] = []
_lock = threading.RLock()


def cache_names() -> tuple[str, ...]:
    """Return every name that `cache_implementation` takes for a paged cache, the shipped ones first."""
    return tuple(_caches)


def is_cache_name(name: object) -> bool:
    """Say whether a paged cache has this name."""
    return name in _caches


def cache_options(name: str) -> dict[str, Any]:
    """Return the options of CacheConfig that a name stands for, `keys` and `values` among them."""
    return copy.deepcopy(dict(_caches[name]))


def watch(changed: Callable[[], None]) -> None:
    """Have `changed` called whenever a name has come or gone."""
    if changed not in _watchers:
        _watchers.append(changed)


def unwatch(changed: Callable[[], None]) -> None:
    """Call `changed` no more."""
    if changed in _watchers:
        _watchers.remove(changed)


def ship(name: str, options: Mapping[str, Any]) -> None:
    """Add a name that comes with kv_hf."""
    _caches[name] = options
    _shipped.add(name)


def add(name: str, options: Mapping[str, Any]) -> None:
    """Add a name; the same again changes nothing. Raises CacheOptionError for a name that is taken or that no cache can have."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise CacheOptionError(
            f"name must be paged_ and lower-case letters, digits or underscores, as in 'paged_k8v4', got {name!r}"
        )
    with _lock:
        if name in _caches:
            if _caches[name] == options:
                return  # a cell of a notebook runs twice
            back = "" if name in _shipped else ", or call kv_hf.unregister_cache before"
            raise CacheOptionError(
                f"cache name {name!r} is registered already, for {_words(_caches[name])}; take another name{back}"
            )
        _caches[name] = copy.deepcopy(dict(options))
    _changed()


def drop(name: str) -> None:
    """Take a name back that was registered. Raises CacheOptionError for any other."""
    with _lock:
        if not isinstance(name, str) or name not in _caches:
            raise CacheOptionError(
                f"cache name {name!r} is not registered; there are {', '.join(_caches)}"
            )
        if name in _shipped:
            raise CacheOptionError(f"cache name {name!r} comes with kv_hf and stays")
        del _caches[name]
    _changed()


def _words(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def _changed() -> None:
    for changed in list(_watchers):
        changed()
