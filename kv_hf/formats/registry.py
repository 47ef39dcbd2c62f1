"""The formats that are known, by name: the shipped ones, and those that other packages register.

Holds no list beside the formats themselves: what a side, an option or a kernel takes follows from their attributes.
"""

import threading
from typing import TypeVar

from ..checks import check_choice
from ..errors import CacheOptionError, first_line
from . import named
from .base import FORMATS, Format, get_format
from .checked import check_arithmetic, check_attributes
from .linear import SHIPPED

_OF_CACHES = ("keys", "values")  # the sides that every cache name stands for

Given = TypeVar("Given", bound="Format | type[Format]")

FORMATS.update({one.name: one for one in SHIPPED})
_lock = threading.RLock()


def format_names(*sides: str) -> tuple[str, ...]:
    """Return the names of all formats that may be used for each of these base.SIDES, the shipped ones first."""
    return tuple(name for name, found in list(FORMATS.items()) if {*sides} <= {*found.sides})


def check_format(argument: str, name: object, side: str = "keys") -> None:
    """Raise CacheOptionError naming `argument` unless `name` is a format for one of base.SIDES."""
    check_choice(argument, name, format_names(side))


def readers_of(side: str) -> tuple[str, ...]:
    """Return the formats that have groups on this side, whose size the option `group_size` sets."""
    return tuple(name for name, found in list(FORMATS.items()) if side in found.sized_sides)


def is_shipped(name: str) -> bool:
    """Say whether a format comes with kv_hf."""
    return any(one.name == name for one in SHIPPED)


def register_format(format: Given) -> Given:
    """Make a number format known: to options, `generate`, reports, plans, evaluation and the doctor.

        @kv_hf.register_format
        class NF4(kv_hf.Format):
            ...

    A format for keys and values brings the cache name `paged_<name>` along. The implementations in torch read it, said
    once; compiled kernels read rows of RangeFormat, SignedFormat and Float8Format alone. docs/formats.md has examples. A class
    of the same module and name takes the place of the one before it, as where a cell of a notebook runs again; caches go on
    with the format that they have.

    Args:
        format: a kv_hf.Format, or a class of one that takes no arguments.
    Returns: `format`, so that this can decorate a class.
    Raises: CacheOptionError for a name that is taken, attributes that no format can have, and codes of random numbers
        that do not have the shapes and dtypes that `Format.encode` and `Format.decode` promise; nothing is changed then.
    """
    made = _made(format)
    check_attributes(made, format_names("k_rope"))
    check_arithmetic(made)
    with _lock:
        before = FORMATS.get(made.name)
        if before is not None and (is_shipped(made.name) or _origin(before) != _origin(made)):
            raise CacheOptionError(
                f"format {made.name!r} is registered already; choose another name"
            )
        if {*_OF_CACHES} <= {*made.sides} and (
            before is None or not {*_OF_CACHES} <= {*before.sides}
        ):
            named.add(f"paged_{made.name}", {"keys": made.name, "values": made.name})
        FORMATS[made.name] = made
    return format


def unregister_format(name: str) -> None:
    """Forget a format that `register_format` made known, and its cache name. Caches that hold its pages go on.

    Raises: CacheOptionError for a shipped format and for one that is not registered.
    """
    with _lock:
        get_format(name)
        if is_shipped(name):
            raise CacheOptionError(f"format {name!r} comes with kv_hf and stays")
        if named.is_cache_name(f"paged_{name}"):
            named.drop(f"paged_{name}")
        del FORMATS[name]


def _origin(format: Format) -> tuple[str, str]:
    return type(format).__module__, type(format).__qualname__


def _made(format: Format | type[Format]) -> Format:
    """Return an object of a format. Raises CacheOptionError for anything else, and a class that makes none."""
    made: object = format
    if isinstance(format, type) and issubclass(format, Format):
        try:
            made = format()
        except Exception as error:  # abstract, with arguments, or whatever another package raises
            raise CacheOptionError(
                f"format {format.__name__} must be a class that is made without arguments and has scheme, encode and decode: "
                f"{type(error).__name__}: {first_line(error)}"
            ) from error
    if not isinstance(made, Format):
        got = format.__name__ if isinstance(format, type) else type(format).__name__
        raise CacheOptionError(f"format must be a kv_hf.Format, or a class of one, got {got}")
    return made


# The newest tokens weigh most: where few bits are left of a number, they stay exact
_TAIL = {"recent_tokens": 64}
for _name, _keys, _values, _rest in (
    ("paged_exact", "exact", "exact", {}),
    ("paged_fp8", "fp8", "fp8", {}),
    ("paged_int8", "int8", "int8", {}),
    ("paged_int6", "int6", "int6", {"latent": "int8"}),
    ("paged_k8v4", "int8", "int4", {}),
    ("paged_int4", "int4", "int4", _TAIL),
    ("paged_int3", "int3", "int3", _TAIL),
    ("paged_int2", "int2", "int2", _TAIL),
):
    named.ship(_name, {"keys": _keys, "values": _values, **_rest})
