"""Draw docs/images/speed.svg from the newest rows of results/generate.jsonl: `python scripts/plots.py`.

The same rows give the same file, byte for byte.
"""

from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from tables import ROOT, Rows, grouped, latest_run, rows_of

# caches drawn, in colours that are told apart with every colour vision (Okabe and Ito)
COLOURS = {
    "dynamic": "#000000",
    "static": "#888888",
    "quanto_int4": "#E69F00",
    "quantized_fp8": "#CC79A7",
    "paged_int4": "#0072B2",
}


def draw(axes: Any, rows: Rows) -> None:
    """Draw the time of a decode step against the length of the context, of one run."""
    for (cache,), own in grouped(rows, "cache").items():
        if colour := COLOURS.get(cache):
            points = sorted((row["context"], row["step_ms_p50"]) for row in own)
            axes.plot(*zip(*points, strict=True), color=colour, marker="o", linewidth=1.4)
            axes.annotate(
                cache, points[-1], (7, -3), textcoords="offset points", color=colour, fontsize=8
            )
    contexts = sorted({row["context"] for row in rows})
    axes.set(xscale="log", xlabel="tokens of context", ylabel="milliseconds", ylim=(0, None))
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axes.minorticks_off()
    axes.margins(x=0.15)
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"A decode step of SmolLM2-135M, {rows[0]['machine']}", loc="left", fontsize=9)


def main() -> None:
    """Draw the picture."""
    plt.rcParams.update({"svg.hashsalt": "kv_hf", "svg.fonttype": "none", "font.size": 9})
    wanted = {"kind": "generate", "model": "smollm2-135m", "device": "cpu", "batch": 1}
    figure, axes = plt.subplots(figsize=(7.5, 4), layout="constrained")
    draw(axes, latest_run(rows_of("generate.jsonl"), **wanted))
    figure.savefig(ROOT / "docs" / "images" / "speed.svg", metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
