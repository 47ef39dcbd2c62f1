"""The checks before a format is registered: its attributes, and codes of random numbers."""

import re
from collections.abc import Collection, Mapping
from inspect import getattr_static

import torch

from ..errors import CacheOptionError, first_line
from .base import GROUP_OPTIONS, SIDES, Format, Scheme

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_PAGE, _DIM = 64, 128  # of the trial, if groups of these sizes are whole


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
    made: Format, native: Mapping[int | None, Format], codes: Collection[str]
) -> None:
    """Raise CacheOptionError for attributes that no format can have, or that contradict each other.

    Args:
        native: the shipped formats by the number that compiled kernels know them by.
        codes: names of arithmetic, which backends would take for that of a shipped format.
    """
    name = getattr(made, "name", None)
    where = f"format {name!r}"
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise CacheOptionError(
            f"name of a format must be lower-case letters, digits or underscores, got {name!r}"
        )
    if name in codes:
        raise CacheOptionError(
            f"name of a format must not be one of {', '.join(sorted(codes))}, by which backends know the codes of shipped "
            f"formats, got {name!r}"
        )
    bits = getattr(made, "bits", None)
    if bits not in (1, 2, 4, 8) or isinstance(bits, bool):
        raise CacheOptionError(f"{where}: bits must be 1, 2, 4 or 8, got {bits!r}")
    signed = made.code_dtype == torch.int8 and bits == 8
    if made.code_dtype != torch.uint8 and not signed:
        raise CacheOptionError(
            f"{where}: code_dtype must be torch.uint8 (or torch.int8 for codes of 8 bits), got {made.code_dtype}"
        )
    if isinstance(made.sides, str) or not made.sides or set(made.sides) - set(SIDES):
        raise CacheOptionError(
            f"{where}: sides must be some of {', '.join(SIDES)}, got {made.sides!r}"
        )
    for side, option in made.group_options.items():
        if side not in made.sides or option not in GROUP_OPTIONS:
            raise CacheOptionError(
                f"{where}: group_options must map some of {', '.join(made.sides)} to one of {', '.join(GROUP_OPTIONS)}, "
                f"got {side!r}: {option!r}"
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
    same = native.get(made.native_number)
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
            scheme = made.scheme(side)
            if not isinstance(scheme, Scheme) or scheme.format is not made:
                raise CacheOptionError(
                    f"scheme({side!r}) must return self.made(..), got {scheme!r}"
                )
            try:
                resolved = scheme.resolve(_PAGE, _DIM, side)
            except CacheOptionError:
                continue  # groups that these sizes do not hold; a cache says whether they fit its own
            _try(made, resolved)
        except CacheOptionError as error:
            raise CacheOptionError(f"format {made.name!r}: {error}") from None
        except Exception as error:  # whatever a format that is not ours raises
            raise CacheOptionError(
                f"format {made.name!r} cannot encode and decode {side}: {type(error).__name__}: {first_line(error)}"
            ) from error


def _try(made: Format, scheme: Scheme) -> None:
    numbers = torch.randn(2, 1, _PAGE, _DIM, generator=torch.Generator().manual_seed(0))
    codes, scale, offset = made.encode(numbers, scheme)
    _expect("encode's codes", codes, tuple(numbers.shape), made.code_dtype)
    if made.bits < 8 and int(codes.max()) >> made.bits:
        raise CacheOptionError(
            f"encode's codes must be below 2^{made.bits}, got {int(codes.max())}"
        )
    for what, given, group in (
        ("scale", scale, scheme.scale_group),
        ("offset", offset, scheme.offset_group),
    ):
        if group is None:
            if given is not None:
                raise CacheOptionError(
                    f"encode's {what} must be None: the scheme has no {what}_group"
                )
            continue
        _expect(
            f"encode's {what}",
            given,
            (2, 1, _PAGE // group[0], _DIM // group[1]),
            scheme.scale_dtype,
        )
    decoded = made.decode(codes, scale, offset, scheme)
    _expect("decode's numbers", decoded, tuple(numbers.shape), torch.float32)
    if not bool(torch.isfinite(decoded).all()):
        raise CacheOptionError("decode must give finite numbers for the codes of finite numbers")
    alone = torch.cat([made.encode(page[None], scheme)[0] for page in numbers])
    if not torch.equal(alone, codes):
        raise CacheOptionError("encode must give a page the same codes alone as beside other pages")


def _expect(what: str, given: object, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if not isinstance(given, torch.Tensor):
        raise CacheOptionError(f"{what} must be a tensor, got {type(given).__name__}")
    if tuple(given.shape) != shape or given.dtype != dtype:
        raise CacheOptionError(
            f"{what} must be {dtype} {list(shape)}, got {given.dtype} {list(given.shape)}"
        )
