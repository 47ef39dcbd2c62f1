"""Sizes, speeds and counts of tokens as people write them: 24GiB, 3.35TB/s, 128k."""

import operator
import re
from decimal import Decimal

from .errors import CacheOptionError
from .printable import short

BYTE_UNITS = {
    "B": 1,
    **{f"{prefix}iB": 1024 ** (i + 1) for i, prefix in enumerate("KMGT")},
    **{f"{prefix}B": 1000 ** (i + 1) for i, prefix in enumerate("KMGT")},
}
MOST = 1 << 62  # bytes, tokens: what is beyond it is a slip
TOKEN_UNITS = {"": 1, "k": 1024, "M": 1024**2}
# a comma stands between groups of three digits only: the decimal comma of 1,5GiB is refused
_WHOLE = "(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+(?:_[0-9]+)*)"
_NUMBER = re.compile(rf"({_WHOLE}(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)")


def parse_bytes(argument: str, given: str | int, least: int = 1) -> int:
    """Return the bytes of "24GiB" (1024**3), "24GB" (1000**3) or a plain number: `least` (0 or 1) of them or more.

    Raises: CacheOptionError naming `argument` for anything else, such as "24G", which both could be meant by.
    """
    rule = (
        f"a size of at least {least} byte{'s' * (least != 1)} such as 24GiB (1024**3), 24GB (1000**3), 512MiB or a number "
        "of bytes"
    )
    return _parse(argument, given, {"": 1, **BYTE_UNITS}, rule, least=least)


def parse_bandwidth(argument: str, given: str | int) -> int:
    """Return the bytes per second of "3.35TB/s" or "900GB/s"; a plain number is bytes per second.

    Raises: CacheOptionError naming `argument` for anything else.
    """
    rule = "bytes per second such as 3.35TB/s, 900GB/s or a number"
    text = given.strip().removesuffix("/s") if isinstance(given, str) else given
    return _parse(argument, given, {"": 1, **BYTE_UNITS}, rule, text)


def parse_tokens(argument: str, given: str | int) -> int:
    """Return the tokens of "8192", "8,192", "128k" (128 * 1024), "1M" (1024 * 1024), or a whole number of any type.

    Such a number may be a tensor: `get_seq_length()` of a cache with max_length returns one.

    Raises: CacheOptionError naming `argument` for anything else.
    """
    rule = "a number of tokens such as 8192 or 128k (128 * 1024)"
    return _parse(argument, given, {**TOKEN_UNITS, "K": 1024}, rule)


def _parse(
    argument: str,
    given: str | int,
    units: dict[str, int],
    rule: str,
    text: str | int | None = None,
    least: int = 1,
) -> int:
    text = given if text is None else text
    found = _NUMBER.fullmatch(text.strip()) if isinstance(text, str) else None
    try:
        if found is None:
            if isinstance(text, bool):
                raise TypeError
            result = Decimal(operator.index(text))  # type: ignore[arg-type]
        else:
            result = Decimal(re.sub("[_,]", "", found[1])) * units[found[2]]
    except (KeyError, TypeError):
        raise CacheOptionError(f"{argument} must be {rule}, got {short(given)}") from None
    if result > MOST:
        raise CacheOptionError(f"{argument} must be at most {MOST:,}, got {short(given)}")
    if result < least or result != result.to_integral_value():
        raise CacheOptionError(f"{argument} must be {rule}, got {short(given)}")
    return int(result)


def format_bytes(count: float) -> str:
    """Return bytes in the binary unit that leaves the fewest digits: "16.5 GiB"."""
    value, unit = float(count), "B"
    for prefix in "KMGTP":
        if abs(value) < 1024:
            break
        value, unit = value / 1024, f"{prefix}iB"
    return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.2f} {unit}"


def format_bandwidth(count: float) -> str:
    """Return bytes per second in the decimal unit of data sheets: "3.35 TB/s"."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if count >= size:
            return f"{count / size:,.4g} {prefix}B/s"
    return f"{count:,.0f} B/s"


def format_count(count: float) -> str:
    """Return a large count in millions or billions of numbers: "8.03 B"; smaller ones as they are."""
    for name, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if count >= size:
            return f"{count / size:.2f} {name}"
    return f"{count:,.0f}"
