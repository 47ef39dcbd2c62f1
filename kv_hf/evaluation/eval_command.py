"""`kv-hf eval`: what caches cost on a model and a text, side by side.

Every scored token reads the stored cache as a decode step does (teacher_forcing), whichever cache it is.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from ..cache_names import all_cache_names, cache_label
from ..errors import KVCacheError
from ..formats import cache_names
from ..printable import tell, tell_error
from ..text_table import table_lines, text_width
from ..texts import BUNDLED, SETS
from .cache_kinds import cache_kind
from .child import in_words
from .loaded_model import LoadedModel, TextSettings
from .rows import append_rows, check_writable, make_row

ROWS = Path("kv_hf_eval.jsonl")
DTYPES = ("float32", "bfloat16", "float16")
# field -> (column, format)
COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "stored_bits": ("bits", "{:.2f}".format),
    "bytes_per_token": ("B/token", "{:.0f}".format),
    "kl_mean": ("KL", "{:.5f}".format),
    "kl_low": ("KL from", "{:.5f}".format),
    "kl_high": ("KL to", "{:.5f}".format),
    "kl_median": ("median", "{:.5f}".format),
    "kl_p99": ("p99", "{:.4f}".format),
    "top1": ("top-1", "{:.1%}".format),
    "perplexity_delta": ("ppl +%", "{:+.2f}".format),
    "perplexity_delta_low": ("ppl from", "{:+.2f}".format),
    "perplexity_delta_high": ("ppl to", "{:+.2f}".format),
    "divergence_mean": ("same tokens", "{:.1f}".format),
}


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(
        prog=prog,
        allow_abbrev=False,
        description="Measure what caches cost on a text: KL divergence, perplexity, agreement, first different token, bytes.",
        epilog=f"caches: {', '.join(all_cache_names())}, recipe:FILE. transformers' quantized caches and texts of the hub "
        "need pip install -e '.[eval]' in the clone.",
    )
    found.add_argument("--model", required=True, help="a hub id or a folder")
    found.add_argument(
        "--text",
        default="held_out",
        help=f"a file, dataset:PATH,CONFIG,SPLIT,FIELD, one of {', '.join(BUNDLED)}, or a set of them: {', '.join(SETS)} "
        "(default: held_out)",
    )
    found.add_argument(
        "--caches",
        "--cache",
        nargs="+",
        default=list(cache_names()),
        metavar="NAME[:OPTION=VALUE,..]",
        help=f"default: {' '.join(cache_names())}",
    )

    def number(flag: str, default: int, text: str) -> None:
        found.add_argument(flag, type=int, default=default, help=f"{text} (default: %(default)s)")

    number("--windows", 2, "texts cut from each source")
    number("--window", 1600, "tokens of a text")
    number("--prompt", 512, "tokens of it that are not scored")
    number("--divergence", 64, "greedy tokens compared, 0 for none")
    found.add_argument("--dtype", default="float32", choices=DTYPES, help="default: %(default)s")
    found.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="default: %(default)s",
    )
    found.add_argument("--record", action="store_true", help="append rows to --out")
    found.add_argument(
        "--out", type=Path, default=ROWS, metavar="FILE", help="default: %(default)s"
    )
    return found


def main(argv: Sequence[str] | None = None, prog: str = "kv-hf eval") -> int:
    """Measure; return the exit code: 0, 1 where some cache could not be measured, 2 for bad arguments."""
    args = parser(prog).parse_args(sys.argv[1:] if argv is None else list(argv))
    return evaluate(args, prog)


def evaluate(args: argparse.Namespace, prog: str, load: Callable[..., Any] = LoadedModel) -> int:
    """Measure what `args` ask for, and print it; return the exit code of `main`.

    Args:
        args: as `parser` returns them.
        load: makes the model, as `LoadedModel` does.
    """
    transformers_logging.disable_progress_bar()
    settings = TextSettings(args.text, args.windows, args.window, args.prompt)
    try:
        for cache in args.caches:
            cache_kind(cache)
        if args.record:
            check_writable(args.out)
        loaded = load(args.model, getattr(torch, args.dtype), args.device)
        texts = loaded.reference(settings).texts
    except (KVCacheError, ValueError, ImportError, OSError) as error:
        tell_error(prog, error)
        return 2
    rows, failures = _measure(args, loaded, settings, len(texts) * (args.window - args.prompt))
    for failure in failures:
        tell(f"no figures for {failure}", to_errors=True)
    if rows:
        show(f"{args.model}, {args.text}", rows)
    if rows and args.record:
        common = {"kind": "accuracy", "model": args.model, "model_revision": loaded.revision}
        common |= {"dtype": args.dtype, "device": torch.device(args.device).type}
        append_rows(args.out, [make_row(**common, **row) for row in rows])
    return int(bool(failures))


def _measure(
    args: argparse.Namespace, loaded: Any, settings: TextSettings, scored: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return (a row of each cache, what could not be measured, in words)."""
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
    return rows, failures


def show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print measured rows as tables: all texts together, and the KL on each where there are several."""
    width, names = text_width(), [row["cache"] for row in rows]
    first = rows[0]
    tell(
        f"{title}: {first['tokens']:,} scored tokens, exact perplexity {first['perplexity_exact']:.3f}\n"
    )
    columns = [
        (heading, [form(row[field]) for row in rows])
        for field, (heading, form) in COLUMNS.items()
        if field in first
    ]
    tell("\n".join(table_lines([("cache", names), *columns], width)))
    tell("\nKL in nats from the exact cache, from and to: its 95 % interval")
    if len(first["texts"]) < 2:
        return
    tell("\nKL on each text (95 % interval)\n")
    each = [(text, [_interval(row["texts"][text]) for row in rows]) for text in first["texts"]]
    tell("\n".join(table_lines([("cache", names), *each], width)))


def _interval(one: dict[str, Any]) -> str:
    return f"{one['kl_mean']:.5f} ({one['kl_low']:.5f}-{one['kl_high']:.5f})"
