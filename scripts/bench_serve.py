"""Time the turns of a chat with `kv-hf serve` beside `transformers serve`, on one model and machine.

    python scripts/bench_serve.py --record

All servers run at once and take turns, so that the machine's other work meets them alike. One round of chats warms them up.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from measure.models.packaged import resolve_model
from measure.serving.second_turn import Turn, of_kv_hf, of_transformers, server, two_turns
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from kv_hf.evaluation.rows import append_rows, make_row
from kv_hf.texts import load_text

RESULTS = Path(__file__).parent.parent / "results" / "serving.jsonl"
STOCK = "transformers serve"
QUESTIONS = ("What is this text about?", "Who wrote it, and when?")
console = Console(width=120)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="packaged model, hub id or folder")
    parser.add_argument("--caches", nargs="+", default=["paged_exact", "paged_int4"])
    parser.add_argument("--system", type=int, default=1024, help="tokens of the system prompt")
    parser.add_argument("--new-tokens", type=int, default=32, help="tokens of each answer")
    parser.add_argument(
        "--chats", type=int, default=5, help="chats that are timed, each with a text of its own"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--record", action="store_true", help=f"append rows to {RESULTS.name}")
    return parser.parse_args(argv)


def systems(folder: str, tokens: int, count: int) -> list[str]:
    """Return texts of `tokens` tokens each, which begin differently."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(load_text())["input_ids"]
    return [str(tokenizer.decode(ids[97 * index : 97 * index + tokens])) for index in range(count)]


def measured(args: argparse.Namespace) -> dict[str, list[list[Turn]]]:
    """Return the turns of each chat, for each server."""
    folder = str(resolve_model(args.model))
    texts = systems(folder, args.system, args.chats + 1)
    commands = {STOCK: of_transformers(folder)}
    commands |= {cache: of_kv_hf(folder, cache) for cache in args.caches}
    found: dict[str, list[list[Turn]]] = {name: [] for name in commands}
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(server([*command, "--dtype", args.dtype], folder))
            for name, command in commands.items()
        }
        for number, text in enumerate(texts):
            names = list(running)
            for name in names if number % 2 else reversed(names):
                turns = two_turns(running[name], text, QUESTIONS, args.new_tokens)
                if number:
                    found[name].append(turns)
    return found


def row_of(args: argparse.Namespace, name: str, turn: int, turns: Sequence[Turn]) -> dict[str, Any]:
    """Return the row of one turn: least times over the chats, and the tokens of the last chat."""
    return make_row(
        kind="serve",
        model=args.model,
        device="cuda" if torch.cuda.is_available() else "cpu",
        dtype=args.dtype,
        config={
            "implementation": name,
            "system_tokens": args.system,
            "new_tokens": args.new_tokens,
            "batching": False,
        },
        turn=turn,
        metric="cpu_per_turn",
        unit="s",
        value=min(one.cpu_s for one in turns),
        first_token_s=min(one.first_s for one in turns),
        whole_s=min(one.whole_s for one in turns),
        prompt_tokens=turns[-1].prompt_tokens,
        tokens_computed=turns[-1].tokens_computed,
        n=len(turns),
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    found = measured(args)
    table = Table("server", "turn", "prompt", "computed", "first token, s", "answer, s", "CPU, s")
    rows = []
    for name, chats in found.items():
        for turn, turns in enumerate(zip(*chats, strict=True), 1):
            row = row_of(args, name, turn, turns)
            rows.append(row)
            seconds = [row[key] for key in ("first_token_s", "whole_s", "value")]
            counts = [row[key] for key in ("prompt_tokens", "tokens_computed")]
            table.add_row(
                name, str(turn), *(f"{n:,}" for n in counts), *(f"{s:.2f}" for s in seconds)
            )
    console.print(table)
    if args.record:
        append_rows(RESULTS, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
