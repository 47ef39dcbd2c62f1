"""Measure what fewer kv heads cost: perplexity of checkpoints on the same text, beside the bytes of their caches.

    python scripts/gqa_quality.py original converted-svd converted-mean --text a.txt b.txt --windows 8 --window 512
    python scripts/gqa_quality.py stories15M converted --text tiny.utf8 --split "<|endoftext|>" --skip 50 --window 256

Texts are joined and cut into windows, each begun as the tokenizer begins texts; with --split every document is a window of its
own, cut off where it is longer. The first checkpoint is the one that the others are compared with. With --record the rows are
appended to results/gqa.jsonl.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from kv_hf.evaluation.caches import layer_shapes
from kv_hf.evaluation.models import weights_of
from kv_hf.evaluation.rows import append_rows, check_writable, make_row
from kv_hf.records import CONVERSION
from kv_hf.texts import load_text, token_windows

RESULTS = Path(__file__).parent.parent / "results" / "gqa.jsonl"
console = Console(width=140)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("checkpoints", nargs="+", help="folders; the original first")
    parser.add_argument(
        "--text", nargs="+", default=["lincoln_1862"], help="files, dataset:.. or bundled texts"
    )
    parser.add_argument(
        "--text-name", help="what the rows call the text; default: the names of the files"
    )
    parser.add_argument(
        "--split", help="what lies between the documents of a text; each becomes a window"
    )
    parser.add_argument(
        "--skip", type=int, default=0, help="documents or windows left out at the beginning"
    )
    parser.add_argument("--windows", type=int, default=1 << 30, help="at most this many")
    parser.add_argument("--window", type=int, default=512, help="tokens of a window")
    parser.add_argument("--note", default="", help="of all rows: how the checkpoints were made")
    parser.add_argument("--record", action="store_true", help=f"append rows to {RESULTS.name}")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args(argv)


def windows_of(tokenizer: Any, args: argparse.Namespace) -> list[list[int]]:
    """Return the token ids that are scored, window by window."""
    text = "\n\n".join(load_text(source) for source in args.text)
    ahead = [i for i in tokenizer("").input_ids if i == tokenizer.bos_token_id]

    def ids(part: str) -> list[int]:
        found: list[int] = tokenizer(part, add_special_tokens=False, verbose=False).input_ids
        return found

    if args.split:
        parts = [part.strip() for part in text.split(args.split) if part.strip()]
        found = [[*ahead, *ids(part)][: args.window] for part in parts]
    else:
        found = [[*ahead, *w] for w in token_windows(ids(text), args.window - len(ahead), 1 << 30)]
    found = [w for w in found[args.skip :] if len(w) > 1][: args.windows]
    if not found:
        raise ValueError(f"the text has no window behind the first {args.skip}")
    return found


@torch.no_grad()
def perplexity(folder: str, windows: list[list[int]]) -> dict[str, Any]:
    """Return what is measured of one checkpoint, in float32; its kv heads and bytes as its layers cache them.

    Where layers have different numbers of kv heads, the largest is told.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total, count = 0.0, 0
    for window in tqdm(windows, desc=Path(folder).name, unit="window", leave=False):
        tokens = torch.tensor([window])
        logits = model(tokens).logits[0, :-1].float()
        total += float(torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum"))
        count += len(window) - 1
    shapes = [shape for shape in layer_shapes(model) if shape is not None]
    record = json.loads((Path(folder) / "config.json").read_text("utf-8")).get(CONVERSION)
    return {
        "method": record["method"] if record else "original",
        "kv_heads": max(heads for heads, *_ in shapes),
        "kv_bytes_per_token": sum(2 * heads * (key + value) for heads, key, value in shapes),
        "tokens": count,
        "perplexity": math.exp(total / count),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; 0 when all was measured, 2 for bad arguments."""
    args = arguments(argv)
    transformers_logging.disable_progress_bar()
    try:
        if args.record:
            check_writable(args.out)
        windows = windows_of(AutoTokenizer.from_pretrained(args.checkpoints[0]), args)
        name = args.text_name or ", ".join(Path(source).name for source in args.text)
        rows = [{"checkpoint": Path(f).name, **perplexity(f, windows)} for f in args.checkpoints]
    except (ValueError, OSError) as error:
        console.print(f"[bold red]{type(error).__name__}[/]: {escape(str(error))}", highlight=False)
        return 2
    table = Table(title=f"{name}: {rows[0]['tokens']} tokens")
    for head in ("checkpoint", "method", "kv heads", "kv bytes per token (bf16)", "perplexity"):
        table.add_column(head, justify="left" if head in ("checkpoint", "method") else "right")
    for row in rows:
        table.add_row(
            row["checkpoint"], row["method"], str(row["kv_heads"]), f"{row['kv_bytes_per_token']:,}",
            f"{row['perplexity']:.2f}",
        )  # fmt: skip
    console.print(table)
    if args.record:
        common = {
            "kind": "gqa",
            "model": rows[0]["checkpoint"],
            "text": name,
            "window": args.window,
        }
        common |= {"windows": len(windows), "dtype": "float32", "note": args.note}
        common |= weights_of(args.checkpoints[0])._asdict()
        append_rows(args.out, [make_row(**common, **row) for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
