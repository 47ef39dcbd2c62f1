"""The checks of formats of other packages: their attributes, and the form of what they encode and decode.

Pages are written by index, where a result of another shape may fit by broadcasting: without a check it would be stored.
"""

import math
import re
from collections.abc import Collection, Iterator

import torch

from ..checks import listed
from ..errors import CacheOptionError, first_line
from .base import CODE_BITS, NATIVE_NUMBERS, SIDES, Format, Scheme

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_CODES = sorted({code for code, _ in NATIVE_NUMBERS})  # by which kernels know arithmetics
_PAGE, _DIM = 64, 128  # of the trial, or multiples where groups are larger or do not divide these


def check_attributes(made: Format, k_ropes: Collection[str]) -> None:
    """Raise CacheOptionError for attributes that no format can have; `k_ropes`: the formats of RoPE keys."""
    for what, fits, rule in _rules(made, k_ropes):
        if not fits:
            got = getattr(made, what, None)
            name = getattr(made, "name", None)
            raise CacheOptionError(f"format {name!r}: {what} must be {rule}, got {got!r}")


def _rules(made: Format, k_ropes: Collection[str]) -> Iterator[tuple[str, bool, str]]:
    """Yield each attribute, whether it fits, and the rule; what comes later relies on what came before."""
    name, bits = getattr(made, "name", None), getattr(made, "bits", None)
    sides, sized = made.sides, made.sized_sides
    letters = "lower-case letters, digits or underscores, a letter first"
    yield "name", isinstance(name, str) and bool(_NAME.fullmatch(name)), letters
    yield "name", name not in _CODES, f"none of {', '.join(_CODES)}, kernels' words for arithmetics"
    yield "bits", type(bits) is int and bits in CODE_BITS, "1, 2, 3, 4, 6 or 8"
    dtypes = (torch.uint8, torch.int8) if bits == 8 else (torch.uint8,)
    yield "code_dtype", made.code_dtype in dtypes, f"one of {listed(map(str, dtypes))}"
    is_list = isinstance(sides, (tuple, list)) and bool(sides)
    ours = is_list and all(side in SIDES for side in sides)
    yield "sides", ours, f"some of {', '.join(SIDES)}"
    known = isinstance(sized, (tuple, list)) and all(side in sides for side in sized)
    yield "sized_sides", known, f"some of {', '.join(sides)}, or ()"
    formats = (*k_ropes, str(name)) if "k_rope" in sides else tuple(k_ropes)
    rule = f"a format of RoPE keys, one of {', '.join(formats)}"
    yield "k_rope", made.k_rope in formats, rule


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
    if scheme.widths and side != "keys":
        raise CacheOptionError(f"format {made.name!r}: widths are for keys, not for {side}")
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
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(0), device="cpu")
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


def check_encoded(result: object, shape: torch.Size, scheme: Scheme) -> None:
    """Raise CacheOptionError unless `result` is what `Format.encode` promises for whole pages.

    Shapes and dtypes are checked everywhere, values (codes that fit their bits, scales and offsets that are finite) on a
    CPU alone: elsewhere the host would wait for the device.

    Args:
        shape: (pages, num_kv_heads, page_size, head_dim) of the numbers that were encoded.
        scheme: with groups of plain sizes.
    """
    if not isinstance(result, tuple) or len(result) != 3:
        got = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
        raise _wrong(scheme, f"encode must return (codes, scale, offset), got {got}")
    codes, scale, offset = result
    pages, heads, tokens, dim = shape
    _check_form(scheme, "encode's codes", codes, tuple(shape), scheme.code_dtype)
    for what, given, group in (
        ("scale", scale, scheme.scale_group),
        ("offset", offset, scheme.offset_group),
    ):
        if group is None:
            if given is not None:
                raise _wrong(
                    scheme, f"encode's {what} must be None: the scheme has no {what}_group"
                )
            continue
        groups = (pages, heads, tokens // group[0], dim // group[1])
        _check_form(scheme, f"encode's {what}", given, groups, scheme.scale_dtype)
        if given.device.type == "cpu" and not bool(given.isfinite().all()):
            raise _wrong(
                scheme,
                f"encode's {what} must be finite for finite numbers, got inf or nan in {given.dtype}",
            )
    if codes.device.type != "cpu" or not codes.numel():
        return
    sizes = [channels for _, channels in scheme.wide]
    parts = codes.split([*sizes, dim - sum(sizes)], -1)
    for bits, part in zip((*dict(scheme.wide), scheme.bits), parts, strict=True):
        largest = int(part.max())
        if bits < 8 and largest >> bits:
            raise _wrong(scheme, f"encode's codes must be below 2^{bits}, got {largest}")


def check_decoded(result: object, shape: torch.Size, scheme: Scheme) -> None:
    """Raise CacheOptionError unless `result` is fp32 of that shape, as `Format.decode` promises."""
    _check_form(scheme, "decode's numbers", result, tuple(shape), torch.float32)


def _check_form(
    scheme: Scheme, what: str, given: object, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    if not isinstance(given, torch.Tensor):
        raise _wrong(scheme, f"{what} must be a tensor, got {type(given).__name__}")
    if tuple(given.shape) != shape or given.dtype != dtype:
        raise _wrong(
            scheme,
            f"{what} must be {dtype} {list(shape)}, got {given.dtype} {list(given.shape)}",
        )


def _wrong(scheme: Scheme, says: str) -> CacheOptionError:
    return CacheOptionError(f"format {scheme.name!r}: {says}")
