"""Fewer kv heads and fewer bits side by side: a model and its conversions, with all their caches, on the same tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .accuracy_tables import whole
from .cells import Cell, Table, derived, measured, named, percent, short, words
from .frontier import Point, pareto_front
from .select import Group, Row, family

OWN = ("model", "model_revision")  # what groups of one set may differ in


@dataclass(frozen=True)
class Levers:
    """Groups of accuracy rows of a model and its conversions.

    Attributes:
        groups: the original (or what comes nearest to it) first, then by kv heads and name.
        exact: perplexity of the first group's exact cache.
        exact_bytes: bytes per token of it; None where no row says them.
    """

    groups: tuple[Group, ...]
    exact: float
    exact_bytes: float | None

    @property
    def original(self) -> Group:
        """The model that the others are compared with."""
        return self.groups[0]

    @property
    def rows(self) -> list[tuple[Group, Row]]:
        """(group, row) of all rows with a perplexity and bytes per token."""
        return [
            (group, row)
            for group in self.groups
            for row in group.rows
            if row.get("perplexity") is not None and row.get("bytes_per_token") is not None
        ]

    def common(self) -> list[tuple[Group, Row]]:
        """Return the rows of the caches that every model was measured with; all rows where there is no such cache."""
        own = [
            {row["cache"] for member, row in self.rows if member is group} for group in self.groups
        ]
        caches = set.intersection(*own)
        return [(group, row) for group, row in self.rows if row["cache"] in caches or not caches]

    def front(self, rows: Sequence[tuple[Group, Row]] | None = None) -> list[tuple[Group, Row]]:
        """Return those of `rows` (None: all) that no other beats in both bytes per token and perplexity, by rising bytes."""
        by_name = {f"{at}": pair for at, pair in enumerate(self.rows if rows is None else rows)}
        points = [
            Point(name, row["bytes_per_token"], row["perplexity"])
            for name, (_, row) in by_name.items()
        ]
        return [by_name[point.name] for point in pareto_front(points)]


def find_levers(groups: Sequence[Group]) -> list[Levers]:
    """Return a set for every text and protocol by which a converted model and another one were measured."""
    sets: dict[tuple[Any, ...], list[Group]] = {}
    for group in groups:
        if group.kind == "accuracy":
            shared = sorted(
                (name, str(value)) for name, value in group.protocol.items() if name not in OWN
            )
            sets.setdefault(tuple(shared), []).append(group)
    found = []
    for members in sets.values():
        newest: dict[str, Group] = {}
        for group in members:  # groups come newest first
            newest.setdefault(group.model, group)
        own = sorted(newest.values(), key=_order)
        if len(own) < 2 or not any(_first(group, "conversion") for group in own):
            continue
        # one original per set: perplexities of different models are not to be compared
        if sum(not _first(group, "conversion") for group in own) != 1:
            continue
        reference = own[0].reference() or own[0].rows[0]
        exact = reference.get("perplexity_exact") or reference.get("perplexity")
        if exact is not None:
            found.append(Levers(tuple(own), exact, _exact_bytes(own[0])))
    return found


def _order(group: Group) -> tuple[bool, int, bool, str]:
    converted = _first(group, "conversion") is not None
    heads = _first(group, "kv_heads") or 0
    return converted, -heads, bool(_first(group, "uptrained_tokens")), group.model


def _first(group: Group, name: str) -> Any:
    return next((row[name] for row in group.rows if row.get(name) is not None), None)


def _exact_bytes(group: Group) -> float | None:
    for row in group.rows:
        held, exact, each = (row.get(n) for n in ("bytes", "bytes_exact", "bytes_per_token"))
        if held and exact and each:
            return float(each * exact / held)
    return None


def kv_heads(levers: Levers, group: Group) -> int | None:
    """Return a model's kv heads; rows of an original may leave them to those of its conversions."""
    own = _first(group, "kv_heads")
    if own is None and group is levers.original:
        told = [_first(other, "kv_heads_before") for other in levers.groups]
        own = next((heads for heads in told if heads is not None), None)
    return own


def trained(group: Group) -> bool:
    """Say whether a model was trained after its conversion."""
    return _first(group, "uptrained_tokens") is not None


def origin(group: Group) -> str:
    """Return in words how a model came to have its kv heads."""
    method, tokens = _first(group, "conversion"), _first(group, "uptrained_tokens")
    made = "original" if method is None else method
    return made if tokens is None else f"{made}, trained on {tokens:,} tokens"


def levers_table(levers: Levers) -> Table:
    """Return a line per model and cache, by rising bytes per token."""
    front = {id(row) for _, row in levers.front()}
    lines = []
    for group, row in sorted(levers.rows, key=lambda pair: pair[1]["bytes_per_token"]):
        share = levers.exact_bytes and row["bytes_per_token"] / levers.exact_bytes
        lines.append(
            [
                named(row["cache"], family(row["cache"])),
                Cell(group.model),
                words(kv_heads(levers, group), "number"),
                words(origin(group)),
                measured(row, "bytes_per_token", whole),
                derived(share, percent),
                measured(row, "perplexity"),
                derived(row["perplexity"] / levers.exact, _times),
                Cell(strong="on the front") if id(row) in front else Cell("behind"),
            ]
        )
    heads = [
        "cache",
        "model",
        "kv heads",
        "how",
        "bytes per token",
        "of the original's exact bytes",
    ]
    heads += ["perplexity", "times the original", "front"]
    return Table("Every model with every cache", heads, lines)


def _times(value: float) -> str:
    return f"{short(value)} x"
