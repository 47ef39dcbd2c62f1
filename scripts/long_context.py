"""Ask for what is hidden in long texts, through the store of each cache: needles at depths, and RULER's tasks.

    python scripts/long_context.py --model smollm2-135m --lengths 512 1024 2048 --depths 0 0.25 0.5 0.75 1
    python scripts/long_context.py --model smollm2-135m --lengths 2048 --tasks multi_key variable_tracking
    python scripts/long_context.py --lengths 1024 2048 --tasks single --samples 20 --record     # the table of docs/

Without --tasks the needle grid of lengths by depths is measured (and drawn to --plot); with --tasks those tasks at each
length, each sample at a depth of its own. Every answer reads the stored cache (docs/long_context.md). --record appends rows
to results/ as samples finish; what has rows there is not asked again, so that a run can be stopped and go on.
"""

import argparse
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from measure.grid.cell import cache_contents
from measure.grid.loaded import model_revision
from measure.models.packaged import PACKAGED, resolve_model
from measure.peers import known_peers
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from kv_hf.cache_names import cache_label
from kv_hf.evaluation.retrieval import TASKS, needle_cells, task_cells
from kv_hf.evaluation.retrieval.grid import measure_cells
from kv_hf.evaluation.retrieval.haystack import LINCOLN, NOISE
from kv_hf.evaluation.retrieval.heatmap import draw_needle
from kv_hf.evaluation.retrieval.prompt import Cell, Frame
from kv_hf.evaluation.retrieval.puzzles import AT_A_DEPTH
from kv_hf.evaluation.retrieval.rate import Rate
from kv_hf.evaluation.rows import append_rows, check_writable, make_row, read_rows

