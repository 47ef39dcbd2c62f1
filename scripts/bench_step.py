"""Time the cache's work of whole decode steps, the linear layers taken out: DynamicCache and sdpa against pages.

    python scripts/bench_step.py --shapes smollm2 --context 16 512 --batch 1 16
    python scripts/bench_step.py --record

Each step calls cache.update and attention once per layer. `dynamic` is DynamicCache and transformers' sdpa attention,
`paged_*` the whole path through a PagedCache, `calls_*` only the kernel's calls in it: appending to both sides of the
windows and attention. All run in one process, in turns, on the same random tokens; a ratio above 1 is faster than `dynamic`.
Results are compared with a softmax in fp64 first; a wrong one ends the run with exit code 1.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from kv_hf.evaluation.shapes import SHAPES
from kv_hf.evaluation.timing import Budget, interleave, spread
from measure.speed.decode_contenders import Contender, Workload, dynamic, kernel_calls, paged
from rich.console import Console
from rich.table import Table

from kv_hf.doctor.kernels import paged_names
from kv_hf.evaluation.rows import append_rows, check_writable, make_row

RESULTS = Path(__file__).parent.parent / "results" / "steps.jsonl"
LAYERS = {"smollm2": 30, "llama-8b": 32}
MOST_BYTES = 256 << 20  # of one dense cache; the workload and every contender hold as much
console = Console(width=130)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=list(LAYERS), choices=LAYERS)
    parser.add_argument("--context", nargs="+", type=int, default=[16, 64, 128, 256, 512])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument(
        "--dtype",
        nargs="+",
        default=["bfloat16", "float32"],
        choices=("bfloat16", "float16", "float32"),
    )
    parser.add_argument(
        "--formats", nargs="+", default=["exact", "int8", "int4"], choices=paged_names()
    )
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--threads", type=int, help="threads of torch")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--budget-s", type=float, help="begin nothing new after so many seconds")
    parser.add_argument("--record", action="store_true", help=f"append rows to {RESULTS.name}")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args(argv)


def layers_of(name: str, batch: int, context: int, dtype: torch.dtype) -> int:
    """Return the layers to measure: all of the model, or as many as fit beside each other in memory."""
    dense = batch * SHAPES[name].dense_bytes(context, dtype)
    return int(max(2, min(LAYERS[name], MOST_BYTES // dense)))


def contenders(work: Workload, args: argparse.Namespace) -> list[Contender]:
    """Make all contenders of one workload, each on tokens of its own cache."""
    found = [dynamic(work)]
    for name in args.formats:
        whole, _ = paged(work, name, page_size=args.page_size)
        found.append(whole)
        if whole.kernel == "c":
            found.append(kernel_calls(work, whole))
    return found


def metered(run: Callable[[], Any], times: list[float]) -> Callable[[], None]:
    """Return `run` that notes the milliseconds of the calling thread's processor time in `times`.

    With one thread that is all of the work, however many other programs take the processor away in between.
    """

    def call() -> None:
        start = time.thread_time()
        run()
        times.append(1e3 * (time.thread_time() - start))

    return call


def measure(
    name: str, context: int, batch: int, dtype: str, args: argparse.Namespace, budget: Budget
) -> list[dict[str, Any]] | None:
    """Judge and time one step; None where a result is wrong."""
    kind = getattr(torch, dtype)
    layers = layers_of(name, batch, context, kind)
    work = Workload(SHAPES[name], batch, context, layers, kind, torch.device("cpu"))
    found = contenders(work, args)
    for contender in found:
        verdict = contender.verdict()
        if not verdict.ok:
            console.print(
                f"[bold red]{contender.name} is wrong[/]: {verdict.error:.3g}, allowed {verdict.budget:.3g}"
            )
            return None
    by_name = {contender.name: contender for contender in found}
    cpu: dict[str, list[float]] = {which: [] for which in by_name}
    runs = {which: metered(one.run, cpu[which]) for which, one in by_name.items()}
    times = interleave(
        runs, args.rounds, work.device, budget=budget, before=lambda which: by_name[which].prepare()
    )
    whole = LAYERS[name] / layers
    steps = {which: spread([whole * t for t in samples]) for which, samples in times.items()}
    return [
        make_row(
            kind="step",
            shape=name,
            context=context,
            batch=batch,
            dtype=dtype,
            device="cpu",
            layers=LAYERS[name],
            layers_measured=layers,
            contender=which,
            path=by_name[which].kind,
            kernel=by_name[which].kernel,
            page_size=args.page_size if by_name[which].kernel else None,
            **one.row("ms"),
            ms_min=whole * min(times[which]),
            thread_ms_min=whole * min(cpu[which]),
            ratio_to_dynamic=steps["dynamic"].p50 / one.p50,
            ratio_of_minima=min(times["dynamic"]) / min(times[which]),
            ratio_of_thread_minima=min(cpu["dynamic"]) / min(cpu[which]),
        )
        for which, one in steps.items()
    ]


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print all rows, a line per workload: of one thread its processor time, of several the wall's, least of all rounds."""
    ms, ratio = ("thread_ms_min", "ratio_of_thread_minima")
    if rows[0]["threads"] > 1:
        ms, ratio = "ms_min", "ratio_of_minima"
    names = list(dict.fromkeys(row["contender"] for row in rows))
    table = Table(title=f"times as fast as dynamic (its ms per step), {rows[0]['threads']} threads")
    for column in ("shape", "dtype", "batch", "context", *names):
        table.add_column(column, justify="right")
    by_workload = itertools.groupby(
        rows, lambda row: [str(row[of]) for of in ("shape", "dtype", "batch", "context")]
    )
    for workload, group in by_workload:
        cells = {
            row["contender"]: f"{row[ms]:.2f} ms"
            if row["contender"] == "dynamic"
            else f"{row[ratio]:.2f}"
            for row in group
        }
        table.add_row(*workload, *(cells.get(name, "") for name in names))
    console.print(table)


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 when all results were right, else 1."""
    args = arguments(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.record:
        check_writable(args.out)
    budget = Budget(args.budget_s)
    recorded: list[dict[str, Any]] = []
    for name, dtype, batch, context in itertools.product(
        args.shapes, args.dtype, args.batch, args.context
    ):
        if budget.spent:
            console.print(
                f"the budget is spent: {name}, {dtype}, batch {batch}, {context} tokens is left out"
            )
            continue
        rows = measure(name, context, batch, dtype, args, budget)
        if rows is None:
            return 1
        recorded += rows
        if args.record:
            append_rows(args.out, rows)
    if recorded:
        show(recorded)
    return 0


if __name__ == "__main__":
    sys.exit(main())
