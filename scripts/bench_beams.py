"""Time what beam search asks of a cache in each step, by length of the context: new order of rows, one token more.

    python scripts/bench_beams.py
    python scripts/bench_beams.py --context 512 2048 --beams 8 --caches dynamic paged_int4 --no-record

No model is run: the caches are filled with random keys and values of SmolLM2-135M's sizes. All take turns in one
process. First 140 random steps are taken and what the caches hold is compared; when one is wrong, nothing is timed or
written and the exit code is 1.
"""

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from kv_hf.evaluation.cache_kinds import cache_kind
from kv_hf.evaluation.shapes import SHAPES
from kv_hf.evaluation.timing import Budget
from measure.speed.beams import beam_steps, wrong_beams
from measure.speed.compare_steps import ms_per_1k_tokens
from rich.console import Console
from rich.table import Table

from kv_hf.cache_names import all_cache_names
from kv_hf.evaluation.rows import append_rows, make_row

RESULTS = Path(__file__).parent.parent / "results" / "beams.jsonl"
CACHES = ["dynamic", "paged_exact", "paged_int4"]
LAYERS = 30  # SmolLM2-135M
console = Console(width=130)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="smollm2", choices=SHAPES)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--context", nargs="+", type=int, default=[512, 2048, 8192, 32768])
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--caches", nargs="+", default=CACHES, choices=all_cache_names())
    parser.add_argument("--steps", type=int, default=20, help="timed steps per cache")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="threads of torch on the CPU")
    parser.add_argument("--budget-s", type=float, help="begin nothing new after so many seconds")
    parser.add_argument(
        "--record", action=argparse.BooleanOptionalAction, default=True, help="append rows to --out"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args(argv)


def show(context: int, results: list[dict[str, Any]]) -> None:
    """Print the results of one context as a table."""
    table = Table(title=f"a beam step's cache work, {context} tokens, {results[0]['beams']} beams")
    for name in (
        "cache",
        "reorder ms",
        "append ms",
        "both ms",
        "x dynamic",
        "MiB copied",
        "KV MiB",
    ):
        table.add_column(name, justify="left" if name == "cache" else "right")
    for found in results:
        table.add_row(
            found["cache"],
            f"{found['reorder_ms_p50']:.2f}",
            f"{found['append_ms_p50']:.2f}",
            f"{found['step_ms_p50']:.2f}",
            f"{found['ratio_to_dynamic']:.1f}",
            f"{found['copied_bytes'] / 2**20:.1f}",
            f"{found['kv_bytes'] / 2**20:.0f}",
        )
    console.print(table)


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 when the results were right, else 1."""
    args = arguments(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    shape, device, dtype = SHAPES[args.shape], torch.device(args.device), getattr(torch, args.dtype)
    kinds = [cache_kind(name) for name in dict.fromkeys(("dynamic", *args.caches))]
    wrong = wrong_beams(kinds, shape, dtype, device, beams=args.beams)
    if wrong:
        console.print(f"[bold red]wrong after reordering: {', '.join(wrong)}; nothing is timed[/]")
        return 1
    budget = Budget(args.budget_s)
    rows: list[dict[str, Any]] = []
    for context in args.context:
        if budget.spent:
            console.print(f"the budget is spent: {context} tokens are left out")
            continue
        results = beam_steps(
            kinds,
            shape,
            args.layers,
            context,
            beams=args.beams,
            steps=args.steps,
            dtype=dtype,
            device=device,
            budget=budget,
        )
        show(context, results)
        rows += [
            make_row(
                kind="beams",
                shape=args.shape,
                device=device.type,
                dtype=args.dtype,
                context=context,
                **found,
            )
            for found in results
        ]
        gc.collect()  # the caches of one context go before those of the next come
    for kind in kinds:
        found = [row for row in rows if row["cache"] == kind.name]
        if len(found) > 1:
            slope = ms_per_1k_tokens(
                [row["context"] for row in found], [row["step_ms_p50"] for row in found]
            )
            console.print(f"  {kind.name}: {slope:.4f} ms per step and 1,000 tokens of context")
    if args.record:
        append_rows(args.out, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
