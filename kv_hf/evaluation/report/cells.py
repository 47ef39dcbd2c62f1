"""Numbers of a row as cells of a table. What was measured is in data-value as it is in the row, unrounded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .select import Row

MIB = 2**20
MINUS = "\u2212"


@dataclass(frozen=True)
class Cell:
    """One cell of a table, from left to right: sign, strong, text, codes, interval, difference.

    Attributes:
        kind: its class: "number", "none", "score", "pass", "fail", "wrap" or none.
        codes: names of caches, with commas between them.
        difference: of a value from the exact cache; "" leaves its place empty, None has none.
        data: data attributes: numbers as the row has them, and what a column is sorted by.
        head: it is the head of its line.
        sign: family of a cache, whose sign stands in front.
        style: CSS of its own.
    """

    text: str = ""
    kind: str = ""
    strong: str = ""
    codes: Sequence[str] = ()
    interval: str = ""
    difference: str | None = None
    data: Mapping[str, str] = field(default_factory=dict)
    head: bool = False
    sign: str = ""
    style: str = ""


@dataclass(frozen=True)
class Table:
    """A table with its caption; a click on a column's head sorts by it."""

    caption: str
    heads: Sequence[str]
    lines: Sequence[Sequence[Cell]]
    sortable: bool = True

    @property
    def columns(self) -> list[tuple[str, str | None]]:
        """(head, class) of each column: the head of a column of numbers stands over the numbers."""
        numbers = (
            any(line[at].kind == "number" for line in self.lines) for at in range(len(self.heads))
        )
        return [
            (head, "number" if any_ else None)
            for head, any_ in zip(self.heads, numbers, strict=True)
        ]


NONE = Cell("\u2013", "none")


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


def measured(row: Row, name: str, text: Any = short, ends: tuple[str, str] | None = None) -> Cell:
    """Return field `name` of a row as a cell, with its interval where the row has the fields `ends`.

    Args:
        text: number -> what is shown.
    """
    value = row.get(name)
    if value is None:
        return NONE
    low, high = (row.get(end) for end in ends) if ends else (None, None)
    if low is None or high is None:
        return Cell(text(value), "number", data={"data-value": repr(value)})
    return Cell(
        text(value),
        "number",
        interval=f" {text(low)} … {text(high)}",
        data={"data-value": repr(value), "data-low": repr(low), "data-high": repr(high)},
    )


def derived(value: float | None, text: Any = short) -> Cell:
    """Return a number that was calculated from measured ones as a cell."""
    if value is None:
        return NONE
    return Cell(text(value), "number", data={"data-derived": repr(value)})


def words(value: Any, kind: str = "") -> Cell:
    """Return text as a cell."""
    return NONE if value in (None, "") else Cell(str(value), kind)


def named(cache: str, family: str) -> Cell:
    """Return the head of a cache's line, with the sign of its family."""
    return Cell(codes=[cache], head=True, sign=family, data={"data-sort": cache})


def _zeros(value: float) -> int:
    """Return the zeros behind the point of a number below 1."""
    zeros = 0
    while value < 0.1:
        value *= 10
        zeros += 1
    return zeros
