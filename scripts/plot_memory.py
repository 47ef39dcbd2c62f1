"""Draw results/memory.jsonl: held bytes and the peak of memory against the context, for every cache.

    python scripts/plot_memory.py

Only the newest run of each model, device and batch is drawn. The same rows give the same files, byte for byte.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from plots import COLOURS, DASHES, GREY, ORANGE, RED, RESULTS, groups, machine

from kv_hf.evaluation.rows import latest_run, read_rows

PANELS = [
    ("held_bytes", "held by the cache"),
    ("steps_peak_bytes", "peak of the decode steps"),
    ("prefill_peak_bytes", "peak of the prefill"),
]
MARKERS = {"paged": "o", "quanto": "D", "hqq": "^", "quantized": "v"}
# of the two quantizers of transformers: one colour each, a dash for the bits
FURTHER = {"quanto_int2": ORANGE, "hqq_int8": RED, "hqq_int2": RED}
MORE_DASHES = {"quanto_int2": (3, 1, 1, 1), "hqq_int2": (3, 1, 1, 1)}


def draw_memory(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the rows of one model, device and batch; one panel for each of PANELS, with the same axes."""
    figure, axes = plt.subplots(
        1, len(PANELS), figsize=(12, 4.4), sharey=True, layout="constrained"
    )
    contexts = sorted({row["context"] for row in rows})
    for place, (field, title) in zip(axes, PANELS, strict=True):
        for name in dict.fromkeys(row["cache"] for row in rows):
            of = {row["context"]: row[field] for row in rows if row["cache"] == name}
            points = [(x, of[x] / 2**20) for x in contexts if of.get(x) is not None]
            base = name.partition(":")[0]
            place.plot(
                [x for x, _ in points],
                [y for _, y in points],
                color=COLOURS.get(base) or FURTHER.get(base, GREY),
                marker=MARKERS.get(base.split("_")[0], "s"),
                markersize=4,
                linewidth=1.4,
                dashes=(1, 1)
                if name != base
                else {**DASHES, **MORE_DASHES}.get(base, (None, None)),
                label=name,
            )
        place.set_title(title, loc="left")
        place.set_xscale("log", base=2)
        place.set_yscale("log", base=2)
        place.set_xticks(contexts, [f"{x:,}" for x in contexts])
        place.minorticks_off()
        place.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        place.set_xlabel("tokens of context")
        place.grid(True, color="#dddddd", linewidth=0.6)
        place.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("MiB")
    axes[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
    first = rows[0]
    figure.suptitle(
        f"{Path(str(first['model'])).name}, {machine(first)}, batch {first['batch']}, {first['dtype']}; "
        f"peaks: {first['measured_by']} memory"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None, "Creator": None} if path.suffix == ".svg" else {})
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw everything; 0 also when there is nothing to draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, default=RESULTS / "memory.jsonl")
    parser.add_argument("--out", type=Path, help="default: plots/ beside the rows")
    args = parser.parse_args(argv)
    out: Path = args.out or args.rows.parent / "plots"
    plt.rcParams.update({"svg.hashsalt": "kv_hf", "svg.fonttype": "none", "font.size": 9})
    rows = [row for row in read_rows(args.rows) if row["kind"] == "memory"]
    for group in groups(rows, "model", "device", "batch"):
        model, device, batch = group.values()
        path = out / f"memory-{Path(str(model)).name}-{device}-batch{batch}.svg"
        draw_memory(latest_run(rows, **group), path)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
