"""Measure everything on one GPU in one command, without a network: correctness, then kernels, then whole steps.

    python scripts/bench_gpu.py --budget-s 480

Random weights of the sizes of Llama-3.1-8B, Qwen2.5-7B, one layer of a 70B model and layers of DeepSeek's. Each part ends cleanly when its
share of the budget is spent, and what was measured until then is written. Exit codes: 0 all right, 1 a wrong result
(whatever was measured before it is kept), 2 no GPU.
"""

import argparse
import gc
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import bench_decode
import bench_generate
import torch
from rich.console import Console

from kv_hf.evaluation.timing import Budget

RESULTS = Path(__file__).parent.parent / "results"
console = Console(width=130)

# (part of the budget that may be spent when this ends, title, function, arguments); in order of importance
GATE = ["--gate-only", "--context", "1000", "4096"]
SHAPES = ["llama-8b", "qwen2.5-7b", "llama-70b-layer", "smollm2"]
CACHES = [
    "dynamic", "static", "quanto_int4", "hqq_int4", "quantized_fp8",
    "paged_exact", "paged_fp8", "paged_int8", "paged_int4", "paged_int2",
]  # fmt: skip
LATENT = ["--caches", "dynamic", "paged_exact", "paged_fp8", "paged_int8", "paged_int4"]
Main = Callable[[Sequence[str]], int]
PARTS: list[tuple[float, str, Main, list[str]]] = [
    (0.15, "results of all kernels", bench_decode.main, ["--shapes", *SHAPES, *GATE]),
    (
        0.35,
        "kernels, one row",
        bench_decode.main,
        ["--shapes", *SHAPES[:3], "--context", "4096", "32768", "131072"],
    ),
    (
        0.45,
        "kernels, 32 rows",
        bench_decode.main,
        ["--shapes", *SHAPES[:2], "--context", "4096", "--batch", "32"],
    ),
    (
        0.75,
        "Llama-3.1-8B",
        bench_generate.main,
        ["--random", "llama-3.1-8b", "--context", "4096", "32768", "--prefills", "2",
         "--caches", *CACHES],
    ),
    (
        0.85,
        "Qwen2.5-7B",
        bench_generate.main,
        ["--random", "qwen2.5-7b", "--context", "4096", "32768", "--fill", "random"],
    ),
    (
        0.92,
        "one layer of a 70B model",
        bench_generate.main,
        ["--random", "llama-70b-layer", "--context", "4096", "32768", "131072", "--fill", "random"],
    ),
    (
        0.95,
        "latent attention of DeepSeek-V2-Lite's sizes",
        bench_generate.main,
        ["--random", "deepseek-v2-lite-layer", "--context", "4096", "32768", "--fill", "random", *LATENT],
    ),
    (
        0.97,
        "two layers of DeepSeek-V3's sizes",
        bench_generate.main,
        ["--random", "deepseek-v3-2-layers", "--context", "4096", "32768", "--fill", "random", *LATENT],
    ),
    (
        0.98,
        "Llama-3.1-8B with offloaded layers",
        bench_generate.main,
        ["--random", "llama-3.1-8b", "--context", "16384", "--fill", "random", "--steps", "8",
         "--caches", "offloaded", "paged_int4"],
    ),
    (
        1.0,
        "Llama-3.1-8B, ragged batches and growth",
        bench_generate.main,
        ["--random", "llama-3.1-8b", "--scaling", "--context", "8192", "--growth-steps", "140"],
    ),
]  # fmt: skip


def run(
    parts: Sequence[tuple[float, str, Main, list[str]]], seconds: float, common: list[str]
) -> int:
    """Run the parts one behind the other, each until its share of `seconds` is spent; return the exit code.

    A part that breaks (memory, an unforeseen call) is shown and does not keep the others from running; a wrong
    result in the first part, the gate, does.
    """
    total, worst = Budget(seconds), 0
    for number, (share, title, main, arguments) in enumerate(parts):
        left = (total.left or 0.0) - (1.0 - share) * seconds
        if left <= 0:
            console.print(f"[bold]{title}[/]: left out, the budget is spent")
            continue
        console.rule(f"{title} (at most {left:.0f} s)")
        try:
            code = main([*arguments, *common, "--budget-s", f"{left:.1f}"])
        except Exception:  # the other parts still have something to say
            console.print(traceback.format_exc(), markup=False)
            code = 1
        worst = max(worst, code)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if code and number == 0:
            console.print("[bold red]a kernel gives wrong results: nothing is timed[/]")
            break
    return worst


def main(argv: Sequence[str] | None = None) -> int:
    """Run all parts on the GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget-s", type=float, default=480, help="seconds for everything")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the rows")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        console.print(
            "bench-gpu needs a CUDA GPU, and torch sees none here (torch.cuda.is_available() is False). "
            "On a CPU: make bench"
        )
        return 2
    console.print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    parts = []
    for share, title, of, arguments in PARTS:
        name = "decode.jsonl" if of is bench_decode.main else "generate.jsonl"
        if arguments[-len(LATENT) :] == LATENT:
            name = "mla.jsonl"
        parts.append((share, title, of, [*arguments, "--out", str(args.out / name)]))
    return run(parts, args.budget_s, ["--device", "cuda", "--kernel", args.kernel, "--record"])


if __name__ == "__main__":
    sys.exit(main())
