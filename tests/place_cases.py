"""Rows around every border: the table of cases that all who place tokens are checked with, the planner's page included."""

from kv_hf.geometry import Geometry

SIZES = [
    Geometry(16, 4, 0),
    Geometry(16, 0, 0),
    Geometry(32, 1, 40),
    Geometry(16, 33, 5),
    Geometry(16, 4, 0, 1),
    Geometry(16, 4, 0, 40),
    Geometry(32, 0, 7, 33),
    Geometry(16, 20, 3, 17),
]


def lengths_of(sizes):
    """Row lengths around the sinks, the first and later borders of pages, and the borders that leave the window."""
    borders = [0, sizes.sink_tokens, sizes.kept, sizes.kept + sizes.page_size]
    borders += [sizes.kept + 3 * sizes.page_size, sizes.sink_tokens + 2 * sizes.page_size]
    if sizes.window is not None:
        start = sizes.sink_tokens + sizes.window - 1
        borders += [sizes.window, start + sizes.page_size, start + 4 * sizes.page_size]
    return sorted({length for at in borders for length in (at - 1, at, at + 1) if length >= 0})


def name_of(sizes):
    window = "" if sizes.window is None else f"-window{sizes.window}"
    return f"page{sizes.page_size}-sinks{sizes.sink_tokens}-recent{sizes.recent_tokens}{window}"
