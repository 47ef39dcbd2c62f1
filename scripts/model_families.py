"""Compare paged caches with DynamicCache on a tiny model of every family of the installed transformers.

    python scripts/model_families.py --workers 2 --record
    python scripts/model_families.py --families gemma4 minimax_m3_vl_text --operations lookup assisted

Each family is built from its config's own defaults, shrunk, with random weights (results/model_families.md). With
--record, rows go to results/model_families.jsonl; families that have a row of this commit and these versions there are not
examined again, so that an interrupted walk goes on. The exit code is 1 when a family differs, or ends with an error.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from measure.families import model_families
from measure.family_models import ROLES, families
from measure.family_operations import OPERATIONS
from measure.runner import RESULTS, WORKLOADS, Fields, run


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--families", nargs="+", metavar="TYPE", help="model types (all of the roles)")
    add("--roles", nargs="+", choices=ROLES, default=list(ROLES))
    add("--operations", nargs="+", choices=OPERATIONS, help="only these; not recorded")
    add("--workers", type=int, default=1, help="families at a time")
    add("--record", action="store_true", help="append rows to the file --out")
    add("--out", type=Path, default=RESULTS / "model_families.jsonl")
    args = parser.parse_args(argv)
    known = {family for role in args.roles for family in families(role)}
    unknown = sorted(set(args.families or ()) - known)
    if unknown:
        parser.error(f"--families: not in {', '.join(args.roles)} here: {', '.join(unknown)}")
    if args.operations and args.record:
        parser.error("--record keeps whole examinations: leave --operations out")
    return args


def show(row: Fields) -> None:
    """Print a family's verdict, and its operations that came to something else than equal."""
    said = f"{row['family']} ({row['role']}): {row['verdict']}"
    print(f"{said}, kernels make {row.get('reads')} of the reads, {row.get('pages', 0)} pages")
    by_message: dict[str, list[str]] = {}
    for name, one in row["others"].items():
        figures = ", ".join(f"{key} {x:.2g}" for key, x in one.items() if isinstance(x, float))
        message = f"{one['verdict']} {figures} {one.get('message', '')}"
        by_message.setdefault(message, []).append(name)
    if not row["equal"] and not row["others"]:
        by_message[row["message"]] = ["not built"]
    for message, names in by_message.items():
        print(f"    {', '.join(names)}: {message}")


def main(argv: Sequence[str] | None = None) -> int:
    """Walk; 0 when no family differs."""
    args = arguments(argv)
    only = {"role": args.roles, **({"family": args.families} if args.families else {})}
    work = WORKLOADS[model_families.__name__]
    todo = work.configurations(only)
    if args.operations:
        todo = [{**one, "operations": args.operations} for one in todo]
    torch.set_num_threads(args.workers)  # one each
    found = run(work, todo, workers=args.workers, out=args.out if args.record else None)
    for row in found.rows:
        show(row)
    counts = Counter(row["verdict"] for row in found.rows)
    print(", ".join(f"{verdict}: {count}" for verdict, count in counts.most_common()))
    print("".join(f"failed: {one}\n" for one in found.failed), end="")
    return int(bool(found.failed or counts["DIFFERS"] or counts["ERROR"]))


if __name__ == "__main__":
    sys.exit(main())
