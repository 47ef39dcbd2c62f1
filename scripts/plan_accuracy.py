"""Write what the planner's page shows of accuracy, from results/accuracy_vs_memory.jsonl.

python scripts/plan_accuracy.py           # writes kv_hf/planner/explore/accuracy.json
python scripts/plan_accuracy.py --check   # exit code 1 where that file says something else
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from captions import weights_of_row
from eval_tables import MODELS, measured

from kv_hf.formats import cache_options, is_cache_name

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results" / "accuracy_vs_memory.jsonl"
PAGE_DATA = ROOT / "kv_hf" / "planner" / "explore" / "accuracy.json"
SIDES = ("keys", "values")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    text = page_data()
    if args.check:
        if PAGE_DATA.exists() and PAGE_DATA.read_text() == text:
            return 0
        print(f"{PAGE_DATA} is not what {RESULTS} says: run scripts/plan_accuracy.py")
        return 1
    PAGE_DATA.write_text(text)
    return 0


def page_data() -> str:
    """Return the contents of accuracy.json: measured models, and a row of every format that was measured on them."""
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    models: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    for model, title in MODELS.items():
        caches = measured(rows, model)
        if not caches:
            continue
        first = next(iter(caches.values()))
        models.append(
            {
                "model": model,
                "title": title,
                "weights": weights_of_row(first).weights_precision,
                "text": first["text"],
                "windows": first["windows"],
                "window": first["window"],
                "tokens": first["tokens"],
                "perplexity_exact": _short(first["perplexity_exact"]),
            }
        )
        for cache, row in caches.items():
            formats = formats_of(cache)
            if formats is not None:
                found.append({"model": model, "cache": cache, **formats, **_figures(row)})
    data = {"source": "results/" + RESULTS.name, "models": models, "rows": found}
    return json.dumps(data, indent=1) + "\n"


def formats_of(cache: str) -> dict[str, Any] | None:
    """Return {"keys", "values", "options"} of one of our caches as the grid names it; None for any other."""
    name, _, given = cache.partition(":")
    if not is_cache_name(name):
        return None
    options = dict(part.split("=") for part in given.split(",")) if given else {}
    sides = {side: options.pop(side, cache_options(name)[side]) for side in SIDES}
    return {**sides, "options": {option: int(value) for option, value in options.items()}}


def _figures(row: dict[str, Any]) -> dict[str, float]:
    figures = {
        "kl": row["kl_mean"],
        "kl_low": row["kl_low"],
        "kl_high": row["kl_high"],
        "perplexity_ratio": row["perplexity"] / row["perplexity_exact"],
        "bits": row["stored_bits"],
        "top1": row["top1"],
    }
    return {name: _short(value) for name, value in figures.items()}


def _short(value: float) -> float:
    return float(f"{value:.6g}")


if __name__ == "__main__":
    sys.exit(main())
