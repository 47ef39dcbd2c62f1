"""Plot of kv heads and bits: perplexity against bytes per token, a line per model, a point per cache."""

from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from .canvas import COLOURS, headed, new_figure, plain, tick
from .levers import Levers, kv_heads, origin, trained
from .scatter import size_ticks

ROLES = (
    "exact",
    "ours",
    "recipe",
    "peer",
    "values",
    "front",
)  # of colours: one per number of heads
SIGNS = (
    "*",
    "o",
    "s",
    "^",
    "D",
)  # an original, what was merged, what was trained, and more of each


def lever_plot(levers: Levers, title: str, below: str) -> Figure:
    """Draw both axes in logarithms, of the caches that all models were measured with.

    Lines of as many kv heads have one colour, broken before training; the points of the original are named.
    """
    figure = new_figure(8.4, 5.4)
    axes = figure.add_subplot()
    axes.set(xscale="log", yscale="log")
    shown = levers.common()
    counts = list(dict.fromkeys(kv_heads(levers, group) for group in levers.groups))
    values = []
    for at, group in enumerate(levers.groups):
        own = [(r["bytes_per_token"], r["perplexity"], r["cache"]) for g, r in shown if g is group]
        own.sort(reverse=True)
        values += [(x, y) for x, y, _ in own]
        heads = kv_heads(levers, group)
        original = group is levers.original
        sign = "*" if original else SIGNS[1 + trained(group)]
        axes.plot(
            [x for x, _, _ in own],
            [y for _, y, _ in own],
            color=COLOURS[ROLES[counts.index(heads) % len(ROLES)]],
            marker=sign,
            markersize=10 if original else 6,
            markeredgecolor=COLOURS["surface"],
            markeredgewidth=0.8,
            linewidth=1.2,
            linestyle="-" if original or trained(group) else (0, (4, 2)),
            label=f"{_heads(heads)}{origin(group)}",
            zorder=3 + at / 100,
        )
        for x, y, cache in own if original else ():
            axes.annotate(
                cache.removeprefix("paged_"),
                (x, y),
                xytext=(0, -13),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color=COLOURS["muted"],
            )
    front = [(row["bytes_per_token"], row["perplexity"]) for _, row in levers.front(shown)]
    axes.plot(
        *zip(*front, strict=True), color=COLOURS["front"], linewidth=5, alpha=0.3, zorder=1,
        label="Pareto front",
    )  # fmt: skip
    size_ticks(axes, [x for x, _ in values])
    _perplexity_ticks(axes, [y for _, y in values])
    axes.set_xlabel("bytes held per token, everything counted")
    axes.set_ylabel("perplexity of the same tokens")
    plain(axes)
    headed(axes, title, below)
    axes.legend(loc="upper right", frameon=False, fontsize=8)
    return figure


def _heads(count: int | None) -> str:
    if count is None:
        return ""
    return f"{count} kv head{'s' if count > 1 else ''}, "


def _perplexity_ticks(axes: Any, values: list[float]) -> None:
    low, high = min(values), max(values)
    axes.set_ylim(low / 1.12, high * (1.6 if high / low > 3 else 1.3))
    subs = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0) if high / low > 3 else range(1, 10)
    axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=20))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
