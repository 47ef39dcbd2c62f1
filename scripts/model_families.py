"""Compare paged caches with DynamicCache on a tiny model of every family of the installed transformers.

    python scripts/model_families.py
    python scripts/model_families.py --families gemma4 minimax_m3_vl_text --operations lookup assisted
    python scripts/model_families.py --roles conditional --record

Each family is built from its config's own defaults, shrunk, with random weights, and examined in a process of its own
(docs/model_families.md). With --record, rows go to results/model_families.jsonl; families that have a row of this
commit and these versions there are not examined again, so that an interrupted walk goes on. The exit code is 1 when a
family differs, or ends with an error.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure.families.build import ROLES, families
from measure.families.operations import OPERATIONS
from measure.families.walk import Task, walk
from rich.console import Console

from kv_hf.evaluation.rows import append_rows, commit, make_row, read_rows, versions

RESULTS = Path(__file__).parent.parent / "results" / "model_families.jsonl"
WRONG = ("DIFFERS", "ERROR")
console = Console(width=150)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--families", nargs="+", metavar="TYPE", help="model types (all of the roles)"
    )
    parser.add_argument("--roles", nargs="+", choices=ROLES, default=list(ROLES))
    parser.add_argument(
        "--operations", nargs="+", choices=OPERATIONS, help="only these; not recorded"
    )
    parser.add_argument("--seconds", type=float, default=180, help="limit of one family")
    parser.add_argument("--processes", type=int, default=1, help="families at a time")
    parser.add_argument("--record", action="store_true", help=f"append rows to {RESULTS.name}")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    known = {family for role in args.roles for family in families(role)}
    unknown = sorted(set(args.families or ()) - known)
    if unknown:
        parser.error(
            f"--families: not in {', '.join(args.roles)} of this transformers: {', '.join(unknown)}"
        )
    if args.operations and args.record:
        parser.error("--record keeps whole examinations: leave --operations out")
    return args


def tasks(args: argparse.Namespace) -> list[Task]:
    """Return what is to be examined: named families always, others where they have no row of this code yet."""
    wanted = [
        (family, role)
        for role in args.roles
        for family in families(role)
        if not args.families or family in args.families
    ]
    if args.families or not args.record:
        return wanted
    done = {
        (row["family"], row["role"])
        for row in read_rows(args.out)
        if row["commit"] == commit() and row["versions"] == versions()
    }
    return [task for task in wanted if task not in done]


def recorded(row: dict[str, Any]) -> dict[str, Any]:
    """Return a family's row without what says nothing: of equal operations the names and the largest distance."""
    found = row["operations"]
    equal = [name for name, one in found.items() if one["verdict"] == "equal"]
    others = {
        name: {
            key: float(f"{value:.3g}") if isinstance(value, float) else value
            for key, value in one.items()
        }
        for name, one in found.items()
        if one["verdict"] not in ("equal", "absent")
    }
    worst = max(
        (found[name].get("distance", 0.0) for name in equal if name != "quantized"), default=None
    )
    kept = {key: value for key, value in row.items() if key != "operations"}
    return {**kept, "equal": equal, "others": others, "distance": worst}


def show(row: dict[str, Any]) -> None:
    """Print a family's verdict, and its operations that came to something else than equal."""
    said = f"{row['family']} ({row['role']}): {row['verdict']}"
    console.print(f"{said}, {row.get('attention', '-')}, {row.get('pages', 0)} pages", markup=False)
    by_message: dict[str, list[str]] = {}
    for name, found in row["operations"].items():
        if found["verdict"] in ("equal", "absent"):
            continue
        figures = ", ".join(
            f"{key} {value:.2g}" for key, value in found.items() if isinstance(value, float)
        )
        by_message.setdefault(
            f"{found['verdict']} {figures} {found.get('message', '')}", []
        ).append(name)
    for message, names in by_message.items():
        console.print(f"    {', '.join(names)}: {message}", markup=False)
    if not row["operations"]:
        console.print(f"    {row['message']}", markup=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Walk; 0 when no family differs."""
    args = arguments(argv)
    counts: Counter[str] = Counter()
    for row in walk(tasks(args), args.operations, seconds=args.seconds, processes=args.processes):
        show(row)
        counts[row["verdict"]] += 1
        if args.record:
            append_rows(
                args.out, [make_row(kind="model_families", weights="random", **recorded(row))]
            )
    console.print(", ".join(f"{verdict}: {count}" for verdict, count in counts.most_common()))
    return int(any(counts[word] for word in WRONG))


if __name__ == "__main__":
    sys.exit(main())