CELL = ("task", "cache", "length", "depth")
RESULTS = Path(__file__).parent.parent / "results" / "long_context.jsonl"
CACHES = ("dynamic", "paged_int8", "paged_int4", "paged_int2")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    packaged = ", ".join(PACKAGED)
    parser.add_argument("--model", default="smollm2-135m", help=f"{packaged}, a hub id or a folder")
    parser.add_argument("--caches", nargs="+", default=list(CACHES), help='e.g. "quanto_int4"')
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 2048])
    parser.add_argument("--depths", nargs="+", type=float, default=[0.0, 0.25, 0.5, 0.75, 1.0])
    parser.add_argument(
        "--needle", default="single", choices=AT_A_DEPTH, help="task of the grid over depths"
    )
    parser.add_argument(
        "--tasks", nargs="+", default=[], choices=list(TASKS), help="in place of the grid"
    )
    parser.add_argument("--samples", type=int, default=3, help="prompts per cell")
    parser.add_argument(
        "--at-once", type=int, default=2, help="samples of a row, which a stopped run repeats"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--haystack", default=LINCOLN, help=f"{LINCOLN}, {NOISE} or a file")
    parser.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="use the tokenizer's chat template (default: where it has one)",
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--plot", type=Path, help="heat map of the grid, PNG and SVG")
    parser.add_argument("--record", action="store_true", help="append rows to --out")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args(argv)


def measured(args: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """Yield rows as samples finish, with a progress bar; with --record they are appended, and known ones not measured."""
    if args.tasks:
        cells = [cell for length in args.lengths for cell in task_cells(args.tasks, length)]
    else:
        cells = needle_cells(args.lengths, args.depths, args.needle)
    folder, revision = resolve_model(args.model), model_revision(args.model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.dtype))
    model = model.to(args.device).eval()
    run = {
        "model": args.model,
        "model_revision": revision,
        "dtype": args.dtype,
        "device": torch.device(args.device).type,
    }
    asked = {"chat": Frame.of(tokenizer, args.chat).chat, "haystack": args.haystack}
    asked |= {"model": args.model, "model_revision": revision}
    asked |= {"dtype": args.dtype, "seed": args.seed}
    known = read_rows(args.out) if args.record else []
    known = [row for row in known if all(row.get(name) == asked[name] for name in asked)]
    # long cells come last: the time left is counted in tokens, not in cells
    total = sum(cell.length for cell in cells) * args.samples * len(args.caches)
    with tqdm(total=total, unit="token", desc=args.model) as bar:
        for cell in cells:
            for first in range(0, args.samples, args.at_once):
                samples = min(args.at_once, args.samples - first)
                found = recorded(known, cell, first, samples)
                keys = {cache: (cache_label(cache), cache_contents(cache)) for cache in args.caches}
                yield from (found[key] for key in keys.values() if key in found)
                left = [cache for cache, key in keys.items() if key not in found]
                bar.update(cell.length * samples * (len(args.caches) - len(left)))
                if not left:
                    continue
                for measured_row in measure_cells(
                    model,
                    tokenizer,
                    left,
                    [cell],
                    samples,
                    args.seed,
                    haystack=args.haystack,
                    chat=args.chat,
                    progress=bar.update,
                    first_sample=first,
                ):
                    label, contents = keys[measured_row["cache"]]
                    named = {"cache": label, "cache_contents": contents}
                    row = make_row(**run, **{**measured_row, **named})
                    if args.record:
                        append_rows(args.out, [row])
                    yield row


def recorded(
    rows: Sequence[dict[str, Any]], cell: Cell, first: int, samples: int
) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the rows of these samples of a cell by the cache's name and its recipe, the newest of each."""
    wanted = {"task": cell.task, "length": cell.length, "depth": cell.depth}
    wanted |= {"first_sample": first, "samples": samples}
    found = [row for row in rows if all(row.get(name) == wanted[name] for name in wanted)]
    return {(row["cache"], row.get("cache_contents", "")): row for row in found}


def pooled(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per cell and cache: the rows of its samples in one."""
    cells: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault(tuple(row[name] for name in CELL), []).append(row)
    found = []
    for parts in cells.values():
        scores, nlls = ([one for row in parts for one in row[name]] for name in ("scores", "nlls"))
        low, high = Rate.of(scores).interval()
        found.append(
            {
                **parts[0],
                "scores": scores,
                "nlls": nlls,
                "samples": len(scores),
                "score": statistics.fmean(scores),
                "nll": statistics.fmean(nlls),
                "top1": sum(row["top1"] * row["samples"] for row in parts) / len(scores),
                "found": Rate.of(scores).found,
                "rate_low": low,
                "rate_high": high,
            }
        )
    return found


def show(rows: Sequence[dict[str, Any]], title: str) -> None:
    table = Table(title=title, box=SIMPLE_HEAD, padding=0)
    for name in ("task", "cache"):
        table.add_column(name, overflow="fold")
    for name in ("length", "depth", "found", "all of it", "nll", "top-1", "B/token"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["task"],
            row["cache"],
            f"{row['length']:,}",
            "" if row["depth"] is None else f"{row['depth']:g}",
            f"{row['score']:.2f}",
            f"{row['found']}/{row['samples']} ({row['rate_low']:.2f}-{row['rate_high']:.2f})",
            f"{row['nll']:.4f}",
            f"{100 * row['top1']:.1f} %",
            f"{row['bytes_per_token']:,.0f}",
        )
    Console().print(table)


@known_peers()
def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    rows = []
    try:
        if args.record:
            check_writable(args.out)
        for row in measured(args):
            rows.append(row)
    except (ValueError, OSError) as error:  # OSError: no such model, a full disk
        print(f"long_context.py: {error}", file=sys.stderr)
        return 2
    rows = pooled(rows)
    show(rows, f"{args.model}: found again through the cache, {args.samples} prompts per cell")
    if args.plot and not args.tasks:
        for measure in ("score", "nll"):
            path = args.plot.with_name(f"{args.plot.stem}-{measure}")
            print(*draw_needle(rows, path, measure), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
