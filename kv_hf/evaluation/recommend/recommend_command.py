"""`kv-hf recommend`: find the formats of every layer and side that lose least within a budget, and write them as recipes.

Measures every layer and side once (cells that --cells holds already are not measured again), then solves each budget. Other text
decides between a recipe and the best uniform caches: where no recipe wins, the file holds the uniform cache's formats, and the
table and the file say so. With --check nothing is searched: recipes that are there are compared with the caches of --against on
the held-out text.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from ...errors import KVCacheError
from ...formats import is_cache_name
from ...printable import tell, tell_error
from ...recipe import MEASURED_OPTIONS
from ...text_table import say, table_lines, text_width
from ...texts import BUNDLED, CALIBRATION, HELD_OUT
from ..model_name import check_model_name
from .attention import paged_attention
from .check import check_recipe
from .cost import Budget
from .for_model import make_search
from .recommendation import Recommendation

CELLS = Path("kv_hf_sensitivity.jsonl")
RECIPES = Path("recipes")
FEW = 256  # scored tokens


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    bundled = ", ".join(BUNDLED)
    found = argparse.ArgumentParser(
        prog=prog,
        allow_abbrev=False,
        description="Find the formats of every layer and side that lose least within a budget, and write them as recipes.",
        epilog=f"{prog} --model ./my-model --check recipe.json --against paged_int4 paged_k8v4 compares recipes that are there.",
    )
    found.add_argument("--model", required=True, help="a hub id or a folder")
    found.add_argument(
        "--budget",
        "--budget-bits",
        nargs="+",
        default=["4.5"],
        help="bits per stored number, bytes_per_token=N, bytes=N, or a uniform cache such as paged_int4",
    )
    found.add_argument(
        "--text", nargs="+", default=CALIBRATION, help=f"to choose on: files, or some of {bundled}"
    )
    found.add_argument(
        "--held-out", nargs="+", default=HELD_OUT, help="to judge on, likewise: other text"
    )
    found.add_argument("--windows", type=int, default=1, help="windows cut from each --text")
    found.add_argument(
        "--held-out-windows", type=int, default=2, help="windows cut from each --held-out"
    )
    found.add_argument("--window", type=int, default=1024, help="tokens of a window")
    found.add_argument("--prompt", type=int, default=896, help="tokens of it that are not scored")
    found.add_argument(
        "--check",
        nargs="+",
        type=Path,
        metavar="RECIPE",
        help="recipes to compare with --against; nothing is searched",
    )
    found.add_argument(
        "--against",
        nargs="+",
        default=["paged_int4"],
        help="paged caches that --check compares with",
    )
    found.add_argument("--context", type=int, default=4096, help="tokens that bytes are counted at")
    found.add_argument("--batch", type=int, default=1, help="rows that bytes are counted for")
    found.add_argument(
        "--option", nargs="*", default=[], metavar="NAME=N", help=", ".join(MEASURED_OPTIONS)
    )
    found.add_argument(
        "--variant",
        action="append",
        metavar="NAME=N,..",
        help="other options of the whole cache to try within the same bytes; may be repeated; 'none' tries nothing",
    )
    found.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    found.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    found.add_argument(
        "--cells",
        type=Path,
        default=CELLS,
        help="file of measured cells, which are not measured again (default: %(default)s)",
    )
    found.add_argument(
        "--out",
        type=Path,
        help="file of the recipe (one budget), or folder; default: recipes/MODEL-BUDGET.json",
    )
    return found


def main(argv: Sequence[str] | None = None, prog: str = "kv-hf recommend") -> int:
    """Search or check; return the exit code: 0, or 2 for an error that says its reason."""
    return recommend_formats(
        parser(prog).parse_args(sys.argv[1:] if argv is None else list(argv)), prog
    )


def recommend_formats(
    args: argparse.Namespace, prog: str, find_model: Callable[[str], str] = check_model_name
) -> int:
    """Do what `args` ask, and print it; return the exit code of `main`.

    Args:
        args: as `parser` returns them.
        find_model: returns the hub id or folder to load for --model; raises ValueError.
    """
    try:
        if args.out is not None and args.out.suffix == ".json" and len(args.budget) > 1:
            raise ValueError("--out must be a folder where there are several budgets")
        budgets = [
            Budget.parse(item if is_cache_name(item) or "=" in item else f"bits={item}")
            for item in args.budget
        ]
        scored = len(args.text) * args.windows * (args.window - args.prompt)
        if not args.check and scored < FEW:
            say(
                f"only {scored} tokens are scored: a choice by so few may be wrong on other text (640 are the default)"
            )
        source = find_model(args.model)
        tokenizer: Any = AutoTokenizer.from_pretrained(source)
        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, args.dtype))
        model = model.to(args.device).eval()
        if args.check:
            check(args, model, tokenizer)
        else:
            search(args, budgets, model, tokenizer)
    except (KVCacheError, ValueError, OSError) as error:
        tell_error(prog, error)
        return 2
    return 0


def numbers(items: Sequence[str]) -> dict[str, Any]:
    """Read NAME=N options. Raises ValueError for anything else."""
    found = {}
    for item in items:
        name, _, value = item.partition("=")
        if not value.isdecimal():
            raise ValueError(f"options must be NAME=N, got {item!r}")
        found[name] = int(value)
    return found


def place(args: argparse.Namespace, budget: Budget) -> Path:
    """Return where the recipe of a budget goes."""
    if args.out is not None and args.out.suffix == ".json":
        return args.out
    name = f"{Path(args.model).name}-{str(budget).replace('=', '')}.json"
    return (args.out or RECIPES) / name


def search(args: argparse.Namespace, budgets: list[Budget], model: Any, tokenizer: Any) -> None:
    """Write a recipe for each budget, and print them beside uniform caches."""
    variants = None
    if args.variant is not None:
        variants = [numbers(one.split(",")) for one in args.variant if one != "none"]
    started = time.perf_counter()
    found: list[tuple[Recommendation, Path]] = []
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
            one, path = made.recommend(budget), place(args, budget)
            one.save(path)
            found.append((one, path))
    tell(f"measured in {time.perf_counter() - started:.0f} s")
    show(args.model, found)


def show(model: str, found: Sequence[tuple[Recommendation, Path]]) -> None:
    """Print recommendations: figures of each, then in words what to take and where it lies."""
    rows = [row(one) for one, _ in found]
    budgets = [str(one.budget) for one, _ in found]
    columns = [(heading, [cells[heading] for cells in rows]) for heading in rows[0]]
    tell(f"\n{model}: recipes against uniform caches, KL in nats per token\n")
    tell("\n".join(table_lines([("budget", budgets), *columns], text_width())))
    for one, path in found:
        options = ", ".join(f"{name}={value}" for name, value in one.recipe.options.items())
        with_options = f" with {options}" if options else ""
        tell("")
        say(f"{one.budget}: {one.verdict}")
        tell(f"  {path}{with_options}")


def check(args: argparse.Namespace, model: Any, tokenizer: Any) -> None:
    """Print recipes that are there beside other caches, on the held-out text."""
    names: list[str] = []
    rows: list[dict[str, str]] = []
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
            names.append(path.stem)
            rows.append(
                {
                    "against": cache,
                    "its KL": f"{found.recipe_kl:.5f}",
                    "the cache's": f"{found.uniform_kl:.5f}",
                    "gain": f"{found.gain:+.5f} ({found.low:+.5f} to {found.high:+.5f})",
                    "recipe wins": "yes" if found.wins else "no",
                    **{
                        text: f"{recipe:.5f} {other:.5f}"
                        for text, (recipe, other) in found.texts.items()
                    },
                }
            )
    say(
        f"{args.model}: KL in nats per token on held-out text; of each text the recipe's and the cache's"
    )
    tell("")
    columns = [(heading, [cells[heading] for cells in rows]) for heading in rows[0]]
    tell("\n".join(table_lines([("recipe", names), *columns], text_width())))


def row(one: Recommendation) -> dict[str, str]:
    """Return what the table says about a recommendation: heading -> cell."""
    judged = one.held_out
    there = ["", f"{min(one.opponents.values()):.6f}", ""]
    if judged is not None:
        gain = f"{judged.gain:+.6f} ({judged.low:+.6f} to {judged.high:+.6f})"
        there = [f"{judged.recipe_kl:.6f}", f"{judged.uniform_kl:.6f}", gain]
    return {
        "bits": f"{one.bits_per_element:.3f}",
        "bytes/token": f"{one.bytes_per_token:.0f}",
        "KL predicted": f"{one.predicted_kl:.6f}",
        "KL measured": f"{one.measured_kl:.6f}",
        "best uniform": one.uniform,
        "its bytes/token": f"{one.uniform_bytes_per_token:.0f}",
        "its KL": f"{one.uniform_kl:.6f}",
        "held out": there[0],
        "uniform there": there[1],
        "recipe's gain there": there[2],
        "recommended": "uniform" if one.is_uniform else "recipe",
    }
