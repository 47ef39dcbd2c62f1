"""Plot of what each layer costs: KL with only its keys, or only its values, in a format; one panel per format."""

import math
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from .canvas import COLOURS, headed, new_figure, plain, tick
from .points import FLOOR
from .select import SIDES, Row, formats

MOST_PANELS = 4


def sensitivity_plot(rows: Sequence[Row], title: str, below: str) -> Figure:
    """Draw KL (log) per layer, keys beside values; the MOST_PANELS formats with the fewest bits."""
    panels = formats(rows)[:MOST_PANELS]
    layers = sorted({int(row["layer"]) for row in rows})
    figure = new_figure(max(6.4, min(12.0, 2.0 + 0.22 * len(layers))), 1.3 + 1.9 * len(panels))
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, name in zip(grid, panels, strict=True):
        shown = [row for row in rows if row["format"] == name]
        above = [row["kl_mean"] for row in shown if row["kl_mean"] >= FLOOR] or [FLOOR]
        bottom = 10.0 ** math.floor(math.log10(min(above) / 1.5))
        for place, side in enumerate(SIDES):
            found = {int(row["layer"]): row["kl_mean"] for row in shown if row["side"] == side}
            axes.bar(
                [layer + 0.42 * (place - 0.5) for layer in found],
                [max(value, bottom * 1.05) - bottom for value in found.values()],
                bottom=bottom,
                width=0.4,
                color=COLOURS[side],
                hatch="////" if side == "values" else None,
                edgecolor=COLOURS["surface"],
                linewidth=0.0,
                zorder=2,
            )
        plain(axes)
        axes.set_yscale("log")
        axes.set_ylim(bottom, 2 * max(above))
        powers = range(round(math.log10(bottom)), math.ceil(math.log10(2 * max(above))) + 1)
        axes.yaxis.set_major_locator(FixedLocator([10.0**power for power in powers]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
        axes.minorticks_off()
        axes.grid(False, axis="x")
        axes.set_ylabel(f"{name}\nKL, nats")
    last = grid[-1]
    last.set_xlim(layers[0] - 0.7, layers[-1] + 0.7)
    last.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True))
    last.set_xlabel("layer")
    headed(grid[0], title, below)
    figure.align_ylabels(list(grid))
    handles = [
        Patch(
            facecolor=COLOURS[side],
            hatch="////" if side == "values" else None,
            edgecolor=COLOURS["surface"],
            linewidth=0.0,
            label=f"only its {side}",
        )
        for side in SIDES
        if any(row["side"] == side for row in rows)
    ]
    grid[0].legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(-0.01, 1.0),
        ncols=2,
        frameon=False,
        fontsize=8,
        borderaxespad=0.2,
    )
    return figure
