"""Find the formats of every layer and side that lose least within a budget, and write them as recipes.

    python scripts/recommend.py --model smollm2-135m --budget 4.5
    python scripts/recommend.py --model qwen2.5-coder-1.5b --budget 3.25 4.5 paged_int8 --cells results/cells.jsonl

Measures every layer and side once (cells that --cells holds already are not measured again), then solves each budget.
The last columns compare recipe and uniform format on other text.
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure.models.packaged import PACKAGED, resolve_model
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from kv_hf.evaluation.recommend.calibration import Calibration
from kv_hf.evaluation.recommend.cost import Budget
from kv_hf.evaluation.recommend.for_model import TEXT, make_search, paged_attention
from kv_hf.evaluation.recommend.search import Recommendation
from kv_hf.formats import IMPLEMENTATIONS, is_cache_name
from kv_hf.recipe import MEASURED_OPTIONS
from kv_hf.texts import BUNDLED, text_windows

ROOT = Path(__file__).parent.parent
FEW = 256  # scored tokens


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    packaged, bundled = ", ".join(PACKAGED), ", ".join(BUNDLED)
    parser.add_argument("--model", default="smollm2-135m", help=f"{packaged}, a hub id or a folder")
    parser.add_argument(
        "--budget",
        "--budget-bits",
        nargs="+",
        default=["4.5"],
        help="bits per stored number, bytes_per_token=N, bytes=N, or a uniform cache such as paged_int4",
    )
    parser.add_argument("--text", default=TEXT, help=f"to measure on: a file, or {bundled}")
    parser.add_argument("--windows", type=int, default=2, help="texts cut from it")
    parser.add_argument("--window", type=int, default=1024, help="tokens of a text")
    parser.add_argument("--prompt", type=int, default=768, help="tokens of it that are not scored")
    parser.add_argument(
        "--tokens",
        type=int,
        help="tokens to score in all, in place of --prompt: windows share them",
    )
    parser.add_argument(
        "--context", type=int, default=4096, help="tokens that bytes are counted at"
    )
    parser.add_argument("--batch", type=int, default=1, help="rows that bytes are counted for")
    parser.add_argument(
        "--option", nargs="*", default=[], metavar="NAME=N", help=", ".join(MEASURED_OPTIONS)
    )
    parser.add_argument(
        "--variant",
        action="append",
        metavar="NAME=N,..",
        help="other options of the whole cache to try within the same bytes; may be repeated; 'none' tries nothing",
    )
    parser.add_argument("--check-text", default="lincoln_1862", help="other text; '' leaves it out")
    parser.add_argument("--check-windows", type=int, default=4)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cells", type=Path, default=ROOT / "results" / "sensitivity.jsonl")
    parser.add_argument(
        "--out",
        type=Path,
        help="file of the recipe (one budget), or folder; default: recipes/<model>-<budget>.json",
    )
    args = parser.parse_args()
    if args.tokens is not None:
        args.prompt = args.window - args.tokens // args.windows
    if args.out is not None and args.out.suffix == ".json" and len(args.budget) > 1:
        parser.error("--out must be a folder where there are several budgets")
    return args


def numbers(items: list[str]) -> dict[str, Any]:
    """Read NAME=N options."""
    return {name: int(value) for name, value in (item.split("=") for item in items)}


def place(args: argparse.Namespace, budget: Budget) -> Path:
    """Return where the recipe of a budget goes."""
    if args.out is not None and args.out.suffix == ".json":
        return args.out
    name = f"{Path(args.model).name}-{str(budget).replace('=', '')}.json"
    return (args.out or ROOT / "recipes") / name


def main() -> None:
    args = arguments()
    budgets = [
        Budget.parse(item if is_cache_name(item) or "=" in item else f"bits={item}")
        for item in args.budget
    ]
    options = numbers(args.option)
    variants = None
    if args.variant is not None:
        variants = [numbers(one.split(",")) for one in args.variant if one != "none"]
    scored = args.windows * (args.window - args.prompt)
    if scored < FEW:
        print(
            f"only {scored} tokens are scored: a choice by so few may be wrong on other text (512 are the default)"
        )
    folder = resolve_model(args.model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.dtype))
    model = model.to(args.device).eval()
    table = Table(title=f"{args.model}: recipes against uniform formats, KL in nats per token")
    for column in (
        *("budget", "bits", "KL predicted", "KL measured"),
        *("bytes/token", "options", "uniform", "its KL predicted", "its KL"),
        *("other text", "uniform there", "recipe"),
    ):
        table.add_column(column)
    started = time.perf_counter()
    with paged_attention(model), tqdm(desc=args.model, unit="layer") as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        search = make_search(
            model,
            tokenizer=tokenizer,
            text=args.text,
            windows=args.windows,
            window=args.window,
            prompt=args.prompt,
            context=args.context,
            batch=args.batch,
            cells=args.cells,
            progress=progress,
            variants=variants,
            **options,
        )
        search.study.facts["model"] = args.model
        found = [search.recommend(budget) for budget in budgets]
        bar.close()
        print(f"measured in {time.perf_counter() - started:.0f} s")
        other = functools.cache(functools.partial(check_calibration, args, model, tokenizer))
        for one in found:
            path = place(args, one.budget)
            one.save(path)
            table.add_row(*row(one, other if args.check_text else None, options), str(path))
    Console(width=200).print(table)


def check_calibration(args, model, tokenizer, options: frozenset[tuple[str, int]]) -> Calibration:  # type: ignore[no-untyped-def]
    """Return other text to compare caches of these options on."""
    cut = text_windows(tokenizer, args.check_text, args.window, args.check_windows)
    texts = [torch.tensor(window, device=args.device) for window in cut]
    return Calibration(model, texts, args.prompt, dict(options))


def row(
    one: Recommendation,
    other: Callable[[frozenset[tuple[str, int]]], Calibration] | None,
    options: dict[str, int],
) -> list[str]:
    """Return what the table says about a recommendation."""

    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.6f}"

    there = uniform_there = None
    if other is not None:
        layers = one.recipe.layers()
        there = other(frozenset(one.recipe.options.items())).kl(layers)
        if one.uniform is not None:
            name = IMPLEMENTATIONS[one.uniform]
            both = {"keys": name, "values": name}
            uniform_there = other(frozenset(options.items())).kl(dict.fromkeys(layers, both))
    return [
        str(one.budget),
        f"{one.bits_per_element:.3f}",
        number(one.predicted_kl),
        number(one.measured_kl),
        f"{one.bytes_per_token:.0f}",
        ", ".join(f"{name}={value}" for name, value in one.recipe.options.items()),
        one.uniform or "",
        number(one.uniform_predicted_kl),
        number(one.uniform_kl),
        number(there),
        number(uniform_there),
    ]


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        print(f"recommend.py: error: {error}", file=sys.stderr)
        sys.exit(2)
