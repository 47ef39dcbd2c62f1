"""Time the attention of one decode step, per layer: transformers and torch against pages, side by side.

    python scripts/bench_decode.py --shapes llama-8b smollm2 --context 2048 8192
    python scripts/bench_decode.py --device cuda --context 4096 131072 --record

All contenders run in one process, in turns, on the same random tokens. Each is first compared with a softmax in
fp64 over the tokens that it stores; when one is wrong, nothing is timed or written and the exit code is 1.
`dynamic` is DynamicCache.update and transformers' sdpa attention, `sdpa*` and `flash*` are torch alone on keys
that lie there already, `paged_*` is the whole path through a PagedCache, `kernel_*` the attention in it alone.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from kv_hf.evaluation.shapes import SHAPES
from kv_hf.evaluation.timing import Budget, captured, copy_bandwidth, interleave, spread
from measure.speed.decode_contenders import Contender, Workload, dynamic, layers_for, paged, stock
from rich.console import Console
from rich.table import Table

from kv_hf.backend_names import kernel_choices
from kv_hf.doctor.kernels import paged_names
from kv_hf.evaluation.rows import append_rows, make_row
from kv_hf.formats import FORMAT_NAMES

RESULTS = Path(__file__).parent.parent / "results" / "decode.jsonl"
console = Console(width=130)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["llama-8b", "smollm2"], choices=SHAPES)
    parser.add_argument("--context", nargs="+", type=int, default=[2048, 8192, 16384, 32768])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--formats", nargs="+", default=list(FORMAT_NAMES), choices=paged_names())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kernel", default="auto", choices=kernel_choices())
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--layers", type=int, help="default: enough to leave the processor's cache")
    parser.add_argument("--threads", type=int, help="threads of torch on the CPU")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--no-graphs", action="store_true", help="time launches on CUDA too")
    parser.add_argument("--gate-only", action="store_true", help="check the results, time nothing")
    parser.add_argument("--budget-s", type=float, help="begin nothing new after so many seconds")
    parser.add_argument("--record", action="store_true", help=f"append rows to {RESULTS.name}")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args(argv)


def contenders(work: Workload, args: argparse.Namespace) -> list[Contender]:
    """Make all contenders of one workload."""
    found = [dynamic(work), *stock(work)]
    for name in args.formats:
        found += paged(work, name, args.kernel, args.page_size)
    return found


def gate(found: list[Contender]) -> tuple[list[Contender], dict[str, Any], list[str]]:
    """Judge every contender: those that run, their verdicts, and the names of the wrong ones.

    A call of torch's own that does not run here is left out with its reason; one of ours must run.
    """
    able, verdicts, wrong = [], {}, []
    for contender in found:
        try:
            verdict = contender.verdict()
        except RuntimeError as error:
            if contender.kernel is not None or contender.kind == "cache":
                raise
            console.print(f"  {contender.name} is left out: {str(error).splitlines()[0][:90]}")
            continue
        able.append(contender)
        verdicts[contender.name] = verdict
        if not verdict.ok:
            wrong.append(contender.name)
            console.print(
                f"[bold red]  {contender.name} is wrong[/]: error {verdict.error:.3g}, allowed {verdict.budget:.3g}"
            )
    return able, verdicts, wrong


def runs(able: list[Contender], work: Workload, graphs: bool) -> tuple[dict[str, Any], set[str]]:
    """Return what to time for each contender, and the names that replay a CUDA graph.

    Only what appends nothing can be replayed; on a GPU that takes the launches out of the bare kernels.
    """
    calls: dict[str, Any] = {contender.name: contender.run for contender in able}
    replayed = set()
    for contender in able:
        if not graphs or work.device.type != "cuda" or contender.kind == "cache":
            continue
        contender.prepare()
        try:
            calls[contender.name] = captured(contender.run)
            replayed.add(contender.name)
        except RuntimeError as error:
            console.print(
                f"  {contender.name} is timed with its launches: {str(error).splitlines()[0][:80]}"
            )
    return calls, replayed


def measure(
    name: str, context: int, args: argparse.Namespace, copy: float, budget: Budget
) -> tuple[list[dict[str, Any]], bool]:
    """Judge and time one shape at one context: (rows, all right)."""
    shape, device = SHAPES[name], torch.device(args.device)
    layers = args.layers or layers_for(shape, args.batch, context, device)
    work = Workload(shape, args.batch, context, layers, getattr(torch, args.dtype), device)
    able, verdicts, wrong = gate(contenders(work, args))
    if wrong or args.gate_only:
        return [], not wrong
    calls, replayed = runs(able, work, not args.no_graphs)
    by_name = {contender.name: contender for contender in able}

    def before(which: str) -> None:
        if which not in replayed:
            by_name[which].prepare()

    times = interleave(calls, args.rounds, device, budget=budget, before=before)
    per_layer = {which: spread([t / layers for t in samples]) for which, samples in times.items()}
    elements = args.batch * shape.elements(context + 1)
    # torch's own best call: on a CPU far ahead of what transformers calls, so the harder thing to beat
    best = min(found.p50 for which, found in per_layer.items() if by_name[which].kind == "dense")
    rows = []
    for which, found in per_layer.items():
        contender, verdict = by_name[which], verdicts[which]
        speed = contender.nbytes / (1e6 * found.p50)
        rows.append(
            make_row(
                kind="decode",
                shape=name,
                context=context,
                batch=args.batch,
                dtype=args.dtype,
                device=device.type,
                layers=layers,
                contender=which,
                path=contender.kind,
                kernel=contender.kernel,
                page_size=args.page_size if contender.kernel else None,
                timing="graph" if which in replayed else "eager",
                **found.row("ms"),
                ratio_to_dynamic=per_layer["dynamic"].p50 / found.p50,
                ratio_to_best_torch=best / found.p50,
                gelem_per_s=elements / (1e6 * found.p50),
                nbytes=contender.nbytes,
                gb_per_s=speed,
                copy_gb_per_s=copy,
                part_of_copy=speed / copy,
                error=verdict.error,
                error_allowed=verdict.budget,
            )
        )
    return rows, True


def show(rows: list[dict[str, Any]]) -> None:
    """Print the rows of one shape and context."""
    first = rows[0]
    title = (
        f"{first['shape']}, {first['context']} tokens, batch {first['batch']}, {first['dtype']}, {first['device']}, "
        f"{first['threads']} threads, {first['layers']} layers in turn"
    )
    table = Table(title=title)
    columns = (
        "contender", "kernel", "ms/layer", "p20-p80", "x dynamic", "x torch", "Gelem/s", "GB/s", "of copy", "error/allowed",
    )  # fmt: skip
    for column in columns:
        table.add_column(column, justify="left" if column in columns[:2] else "right")
    for row in rows:
        mark = " (graph)" if row["timing"] == "graph" else ""
        table.add_row(
            row["contender"],
            (row["kernel"] or "") + mark,
            f"{row['ms_p50']:.4f}",
            f"{row['ms_p20']:.4f}-{row['ms_p80']:.4f}",
            f"{row['ratio_to_dynamic']:.2f}",
            f"{row['ratio_to_best_torch']:.2f}",
            f"{row['gelem_per_s']:.2f}",
            f"{row['gb_per_s']:.1f}",
            f"{100 * row['part_of_copy']:.0f} %",
            f"{row['error']:.1e}/{row['error_allowed']:.1e}",
        )
    console.print(table)


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 when all results were right, else 1."""
    args = arguments(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    budget = Budget(args.budget_s)
    copy = 0.0 if args.gate_only else copy_bandwidth(torch.device(args.device))
    if copy:
        console.print(f"copying large buffers on {args.device}: {copy:.1f} GB/s read plus written")
    recorded: list[dict[str, Any]] = []
    try:
        right = all_workloads(args, copy, budget, recorded)
    except BaseException:  # what is measured is right, and stays
        record(args, recorded)
        raise
    if not right:
        console.print("[bold red]wrong results: nothing is recorded[/]")
        return 1
    record(args, recorded)
    return 0


def all_workloads(
    args: argparse.Namespace, copy: float, budget: Budget, recorded: list[dict[str, Any]]
) -> bool:
    """Measure every shape at every context, adding to `recorded`; False at the first wrong result."""
    for name in args.shapes:
        for context in args.context:
            if budget.spent:
                console.print(f"the budget is spent: {name} at {context} tokens is left out")
                continue
            try:
                rows, right = measure(name, context, args, copy, budget)
            except torch.OutOfMemoryError:
                console.print(f"{name} at {context} tokens is left out: not enough memory")
                continue
            if not right:
                return False
            if args.gate_only:
                console.print(f"{name} at {context} tokens: all contenders are right")
                continue
            show(rows)
            recorded += rows
    return True


def record(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Append the rows where that was asked for."""
    if args.record and rows:
        append_rows(args.out, rows)


if __name__ == "__main__":
    sys.exit(main())
