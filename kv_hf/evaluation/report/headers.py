"""The conditions of a group of rows' measurement, in words; every number from its rows."""

from collections.abc import Sequence
from typing import Any

from .select import Group, Row, distinct


def conditions(group: Group) -> list[tuple[str, Any]]:
    """Return (name, value) of model, text, protocol, dtype, commits, machines, versions and dates of a group."""
    rows = group.rows
    dates = sorted(str(date) for date in distinct(rows, "date"))
    counted = group.protocol.get("bytes_dtype")
    entries: list[tuple[str, Any]] = [
        ("Model", _with(group.model, group.protocol.get("model_revision"), "revision")),
        ("Text", group.protocol.get("text")),
        ("Tokens scored", ", ".join(f"{tokens:,}" for tokens in distinct(rows, "tokens"))),
        ("Protocol", in_words(group)),
        ("Dtype", _with(group.protocol.get("dtype"), counted, "bytes counted as of")),
        ("Device", ", ".join(map(str, distinct(rows, "device")))),
        ("Context", _count(group.protocol.get("context"), "tokens")),
        ("Batch", group.protocol.get("batch")),
        ("Samples", group.protocol.get("samples")),
        ("Seed", ", ".join(map(str, distinct(rows, "seed")))),
        ("Date", dates[0] + (f" to {dates[-1]}" if len(dates) > 1 else "") if dates else None),
        ("Commit", ", ".join(map(str, distinct(rows, "commit")))),
        ("Machine", "; ".join(map(str, distinct(rows, "machine")))),
        ("Versions", "; ".join(versions(rows))),
    ]
    return [entry for entry in entries if entry[1] not in (None, "")]


def in_words(group: Group) -> str:
    """Say how the figures of a group were made."""
    known = group.protocol
    said = [str(known["protocol"])] if "protocol" in known else []
    if {"windows", "window", "prompt"} <= known.keys():
        said.append(
            f"{known['windows']:,} windows of {known['window']:,} tokens, of which the first {known['prompt']:,} of "
            "each are the prompt and are not scored"
        )
    if group.kind == "accuracy":
        said.append("KL in nats per token, from the exact cache to this one, on the same text")
    if group.kind == "sensitivity":
        said.append("one layer's keys or values in the format, everything else exact")
    text = "; ".join(said)
    return text[:1].upper() + text[1:]


def below_title(group: Group) -> str:
    """Return the line under the title of a plot."""
    known = group.protocol
    said = [str(known["text"])] if "text" in known else []
    if {"windows", "window", "prompt"} <= known.keys():
        said.append(
            f"{known['windows']} windows of {known['window']:,} tokens, the first {known['prompt']:,} not scored"
        )
    said += [f"{tokens:,} tokens scored" for tokens in distinct(group.rows, "tokens")[:1]]
    if "dtype" in known:
        said.append(str(known["dtype"]))
    return " · ".join(said)


def versions(rows: Sequence[Row]) -> list[str]:
    """Return the packages of all rows with their versions; several where rows differ."""
    found: dict[str, list[str]] = {}
    for row in rows:
        given = row.get("versions")
        for name, version in given.items() if isinstance(given, dict) else ():
            if str(version) not in found.setdefault(str(name), []):
                found[str(name)].append(str(version))
    return [f"{name} {' / '.join(versions)}" for name, versions in found.items()]


def _with(value: Any, more: Any, what: str) -> str | None:
    if value in (None, ""):
        return None
    return f"{value} ({what} {more})" if more not in (None, "") else str(value)


def _count(value: Any, unit: str) -> str | None:
    return None if value is None else f"{value:,} {unit}"
