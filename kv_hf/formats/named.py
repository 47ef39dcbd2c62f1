"""Names of paged caches: `paged_int4` and others that `cache_implementation` takes, and the options that they stand for.

Options are held as they were given; kv_hf.cache_names.register_cache checks them before they come here.
"""

import copy
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import CacheOptionError

_NAME = re.compile(r"paged_[a-z0-9_]+")


@dataclass(frozen=True)
class _Named:
    """Options of a name; the one format that it stands for, and whether it comes with kv_hf."""

    options: Mapping[str, Any]
    format: str | None = None
    shipped: bool = False


_caches: dict[str, _Named] = {}
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
    return copy.deepcopy(dict(_caches[name].options))


def formats_named(name: str) -> str | None:
    """Return "paged_int3 is keys='int2_mixed', values='int3_rotated'" for that name or "int3"; None for any other."""
    for one in (name, f"paged_{name}"):
        options = _caches[one].options if one in _caches else {}
        if options.keys() >= {"keys", "values"}:
            return f"{one} is {_words({side: options[side] for side in ('keys', 'values')})}"
    return None


def watch(changed: Callable[[], None]) -> None:
    """Have `changed` called whenever a name has come or gone."""
    if changed not in _watchers:
        _watchers.append(changed)


def unwatch(changed: Callable[[], None]) -> None:
    """Call `changed` no more."""
    if changed in _watchers:
        _watchers.remove(changed)


def ship(name: str, options: Mapping[str, Any], format: str | None = None) -> None:
    """Add a name that comes with kv_hf."""
    _caches[name] = _Named(options, format, shipped=True)


def add(name: str, options: Mapping[str, Any], format: str | None = None) -> None:
    """Add a name. Raises CacheOptionError for a name that is taken or that no cache can have.

    Args:
        format: the format that brought the name along; None where the name was registered by itself.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise CacheOptionError(
            f"name must be paged_ and lower-case letters, digits or underscores, as in 'paged_k8v4', got {name!r}"
        )
    with _lock:
        if name in _caches:
            raise CacheOptionError(
                f"cache name {name!r} is registered already, for {_words(_caches[name].options)}; take another name"
            )
        _caches[name] = _Named(copy.deepcopy(dict(options)), format)
    _changed()


def drop(name: str) -> None:
    """Take a name back that was registered by itself. Raises CacheOptionError for any other."""
    with _lock:
        found = _caches.get(name) if isinstance(name, str) else None
        if found is None:
            raise CacheOptionError(
                f"cache name {name!r} is not registered; there are {', '.join(_caches)}"
            )
        if found.shipped:
            raise CacheOptionError(f"cache name {name!r} comes with kv_hf and stays")
        if found.format is not None:
            raise CacheOptionError(
                f"cache name {name!r} belongs to the format {found.format!r}: "
                f"kv_hf.unregister_format({found.format!r}) takes both back"
            )
        del _caches[name]
    _changed()


def drop_of_format(format: str) -> None:
    """Take the name back that a format brought along, if it did."""
    with _lock:
        names = [name for name, found in _caches.items() if found.format == format]
        for name in names:
            del _caches[name]
    _changed()


def users_of(format: str) -> list[str]:
    """Return the names whose options name a format."""
    return [name for name, found in _caches.items() if format in set(_formats_in(found.options))]


def _formats_in(options: Mapping[str, Any]) -> Iterator[Any]:
    for name in ("keys", "values", "latent", "k_rope"):
        yield options.get(name)
    for sides in (options.get("layers") or {}).values():
        yield from sides.values() if isinstance(sides, Mapping) else (sides,)


def _words(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def _changed() -> None:
    for changed in list(_watchers):
        changed()


class Implementations(Mapping[str, str]):
    """The names whose keys and values have one format -> the format, as they are now; kv_hf.cache_names() lists all."""

    def __getitem__(self, name: str) -> str:
        found = _caches[name].format
        if found is None:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return (name for name, found in list(_caches.items()) if found.format is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return repr(dict(self))
