"""Find the formats of every layer and side that lose least within a budget, and write them as recipes.

    python scripts/recommend.py --model smollm2-135m --budget 4.5
    python scripts/recommend.py --model qwen2.5-coder-1.5b --budget 3.25 4.5 paged_int8 --cells results/cells.jsonl
    python scripts/recommend.py --model smollm2-135m --check recipe.json --against paged_int4 paged_k8v4

Measures every layer and side once (cells that --cells holds already are not measured again), then solves each budget.
Other text decides between a recipe and the best uniform caches: where no recipe wins, the file holds the uniform cache's
formats, and the table and the file say so. With --check nothing is searched: recipes that are there are compared with the
caches of --against on the held-out text.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from measure.models.packaged import PACKAGED, resolve_model
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from kv_hf.evaluation.recommend import Recommendation, check_recipe
from kv_hf.evaluation.recommend.attention import paged_attention
from kv_hf.evaluation.recommend.cost import Budget
from kv_hf.evaluation.recommend.for_model import make_search
from kv_hf.formats import is_cache_name
from kv_hf.recipe import MEASURED_OPTIONS
from kv_hf.texts import BUNDLED, CALIBRATION, HELD_OUT

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
    parser.add_argument(
        "--text", nargs="+", default=CALIBRATION, help=f"to choose on: files, or some of {bundled}"
    )
    parser.add_argument(
        "--held-out", nargs="+", default=HELD_OUT, help="to judge on, likewise: other text"
    )
    parser.add_argument("--windows", type=int, default=1, help="windows cut from each --text")
    parser.add_argument(
        "--held-out-windows", type=int, default=2, help="windows cut from each --held-out"
    )
    parser.add_argument("--window", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--prompt", type=int, default=896, help="tokens of it that are not scored")
    parser.add_argument(
        "--check",
        nargs="+",
        type=Path,
        metavar="RECIPE",
        help="recipes to compare with --against; nothing is searched",
    )
    parser.add_argument(
        "--against",
        nargs="+",
        default=["paged_int4"],
        help="paged caches that --check compares with",
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
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cells", type=Path, default=ROOT / "results" / "sensitivity.jsonl")
    parser.add_argument(
        "--out",
        type=Path,
        help="file of the recipe (one budget), or folder; default: recipes/<model>-<budget>.json",
    )
    args = parser.parse_args()
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
    scored = len(args.text) * args.windows * (args.window - args.prompt)
    if not args.check and scored < FEW:
        print(
            f"only {scored} tokens are scored: a choice by so few may be wrong on other text (640 are the default)"
        )
    folder = resolve_model(args.model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.dtype))
    model = model.to(args.device).eval()
    table = check(args, model, tokenizer) if args.check else search(args, budgets, model, tokenizer)
    Console(width=200).print(table)


def search(args: argparse.Namespace, budgets: list[Budget], model: Any, tokenizer: Any) -> Table:
    """Write a recipe for each budget, and return a table of them."""
    variants = None
    if args.variant is not None:
        variants = [numbers(one.split(",")) for one in args.variant if one != "none"]
    table = Table(title=f"{args.model}: recipes against uniform caches, KL in nats per token")
    for column in (
        *("budget", "bits", "bytes/token", "options", "KL predicted", "KL measured"),
        *("best uniform", "its bytes/token", "its KL"),
        *("held out", "uniform there", "recipe's gain there", "recommended", "file"),
    ):
        table.add_column(column)
    started = time.perf_counter()
    verdicts = []
    with paged_attention(model), tqdm(desc=args.model, unit="layer") as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        made = make_search(
            model,
            tokenizer=tokenizer,
            text=args.text,
            held_out=args.held_out,
            windows=args.windows,
            held_out_windows=args.held_out_windows,
            window=args.window,
            prompt=args.prompt,
            context=args.context,
            batch=args.batch,
            cells=args.cells,
            progress=progress,
            variants=variants,
            **numbers(args.option),
        )
        made.study.facts["model"] = args.model
        for budget in budgets:
            one = made.recommend(budget)
            path = place(args, budget)
            one.save(path)
            table.add_row(*row(one), str(path))
            verdicts.append(one.verdict)
    print(f"measured in {time.perf_counter() - started:.0f} s")
    table.caption = "\n".join(verdicts)
    return table


def check(args: argparse.Namespace, model: Any, tokenizer: Any) -> Table:
    """Return a table of recipes that are there beside other caches, on the held-out text."""
    table = Table(title=f"{args.model}: KL in nats per token on held-out text")
    for column in ("recipe", "against", "its KL", "the cache's", "gain", "recipe wins", *args.held_out):  # fmt: skip
        table.add_column(column)
    for path in args.check:
        compared = check_recipe(
            model,
            path,
            args.against,
            tokenizer=tokenizer,
            held_out=args.held_out,
            windows=args.held_out_windows,
            window=args.window,
            prompt=args.prompt,
        )
        for cache, found in compared.items():
            texts = [f"{recipe:.5f} {other:.5f}" for recipe, other in found.texts.values()]
            gain = f"{found.gain:+.5f} ({found.low:+.5f} to {found.high:+.5f})"
            figures = (f"{found.recipe_kl:.5f}", f"{found.uniform_kl:.5f}", gain)
            table.add_row(path.stem, cache, *figures, "yes" if found.wins else "no", *texts)
    return table


def row(one: Recommendation) -> list[str]:
    """Return what the table says about a recommendation."""
    judged = one.held_out
    there = ["", f"{min(one.opponents.values()):.6f}", ""]
    if judged is not None:
        gain = f"{judged.gain:+.6f} ({judged.low:+.6f} to {judged.high:+.6f})"
        there = [f"{judged.recipe_kl:.6f}", f"{judged.uniform_kl:.6f}", gain]
    return [
        str(one.budget),
        f"{one.bits_per_element:.3f}",
        f"{one.bytes_per_token:.0f}",
        ", ".join(f"{name}={value}" for name, value in one.recipe.options.items()),
        f"{one.predicted_kl:.6f}",
        f"{one.measured_kl:.6f}",
        one.uniform,
        f"{one.uniform_bytes_per_token:.0f}",
        f"{one.uniform_kl:.6f}",
        *there,
        "uniform" if one.is_uniform else "recipe",
    ]


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        print(f"recommend.py: error: {error}", file=sys.stderr)
        sys.exit(2)
