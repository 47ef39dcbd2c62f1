"""Numbers of a row as cells of a table. What was measured is in data-value as it is in the row, unrounded."""

from typing import Any

from .markup import Markup, join, tag
from .select import Row

MIB = 2**20
MINUS = "\u2212"
NUMBER = 'class="number"'
NONE = tag("td", "\u2013", class_="none")


def short(value: float) -> str:
    """Return a number with three significant digits, without an exponent from 0.0001 to a million."""
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e6:
        digits, exponent = f"{value:.1e}".split("e")
        return f"{digits}e{int(exponent)}".replace("-", MINUS)
    places = max(0, 3 - len(f"{abs(value):.0f}")) if abs(value) >= 1 else 3 + _zeros(abs(value))
    return f"{value:,.{places}f}".replace("-", MINUS)


def percent(value: float) -> str:
    """Return a fraction as a percentage."""
    text = f"{100 * value:.1f}"
    return f"{text.removesuffix('.0')} %"


def score(value: float) -> str:
    """Return a score: three decimals where it is a part of 1."""
    if abs(value) > 1:
        return short(value)
    return f"{round(value, 3) or 0.0:.3f}".replace("-", MINUS)


def signed(value: float, unit: str = "", form: Any = short) -> str:
    """Return a difference with its sign."""
    text = form(value)
    return ("+" if value > 0 else "") + text + (f" {unit}" if unit else "")


def size(value: float) -> str:
    """Return bytes as MiB, or as bytes below 0.1 MiB."""
    return f"{value / MIB:,.2f} MiB" if value >= MIB / 10 else f"{value:,.0f} B"


def measured(row: Row, name: str, text: Any = short, ends: tuple[str, str] | None = None) -> Markup:
    """Return field `name` of a row as a cell, with its interval where the row has the fields `ends`.

    Args:
        text: number -> what is shown.
    """
    value = row.get(name)
    if value is None:
        return NONE
    low, high = (row.get(end) for end in ends) if ends else (None, None)
    if low is None or high is None:
        return tag("td", text(value), data_value=repr(value), class_="number")
    interval = tag("span", f" {text(low)} … {text(high)}", class_="interval")
    return tag(
        "td",
        text(value),
        interval,
        data_value=repr(value),
        data_low=repr(low),
        data_high=repr(high),
        class_="number",
    )


def derived(value: float | None, text: Any = short) -> Markup:
    """Return a number that was calculated from measured ones as a cell."""
    if value is None:
        return NONE
    return tag("td", text(value), data_derived=repr(value), class_="number")


def words(value: Any, **attributes: Any) -> Markup:
    """Return text as a cell."""
    return tag("td", value, **attributes) if value not in (None, "") else NONE


def named(cache: str, family: str) -> Markup:
    """Return the head of a cache's line, with the sign of its family."""
    sign = tag("span", class_=f"sign {family}", title=family, aria_hidden="true")
    return tag("th", sign, tag("code", cache), scope="row", data_sort=cache)


def table(
    caption: str, heads: list[str], lines: list[list[Markup]], sortable: bool = True
) -> Markup:
    """Return a table in a box that scrolls sideways where it is too wide."""
    # the head of a column of numbers stands over the numbers
    kinds = [
        "number" if any(NUMBER in line[at] for line in lines) else None for at in range(len(heads))
    ]
    cells = (
        tag("th", name, scope="col", class_=kind) for name, kind in zip(heads, kinds, strict=True)
    )
    head = tag("thead", tag("tr", *cells))
    body = tag("tbody", *(join(tag("tr", *line), Markup("\n")) for line in lines))
    whole = tag(
        "table", tag("caption", caption), head, body, class_="sortable" if sortable else None
    )
    return tag("div", whole, class_="scroll", tabindex="0", role="region", aria_label=caption)


def _zeros(value: float) -> int:
    """Return the zeros behind the point of a number below 1."""
    zeros = 0
    while value < 0.1:
        value *= 10
        zeros += 1
    return zeros
