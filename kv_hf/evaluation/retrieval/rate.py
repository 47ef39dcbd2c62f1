"""How often something was found, with the interval that so few questions leave."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
