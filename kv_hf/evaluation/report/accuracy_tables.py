"""Tables of accuracy rows: every cache with its distances, each peer against our best, and layers one by one."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .cells import NONE, Cell, Table, derived, measured, named, percent, signed, size, words
from .frontier import AIM, PeerRatio, dominated_by, peer_ratio
from .points import front_marks, kl_marks, loss_point, marks
from .select import SIDES, Group, Row, distinct, family, formats

OURS, PEERS = ("ours", "recipe"), ("peer",)


def accuracy_table(group: Group) -> Table:
    """Return all figures of a group, one line per cache."""
    shown = kl_marks(group.rows)
    points = {mark.name: loss_point(mark) for mark in shown}
    front = {mark.name for mark in front_marks(shown)}

    def place(row: Row) -> Cell:
        if row["cache"] not in points:
            return NONE
        if row["cache"] in front:
            return Cell(strong="on the front", data={"data-sort": "0"})
        better = dominated_by(points[row["cache"]], list(points.values()))[0].name
        return Cell("behind ", codes=[better], data={"data-sort": f"1 {better}"})

    generated = [f"{count:,}" for count in distinct(group.rows, "divergence_tokens")]
    of = f" (of {' or '.join(generated)})" if generated else ""
    columns: list[tuple[str, Any]] = [
        ("mean KL (interval)", lambda row: measured(row, "kl_mean", ends=("kl_low", "kl_high"))),
        ("worst text: mean KL", _worst_text),
        ("stored bits per number", lambda row: measured(row, "stored_bits")),
        ("bytes per token", lambda row: measured(row, "bytes_per_token", whole)),
        ("of the exact bytes", _part_of_exact),
        ("Pareto front", place),
        ("median KL", lambda row: measured(row, "kl_median")),
        ("99th percentile", lambda row: measured(row, "kl_p99")),
        ("same top token", lambda row: measured(row, "top1", percent)),
        ("perplexity", lambda row: measured(row, "perplexity")),
        (
            "change of perplexity (interval)",
            lambda row: measured(
                row,
                "perplexity_delta",
                lambda value: signed(value, "%"),
                ("perplexity_delta_low", "perplexity_delta_high"),
            ),
        ),
        (f"first different token{of}, mean", lambda row: measured(row, "divergence_mean")),
        ("… median", lambda row: measured(row, "divergence_median")),
        ("bits of the format", lambda row: measured(row, "bits_per_element")),
        ("bytes held", lambda row: measured(row, "bytes", size)),
        ("measured", lambda row: words(row.get("date"))),
        ("commit", lambda row: words(row.get("commit"))),
    ]
    return columns_table("Every cache: distances and bytes", group.rows, columns)


def _worst_text(row: Row) -> Cell:
    """Return the mean KL of the text that a cache loses most on; nothing where one text was measured."""
    texts, name = row.get("texts"), row.get("worst_text")
    if not isinstance(texts, dict) or len(texts) < 2 or not isinstance(texts.get(name), dict):
        return NONE
    cell = measured(texts[name], "kl_mean")
    return replace(cell, text=f"{cell.text} ({name})")


def columns_table(
    caption: str, rows: Sequence[Row], columns: Sequence[tuple[str, Any]], first: str = "cache"
) -> Table:
    """Return a table of one line per cache; columns that are empty in all lines are left out."""
    cells = [[make(row) for _, make in columns] for row in rows]
    kept = [at for at in range(len(columns)) if any(line[at] != NONE for line in cells)]
    heads = [first, *(columns[at][0] for at in kept)]
    lines = [
        [named(row["cache"], family(row["cache"])), *(line[at] for at in kept)]
        for row, line in zip(rows, cells, strict=True)
    ]
    return Table(caption, heads, lines)


def peers(group: Group) -> list[PeerRatio]:
    """Compare each peer of a group with the best of ours that holds no more bytes per token."""
    shown = marks(group.rows, "bytes_per_token", "kl_mean", "kl_low", "kl_high")
    ours = [loss_point(mark) for mark in shown if mark.family in OURS]
    others = [loss_point(mark) for mark in shown if mark.family in PEERS]
    return peer_ratio(ours, others) if ours else []


def peer_table(group: Group, found: Sequence[PeerRatio]) -> Table:
    """Return the comparison with each peer, with what came of it in words."""
    rows = {row["cache"]: row for row in group.rows}
    lines = []
    for each in found:
        peer = rows[each.peer.name]
        best = rows[each.best.name] if each.best else {}
        lines.append(
            [
                named(peer["cache"], "peer"),
                verdict(each),
                derived(each.ratio),
                derived(_worst(peer, best) if each.ratio is not None else None),
                measured(peer, "bytes_per_token", whole),
                measured(peer, "kl_mean", ends=("kl_low", "kl_high")),
                Cell(codes=[best["cache"]]) if best else NONE,
                measured(best, "bytes_per_token", whole),
                measured(best, "kl_mean", ends=("kl_low", "kl_high")),
            ]
        )
    heads = [
        "peer",
        "aim met",
        "our KL / its KL",
        "at the worst ends",
        "its bytes per token",
        "its KL",
    ]
    heads += ["our best at no more bytes", "bytes per token", "KL"]
    return Table(f"At each peer's bytes: at most {AIM:g} of its KL", heads, lines)


def verdict(found: PeerRatio) -> Cell:
    """Say in words whether the aim is met at a peer's bytes, and why not."""
    if found.passed:
        why = "" if found.ratio is not None else ": neither loses anything"
        return Cell(why, "pass", strong="pass")
    if found.best is None:
        return Cell("not compared: no cache of ours that was measured holds so few bytes")
    elif found.ratio is None:
        why = ": the peer loses nothing"
    elif found.ratio >= 1:
        why = ": ours is no better here"
    else:
        why = f": better, but more than {AIM:g} of its KL"
    return Cell(why, "fail", strong="FAIL")


def sensitivity_table(group: Group) -> Table:
    """Return KL and bytes of each layer's keys and values, one pair of columns per format and side."""
    names = formats(group.rows)
    by_cell = {(int(row["layer"]), row["side"], row["format"]): row for row in group.rows}
    heads = ["layer", *(f"{side}, {name}" for name in names for side in SIDES)]
    lines = []
    for layer in sorted({int(row["layer"]) for row in group.rows}):
        line = [Cell(str(layer), head=True, data={"data-sort": str(layer)})]
        for name in names:
            line += [measured(by_cell.get((layer, side, name), {}), "kl_mean") for side in SIDES]
        lines.append(line)
    return Table("Mean KL with only this layer's keys or values in a format", heads, lines)


def whole(value: float) -> str:
    """Return bytes as an integer with thousands."""
    return f"{value:,.0f}"


def _part_of_exact(row: Row) -> Cell:
    held, exact = row.get("bytes"), row.get("bytes_exact")
    return derived(held / exact if held is not None and exact else None, percent)


def _worst(peer: Row, best: Row) -> float | None:
    high, low = best.get("kl_high"), peer.get("kl_low")
    return high / low if high is not None and low else None
