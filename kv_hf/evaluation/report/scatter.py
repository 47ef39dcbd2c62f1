"""Plots of one point per cache: KL against stored bits with the Pareto front, perplexity against bytes per token."""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from .canvas import COLOURS, LOOKS, headed, look, new_figure, plain, tick
from .labels import Named, place
from .points import FLOOR, Mark, at_floor, front_marks

# of stored bits and of bytes: powers of two with the steps between them
STEPS = (1, 1.25, 1.5, 1.75)
SYMLOG = 0.1  # percent of perplexity within which the axis is linear


def pareto_plot(marks: Sequence[Mark], title: str, below: str) -> Figure:
    """Draw KL (y, log) against stored bits per element (x, log), with the front as a step line.

    What is below FLOOR is drawn on a line that is marked as such.
    """
    figure = new_figure(8.4, 5.4)
    axes = figure.add_subplot()
    above = [mark for mark in marks if not at_floor(mark)]
    lowest = min((max(mark.low, FLOOR, mark.value / 30) for mark in above), default=1e-4)
    bottom = 10.0 ** math.floor(math.log10(lowest))
    floor = bottom / 10**0.7
    highest = max((mark.high for mark in above), default=1.0)
    front = front_marks(marks)
    line = _steps([(mark.cost, floor if at_floor(mark) else mark.value) for mark in front])
    axes.set(xscale="log", yscale="log")
    axes.plot(*zip(*line, strict=True), color=COLOURS["front"], linewidth=1.2, zorder=1.5)
    named = [_draw(axes, mark, floor if at_floor(mark) else mark.value, floor) for mark in marks]
    if len(above) < len(marks):
        axes.axhline(floor, color=COLOURS["muted"], linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
    _ticks(axes.xaxis, [mark.cost for mark in marks])
    decades = [
        10.0**power for power in range(round(math.log10(bottom)), 3) if 10.0**power <= 3 * highest
    ]
    axes.yaxis.set_major_locator(
        FixedLocator([floor, *decades] if len(above) < len(marks) else decades)
    )
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"< {tick(FLOOR)}" if value < bottom * 0.99 else tick(value))
    )
    axes.set_ylim(floor / 1.6 if len(above) < len(marks) else bottom, 2.2 * highest)
    axes.set_xlabel("stored bits per number, everything counted")
    axes.set_ylabel("mean KL(exact || cache) per token, nats")
    plain(axes)
    headed(axes, title, below)
    _legend(axes, marks, front=True)
    place(figure, axes, named, line)
    return figure


def perplexity_plot(marks: Sequence[Mark], title: str, below: str) -> Figure:
    """Draw the change of perplexity in percent (y) against bytes per token (x, log).

    Far from zero the axis is logarithmic, on both sides of it.
    """
    figure = new_figure(8.4, 5.0)
    axes = figure.add_subplot()
    axes.set_xscale("log")
    most = max(abs(end) for mark in marks for end in (mark.low, mark.high, mark.value))
    if most > 50 * SYMLOG:
        axes.set_yscale("symlog", linthresh=SYMLOG, linscale=0.6)
        decades = [10.0**power for power in range(-1, 6) if 10.0**power <= 2 * most]
        below_zero = [-ten for ten in decades if any(-ten >= 2 * mark.low for mark in marks)]
        axes.yaxis.set_major_locator(FixedLocator([*below_zero, 0.0, *decades]))
        least = min(0.0, *(min(mark.low, mark.value) for mark in marks))
        axes.set_ylim(2 * least - SYMLOG / 2, 2.2 * most)
    axes.axhline(0, color=COLOURS["muted"], linewidth=0.9, zorder=1)
    named = [_draw(axes, mark, mark.value, None) for mark in marks]
    _ticks(axes.xaxis, [mark.cost for mark in marks], thousands=True)
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:+g} %" if value else "0")
    )
    axes.set_xlabel("bytes held per token, everything counted")
    axes.set_ylabel("change of perplexity")
    plain(axes)
    headed(axes, title, below)
    _legend(axes, marks, front=False)
    lowest, highest = min(mark.cost for mark in marks), max(mark.cost for mark in marks)
    place(figure, axes, named, [(lowest, 0.0), (highest, 0.0)])
    return figure


def _draw(axes: Any, mark: Mark, y: float, floor: float | None) -> Named:
    """Draw a point with its interval; return it with its name for the labels."""
    colour = COLOURS[mark.family]
    sign, size, _ = look(mark.family, mark.name)
    low = min(y, max(mark.low, floor) if floor is not None else mark.low)
    high = max(y, mark.high)
    axes.errorbar(
        [mark.cost],
        [y],
        yerr=[[y - low], [high - y]],
        color=colour,
        marker=sign,
        markersize=size,
        markeredgecolor=COLOURS["surface"],
        markeredgewidth=0.8,
        elinewidth=1.2,
        capsize=2.5,
        zorder=3 if mark.family == "exact" else 4,
    )
    return Named(mark.name, mark.cost, y, (low, high), colour)


def _steps(front: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the corners of the line below which no cache lies: right along a loss, then down to the next."""
    corners: list[tuple[float, float]] = []
    for x, y in front:
        if corners:
            corners.append((x, corners[-1][1]))
        corners.append((x, y))
    return corners


def _ticks(axis: Any, values: Sequence[float], thousands: bool = False) -> None:
    """Put ticks of a log axis at powers of two, and between them where the values span few."""
    low, high = min(values), max(values)
    steps = STEPS[::2] if high / low > 3 else STEPS
    ticks = [
        step * 2.0**power
        for power in range(math.floor(math.log2(low)) - 1, math.ceil(math.log2(high)) + 1)
        for step in steps
        if low / 1.2 <= step * 2.0**power <= high * 1.2
    ]
    axis.set_major_locator(MaxNLocator(6) if high / low < 1.6 else FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:,.0f}" if thousands else f"{value:g}")
    )
    axis.axes.set_xlim(low / 1.16, high * 1.24)


def size_ticks(axes: Any, values: Sequence[float]) -> None:
    """Put ticks of bytes on the x axis, a log axis."""
    _ticks(axes.xaxis, values, thousands=True)


def _legend(axes: Any, marks: Sequence[Mark], front: bool) -> None:
    present = {look(mark.family, mark.name) for mark in marks}
    handles = [
        Line2D(
            [],
            [],
            color=COLOURS[family],
            marker=sign,
            markersize=min(size, 10),
            linestyle="none",
            label=name,
        )
        for (family, _), (sign, size, name) in LOOKS.items()
        if (sign, size, name) in present
    ]
    if front:
        handles.append(Line2D([], [], color=COLOURS["front"], linewidth=1.2, label="Pareto front"))
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(-0.01, 1.0),
        ncols=len(handles),
        frameon=False,
        fontsize=8,
        handletextpad=0.4,
        columnspacing=1.4,
        borderaxespad=0.2,
    )
