"""Measure what caches cost on a text: perplexity, KL, agreement, first divergence and bytes, side by side.

    python scripts/perplexity.py --model smollm2-135m
    python scripts/perplexity.py --model ./my-model --text essay.txt --windows 7 --caches paged_int4 quanto_int4
    python scripts/perplexity.py --text dataset:Salesforce/wikitext,wikitext-2-raw-v1,test,text --window 2048
    python scripts/perplexity.py --caches paged_int4:keys=int8 paged_int4:recent_tokens=64

Every scored token reads the stored cache as a decode step does (kv_hf.evaluation.teacher_forcing), whichever cache it
is. With --record the rows are appended to results/perplexity.jsonl.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from measure.grid.cell import check_caches
from measure.grid.loaded import LoadedModel, TextSettings
from measure.models.packaged import PACKAGED
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from kv_hf.cache_names import all_cache_names, cache_label
from kv_hf.evaluation.child import in_words
from kv_hf.evaluation.rows import append_rows, check_writable, make_row
from kv_hf.formats import cache_names
from kv_hf.texts import BUNDLED, SETS

RESULTS = Path(__file__).parent.parent / "results" / "perplexity.jsonl"
DEFAULT = (*cache_names(), "quanto_int4", "hqq_int4", "quantized_fp8")
console = Console(width=140)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog=f"caches: {', '.join(all_cache_names())}, recipe:FILE",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    packaged = ", ".join(PACKAGED)
    parser.add_argument("--model", default="smollm2-135m", help=f"{packaged}, a hub id or a folder")
    parser.add_argument(
        "--text",
        default="held_out",
        help=f"a file, dataset:PATH,CONFIG,SPLIT,FIELD, one of {', '.join(BUNDLED)}, or a set of them: {', '.join(SETS)}",
    )
    parser.add_argument(
        "--caches", nargs="+", default=list(DEFAULT), metavar="NAME[:OPTION=VALUE,..]"
    )
    parser.add_argument("--windows", type=int, default=2, help="texts cut from each source")
    parser.add_argument("--window", type=int, default=1600, help="tokens of a text")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of it that are not scored")
    parser.add_argument(
        "--divergence", type=int, default=64, help="greedy tokens compared, 0 for none"
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--record", action="store_true", help=f"append rows to {RESULTS.name}")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args(argv)


# field -> (column, format)
COLUMNS: dict[str, tuple[str, Any]] = {
    "cache": ("cache", str),
    "stored_bits": ("bits", "{:.2f}".format),
    "bytes_per_token": ("B/token", "{:.0f}".format),
    "kl_mean": ("KL", "{:.5f}".format),
    "kl_low": ("from", "{:.5f}".format),
    "kl_high": ("to", "{:.5f}".format),
    "kl_median": ("median", "{:.5f}".format),
    "kl_p99": ("p99", "{:.4f}".format),
    "top1": ("top-1", "{:.1%}".format),
    "perplexity_delta": ("ppl +%", "{:+.2f}".format),
    "perplexity_delta_low": ("from", "{:+.2f}".format),
    "perplexity_delta_high": ("to", "{:+.2f}".format),
    "divergence_mean": ("same tokens", "{:.1f}".format),
}


def show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print measured rows as a table."""
    table = Table(title=title)
    used = {name: column for name, column in COLUMNS.items() if name in rows[0]}
    for name, (head, _) in used.items():
        table.add_column(head, justify="left" if name == "cache" else "right")
    for row in rows:
        table.add_row(*(form(row[name]) for name, (_, form) in used.items()))
    console.print(table)


def show_texts(rows: Sequence[dict[str, Any]]) -> None:
    """Print the mean KL of every cache on each text, where there are several."""
    names = list(rows[0]["texts"])
    if len(names) < 2:
        return
    table = Table(title="KL on each text (95 % interval)")
    table.add_column("cache")
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        each = [row["texts"][name] for name in names]
        cells = (f"{one['kl_mean']:.5f} ({one['kl_low']:.5f}-{one['kl_high']:.5f})" for one in each)
        table.add_row(row["cache"], *cells)
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; 0 when every cache could be measured, 1 when some could not, 2 for bad arguments."""
    args = arguments(argv)
    transformers_logging.disable_progress_bar()
    settings = TextSettings(args.text, args.windows, args.window, args.prompt)
    try:
        check_caches(args.caches)
        if args.record:
            check_writable(args.out)
        loaded = LoadedModel(args.model, getattr(torch, args.dtype), args.device)
        texts = loaded.reference(settings).texts
    except (ValueError, OSError) as error:
        console.print(f"[bold red]{type(error).__name__}[/]: {error}", highlight=False)
        return 2
    scored = len(texts) * (args.window - args.prompt)
    rows: list[dict[str, Any]] = []
    failures = []
    with tqdm(total=scored * len(args.caches), unit="token", desc=args.model) as bar:
        for cache in args.caches:
            begun = bar.n
            try:
                found = loaded.accuracy(cache, settings, args.divergence, bar.update)
            except Exception as error:  # whatever a cache or its library raises; the others go on
                failures.append(f"{cache}: {in_words(error)}")
                bar.update(begun + scored - bar.n)
                continue
            rows.append({"cache": cache_label(cache), **found})
    for failure in failures:
        console.print(f"[bold red]no figures for[/] {failure}", highlight=False)
    if rows:
        exact = rows[0]["perplexity_exact"]
        show(f"{args.model}, {args.text}: {scored} tokens, exact perplexity {exact:.3f}", rows)
        show_texts(rows)
    if rows and args.record:
        common = {"kind": "accuracy", "model": args.model, "model_revision": loaded.revision}
        common |= {"dtype": args.dtype, "device": torch.device(args.device).type}
        append_rows(args.out, [make_row(**common, **row) for row in rows])
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
