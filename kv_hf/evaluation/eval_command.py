"""`kv-hf eval`: what caches cost on a model and a text, side by side.

Every scored token reads the stored cache as a decode step does (accuracy.py), whichever cache it is.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from ..formats import cache_names
from ..printable import tell, tell_error
from ..text_table import table_lines, text_width
from .caches import cache_kind
from .memory import in_words, measured_device
from .models import LoadedModel, TextSettings
from .recommend import best, check_bits, interval, pareto
from .rows import Row, append_rows, check_writable, make_row

# field, column, format; z: what rounds to nothing has no minus
COLUMNS = (
    ("stored_bits", "bits", "z.2f"),
    ("bytes_per_token", "B/token", "z.0f"),
    ("kl_mean", "KL", "z.5f"),
    ("kl_low", "KL from", "z.5f"),
    ("kl_high", "KL to", "z.5f"),
    ("kl_median", "median", "z.5f"),
    ("kl_p99", "p99", "z.4f"),
    ("kl_p999", "p99.9", "z.4f"),
    ("top1", "top-1", "z.1%"),
    ("perplexity_delta", "ppl +%", "+z.2f"),
    ("perplexity_delta_low", "ppl from", "+z.2f"),
    ("perplexity_delta_high", "ppl to", "+z.2f"),
)


def check_place(args: argparse.Namespace) -> None:
    """Choose a device where none is given. Raise ValueError for one that is not there, and for rows that cannot be written."""
    args.device = measured_device(args.device)
    if args.record:
        check_writable(args.out)


def evaluate(args: argparse.Namespace, prog: str, load: Callable[..., Any] = LoadedModel) -> int:
    """Measure what `args` ask for, and print it.

    Args:
        args: of `kv-hf eval`, as kv_hf_cli.py reads them.
        prog: what errors begin with.
        load: makes the model, as `LoadedModel` does.
    Returns: the exit code: 0, 1 where some cache could not be measured, 2 for bad arguments, 130 for Ctrl-C.
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
    """Choose what is not given. Raise ValueError for arguments that cannot be, before anything is loaded."""
    args.caches = args.caches or list(cache_names())
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
