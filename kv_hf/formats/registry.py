"""The formats that are known, by name: the shipped ones, and those that other packages register.

Holds no list beside the formats themselves: what a side, an option or a kernel takes follows from their attributes.
"""

import threading
from typing import TypeVar

from ..errors import CacheOptionError
from . import named
from .base import FORMATS, Format, get_format
from .exact import Exact
from .fp8 import Fp8
from .fp8_ds_mla import Fp8DsMla
from .int2 import Int2
from .int4 import Int4
from .int8 import Int8
from .trial import check_arithmetic, check_attributes

_SHIPPED = (Exact, Fp8, Int8, Int4, Int2, Fp8DsMla)  # in this order everywhere

Given = TypeVar("Given", bound="Format | type[Format]")

FORMATS.update({kind.name: kind() for kind in _SHIPPED})
_lock = threading.RLock()


def format_names(side: str = "keys") -> tuple[str, ...]:
    """Return the names of all formats that may be used for one of base.SIDES, the shipped ones first."""
    return tuple(name for name, found in list(FORMATS.items()) if side in found.sides)


def readers_of(option: str) -> tuple[str, ...]:
    """Return the formats that have groups whose size `option` sets."""
    return tuple(name for name, found in list(FORMATS.items()) if found.reads(option))


def native_names(side: str = "keys") -> tuple[str, ...]:
    """Return the formats of a side that the compiled kernels read."""
    return tuple(name for name in format_names(side) if FORMATS[name].native_number is not None)


def native_formats() -> dict[int | None, Format]:
    """Return a shipped format for each number that compiled kernels know codes by; exact's codes have none."""
    shipped = [FORMATS[kind.name] for kind in _SHIPPED if kind is not Exact]
    return {one.native_number: one for one in reversed(shipped)}


def native_codes() -> set[str]:
    """Return what backends call the codes of shipped formats: names that mean something else than a format."""
    return {FORMATS[kind.name].code for kind in _SHIPPED}


def is_registered(kind: type) -> bool:
    """Say whether the format of exactly this class is known."""
    return any(type(found) is kind for found in list(FORMATS.values()))


def is_shipped(name: str) -> bool:
    """Say whether a format comes with kv_hf."""
    return any(kind.name == name for kind in _SHIPPED)


def register_format(format: Given) -> Given:
    """Make a number format known: to options, `generate`, reports, plans, evaluation and the doctor.

        @kv_hf.register_format
        class NF4(kv_hf.Format):
            ...

    A format for keys and values brings the cache name `paged_<name>` along. Only the implementations in torch read it,
    said once, unless its `native_number` says that the compiled kernels know its codes. docs/formats.md has an example.

    Args:
        format: a kv_hf.Format, or a class of one that takes no arguments.
    Returns: `format`, so that this can decorate a class.
    Raises: CacheOptionError for a name that is taken, attributes that contradict each other, and codes of random numbers
        that do not have the shapes and dtypes that `Format.encode` and `Format.decode` promise; nothing is changed then.
    """
    made = format() if isinstance(format, type) else format
    if not isinstance(made, Format):
        raise CacheOptionError(
            f"format must be a kv_hf.Format, or a class of one, got {type(made).__name__}"
        )
    check_attributes(made, native_formats(), native_codes())
    check_arithmetic(made)
    cache = f"paged_{made.name}"
    with _lock:
        if made.name in FORMATS:
            raise CacheOptionError(
                f"format {made.name!r} is registered already; kv_hf.unregister_format({made.name!r}) takes it back"
            )
        both = "keys" in made.sides and "values" in made.sides
        if both:
            named.add(cache, {"keys": made.name, "values": made.name}, made.name)
        FORMATS[made.name] = made
    return format


def unregister_format(name: str) -> None:
    """Forget a format that `register_format` made known, and its cache name. Caches that hold its pages go on.

    Raises: CacheOptionError for a shipped format, one that is not registered, and one that a registered cache name needs.
    """
    get_format(name)
    if is_shipped(name):
        raise CacheOptionError(f"format {name!r} comes with kv_hf and stays")
    with _lock:
        users = [one for one in named.users_of(name) if one != f"paged_{name}"]
        if users:
            raise CacheOptionError(
                f"format {name!r} is needed by the cache names {', '.join(users)}; take those back with "
                "kv_hf.unregister_cache first"
            )
        del FORMATS[name]
        named.drop_of_format(name)


for _kind in _SHIPPED:
    if "keys" in _kind.sides:
        named.ship(f"paged_{_kind.name}", {"keys": _kind.name, "values": _kind.name}, _kind.name)
named.ship("paged_k8v4", {"keys": "int8", "values": "int4"})
