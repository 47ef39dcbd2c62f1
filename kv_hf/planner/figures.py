"""Bytes of a cache with what of them holds nothing."""

from dataclasses import dataclass, fields

from ..spec import MemoryReport

EMPTY = MemoryReport(0, 0, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True)
class Figures:
    """The bytes of a cache.

    Attributes:
        report: its bytes, by part.
        waste: those of them, on the device, that hold no token: open slots, free pages, room to grow, padding. A part
            of the report's bytes, not beside them.
    """

    report: MemoryReport = EMPTY
    waste: int = 0

    def times(self, count: int) -> "Figures":
        """Return what `count` layers like this one take; tokens are those of the cache, and stay."""
        if count == 1:
            return self
        products = {
            field.name: count * getattr(self.report, field.name) for field in fields(MemoryReport)
        }
        products["tokens"] = self.report.tokens
        return Figures(MemoryReport(**products), count * self.waste)

    def __add__(self, more: "Figures") -> "Figures":
        """Return the sums; tokens are those of the cache, not of a layer, and stay."""
        sums = {
            field.name: getattr(self.report, field.name) + getattr(more.report, field.name)
            for field in fields(MemoryReport)
        }
        sums["tokens"] = max(self.report.tokens, more.report.tokens)
        return Figures(MemoryReport(**sums), self.waste + more.waste)
