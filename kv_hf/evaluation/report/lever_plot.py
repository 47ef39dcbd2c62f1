"""Plot of kv heads and bits: perplexity against bytes per token, a line per model, a point per cache."""

import itertools
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from .canvas import COLOURS, headed, new_figure, plain, tick
from .levers import Levers, kv_heads, origin
from .scatter import size_ticks

LINES = ("exact", "ours", "peer", "recipe", "values")  # roles of colours, in this order
SIGNS = ("*", "o", "s", "^", "D", "P")


def lever_plot(levers: Levers, title: str, below: str) -> Figure:
    """Draw both axes in logarithms; the points of a model are joined from many bytes to few."""
    figure = new_figure(8.4, 5.4)
    axes = figure.add_subplot()
    axes.set(xscale="log", yscale="log")
    looks = itertools.cycle(zip(itertools.cycle(SIGNS), LINES, strict=False))
    values = []
    for group, (sign, role) in zip(levers.groups, looks, strict=False):
        own = [(row["bytes_per_token"], row["perplexity"]) for g, row in levers.rows if g is group]
        if not own:
            continue
        own.sort(reverse=True)
        values += own
        heads = kv_heads(levers, group)
        label = f"{'' if heads is None else f'{heads} kv heads, '}{origin(group)}"
        axes.plot(
            *zip(*own, strict=True),
            color=COLOURS[role],
            marker=sign,
            markersize=9 if sign == "*" else 6,
            markeredgecolor=COLOURS["surface"],
            markeredgewidth=0.8,
            linewidth=1.1,
            label=label,
        )
    front = [(row["bytes_per_token"], row["perplexity"]) for _, row in levers.front()]
    axes.plot(
        *zip(*front, strict=True),
        color=COLOURS["front"],
        linewidth=4,
        alpha=0.35,
        zorder=1,
        label="Pareto front",
    )
    size_ticks(axes, [x for x, _ in values])
    _perplexity_ticks(axes, [y for _, y in values])
    axes.set_xlabel("bytes held per token, everything counted")
    axes.set_ylabel("perplexity of the same tokens")
    plain(axes)
    headed(axes, title, below)
    axes.legend(loc="upper right", frameon=False, fontsize=8)
    return figure


def _perplexity_ticks(axes: Any, values: list[float]) -> None:
    low, high = min(values), max(values)
    axes.set_ylim(low / 1.1, high * (1.6 if high / low > 3 else 1.25))
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0), numticks=20))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
