"""Draw what a needle grid found: a panel per cache, length across, depth down, one scale of colours for all."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...extras import extra

# field of a row -> (label, colours, ends of the scale or None: from 0 to the largest shown)
MEASURES: dict[str, tuple[str, str, tuple[float, float] | None]] = {
    "score": ("part of the answers found", "cividis", (0.0, 1.0)),
    "nll": ("nats per token of the expected answer", "cividis_r", None),
}
PANELS_A_ROW = 4


def draw_needle(
    rows: Sequence[dict[str, Any]], path: str | Path, measure: str = "score"
) -> list[Path]:
    """Write the heat map of a needle grid as PNG and SVG, on white.

    Args:
        rows: of `needle_grid`, one model and task; of several with the same cache, length and depth the newest counts.
            Rows without a depth are left out.
        path: its suffix is replaced.
        measure: "score" (bright is good), or "nll" (bright is good, too).
    Returns: the files written.
    Raises: ValueError for another measure, no rows with a depth, or rows of several models or tasks.
    """
    if measure not in MEASURES:
        raise ValueError(f"measure must be one of {', '.join(MEASURES)}, got {measure!r}")
    rows = [row for row in rows if row.get("depth") is not None]
    if not rows:
        raise ValueError("rows must hold some of a needle grid (with a depth), got none")
    what = {(row.get("model"), row["task"]) for row in rows}
    if len(what) > 1:
        raise ValueError(f"rows must be of one model and task, got {sorted(map(str, what))}")
    [(model, task)] = what

    with extra("eval", "the heat map"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    cells = {(row["cache"], row["length"], row["depth"]): row[measure] for row in rows}
    caches = list(dict.fromkeys(row["cache"] for row in rows))
    lengths = sorted({row["length"] for row in rows})
    depths = sorted({row["depth"] for row in rows})
    label, colours, ends = MEASURES[measure]
    low, high = ends or (0.0, max(cells.values()) or 1.0)

    tall = math.ceil(len(caches) / PANELS_A_ROW)
    wide = math.ceil(len(caches) / tall)  # rows of panels of nearly equal length
    width, height = 0.62 * len(lengths) + 0.5, 0.42 * len(depths) + 0.8
    figure = Figure(
        figsize=(max(wide * width, 3.2) + 1.4, tall * height + 0.5),
        layout="constrained",
        facecolor="white",
    )
    FigureCanvasAgg(figure)
    grid = figure.subplots(tall, wide, squeeze=False)
    picture: Any = None
    for panel, axes in enumerate(grid.flat):
        if panel >= len(caches):
            axes.set_axis_off()
            continue
        values = [
            [cells.get((caches[panel], length, depth), math.nan) for length in lengths]
            for depth in depths
        ]
        picture = axes.imshow(values, vmin=low, vmax=high, cmap=colours, aspect="auto")
        for y, line in enumerate(values):
            for x, value in enumerate(line):
                _write(axes, x, y, value, picture)
        last = panel + wide >= len(caches)
        axes.set_title(caches[panel], fontsize=9)
        axes.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths] if last else [])
        axes.set_yticks(
            range(len(depths)), [f"{100 * d:.0f} %" for d in depths] if panel % wide == 0 else []
        )
        axes.set_xticks([x - 0.5 for x in range(1, len(lengths))], minor=True)
        axes.set_yticks([y - 0.5 for y in range(1, len(depths))], minor=True)
        axes.grid(which="minor", color="white", linewidth=1)
        axes.tick_params(which="both", labelsize=8, length=0)
        axes.spines[:].set_visible(False)
    figure.supxlabel("tokens", fontsize=9)
    figure.supylabel("depth of the needle", fontsize=9)
    figure.colorbar(picture, ax=grid, shrink=0.9, pad=0.02).set_label(label, fontsize=9)
    figure.suptitle(" · ".join(str(part) for part in (model, task) if part), fontsize=10)
    return _save(figure, Path(path))


def _write(axes: Any, x: int, y: int, value: float, picture: Any) -> None:
    """Write a value into its cell, in the ink that stands out; "-" where nothing was measured."""
    if math.isnan(value):
        axes.text(x, y, "-", ha="center", va="center", fontsize=8, color="#555555")
        return
    red, green, blue, _ = picture.cmap(picture.norm(value))
    ink = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"
    axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=7, color=ink)


def _save(figure: Any, path: Path) -> list[Path]:
    """Write PNG and SVG; the same rows give the same bytes."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path.with_suffix(".png"), path.with_suffix(".svg")]
    with matplotlib.rc_context({"svg.hashsalt": "kv_hf", "svg.fonttype": "none"}):
        figure.savefig(files[0], dpi=160)
        figure.savefig(files[1], metadata={"Date": None, "Creator": None})
    return files
