"""Time whole decode steps and the prefill of a model with every cache, side by side, per context length.

    python scripts/bench_generate.py --context 512 2048 8192
    python scripts/bench_generate.py --random llama-3.1-8b --device cuda --context 4096 32768 --record
    python scripts/bench_generate.py --scaling

All caches take turns in one process. Before anything is timed, the logits through pages are compared with those of
DynamicCache and of the reference kernel; when they differ, nothing is written and the exit code is 1.
With --fill random, random keys and values take the place of a prefill: a step costs the same, a prefill is not timed.
"""

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from kv_hf.evaluation.cache_kinds import CacheKind, cache_kind, why_not
from kv_hf.evaluation.shapes import RANDOM_MODELS, random_model
from kv_hf.evaluation.timing import Budget
from measure.models.packaged import resolve_model
from measure.speed.compare_steps import compare_steps, ms_per_1k_tokens
from measure.speed.decode_gate import gate
from measure.speed.scaling import growth, ragged_steps
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from kv_hf.backend_names import kernel_choices
from kv_hf.cache_names import all_cache_names
from kv_hf.evaluation.rows import append_rows, make_row

RESULTS = Path(__file__).parent.parent / "results" / "generate.jsonl"
LONGEST_PROMPT = {"cpu": 2048, "cuda": 32768}  # --fill auto prefills up to here
GROWING = ("dynamic", "paged_exact", "paged_int4")
console = Console(width=130)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="packaged model, hub id or folder")
    parser.add_argument("--random", choices=RANDOM_MODELS, help="random weights of known sizes")
    parser.add_argument(
        "--caches", nargs="+", default=list(all_cache_names()), choices=all_cache_names()
    )
    parser.add_argument("--context", nargs="+", type=int, default=[512, 2048, 8192])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=24, help="timed steps per cache")
    parser.add_argument("--prefills", type=int, default=3, help="timed prefills per cache")
    parser.add_argument(
        "--fill",
        default="auto",
        choices=("auto", "prompt", "random"),
        help="auto: a real prefill up to 2,048 tokens on a CPU and 32,768 on a GPU",
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kernel", default="auto", choices=kernel_choices())
    parser.add_argument("--threads", type=int, help="threads of torch on the CPU")
    parser.add_argument("--scaling", action="store_true", help="ragged batches and growth instead")
    parser.add_argument("--growth-steps", type=int, default=256)
    parser.add_argument("--budget-s", type=float, help="begin nothing new after so many seconds")
    parser.add_argument("--record", action="store_true", help=f"append rows to {RESULTS.name}")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args(argv)


def load(args: argparse.Namespace, dtype: torch.dtype, for_gate: bool = False) -> Any:
    """Load the model, or for the gate what is cheap to hold in fp32: of random ones two layers suffice."""
    device = torch.device(args.device)
    if args.random:
        small = {"num_hidden_layers": 2, "vocab_size": 1024} if for_gate else {}
        return random_model(args.random, device, dtype, **small)
    model: Any = AutoModelForCausalLM.from_pretrained(resolve_model(args.model), dtype=dtype)
    return model.to(device).eval()


def right(args: argparse.Namespace, model: Any) -> bool:
    """Gate `model`, and print what is wrong."""
    results = gate(model, args.kernel)
    for result in results:
        if not result.ok:
            console.print(
                f"[bold red]{result.name} is wrong[/]: logits differ from those of {result.against} by "
                f"{result.error:.2g} of the largest (allowed {result.allowed:.2g}), greedy tokens "
                f"{'equal' if result.tokens_equal else 'differ'}"
            )
    worst = max(results, key=lambda result: result.error)
    console.print(
        f"gate in {model.dtype}: largest difference {worst.error:.1e} of the largest logit ({worst.name} against "
        f"{worst.against}), allowed {worst.allowed:.0e}"
    )
    return all(result.ok for result in results)


def able_kinds(names: Sequence[str], args: argparse.Namespace) -> list[CacheKind]:
    """Return the caches that can run here, DynamicCache first; say why the others cannot."""
    kinds = []
    for name in dict.fromkeys(("dynamic", *names)):
        reason = why_not(name, torch.device(args.device))
        if reason:
            console.print(f"{name} is left out: {reason}")
        else:
            kinds.append(cache_kind(name, args.kernel))
    return kinds


def rows_of(args: argparse.Namespace, kind: str, results: list[dict[str, Any]], **more: Any) -> Any:
    """Return rows of `results` with what they have in common."""
    return [
        make_row(
            kind=kind,
            model=args.random or args.model,
            weights="random" if args.random else "real",
            device=torch.device(args.device).type,
            dtype=args.dtype,
            **{**more, **result},
        )
        for result in results
    ]


def fill_of(args: argparse.Namespace, context: int) -> str:
    """Return how a context is filled: "prompt" or "random"."""
    if args.fill != "auto":
        return str(args.fill)
    return "prompt" if context <= LONGEST_PROMPT.get(args.device[:4], 2048) else "random"


def contexts(
    args: argparse.Namespace, model: Any, budget: Budget, rows: list[dict[str, Any]]
) -> None:
    """Time all caches at every context length, adding to `rows`."""
    kinds = able_kinds(args.caches, args)
    for context in args.context:
        if budget.spent:
            console.print(f"the budget is spent: {context} tokens are left out")
            continue
        fill = fill_of(args, context)
        try:
            results = compare_steps(
                model,
                kinds,
                context,
                batch=args.batch,
                fill=fill,
                steps=args.steps,
                prefills=args.prefills,
                budget=budget,
                say=console.print,
            )
        except torch.OutOfMemoryError:
            console.print(f"{context} tokens are left out: not enough memory")
            continue
        title = f"{args.random or args.model}, {context} tokens ({fill}), batch {args.batch}, {args.dtype}"
        show(title, results)
        rows += rows_of(args, "generate", results, context=context, batch=args.batch, fill=fill)
        gc.collect()  # a whole set of caches goes before the next one comes
    for name in args.caches:
        found = [row for row in rows if row["cache"] == name]
        if len(found) > 1:
            slope = ms_per_1k_tokens(
                [row["context"] for row in found], [row["step_ms_p50"] for row in found]
            )
            console.print(f"  {name}: {slope:.3f} ms per step and 1,000 tokens of context")


def scaling(
    args: argparse.Namespace, model: Any, budget: Budget, rows: list[dict[str, Any]]
) -> None:
    """Time ragged batches and every step of a long decode, with a few caches, adding to `rows`."""
    kinds = able_kinds([name for name in args.caches if name in GROWING], args)
    for context in args.context:
        jobs: dict[str, Callable[[], list[dict[str, Any]]]] = {
            "ragged": lambda c=context: ragged_steps(  # type: ignore[misc]
                model, kinds, c, steps=min(args.steps, 24), budget=budget
            ),
            "growth": lambda c=context: growth(  # type: ignore[misc]
                model, kinds, c, args.growth_steps, budget
            ),
        }
        for kind, job in jobs.items():
            if budget.spent:
                console.print(f"the budget is spent: {kind} at {context} tokens is left out")
                continue
            results = job()
            show(f"{kind}, {args.random or args.model}, {context} tokens", results)
            rows += rows_of(args, kind, results, context=context, fill="random")
            gc.collect()


# field of a result -> (column, format); a table shows the fields that its results have
COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "cache": ("cache", str),
    "rows": ("rows", str),
    "kernel": ("kernel", str),
    "tokens_held": ("tokens held", str),
    "step_ms_p50": ("step ms", "{:.2f}".format),
    "step_ms_p20": ("p20", "{:.2f}".format),
    "step_ms_p80": ("p80", "{:.2f}".format),
    "step_ms_p99": ("p99", "{:.2f}".format),
    "step_ms_max": ("max", "{:.2f}".format),
    "slowest_step": ("slowest step", str),
    "ratio_to_dynamic": ("x dynamic", "{:.2f}".format),
    "prefill_ms_p50": ("prefill ms", "{:.0f}".format),
    "kv_bytes": ("KV MiB", lambda size: f"{size / 2**20:.1f}"),
    "kv_ratio": ("of dynamic", "{:.1%}".format),
    "bytes_per_token": ("B per token", "{:.0f}".format),
    "transient_bytes": ("transient MiB", lambda size: f"{size / 2**20:.1f}"),
    "predicted_bytes": ("predicted", lambda size: f"{size / 2**20:.1f}"),
    "peak_bytes": ("peak MiB", lambda size: f"{size / 2**20:.0f}"),
}


def show(title: str, results: list[dict[str, Any]]) -> None:
    """Print results as a table."""
    table = Table(title=title)
    used = [name for name in COLUMNS if any(result.get(name) is not None for result in results)]
    for name in used:
        table.add_column(COLUMNS[name][0], justify="left" if name in ("cache", "rows") else "right")
    for result in results:
        cells = [(COLUMNS[name][1], result.get(name)) for name in used]
        table.add_row(*("" if value is None else form(value) for form, value in cells))
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 when the results were right, else 1."""
    args = arguments(argv)
    transformers_logging.disable_progress_bar()
    if args.threads:
        torch.set_num_threads(args.threads)
    budget = Budget(args.budget_s)
    if not right(args, load(args, torch.float32, for_gate=True)):
        console.print("[bold red]wrong results: nothing is timed or recorded[/]")
        return 1
    gc.collect()
    model = load(args, getattr(torch, args.dtype))
    if not right(args, model):
        console.print("[bold red]wrong results: nothing is timed or recorded[/]")
        return 1
    rows: list[dict[str, Any]] = []
    try:
        (scaling if args.scaling else contexts)(args, model, budget, rows)
    finally:  # a run that breaks off leaves what it has: the gate was passed
        if args.record and rows:
            append_rows(args.out, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
