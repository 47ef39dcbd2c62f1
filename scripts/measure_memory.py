"""Measure what each cache takes in memory, by part and as the system sees it, and its throughput, side by side.

    python scripts/measure_memory.py --context 1024 4096
    python scripts/measure_memory.py --caches dynamic hqq_int4 paged_int4:keys=int8 --context 2048 --batch 4
    python scripts/measure_memory.py --random llama-3.1-8b --device cuda --context 4096 32768 --record

Every cache is measured alone, in fresh processes with the environment of any user's, because memory that one has freed would
serve the next. That makes the throughput a by-product; scripts/bench_generate.py times all caches in turns and is the benchmark of speed.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from kv_hf.evaluation.shapes import RANDOM_MODELS
from measure.models.packaged import resolve_model
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from kv_hf.cache_names import all_cache_names
from kv_hf.evaluation.caches import why_not
from kv_hf.evaluation.memory import DTYPES, MeasurementError, check_request, measure_footprint
from kv_hf.evaluation.rows import append_rows, make_row

RESULTS = Path(__file__).parent.parent / "results" / "memory.jsonl"
console = Console(width=170)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="packaged model, hub id or folder")
    parser.add_argument("--random", choices=RANDOM_MODELS, help="random weights of known sizes")
    parser.add_argument(
        "--caches",
        nargs="+",
        default=list(all_cache_names()),
        help="with options: paged_int4:keys=int8",
    )
    parser.add_argument("--context", nargs="+", type=int, default=[1024, 4096])
    parser.add_argument("--batch", nargs="+", type=int, default=[1])
    parser.add_argument("--steps", type=int, default=32, help="decode steps behind the prompt")
    parser.add_argument("--text", default="lincoln_1862", help="of the prompt, repeated")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="threads of torch on the CPU")
    parser.add_argument("--no-speed", action="store_true", help="memory only, in half the time")
    parser.add_argument("--timeout", type=float, help="seconds for one process")
    parser.add_argument("--record", action="store_true", help=f"append rows to {RESULTS.name}")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    try:
        args.folder = args.random or resolve_model(args.model)
        for name in args.caches:
            for context in args.context:
                for batch in args.batch:
                    check_request(args.folder, name, context, batch, **common(args))
        if args.threads is not None and args.threads < 1:
            raise ValueError(f"threads must be at least 1, got {args.threads}")
    except ValueError as error:
        parser.error(str(error))
    return args


def common(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of a measurement that all cells share."""
    return {
        "dtype": args.dtype,
        "device": args.device,
        "steps": args.steps,
        "weights": "random" if args.random else "real",
        "text": args.text,
    }


def able(names: Sequence[str], device: torch.device) -> list[str]:
    """Return the caches that can run here, DynamicCache first; say why the others cannot."""
    found = []
    for name in dict.fromkeys(("dynamic", *names)):
        reason = why_not(name, device)
        if reason:
            console.print(f"{name} is left out: {reason}")
        else:
            found.append(name)
    return found


def megabytes(size: float) -> str:
    return f"{size / 2**20:.1f}"


# title, value of a row, format; a column without any value is left out
COLUMNS: list[tuple[str, Callable[[dict[str, Any]], Any], Callable[[Any], str]]] = [
    ("held MiB", lambda row: row["held_bytes"], megabytes),
    ("of dynamic", lambda row: row.get("ratio_to_dynamic"), "{:.1%}".format),
    ("B/token", lambda row: row["bytes_per_token"], "{:,.0f}".format),
    ("payload", lambda row: row["payload_bytes"], megabytes),
    ("scales", lambda row: row["scales_bytes"] or None, megabytes),
    ("tail", lambda row: row["tail_bytes"] or None, megabytes),
    ("staging", lambda row: row["staging_bytes"] or None, megabytes),
    ("outside", lambda row: row["offloaded_bytes"] or None, megabytes),
    ("grown: prefill", lambda row: row["prefill_grown_bytes"], megabytes),
    ("steps", lambda row: row["steps_grown_bytes"], megabytes),
    ("peak: prefill", lambda row: row["prefill_peak_bytes"], megabytes),
    ("steps", lambda row: row["steps_peak_bytes"], megabytes),
    ("prefill tok/s", lambda row: row.get("prefill_tokens_per_s"), "{:,.0f}".format),
    ("decode tok/s", lambda row: row.get("decode_tokens_per_s"), "{:,.1f}".format),
    ("step ms", lambda row: row.get("step_ms_p50"), "{:.1f}".format),
    ("p20", lambda row: row.get("step_ms_p20"), "{:.1f}".format),
    ("p80", lambda row: row.get("step_ms_p80"), "{:.1f}".format),
]


def table_of(rows: list[dict[str, Any]]) -> Table:
    """Return the caches of one context and batch side by side."""
    first = rows[0]
    table = Table(
        title=f"{first['model']}, {first['context']:,} tokens, batch {first['batch']}, {first['dtype']}, "
        f"{first['steps']} steps; MiB, grown and peak: {first['measured_by']}"
    )
    table.add_column("cache")
    used = [column for column in COLUMNS if any(column[1](row) is not None for row in rows)]
    for title, _, _ in used:
        table.add_column(title, justify="right")
    for row in rows:
        cells = [(value(row), form) for _, value, form in used]
        table.add_row(row["cache"], *("" if cell is None else form(cell) for cell, form in cells))
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; 0 when every cache that can run here gave a row, else 1."""
    args = arguments(argv)
    transformers_logging.disable_progress_bar()
    names = able(args.caches, torch.device(args.device))
    failed = 0
    cells = [(context, batch) for context in args.context for batch in args.batch]
    with tqdm(total=len(cells) * len(names), unit="cell", file=sys.stderr) as bar:
        for context, batch in cells:
            rows: list[dict[str, Any]] = []
            exact: dict[str, Any] | None = None
            for name in names:
                bar.set_description(f"{name}, {context} tokens")
                try:
                    found = measure_footprint(
                        args.folder,
                        name,
                        context,
                        batch,
                        **common(args),
                        threads=args.threads,
                        speed=not args.no_speed,
                        timeout=args.timeout,
                    )
                except (MeasurementError, ValueError) as error:
                    failed += 1
                    bar.write(f"{name} gives no row at {context} tokens, batch {batch}: {error}")
                else:
                    found["model"] = args.random or args.model
                    exact = found if name == "dynamic" else exact
                    if exact is not None:
                        found["ratio_to_dynamic"] = found["held_bytes"] / exact["held_bytes"]
                    rows.append(make_row(kind="memory", **found))
                    if args.record:
                        append_rows(args.out, rows[-1:])
                bar.update()
            if rows:
                bar.clear()
                console.print(table_of(rows))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
