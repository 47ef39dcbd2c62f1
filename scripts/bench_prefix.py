"""Time the prefill of many requests over one system prompt, with and without a prefix store.

    python scripts/bench_prefix.py --record

First the tokens of a few requests with and without sharing are compared in fp32 with exact pages; when they differ,
nothing is timed and the exit code is 1.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from measure.models.packaged import resolve_model
from measure.speed.prefix_sharing import requests_over, run_requests
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from kv_hf.evaluation.rows import append_rows, make_row
from kv_hf.texts import load_text

RESULTS = Path(__file__).parent.parent / "results" / "prefix.jsonl"
console = Console(width=120)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="packaged model, hub id or folder")
    parser.add_argument("--implementation", default="paged_int4")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--system", type=int, default=2000, help="tokens that all prompts share")
    parser.add_argument("--question", type=int, default=24, help="tokens of each prompt's own")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 64])
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--record", action="store_true", help=f"append rows to {RESULTS.name}")
    return parser.parse_args(argv)


def load(args: argparse.Namespace, dtype: torch.dtype) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(resolve_model(args.model), dtype=dtype)
    return model.to(args.device).eval()


def same_tokens(args: argparse.Namespace, prompts: list[list[int]]) -> bool:
    """Say whether sharing changes no token of three requests of 16 tokens."""
    model = load(args, torch.float32)
    runs = [
        run_requests(
            model, prompts[:3], implementation="paged_exact", batch=1, shared=shared, new_tokens=16
        )[1]
        for shared in (False, True)
    ]
    return torch.equal(*runs)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(args.model))
    ids = tokenizer(load_text())["input_ids"]
    prompts = requests_over(ids, args.system, args.requests, args.question)
    if not same_tokens(args, prompts):
        console.print("sharing changes tokens: nothing is timed", style="red")
        return 1
    model = load(args, getattr(torch, args.dtype))
    run_requests(
        model,
        [p[:64] for p in prompts[:2]],
        implementation=args.implementation,
        batch=1,
        shared=True,
    )  # warm-up
    table = Table(
        "prefix store",
        "requests at a time",
        "s",
        "tokens",
        "computed",
        "skipped",
        "pages",
        "MiB of pages",
    )
    rows = []
    # without sharing a larger batch computes the same tokens: one way stands for all
    for shared, batch in [(False, args.batch[0]), *((True, batch) for batch in args.batch)]:
        result, _ = run_requests(
            model, prompts, implementation=args.implementation, batch=batch, shared=shared
        )
        mib = result.pages * result.page_bytes / 2**20
        table.add_row(
            "yes" if shared else "no",
            str(batch),
            f"{result.seconds:.1f}",
            f"{result.tokens:,}",
            f"{result.tokens_computed:,}",
            f"{result.skipped:.1%}",
            f"{result.pages:,}",
            f"{mib:.1f}",
        )
        rows.append(
            make_row(
                model=args.model,
                device=args.device,
                dtype=args.dtype,
                config={
                    "implementation": args.implementation,
                    "requests": args.requests,
                    "system_tokens": args.system,
                    "question_tokens": args.question,
                    "batch": batch,
                    "prefix_store": shared,
                },
                metric="prefill",
                unit="s",
                value=result.seconds,
                tokens=result.tokens,
                tokens_computed=result.tokens_computed,
                skipped=result.skipped,
                pages=result.pages,
                page_bytes=result.page_bytes,
                n=1,
            )
        )
    console.print(table)
    if args.record:
        append_rows(RESULTS, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
