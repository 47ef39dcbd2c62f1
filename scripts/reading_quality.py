"""Measure what is lost where a decode step reads a part of a long text: KL against dense exact reading.

    python scripts/reading_quality.py --texts lincoln_1862 --read 1024
    python scripts/reading_quality.py --models smollm2-135m qwen2.5-coder-1.5b --record      # the table of docs/long_context.md

The caches choose pages as `cache_config={"read_tokens": ..}` lets them, and read what they store, token by token. Beside them
choosers are simulated over exact keys, with the same number of pages: "oracle" knows each page's attention mass, "mean" has the
mean key of a page, "quest" the smallest and largest key of each channel. The last --scored tokens of a text are scored. With
--record rows are appended to results/reading.jsonl as they are measured; what has a row there is not measured again.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from measure.grid.loaded import PackagedModel
from measure.models.packaged import PACKAGED
from measure.reading.choosers import CHOOSERS
from measure.reading.contender import Contender, contenders
from measure.reading.measure import ReadingBench
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from kv_hf.evaluation.rows import append_rows, check_writable, make_row, read_rows
from kv_hf.read_budget import READ_FROM
from kv_hf.texts import HELD_OUT

RESULTS = Path(__file__).parent.parent / "results" / "reading.jsonl"
CACHES = ("paged_exact", "paged_int4", "paged_k5v3")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    packaged = ", ".join(PACKAGED)
    parser.add_argument(
        "--models", nargs="+", default=["smollm2-135m"], help=f"{packaged}, hub ids or folders"
    )
    parser.add_argument("--texts", nargs="+", default=list(HELD_OUT), help="bundled texts or files")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a text")
    parser.add_argument("--scored", type=int, default=256, help="tokens at its end that are scored")
    parser.add_argument("--read", nargs="*", type=int, default=[1024, 2048, 4096], metavar="TOKENS")
    parser.add_argument("--top-p", nargs="*", type=float, default=[], help="masses, for caches")
    parser.add_argument("--read-from", type=int, default=READ_FROM, help="option of that name")
    parser.add_argument("--choosers", nargs="*", default=list(CHOOSERS), choices=list(CHOOSERS))
    parser.add_argument("--caches", nargs="*", default=list(CACHES), metavar="NAME[:OPTION=VALUE]")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--record", action="store_true", help="append rows to --out")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args(argv)


def measured(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield rows as they are measured, with those of earlier runs; with --record new ones are appended."""
    asked = contenders(args.choosers, args.caches, args.read, args.read_from, args.top_p)
    known = read_rows(args.out) if args.record else []
    for name in args.models:
        loaded = PackagedModel(name, getattr(torch, args.dtype))
        run = {
            "model": name,
            "model_revision": loaded.revision,
            "dtype": args.dtype,
            "device": loaded.device.type,
        }
        for text in args.texts:
            bench = ReadingBench(loaded, text, args.length, args.scored)
            of_text = {**run, **bench.known}
            with tqdm(
                total=args.scored * len(asked), unit="token", desc=f"{name}, {text}"
            ) as progress:
                for one in asked:
                    row = recorded(known, of_text, one)
                    if row is None:
                        row = make_row(**run, **bench.measure(one, progress.update))
                        if args.record:
                            append_rows(args.out, [row])
                    else:
                        progress.update(args.scored)
                    yield row


def recorded(
    rows: Sequence[dict[str, Any]], of_text: dict[str, Any], contender: Contender
) -> dict[str, Any] | None:
    """Return the newest row of a contender on a text, or None."""
    wanted = {
        **of_text,
        "contender": contender.name,
        "read_tokens": contender.read_tokens,
        "read_from": contender.read_from,
        "read_top_p": contender.read_top_p,
    }
    found = [row for row in rows if all(row.get(name) == wanted[name] for name in wanted)]
    return found[-1] if found else None


def show(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title="KL against dense exact reading, nats", box=SIMPLE_HEAD, padding=0)
    for name in ("model", "text", "read by"):
        table.add_column(name, overflow="fold")
    for name in ("tokens read", "KL", "95 %", "same top token"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        read = row["read_tokens"] or row.get("tokens_read_mean")
        mass = row.get("read_top_p")
        table.add_row(
            row["model"],
            row["text"],
            row["contender"]
            + (", simulated" if row["simulated"] else "")
            + (f", read_top_p={mass:g}" if mass else ""),
            "all" if read is None else f"{read:,.0f}",
            f"{row['kl_mean']:.5f}",
            f"{row['kl_low']:.5f} to {row['kl_high']:.5f}",
            f"{100 * row['top1']:.1f} %",
        )
    Console(width=140).print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and show the figures; 2 for bad arguments."""
    args = arguments(argv)
    transformers_logging.disable_progress_bar()
    rows = []
    try:
        if args.record:
            check_writable(args.out)
        for row in measured(args):
            rows.append(row)
    except (ValueError, OSError) as error:  # OSError: no such model, a full disk
        print(f"reading_quality.py: {error}", file=sys.stderr)
        return 2
    show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
