"""Measure everything on one GPU in one command, without a network: correctness, then kernels, whole models, latents.

    PYTHONPATH=. python3 scripts/bench_gpu.py --out results/gpu --budget-s 480

Random weights of the sizes of Llama-3.1-8B and of layers of DeepSeek's. Rows go into the folder one at a time
(correctness.jsonl, kernels.jsonl, models.jsonl, latents.jsonl; jobs.jsonl says how each job ended), so that a run that is
killed keeps what it has; the same command then goes on behind it. Kernels are compiled by processes on all cores while
correctness is checked, before anything is timed. The budget counts everything. What breaks is a row with the error.
Exit codes: 0 all right, 1 a wrong result or a failure (the others are kept), 2 no GPU. Torch, Triton and transformers are
enough; the project need not be installed.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from measure.gpu.plan import TINY, Sizes, make_plan
from measure.gpu.run import Run

from kv_hf.evaluation.rows import check_writable

RESULTS = Path(__file__).parent.parent / "results" / "gpu"
MOST_WORKERS = 12  # each has a CUDA context and a copy of torch


def main(argv: Sequence[str] | None = None) -> int:
    """Run all parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the rows")
    parser.add_argument("--budget-s", type=float, default=480, help="seconds for everything")
    parser.add_argument(
        "--workers", type=int, help="processes that compile and check (default: cores)"
    )
    parser.add_argument("--parts", nargs="+", help="only these parts")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on the CPU, to try it out")
    args = parser.parse_args(argv)
    if not args.tiny and not torch.cuda.is_available():
        print(
            "bench-gpu needs a CUDA GPU, and torch sees none here (torch.cuda.is_available() is False). "
            "On a CPU: make bench"
        )
        return 2
    parts = make_plan(TINY if args.tiny else Sizes())
    known = [part.name for part in parts]
    unknown = sorted(set(args.parts or ()) - set(known))
    if unknown:
        parser.error(f"--parts must be some of {', '.join(known)}, got {unknown[0]!r}")
    try:
        check_writable(args.out / "jobs.jsonl")
    except ValueError as error:
        parser.error(str(error))
    workers = args.workers or min(MOST_WORKERS, os.cpu_count() or 1)
    run = Run(args.out, args.budget_s, workers, say=lambda line: print(line, flush=True))
    code = run.run([part for part in parts if not args.parts or part.name in args.parts])
    for title, jobs in (("wrong", run.wrong), ("failed", run.failed), ("left out", run.left_out)):
        print(f"{title}: {len(jobs)}" + "".join(f"\n  {job}" for job in jobs))
    return code


if __name__ == "__main__":
    sys.exit(main())
