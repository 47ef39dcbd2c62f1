"""The formats that are known, by name: the shipped ones, and those that other packages register.

Holds no list beside the formats themselves: what a side, an option or a kernel takes follows from their attributes.
"""

import threading
from typing import TypeVar

from ..checks import check_choice
from ..errors import CacheOptionError, first_line
from . import named
from .base import FORMATS, GONE, Format, get_format, missing_format
from .exact import Exact
from .fp8 import Fp8
from .fp8_ds_mla import Fp8DsMla
from .int2 import Int2
from .int2_mixed import Int2Mixed
from .int2_rotated import Int2Rotated
from .int3_rotated import Int3Rotated
from .int4 import Int4
from .int4_mixed import Int4Mixed
from .int4_rotated import Int4Rotated
from .int8 import Int8
from .trial import check_arithmetic, check_attributes

# in this order everywhere
_SHIPPED = (
    Exact, Fp8, Int8, Int4, Int2, Fp8DsMla, Int4Mixed, Int2Mixed, Int4Rotated, Int3Rotated, Int2Rotated,
)  # fmt: skip

_OF_CACHES = ("keys", "values")  # the sides that every cache name stands for

Given = TypeVar("Given", bound="Format | type[Format]")

FORMATS.update({kind.name: kind() for kind in _SHIPPED})
_lock = threading.RLock()


def format_names(side: str = "keys") -> tuple[str, ...]:
    """Return the names of all formats that may be used for one of base.SIDES, the shipped ones first."""
    return tuple(name for name, found in list(FORMATS.items()) if side in found.sides)


def check_format(argument: str, name: object, side: str = "keys") -> None:
    """Raise CacheOptionError naming `argument` unless `name` is a format for one of base.SIDES.

    For the name of a cache the message says which formats of keys and values the cache has.
    """
    names = format_names(side)
    if isinstance(name, str) and name not in names and name not in GONE and side in _OF_CACHES:
        formats = named.formats_named(name)
        if formats is not None:
            raise CacheOptionError(
                f"{argument} must be one of {', '.join(names)}, got {name!r}; the cache {formats}"
            )
    try:
        check_choice(argument, name, names)
    except CacheOptionError as error:
        if isinstance(name, str) and name in GONE:
            raise CacheOptionError(f"{error}; {missing_format(name)}") from None
        raise


def readers_of(option: str) -> tuple[str, ...]:
    """Return the formats that have groups whose size `option` sets."""
    return tuple(name for name, found in list(FORMATS.items()) if found.reads(option))


def native_names(side: str = "keys") -> tuple[str, ...]:
    """Return the formats of a side that the compiled kernels read."""
    return tuple(name for name in format_names(side) if FORMATS[name].native_number is not None)


def two_sided_names() -> tuple[str, ...]:
    """Return the formats that may be used for keys and for values, and that the compiled kernels read."""
    values = native_names("values")
    return tuple(name for name in native_names("keys") if name in values)


def native_formats() -> dict[int | None, Format]:
    """Return a shipped format for each number that compiled kernels know codes by; exact's codes have none."""
    shipped = [FORMATS[kind.name] for kind in _SHIPPED if kind is not Exact]
    return {one.native_number: one for one in reversed(shipped) if one.native_number is not None}


def wide_codes() -> dict[int, int]:
    """Return the bits of wide channels' unsigned codes, by the number that compiled kernels know these codes by."""
    schemes = [
        FORMATS[kind.name].scheme("keys") for kind in _SHIPPED if kind.native_wide is not None
    ]
    return {one.format.native_wide or 0: one.wide_bits for one in schemes}


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
    made = _made(format)
    check_attributes(made, native_formats(), native_codes(), format_names("k_rope"))
    check_arithmetic(made)
    cache = f"paged_{made.name}"
    with _lock:
        if made.name in FORMATS:
            remedy = (
                "choose another name"
                if is_shipped(made.name)
                else f"kv_hf.unregister_format({made.name!r}) takes it back"
            )
            raise CacheOptionError(f"format {made.name!r} is registered already; {remedy}")
        both = "keys" in made.sides and "values" in made.sides
        if both:
            named.add(cache, {"keys": made.name, "values": made.name}, made.name)
        FORMATS[made.name] = made
        GONE.discard(made.name)
    return format


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


def unregister_format(name: str) -> None:
    """Forget a format that `register_format` made known, and its cache name. Caches that hold its pages go on.

    Raises: CacheOptionError for a shipped format, one that is not registered, and one that a registered cache name needs.
    """
    with _lock:
        get_format(name)
        if is_shipped(name):
            raise CacheOptionError(f"format {name!r} comes with kv_hf and stays")
        users = [one for one in named.users_of(name) if one != f"paged_{name}"]
        if users:
            raise CacheOptionError(
                f"format {name!r} is needed by the cache names {', '.join(users)}; take those back with "
                "kv_hf.unregister_cache first"
            )
        del FORMATS[name]
        GONE.add(name)
        named.drop_of_format(name)


for _name, _keys, _values, _latent in (
    ("paged_exact", "exact", "exact", None),
    ("paged_fp8", "fp8", "fp8", None),
    ("paged_int8", "int8", "int8", None),
    ("paged_k8v4", "int8", "int4", None),
    ("paged_int4", "int4", "int4", None),
    # latents are keys and values at once, for which a format of one side is none
    ("paged_k5v3", "int4_mixed", "int3_rotated", "int4"),
    ("paged_int3", "int2_mixed", "int3_rotated", None),
    ("paged_int2", "int2_mixed", "int2_rotated", "int2"),
    ("paged_int2_v1", "int2", "int2", None),  # what paged_int2 was at first
):
    _options = {"keys": _keys, "values": _values, **({"latent": _latent} if _latent else {})}
    named.ship(_name, _options, _keys if _keys == _values else None)
