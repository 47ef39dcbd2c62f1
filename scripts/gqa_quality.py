"""Measure what fewer kv heads cost: perplexity of checkpoints on the same text, beside the bytes of their caches.

    python scripts/gqa_quality.py original converted-svd converted-mean --text a.txt b.txt --windows 8 --window 512

The first checkpoint is the original. With --split every document is a window of its own. --record appends to results/gqa.jsonl.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from measure.models.packaged import weights_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from kv_hf.evaluation.caches import layer_shapes
from kv_hf.evaluation.rows import append_rows, check_writable, make_row
from kv_hf.printable import tell, tell_error
from kv_hf.records import CONVERSION
from kv_hf.texts import documents, token_windows

RESULTS = Path(__file__).parent.parent / "results" / "gqa.jsonl"


def windows_of(tokenizer: Any, args: argparse.Namespace) -> list[list[int]]:
    """Return the token ids that are scored, window by window, each begun as the tokenizer begins texts."""
    parts = [part for source in args.text for part in documents(source, between=args.split)]
    ahead = [i for i in tokenizer("").input_ids if i == tokenizer.bos_token_id]
    parts = parts if args.split else ["\n\n".join(parts)]
    ids = [tokenizer(part, add_special_tokens=False, verbose=False).input_ids for part in parts]
    if not args.split:
        ids = token_windows(ids[0], args.window - len(ahead), 1 << 30)
    found = [[*ahead, *each][: args.window] for each in ids][args.skip :]
    if not found:
        raise ValueError(f"--text has no window behind the first {args.skip}")
    return [each for each in found if len(each) > 1][: args.windows]


@torch.no_grad()
def perplexity(folder: str, windows: list[list[int]]) -> dict[str, Any]:
    """Return the figures of one checkpoint, in float32; of layers that differ, the largest number of kv heads."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total, count = 0.0, 0
    for window in windows:
        ids = torch.tensor([window])
        total += float(torch.nn.functional.cross_entropy(model(ids).logits[0, :-1].float(), ids[0, 1:], reduction="sum"))  # fmt: skip
        count += len(window) - 1
    shapes = [shape for shape in layer_shapes(model) if shape is not None]
    record = json.loads((Path(folder) / "config.json").read_text("utf-8")).get(CONVERSION)
    return {
        "checkpoint": Path(folder).name,
        "method": record["method"] if record else "original",
        "kv_heads": max(heads for heads, *_ in shapes),
        "kv_bytes_per_token": sum(2 * heads * (key + value) for heads, key, value in shapes),
        "tokens": count,
        "perplexity": math.exp(total / count),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; 0 when all was measured, 2 for bad arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("checkpoints", nargs="+")
    parser.add_argument("--text", nargs="+", default=["lincoln_1862"])
    for name in ("text-name", "split", "note"):
        parser.add_argument(f"--{name}")
    for name, number in (("skip", 0), ("windows", 1 << 30), ("window", 512)):
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    try:
        if args.record:
            check_writable(args.out)
        windows = windows_of(AutoTokenizer.from_pretrained(args.checkpoints[0]), args)
        rows = [perplexity(folder, windows) for folder in args.checkpoints]
    except (ValueError, OSError) as error:
        tell_error("gqa_quality.py", error)
        return 2
    for row in rows:
        tell("  ".join(f"{name} {value}" for name, value in row.items()))
    if args.record:
        text = args.text_name or ", ".join(Path(source).name for source in args.text)
        common = {"kind": "gqa", "model": rows[0]["checkpoint"], "text": text, "window": args.window, "windows": len(windows), "dtype": "float32", "note": args.note or ""}  # fmt: skip
        append_rows(args.out, [make_row(**common, **weights_of(args.checkpoints[0]), **row) for row in rows])  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
