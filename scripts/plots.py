"""Draw results/*.jsonl as SVG: time per step, bytes and decode attention against the length of the context.

    python scripts/plots.py

Only the newest run of each model, shape and device is drawn. The same rows give the same files, byte for byte.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from kv_hf.evaluation.rows import latest_run, read_rows

RESULTS = Path(__file__).parent.parent / "results"
# Okabe and Ito's palette, told apart with every colour vision; a format has one colour, whatever reads it
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PURPLE, GREY = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#888888",
)  # fmt: skip
COLOURS = {
    "dynamic": BLACK,
    "static": GREY,
    "sdpa": GREY,
    "sdpa-packed": GREY,
    "flash": GREY,
    "flash-packed": GREY,
    "offloaded": YELLOW,
    "quanto_int4": ORANGE,
    "hqq_int4": RED,
    "quantized_fp8": PURPLE,
    "paged_exact": BLUE,
    "paged_fp8": PURPLE,
    "paged_int8": SKY,
    "paged_int4": GREEN,
    "paged_int2": ORANGE,
}
DASHES = {
    "static": (4, 2),
    "sdpa": (4, 2),
    "sdpa-packed": (1, 1),
    "flash": (2, 1, 1, 1),
    "flash-packed": (3, 1),
    "quanto_int4": (4, 2),
    "hqq_int4": (1, 1),
    "quantized_fp8": (4, 2),
}
MARKERS = {"paged": "o", "kernel": "v"}
Line = tuple[list[float], list[float], list[float], list[float]]  # x, y, low, high


def lines(
    rows: list[dict[str, Any]],
    name: str,
    y: str,
    scale: float = 1.0,
    band: tuple[str, str] | None = None,
) -> dict[str, Line]:
    """Return, for each value of field `name`, the points of field `y` over the context, the newest row of each."""
    points: dict[str, dict[int, tuple[float, float, float]]] = {}
    for row in rows:
        low, high = (row[field] for field in band) if band else (row[y], row[y])
        points.setdefault(row[name], {})[row["context"]] = (row[y], low, high)
    found: dict[str, Line] = {}
    for which, of in points.items():
        xs = sorted(of)
        middle, low, high = ([of[x][i] * scale for x in xs] for i in range(3))
        found[which] = ([float(x) for x in xs], middle, low, high)
    return found


def draw(path: Path, drawn: dict[str, Line], title: str, label: str) -> None:
    """Write one picture; both axes are logarithmic, the band is the 20th to the 80th percentile."""
    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    for name, (xs, ys, low, high) in drawn.items():
        style = name.replace("kernel_", "paged_")
        part = name.split("_")[0]
        axes.plot(
            xs,
            ys,
            color=COLOURS.get(style, GREY),
            marker=MARKERS.get(part, "s"),
            markersize=4,
            linewidth=1.4,
            dashes=(1, 2) if part == "kernel" else DASHES.get(name, (None, None)),
            label=name,
        )
        axes.fill_between(xs, low, high, color=COLOURS.get(style, GREY), alpha=0.12, linewidth=0)
    axes.set(xscale="log", yscale="log", xlabel="tokens in the cache", ylabel=label, title=title)
    ticks = sorted({x for xs, *_ in drawn.values() for x in xs})
    axes.set_xticks(ticks, [f"{int(x):,}" for x in ticks])
    axes.minorticks_off()
    axes.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 3, 5)))
    axes.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    plt.close(figure)


def groups(rows: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    """Return the different combinations of values of these fields, in order of appearance."""
    seen = {tuple(row[name] for name in names): None for row in rows}
    return [dict(zip(names, values, strict=True)) for values in seen]


def machine(row: dict[str, Any]) -> str:
    """Return where a run was made, for titles."""
    threads = row["threads"]
    return f"{threads} CPU thread{'s' if threads > 1 else ''}" if row["device"] == "cpu" else "GPU"


def main(argv: Sequence[str] | None = None) -> int:
    """Draw everything; 0 also when there is nothing to draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, help="default: plots/ beside the results")
    args = parser.parse_args(argv)
    out: Path = args.out or args.results / "plots"
    plt.rcParams.update({"svg.hashsalt": "kv_hf", "svg.fonttype": "none", "font.size": 9})
    say: Callable[[object], None] = print
    generate = [
        row for row in read_rows(args.results / "generate.jsonl") if row["kind"] == "generate"
    ]
    for group in groups(generate, "model", "device", "batch"):
        rows = latest_run(generate, **group)
        model, device, batch = group.values()
        stem = f"{Path(str(model)).name}-{device}-batch{batch}.svg"
        where = f"{Path(str(model)).name}, {machine(rows[0])}, batch {batch}, {rows[0]['dtype']}"
        steps = lines(rows, "cache", "step_ms_p50", band=("step_ms_p20", "step_ms_p80"))
        draw(out / f"step-{stem}", steps, f"One decode step: {where}", "ms per step")
        sizes = lines(rows, "cache", "kv_bytes", scale=2**-20)
        draw(out / f"bytes-{stem}", sizes, f"Keys and values: {where}", "MiB")
        say(f"{out / f'step-{stem}'}, {out / f'bytes-{stem}'}")
    decode = read_rows(args.results / "decode.jsonl")
    for group in groups(decode, "shape", "device", "batch"):
        rows = latest_run(decode, **group)
        shape, device, batch = group.values()
        path = out / f"decode-{shape}-{device}-batch{batch}.svg"
        times = lines(rows, "contender", "ms_p50", band=("ms_p20", "ms_p80"))
        where = f"{shape}, {machine(rows[0])}, batch {batch}, {rows[0]['dtype']}"
        draw(path, times, f"Attention of one step, one layer: {where}", "ms per layer")
        say(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
