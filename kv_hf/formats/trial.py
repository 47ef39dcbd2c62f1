"""The checks before a format is registered: its attributes, and codes of random numbers."""

import math
import re
from collections.abc import Collection, Mapping
from inspect import getattr_static

import torch

from ..checks import listed
from ..errors import CacheOptionError, first_line
from .base import GROUP_OPTIONS, SIDES, Format, Scheme
from .encoded import check_decoded, check_encoded

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_PAGE, _DIM = 64, 128  # of the trial, or multiples where groups are larger or do not divide these

# what decides how the codes of shipped formats are made and read, beside the scheme
_ARITHMETIC = (
    "encode",
    "decode",
    "numbers_of",
    "codes_of",
    "top",
    "mantissa_bits",
    "exponent_bias",
    "code_dtype",
)


def check_attributes(
    made: Format,
    native: Mapping[int | None, Format],
    codes: Collection[str],
    k_ropes: Collection[str],
) -> None:
    """Raise CacheOptionError for attributes that no format can have, or that contradict each other.

    Args:
        native: the shipped formats by the number that compiled kernels know them by.
        codes: names of arithmetic, which backends would take for that of a shipped format.
        k_ropes: the formats that RoPE keys may have.
    """
    name = getattr(made, "name", None)
    where = f"format {name!r}"
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise CacheOptionError(
            f"name of a format must be lower-case letters, digits or underscores, a letter first, got {name!r}"
        )
    if name in codes:
        raise CacheOptionError(
            f"name of a format must not be one of {', '.join(sorted(codes))}, by which backends know the codes of shipped "
            f"formats, got {name!r}"
        )
    bits = getattr(made, "bits", None)
    if type(bits) is not int or bits not in (1, 2, 3, 4, 8):
        raise CacheOptionError(f"{where}: bits must be 1, 2, 3, 4 or 8, got {bits!r}")
    signed = made.code_dtype == torch.int8 and bits == 8
    if made.code_dtype != torch.uint8 and not signed:
        raise CacheOptionError(
            f"{where}: code_dtype must be torch.uint8 (or torch.int8 for codes of 8 bits), got {made.code_dtype}"
        )
    sides = made.sides if isinstance(made.sides, (tuple, list)) else ()
    if not sides or any(side not in SIDES for side in sides):
        raise CacheOptionError(
            f"{where}: sides must be some of {', '.join(SIDES)}, got {made.sides!r}"
        )
    if not isinstance(made.group_options, Mapping):
        raise CacheOptionError(
            f"{where}: group_options must map sides to options, got {made.group_options!r}"
        )
    for side, option in made.group_options.items():
        if side not in made.sides or option not in GROUP_OPTIONS:
            raise CacheOptionError(
                f"{where}: group_options must map some of {', '.join(made.sides)} to one of {', '.join(GROUP_OPTIONS)}, "
                f"got {side!r}: {option!r}"
            )
    known = (*k_ropes, name) if "k_rope" in made.sides else tuple(k_ropes)
    if made.k_rope not in known:
        raise CacheOptionError(
            f"{where}: k_rope must be a format of RoPE keys, one of {', '.join(known)}, got {made.k_rope!r}"
        )
    if type(made.version) is not int or made.version < 1:
        raise CacheOptionError(
            f"{where}: version must be a whole number of at least 1, got {made.version!r}"
        )
    if made.native_number is None:
        if made.native_code:
            raise CacheOptionError(
                f"{where}: native_code={made.native_code!r} needs the native_number that goes with it; without one no "
                "compiled kernel reads the format"
            )
        return
    _check_native(made, native)


def _check_native(made: Format, native: Mapping[int | None, Format]) -> None:
    """Raise CacheOptionError where compiled kernels would read another arithmetic into the codes than the format's own."""
    where, bits = f"format {made.name!r}", made.bits
    same = native.get(made.native_number) if type(made.native_number) is int else None
    if same is None or (made.code, bits) != (same.code, same.bits):
        known = ", ".join(
            f"{number}: {one.code} of {one.bits} bits" for number, one in native.items()
        )
        raise CacheOptionError(
            f"{where}: native_number and native_code must be those of a format that the compiled kernels read ({known}), got "
            f"{made.native_number!r}: {made.code} of {bits} bits"
        )
    for what in _ARITHMETIC:
        if getattr_static(made, what, None) is not getattr_static(same, what, None):
            raise CacheOptionError(
                f"{where}: {what} differs from that of format {same.name!r}, whose native_number {made.native_number} it "
                'has: compiled kernels would ignore it. Set native_number = None and native_code = "" where the format '
                f"has its own arithmetic, or leave {what} out"
            )


def check_arithmetic(made: Format) -> None:
    """Encode and decode random numbers; raise CacheOptionError where the result is not of the form that kv_hf reads."""
    for side in made.sides:
        try:
            _try(made, _scheme_of(made, side), side)
        except CacheOptionError:
            raise
        except Exception as error:  # whatever a format that is not ours raises
            raise CacheOptionError(
                f"format {made.name!r} cannot encode and decode {side}: {type(error).__name__}: {first_line(error)}"
            ) from error


def _scheme_of(made: Format, side: str) -> Scheme:
    """Return the default scheme of a side. Raises CacheOptionError unless it is one of this format."""
    scheme = made.scheme(side)
    if not isinstance(scheme, Scheme) or scheme.format is not made:
        raise CacheOptionError(
            f"format {made.name!r}: scheme({side!r}) must return self.made(..), got {scheme!r}"
        )
    own = {"name": made.name, "code": made.code, "bits": made.bits}
    for what, right in own.items():
        if getattr(scheme, what) != right:
            raise CacheOptionError(
                f"format {made.name!r}: scheme({side!r}) must have the format's {what} {right!r}, got "
                f"{getattr(scheme, what)!r}"
            )
    return scheme


def _try(made: Format, scheme: Scheme, side: str) -> None:
    """Encode pages together and alone; two heads, and sizes that hold the groups."""
    groups = [group for group in (scheme.scale_group, scheme.offset_group) if group is not None]
    tokens = math.lcm(_PAGE, *(max(1, group[0]) for group in groups))
    if tokens & (tokens - 1):
        raise CacheOptionError(
            f"format {made.name!r}: tokens of a group must divide a page, whose size is a power of two, got groups of "
            f"{listed(str(group[0]) for group in groups)} tokens of {side}"
        )
    channels = math.lcm(scheme.codes_per_byte, *(max(1, group[1]) for group in groups))
    shape = torch.Size((2, 2, tokens, channels * max(1, _DIM // channels)))
    scheme = scheme.resolve(tokens, shape[3], side)
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    given = numbers.clone()
    together = made.encode(given, scheme)
    check_encoded(together, shape, scheme)
    for page in range(shape[0]):
        alone = made.encode(numbers[page : page + 1].clone(), scheme)
        check_encoded(alone, torch.Size((1, *shape[1:])), scheme)
        for what, one, all_pages in zip(("codes", "scale", "offset"), alone, together, strict=True):
            if one is None or all_pages is None:
                continue
            if not torch.equal(one[0], all_pages[page]):
                what = what if what == "codes" else f"{what}s"
                raise CacheOptionError(
                    f"format {made.name!r}: encode must give a page the same {what} alone as beside other pages"
                )
    decoded = made.decode(*together, scheme)
    check_decoded(decoded, shape, scheme)
    if not float((decoded - numbers).square().sum()) < float(numbers.square().sum()):
        raise CacheOptionError(
            f"format {made.name!r}: decode must give numbers near to the encoded ones, and for {side} its errors are "
            f"larger than those of zeros"
        )
