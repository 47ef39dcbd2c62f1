"""Rows as points of a plot, and what the front and the peers are taken from."""

from collections.abc import Sequence
from dataclasses import dataclass

from .frontier import Point, pareto_front
from .select import Row, family, numbers

FLOOR = 1e-6  # nats; the exact cache read in other chunks differs by 4e-9, the best formats by 1e-5 and more


@dataclass(frozen=True)
class Mark:
    """A cache in a plot.

    Attributes:
        family: "ours", "recipe", "peer" or "exact".
        low, high: ends of the interval of `value`; the value itself where the row has none.
    """

    name: str
    family: str
    cost: float
    value: float
    low: float
    high: float


def marks(rows: Sequence[Row], cost: str, value: str, low: str, high: str) -> list[Mark]:
    """Return the rows that have both fields as marks; rows without are left out (see `left_out`)."""
    found = []
    for row in rows:
        both = numbers(row, cost, value)
        if both is None or both[0] <= 0:
            continue
        ends = numbers(row, low, high) or (both[1], both[1])
        found.append(Mark(row["cache"], family(row["cache"]), *both, *ends))
    return found


def kl_marks(rows: Sequence[Row]) -> list[Mark]:
    """Return KL against stored bits per number."""
    return marks(rows, "stored_bits", "kl_mean", "kl_low", "kl_high")


def perplexity_marks(rows: Sequence[Row]) -> list[Mark]:
    """Return the change of perplexity in percent against bytes per token."""
    ends = ("perplexity_delta_low", "perplexity_delta_high")
    return marks(rows, "bytes_per_token", "perplexity_delta", *ends)


def left_out(rows: Sequence[Row], shown: Sequence[Mark]) -> list[str]:
    """Return the caches of rows that are not among the marks."""
    names = {mark.name for mark in shown}
    return [row["cache"] for row in rows if row["cache"] not in names]


def at_floor(mark: Mark) -> bool:
    """Say whether a KL is no more than the noise of float arithmetic."""
    return mark.value < FLOOR


def loss_point(mark: Mark) -> Point:
    """Return a mark for the front: a KL below the floor counts as 0."""
    return Point(mark.name, mark.cost, 0.0 if at_floor(mark) else mark.value)


def front_marks(shown: Sequence[Mark]) -> list[Mark]:
    """Return the marks on the Pareto front, by rising cost."""
    by_name = {mark.name: mark for mark in shown}
    return [by_name[point.name] for point in pareto_front([loss_point(mark) for mark in shown])]
