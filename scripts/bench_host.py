"""What a decode step costs the host, on a GPU that is not there: time, launches, waits. Needs Triton and no GPU.

    python scripts/bench_host.py
    python scripts/bench_host.py --json
    python scripts/bench_host.py --record

Triton's kernels are compiled for an NVIDIA GPU of compute capability 9.0, and launching them does nothing; everything else
runs. Times are the least of many steps, of the calling thread alone. DynamicCache with sdpa is measured in the same run, on one
row of 4 tokens, whose copies and products take the CPU next to no time. docs/kernels_gpu.md says what the figures mean.

With --json the last line is one JSON object, of the first format: microseconds per layer, kernels per layer (Triton's and
torch's, of a layer behind the first), torch kernels per layer of a ragged batch over all steps, waits of a step.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from measure.speed.host_steps import HostRun, HostShape, gpu
from rich.console import Console
from rich.table import Table

from kv_hf.evaluation.rows import append_rows, check_writable, make_row
from kv_hf.formats import FORMAT_NAMES

RESULTS = Path(__file__).parent.parent / "results" / "host.jsonl"
SETTINGS: tuple[tuple[Any, ...], ...] = (  # name, batch, columns, ragged, options
    ("batch 1", 1, 1000, False, {}),
    ("batch 16", 16, 300, False, {}),
    ("ragged 16", 16, 300, True, {}),
    ("ragged 64", 64, 300, True, {}),
    ("preallocated", 1, 1000, False, {"max_length": 2048}),
)
BLOCK = 10  # steps of one cache before the other's turn
console = Console(width=130)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="+", default=["int4"], choices=FORMAT_NAMES)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=130, help="steps that are timed")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    parser.add_argument("--record", action="store_true", help=f"append rows to {RESULTS.name}")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    for name in ("layers", "steps"):
        if getattr(args, name) < 2:
            parser.error(f"--{name} must be at least 2, got {getattr(args, name)}")
    return args


def measure(
    args: argparse.Namespace, fake: Any, keys: str, setting: tuple[Any, ...]
) -> dict[str, Any]:
    """Return the figures of one setting, beside DynamicCache of the same batch."""
    name, batch, context, ragged, options = setting
    shape = HostShape(layers=args.layers)
    room = options or {"reserve_tokens": context + 512}  # as generate() asks for
    run = HostRun(shape, batch, context, keys, ragged=ragged, **room)
    stock = HostRun(
        shape, 1, context, None
    )  # what a GPU's host does for it does not depend on the batch
    run.time(), stock.time()  # kernels are compiled
    counted = [run.count(fake) for _ in range(64)]  # every row seals once
    sealing = max(counted, key=lambda step: step.launches)
    plain = min(counted, key=lambda step: (step.launches, step.in_a_layer))
    times, theirs = [], []
    for number in range(2 * args.steps):
        if number // BLOCK % 2:
            theirs.append(stock.time())
            continue
        sealed, seconds = run.sealed_pages(), run.time()
        times.append((run.sealed_pages() > sealed, seconds))
    return {
        "setting": name,
        "format": keys,
        "paged_us_per_layer": _us(shape, [s for seals, s in times if not seals or ragged]),
        "sealing_us_per_layer": _us(shape, [s for seals, s in times if seals]),
        "dynamic_us_per_layer": _us(shape, theirs),
        "launches_plain": plain.in_a_layer,
        "launches_sealing": sealing.in_a_layer,
        "torch_kernels": _mean([step.kernels / args.layers for step in counted]),
        "synchronisations": max(step.waits for step in counted),
    }


def _us(shape: HostShape, seconds: list[float]) -> float | None:
    return round(min(seconds) * 1e6 / shape.layers, 1) if seconds else None


def _mean(numbers: list[float]) -> float:
    return round(sum(numbers) / len(numbers), 2)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of the first format in one object."""
    by_name = {row["setting"]: row for row in rows if row["format"] == rows[0]["format"]}
    one, many, ragged = by_name["batch 1"], by_name["batch 16"], by_name["ragged 16"]
    return {
        "format": one["format"],
        "paged_us_per_layer": one["paged_us_per_layer"],
        "paged_us_per_layer_batch_16": many["paged_us_per_layer"],
        "sealing_us_per_layer": one["sealing_us_per_layer"],
        "dynamic_us_per_layer": one["dynamic_us_per_layer"],
        "ragged_us_per_layer": ragged["paged_us_per_layer"],
        "launches_plain": one["launches_plain"],
        "launches_sealing": one["launches_sealing"],
        "launches_ragged": ragged["launches_sealing"],
        "launches_preallocated": by_name["preallocated"]["launches_plain"],
        "torch_kernels_ragged": ragged["torch_kernels"],
        "synchronisations": max(row["synchronisations"] for row in rows),
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Print the figures as a table."""
    columns = [name for name in rows[0] if name not in ("setting", "format")]
    table = Table("setting", "format", *(name.replace("_", " ") for name in columns))
    for row in rows:
        table.add_row(row["setting"], row["format"], *(str(row[name]) for name in columns))
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    if args.record:
        check_writable(args.out)
    torch.set_num_threads(1)
    rows = []
    with gpu() as fake:
        for keys in args.formats:
            for setting in SETTINGS:
                rows.append(measure(args, fake, keys, setting))
    show(rows)
    if args.record:
        sizes = asdict(HostShape(layers=args.layers))
        append_rows(args.out, [make_row(kind="host_step", **sizes, **row) for row in rows])
    if args.json:
        print(json.dumps(summary(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
