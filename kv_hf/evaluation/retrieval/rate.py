"""How often something was found, with the interval that so few questions leave."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

NORMAL_95 = 1.959964  # standard deviations on either side of 95 % of a normal distribution


@dataclass(frozen=True)
class Rate:
    """Questions that were answered in full, of all that were asked.

    Attributes:
        found, asked: numbers of questions; at least one was asked.
    """

    found: int
    asked: int

    @classmethod
    def of(cls, scores: Sequence[float]) -> "Rate":
        """Count the scores of 1: a part of an answer is none."""
        return cls(sum(score == 1 for score in scores), len(scores))

    @property
    def share(self) -> float:
        """The part that was found."""
        return self.found / self.asked

    def interval(self) -> tuple[float, float]:
        """Return the 95 % Wilson interval of the share, which has a width where all or none were found.

        Source: E. B. Wilson, 1927, "Probable inference, the law of succession, and statistical inference".
        """
        n, z = self.asked, NORMAL_95
        middle = (self.share + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(self.share * (1 - self.share) / n + (z / n / 2) ** 2)
        return max(0.0, middle - half), min(1.0, middle + half)


# what tells the prompts of two rows apart, beside their numbers
_ASKED = ("model", "model_revision", "task", "cache", "length", "depth", "seed", "haystack", "chat")


def newest_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of kind "needle", the newest of those that asked the same prompts of the same cache."""
    found = {}
    for row in rows:
        if row["kind"] == "needle":
            numbers = (row.get("first_sample", 0), row["samples"])
            found[(*(row.get(name) for name in _ASKED), *numbers)] = row
    return list(found.values())


def rates(rows: Sequence[dict[str, Any]], length: int) -> dict[tuple[str, str, str], Rate]:
    """Return how often each (model, task, cache) found all that was hidden in contexts of `length` tokens."""
    scores: dict[tuple[str, str, str], list[float]] = {}
    for row in newest_rows(rows):
        if row["length"] == length:
            key = (row["model"], row["task"], row["cache"])
            scores.setdefault(key, []).extend(row["scores"])
    return {key: Rate.of(found) for key, found in scores.items()}
