"""Time continuous batching on paged caches beside transformers' own, in the same bytes, on one model and machine.

    python scripts/bench_serving.py --record

Three loads of requests that all come at the start: prompts of mixed lengths with room for all of them; a prefix that all
requests share; and the mixed ones within a cache in which 16-bit pages have room for a part of them. Prompts are cut out
of texts. Runs on a GPU too (--device cuda).
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from kv_hf.evaluation.cache_bytes import layer_shapes
from measure.models.packaged import resolve_model
from measure.serving.batches import OWN, Load, mixed_load, run_load, shared_load
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from kv_hf.evaluation.rows import append_rows, make_row
from kv_hf.units import format_bytes, parse_bytes

RESULTS = Path(__file__).parent.parent / "results" / "serving.jsonl"
console = Console(width=120)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="packaged model, hub id or folder")
    parser.add_argument("--caches", nargs="+", default=[OWN, "paged_exact", "paged_int4"])
    parser.add_argument("--loads", nargs="+", default=["mixed", "shared", "tight"])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument(
        "--prompts", type=int, nargs=2, default=[128, 2048], help="tokens, least and most"
    )
    parser.add_argument(
        "--prefix",
        type=int,
        default=1024,
        help="tokens that the requests of the load 'shared' share",
    )
    parser.add_argument("--answer", type=int, default=128, help="new tokens of each request")
    parser.add_argument("--batch-tokens", type=int, default=512, help="most tokens of a forward")
    parser.add_argument("--room", default="2GiB", help="bytes of the cache")
    parser.add_argument("--tight", default="192MiB", help="bytes of the cache in the load 'tight'")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--record", action="store_true", help=f"append rows to {RESULTS.name}")
    return parser.parse_args(argv)


def loads(args: argparse.Namespace, tokenizer: Any) -> list[tuple[Load, int]]:
    """Return the loads that were asked for, and the bytes of the cache of each."""
    room, tight = parse_bytes("--room", args.room), parse_bytes("--tight", args.tight)
    shortest, longest = args.prompts
    mixed = mixed_load(tokenizer, args.requests, shortest, longest, args.answer)
    made = {
        "mixed": (mixed, room),
        "shared": (shared_load(tokenizer, args.requests, args.prefix, 32, args.answer), room),
        "tight": (Load("tight", mixed.prompts, mixed.answer), tight),
    }
    return [made[name] for name in args.loads]


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    path = resolve_model(args.model)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, args.dtype))
    model = model.to(args.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    token_bytes = sum(
        shape[0] * (shape[1] + shape[2]) * model.dtype.itemsize
        for shape in layer_shapes(model)
        if shape
    )
    table = Table(
        "load",
        "cache",
        "bytes",
        "room, tokens",
        "s",
        "tokens/s",
        "ratio",
        "first token, s",
        "most",
        "equal answers",
    )
    rows = []
    for load, budget in loads(args, tokenizer):
        own: dict[str, Any] | None = None
        for cache in args.caches:
            found = run_load(model, load, cache, budget, token_bytes, args.batch_tokens)
            outputs = found.pop("outputs")
            if cache == OWN:
                own = {**found, "outputs": outputs}
            if own is not None:
                found["ratio_to_transformers"] = found["tokens_per_s"] / own["tokens_per_s"]
                found["first_token_ratio"] = found["first_token_s"] / own["first_token_s"]
                found["equal_answers"] = sum(
                    a == b for a, b in zip(outputs, own["outputs"], strict=True)
                )
            rows.append(
                make_row(
                    kind="batches",
                    load=load.name,
                    cache=cache,
                    model=args.model,
                    requests=len(load.prompts),
                    prompt_tokens=sum(map(len, load.prompts)),
                    answer=load.answer,
                    budget=budget,
                    batch_tokens=args.batch_tokens,
                    dtype=args.dtype,
                    device=args.device,
                    threads=torch.get_num_threads(),
                    **found,
                )
            )
            if args.record:
                append_rows(RESULTS, rows[-1:])
            ratio = found.get("ratio_to_transformers")
            table.add_row(
                load.name, cache, format_bytes(found["cache_bytes"]), f"{found['capacity_tokens']:,}", f"{found['seconds']:.0f}",
                f"{found['tokens_per_s']:.1f}", "" if ratio is None else f"{ratio:.2f}", f"{found['first_token_s']:.1f}",
                f"{found['first_token_s_most']:.1f}", str(found.get("equal_answers", "")),
            )  # fmt: skip
            console.print(
                f"{load.name} {cache}: {found['tokens_per_s']:.1f} tokens/s", highlight=False
            )
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
