"""Measure pages outside of the device: resident memory against the budget, and step time against no offload.

    python scripts/bench_offload.py --context 8192 32768 --record
    python scripts/bench_offload.py --context 8192 16384 --share 0 --read-tokens 2048 --record
    python scripts/bench_offload.py --random llama-3.1-8b --device cuda --context 32768

Before anything is measured, logits with and without offload are compared bit by bit; when they differ, nothing is
written and the exit code is 1. Contexts are filled with random keys and values: a step costs the same.
"""

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from kv_hf.evaluation.resident import give_freed_memory_back
from kv_hf.evaluation.shapes import RANDOM_MODELS, random_model
from kv_hf.evaluation.timing import Budget
from measure.models.packaged import resolve_model
from measure.speed.offload_steps import differing, offload_steps
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from kv_hf.evaluation.rows import append_rows, make_row
from kv_hf.formats import format_names

RESULTS = Path(__file__).parent.parent / "results" / "offload.jsonl"
MIB = (
    "device_bytes",
    "page_bytes",
    "offloaded_bytes",
    "total_bytes",
    "resident_bytes",
    "resident_peak_stepping",
    "allocated_peak",
)
console = Console(width=150)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="packaged model, hub id or folder")
    parser.add_argument("--random", choices=RANDOM_MODELS, help="random weights of known sizes")
    parser.add_argument("--context", nargs="+", type=int, default=[8192, 32768])
    parser.add_argument("--keys", nargs="+", default=["exact", "int4"], choices=format_names())
    parser.add_argument(
        "--share", nargs="+", type=float, default=[0, 0.25, 0.5], help="budgets, 0 for the least"
    )
    parser.add_argument(
        "--read-tokens", type=int, help="one cache more whose steps read so many tokens"
    )
    parser.add_argument("--steps", type=int, default=24, help="timed steps per cache")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="threads of torch on the CPU")
    parser.add_argument("--budget-s", type=float, help="begin nothing new after so many seconds")
    parser.add_argument("--record", action="store_true", help=f"append rows to {RESULTS.name}")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args(argv)


def load(args: argparse.Namespace) -> Any:
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    if args.random:
        return random_model(args.random, device, dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(resolve_model(args.model), dtype=dtype)
    return model.to(device).eval()


def show(title: str, results: list[dict[str, Any]]) -> None:
    """Print results as a table."""
    table = Table(title=title)
    used = [name for name in MIB if any(result[name] for result in results)]
    for name in ("offload", "layers out", *(f"{name} MiB" for name in used), "step ms", "x none"):
        table.add_column(name, justify="right")
    for result in results:
        sizes = ["" if result[name] is None else f"{result[name] / 2**20:.1f}" for name in used]
        table.add_row(
            result["cache"],
            str(result["layers_outside"]),
            *sizes,
            f"{result['step_ms_p50']:.1f}",
            f"{result['ratio_to_none']:.2f}",
        )
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 when the results were right, else 1."""
    args = arguments(argv)
    transformers_logging.disable_progress_bar()
    give_freed_memory_back()
    if args.threads:
        torch.set_num_threads(args.threads)
    budget = Budget(args.budget_s)
    model = load(args)
    places = ("cpu", "disk") if model.device.type == "cuda" else ("disk",)
    rows: list[dict[str, Any]] = []
    for keys in args.keys:
        wrong = differing(model, keys, [{"offload": place} for place in places])
        if wrong:
            console.print(f"[bold red]{keys}: {wrong} gives other logits: nothing is recorded[/]")
            return 1
        console.print(f"gate: {keys} with and without offload gives bit-equal logits")
        for context in args.context:
            if budget.spent:
                console.print(f"the budget is spent: {context} tokens of {keys} are left out")
                continue
            results = offload_steps(
                model,
                keys,
                context,
                places,
                args.share,
                steps=args.steps,
                budget=budget,
                read_tokens=args.read_tokens,
            )
            show(f"{args.random or args.model}, {context} tokens, {keys}, {args.dtype}", results)
            rows += [
                make_row(
                    kind="offload" if args.read_tokens is None else "offload_reading",
                    model=args.random or args.model,
                    weights="random" if args.random else "real",
                    device=model.device.type,
                    dtype=args.dtype,
                    context=context,
                    fill="random",
                    **result,
                )
                for result in results
            ]
            gc.collect()
    if args.record and rows:
        append_rows(args.out, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
