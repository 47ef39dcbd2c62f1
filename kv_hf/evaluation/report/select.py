"""Which rows a report shows: the newest row of each cell, in groups of one protocol.

Knows nothing of how they are shown.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]

# kind -> (fields that rows of one table share, fields that name a cell of it)
KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "accuracy": (
        (
            "text",
            "text_digest",
            "windows",
            "window",
            "prompt",
            "protocol",
            "dtype",
            "bytes_dtype",
            "device",
            "seed",
            "options",
        ),
        ("cache",),
    ),
    "sensitivity": (
        (
            *("text", "windows", "window", "prompt", "protocol"),
            *("dtype", "bytes_dtype", "seed", "options"),
        ),
        ("layer", "side", "format"),
    ),
    "task": (
        ("protocol", "dtype", "seed"),
        ("task", "metric", "samples", "num_fewshot", "cache"),
    ),
    "needle": (
        ("task", "samples", "haystack", "chat", "protocol", "dtype", "seed"),
        ("cache", "length", "depth"),
    ),
    "memory": (
        ("device", "machine", "threads", "dtype", "context", "batch", "steps"),
        ("cache",),
    ),
}
SIDES = ("keys", "values")
EXACT = ("dynamic", "static", "offloaded")  # transformers' own caches that lose nothing


@dataclass
class Group:
    """Rows of one kind and model that were measured alike, one per cell, in the order of their first appearance.

    Attributes:
        protocol: the fields that all its rows share.
    """

    kind: str
    model: str
    protocol: dict[str, Any]
    rows: list[Row] = field(default_factory=list)

    @property
    def newest(self) -> str:
        """Date of the newest row."""
        return max(str(row.get("date", "")) for row in self.rows)

    def reference(self) -> Row | None:
        """Return the row of the exact cache that others are compared with, if there is one."""
        for name in (*EXACT, "paged_exact"):
            for row in self.rows:
                if row["cache"] == name:
                    return row
        return None


def family(cache: str) -> str:
    """Return "ours", "recipe", "peer" or "exact" for the name of a cache."""
    base = cache.partition(":")[0]
    if base == "recipe":
        return "recipe"
    if base.startswith(
        "paged_"
    ):  # of formats as well that were registered where it was measured only
        return "ours"
    return "exact" if base in EXACT else "peer"


def groups(rows: Sequence[Row]) -> list[Group]:
    """Sort rows into groups that may share a table; the newest row of a cell wins, then the last one.

    Rows of unknown kinds are left out (see `unknown_kinds`).

    Raises: ValueError when there is no row to show, or naming a row that lacks a field or has a number that is not finite.
    """
    found: dict[tuple[Any, ...], Group] = {}
    cells: dict[tuple[Any, ...], dict[tuple[Any, ...], Row]] = {}
    dated = sorted(enumerate(rows, 1), key=lambda numbered: str(numbered[1].get("date", "")))
    for number, row in dated:
        kind = row.get("kind")
        if (
            kind not in KINDS or "layers" in row
        ):  # what several layers cost at once is for the solver
            continue
        _check(row, number)
        shared, cell = KINDS[kind]
        names = ("model", "model_revision", *shared)
        key = (kind, *(_hashable(row.get(name)) for name in names))
        protocol = {name: row[name] for name in names if row.get(name) is not None}
        found.setdefault(key, Group(kind, row["model"], protocol))
        cells.setdefault(key, {})[tuple(_hashable(row.get(name)) for name in cell)] = row
    for key, group in found.items():
        group.rows = list(cells[key].values())
    if not found:
        raise ValueError(f"rows must hold rows of {', '.join(KINDS)}, got {len(rows)} of others")
    return sorted(found.values(), key=lambda group: group.newest, reverse=True)


def unknown_kinds(rows: Sequence[Row]) -> list[str]:
    """Return the kinds of rows that no report shows."""
    return sorted({str(row.get("kind")) for row in rows} - set(KINDS))


def numbers(row: Row, *names: str) -> tuple[float, ...] | None:
    """Return these fields of a row, or None when one of them is absent or null."""
    values = tuple(row.get(name) for name in names)
    return None if None in values else tuple(float(value) for value in values)  # type: ignore[arg-type]


def distinct(rows: Sequence[Row], name: str) -> list[Any]:
    """Return the different values of a field that rows have, in order of appearance."""
    seen: list[Any] = []
    for row in rows:
        if row.get(name) not in (None, "", *seen):
            seen.append(row[name])
    return seen


def formats(rows: Sequence[Row]) -> list[str]:
    """Return the formats of sensitivity rows, those with the fewest bits first."""

    def bits(name: str) -> tuple[int, str]:
        digits = re.search(r"\d+", name)
        return (int(digits.group()) if digits else 99, name)

    return sorted((str(name) for name in distinct(rows, "format")), key=bits)


# fields without which a row of a kind says nothing
NEEDED = {
    "accuracy": ("model", "cache", "kl_mean"),
    "sensitivity": ("model", "layer", "side", "format", "kl_mean"),
    "task": ("model", "cache", "task", "metric", "value"),
    "needle": ("model", "cache", "task", "length", "score"),
    "memory": ("model", "cache"),
}


def _check(row: Row, number: int) -> None:
    where = f"rows: row {number} (kind {row['kind']!r})"
    for name in NEEDED[row["kind"]]:
        if row.get(name) is None:
            raise ValueError(f"{where} must have a field {name!r}, got {sorted(row)}")
    for name, value in row.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{where}: {name} must be a finite number, got {value}")


def _hashable(value: Any) -> Any:
    return str(value) if isinstance(value, (dict, list)) else value
