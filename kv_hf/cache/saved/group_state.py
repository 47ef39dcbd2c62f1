"""What a group of rows is beside its rows, taken out for a file and put back."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...pages.group import PageGroup
from ...pages.step import Row

STATE = ("seen", "confirmed", "recording", "padding_seen")


def state_of(group: PageGroup) -> dict[str, Any]:
    """Return what `restore` needs beside the rows: a value for each name of STATE."""
    values = (group.seen, group.confirmed, group.recording, group._padding_seen)
    return dict(zip(STATE, values, strict=True))


def restore(group: PageGroup, rows: Sequence[Row], num_pages: int, state: dict[str, Any]) -> None:
    """Let an empty group hold `rows`, whose pages are 0 .. num_pages - 1, in a state of before."""
    with group.pool.lock:
        group.pool.open_change()
        ids = group.pool.allocate(num_pages)
        group.rows = tuple(rows)
        for row in group.rows:
            group.pool.share(row.pages)
        group.pool.release(ids)
        group.pool.close_change()
    group.seen, group.confirmed = state["seen"], state["confirmed"]
    group.sizes = replace(group.sizes, recording=state["recording"])
    group._padding_seen = state["padding_seen"]
