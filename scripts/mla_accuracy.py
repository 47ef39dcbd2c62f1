"""Measure what caches of latents cost on a text: real GQA weights in MLA form (measure/models/latent_fixture.py).

    python scripts/mla_accuracy.py --caches paged_int8 paged_int4 paged_int4:page_size=32 --along-rank int4
    python scripts/mla_accuracy.py --mixing whitened --caches paged_int4 --record

No small checkpoint with multi-head latent attention can be had offline: a Llama is rewritten as one. The protocol is that
of scripts/perplexity.py. With --record the rows are appended to results/mla_accuracy.jsonl.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from measure.grid.cell import check_caches
from measure.models.along_rank import along_the_rank
from measure.models.latent_fixture import LABEL, MIXINGS, LatentFixture
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from kv_hf.evaluation.cache_kinds import cache_kind
from kv_hf.evaluation.child import in_words
from kv_hf.evaluation.loaded_model import TextSettings
from kv_hf.evaluation.rows import append_rows, check_writable, make_row
from kv_hf.formats import IMPLEMENTATIONS

RESULTS = Path(__file__).parent.parent / "results" / "mla_accuracy.jsonl"
console = Console(width=140)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--model", default="smollm2-135m", help="a Llama: packaged, hub id or folder"
    )
    parser.add_argument("--mixing", default="random", choices=MIXINGS, help="basis of the latents")
    parser.add_argument("--rank", type=int, default=256, help="kv_lora_rank, filled up with zeros")
    parser.add_argument(
        "--caches", nargs="+", default=list(IMPLEMENTATIONS), metavar="NAME[:OPTION=VALUE,..]"
    )
    parser.add_argument(
        "--along-rank",
        nargs="*",
        default=[],
        choices=("int4", "int2"),
        help="formats to measure with groups along the rank too, which kv_hf does not offer",
    )
    parser.add_argument(
        "--text", default="lincoln_1862", help="a file, a bundled text or dataset:.."
    )
    parser.add_argument("--windows", type=int, default=7, help="texts cut from the source")
    parser.add_argument("--window", type=int, default=1600, help="tokens of a text")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of it that are not scored")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--record", action="store_true", help=f"append rows to {RESULTS.name}")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args(argv)


COLUMNS: dict[str, Callable[[Any], str]] = {
    "cache": str,
    "reads": str,
    "bytes_per_token": "{:.0f}".format,
    "stored_bits": "{:.2f}".format,
    "kl_mean": "{:.6f}".format,
    "kl_low": "{:.6f}".format,
    "kl_high": "{:.6f}".format,
    "kl_median": "{:.6f}".format,
    "kl_p99": "{:.5f}".format,
    "top1": "{:.1%}".format,
    "perplexity_delta": "{:+.2f} %".format,
}


def show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print measured rows as a table."""
    table = Table(*COLUMNS, title=title)
    for row in rows:
        table.add_row(*(form(row[name]) for name, form in COLUMNS.items()))
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
        loaded = LatentFixture(
            args.model, getattr(torch, args.dtype), args.device, mixing=args.mixing, rank=args.rank
        )
        texts = loaded.reference(settings).texts
    except (ValueError, OSError) as error:
        console.print(f"[bold red]{type(error).__name__}[/]: {error}", highlight=False)
        return 2
    common = {"kind": "accuracy", "model": args.model, "model_revision": loaded.revision}
    common |= {"dtype": args.dtype, "device": torch.device(args.device).type, **loaded.facts}
    kinds = [cache_kind(cache) for cache in args.caches] + list(
        map(along_the_rank, args.along_rank)
    )
    scored = len(texts) * (args.window - args.prompt)
    rows = []
    failures = []
    with tqdm(total=scored * len(kinds), unit="token", desc=args.model) as bar:
        for kind in kinds:
            begun = bar.n
            try:
                found = loaded.accuracy(kind, settings, 0, bar.update)
            except Exception as error:  # whatever a cache raises; the others go on
                failures.append(f"{kind.name}: {in_words(error)}")
                bar.update(begun + scored - bar.n)
                continue
            named = {"cache": kind.name, "reads": loaded.reads(kind)}
            rows.append(make_row(**common, **named, **found))
            if args.record:
                append_rows(args.out, rows[-1:])
    for failure in failures:
        console.print(f"[bold red]no figures for[/] {failure}", highlight=False)
    if rows:
        facts = f"rank {rows[0]['kv_lora_rank']}, mixing {args.mixing}"
        show(f"{args.model} ({LABEL}; {facts}), {args.text}: {scored} tokens", rows)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
