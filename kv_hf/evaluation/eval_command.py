"""`kv-hf eval`: what caches cost on a model and a text, side by side.

Every scored token reads the stored cache as a decode step does (accuracy.py), whichever cache it is.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from ..cache_names import all_cache_names
from ..formats import cache_names
from ..printable import tell, tell_error
from ..text_table import table_lines, text_width
from ..texts import BUNDLED, SETS
from .caches import cache_kind
from .memory import DTYPES, check_device, in_words
from .models import LoadedModel, TextSettings
from .recommend import best, check_bits, interval, pareto
from .rows import Row, append_rows, check_writable, make_row

ROWS = Path("kv_hf_eval.jsonl")
# field, column, format; z: what rounds to nothing has no minus
COLUMNS = (
    ("stored_bits", "bits", "z.2f"),
    ("bytes_per_token", "B/token", "z.0f"),
    ("kl_mean", "KL", "z.5f"),
    ("kl_low", "KL from", "z.5f"),
    ("kl_high", "KL to", "z.5f"),
    ("kl_median", "median", "z.5f"),
    ("kl_p99", "p99", "z.4f"),
    ("top1", "top-1", "z.1%"),
    ("perplexity_delta", "ppl +%", "+z.2f"),
    ("perplexity_delta_low", "ppl from", "+z.2f"),
    ("perplexity_delta_high", "ppl to", "+z.2f"),
)


def command_parser(prog: str, description: str, out: Path) -> argparse.ArgumentParser:
    """Return the parser of a command that measures a model: where it runs, and the file of rows that --record appends to."""
    found = argparse.ArgumentParser(
        prog=prog,
        allow_abbrev=False,
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    found.add_argument("--device", default=usual, help="of the model")
    found.add_argument("--record", action="store_true", help="append rows to --out")
    found.add_argument("--out", type=Path, default=out, metavar="FILE", help="file of rows")
    return found


def check_place(args: argparse.Namespace) -> None:
    """Raise ValueError for a device that is not there, and for a file of rows that cannot be written."""
    check_device(args.device)
    if args.record:
        check_writable(args.out)


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    paged, texts = list(cache_names()), f"{', '.join(BUNDLED)}, or a set of them: {', '.join(SETS)}"
    what = "Measure what caches cost on a text: KL divergence, perplexity, agreement, bytes."
    found = command_parser(prog, what, ROWS)
    found.epilog = (
        f"caches: {', '.join(all_cache_names())}. transformers' quantized caches, texts of the hub and the plot need "
        "pip install -e '.[eval]' in the clone."
    )
    add = found.add_argument
    add("--model", required=True, help="a hub id or a folder")
    text = f"a file, dataset:PATH,CONFIG,SPLIT,FIELD, one of {texts}"
    add("--text", default="held_out", help=text)
    form = "NAME[:OPTION=VALUE,..]"
    add("--caches", "--cache", nargs="+", default=paged, metavar=form, help="what is measured")
    add("--windows", type=int, default=2, help="texts cut from each source")
    add("--window", type=int, default=1600, help="tokens of a text")
    add("--prompt", type=int, default=512, help="tokens of it that are not scored")
    add("--bits", type=float, help="name the cache that loses least within so many bits per number")
    add("--plot", type=Path, metavar="FILE", help="draw KL against bits; a table lies beside it")
    add("--dtype", default="float32", choices=DTYPES, help="that the model computes in")
    return found


def main(argv: Sequence[str] | None = None, prog: str = "kv-hf eval") -> int:
    """Measure; return the exit code: 0, 1 where some cache could not be measured, 2 for bad arguments, 130 for Ctrl-C."""
    return evaluate(parser(prog).parse_args(argv), prog)


def evaluate(args: argparse.Namespace, prog: str, load: Callable[..., Any] = LoadedModel) -> int:
    """Measure what `args` ask for, and print it; return the exit code of `main`.

    Args:
        args: as `parser` returns them.
        load: makes the model, as `LoadedModel` does.
    """
    transformers_logging.disable_progress_bar()
    rows: list[Row] = []
    try:
        _check(args)
        code = _measure(args, load, rows)
        if rows:
            show(f"{args.model}, {args.text}", rows)
        if rows and args.plot is not None:
            tell("\n" + "\n".join(map(str, pareto(rows, args.plot))))
        if rows and args.bits is not None:
            row = best(rows, args.bits)
            tell(f"\nleast KL within {args.bits:g} bits: {row['cache']}, {interval(row)}")
    except (ValueError, ImportError, OSError) as error:
        tell_error(prog, error)
        return 1 if rows else 2
    return code


def _check(args: argparse.Namespace) -> None:
    """Raise ValueError for arguments that cannot be, before anything is loaded."""
    for cache in args.caches:
        cache_kind(cache)
    check_place(args)
    if args.bits is not None:
        check_bits(args.bits)
    if args.plot is not None:
        if args.plot.suffix not in (".png", ".svg", ".pdf"):
            raise ValueError(f"--plot must end in .png, .svg or .pdf, got {str(args.plot)!r}")
        check_writable(args.plot)


def _measure(args: argparse.Namespace, load: Callable[..., Any], rows: list[Row]) -> int:
    """Append a row of each cache to `rows`, and to the file of rows; return the exit code."""
    settings, code = TextSettings(args.text, args.windows, args.window, args.prompt), 0
    try:
        loaded = load(args.model, getattr(torch, args.dtype), args.device)
        loaded.reference(settings)  # a bad text ends the command, whatever the cache
        common = {"dtype": args.dtype, "device": torch.device(args.device).type}
        for cache in args.caches:
            try:
                found = loaded.accuracy(cache, settings)
            # whatever a cache or its library raises; the others go on
            except Exception as error:
                tell(f"no figures for {cache}: {in_words(error)}", to_errors=True)
                code = 1
                continue
            rows.append(make_row(kind="accuracy", **common, **found))
            if args.record:
                append_rows(args.out, rows[-1:])
    except KeyboardInterrupt:
        done = f"{len(rows)} of {len(args.caches)} caches are measured"
        tell(f"\ninterrupted; {done}", to_errors=True)
        code = 130
    return code


def show(title: str, rows: Sequence[Row]) -> None:
    """Print measured rows as tables: all texts together, and the KL on each where there are several."""
    width, names, first = text_width(), [row["cache"] for row in rows], rows[0]
    tokens, exact = first["tokens"], first["perplexity_exact"]
    tell(f"{title}: {tokens:,} scored tokens, exact perplexity {exact:.3f}\n")
    columns = [
        (heading, [format(row[field], form) for row in rows]) for field, heading, form in COLUMNS
    ]
    tell("\n".join(table_lines([("cache", names), *columns], width)))
    tell("\nKL in nats from the exact cache, from and to: its 95 % interval")
    if len(first["texts"]) > 1:
        tell("\nKL on each text (95 % interval)\n")
        each = [(text, [interval(row["texts"][text]) for row in rows]) for text in first["texts"]]
        tell("\n".join(table_lines([("cache", names), *each], width)))
