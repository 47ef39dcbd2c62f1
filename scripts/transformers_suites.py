"""Run transformers' own tests on DynamicCache and again on paged caches, and compare what passes.

    python scripts/transformers_suites.py --checkout ~/transformers --record
    python scripts/transformers_suites.py --checkout ~/transformers --seq-length 0 --new-tokens 0
    python scripts/transformers_suites.py --checkout ~/transformers tests/models/llama/test_modeling_llama.py -k beam

--checkout is a source checkout of the transformers version that is installed (its tests are not part of the package);
nothing in it is changed. Wherever generate() would make a DynamicCache, and wherever a test or a model makes one itself,
the second run gets a paged cache. The exit code is 1 when a test passes with DynamicCache and fails with pages.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure.families.build import ROLES, families
from rich.console import Console
from rich.table import Table
from transformers.models.auto.configuration_auto import model_type_to_module_name

from kv_hf.evaluation.rows import append_rows, make_row

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results" / "transformers_suites.jsonl"
GENERAL = ("tests/utils/test_cache_utils.py", "tests/generation/test_utils.py")
# what a cache has a part in; compiled, exported and static caches are no DynamicCache
SELECTION = (
    "(generat or cache or past_key or beam or assisted or contrastive or lookup or padding or speculative or crop) "
    "and not compil and not static and not export and not flash"
)
console = Console(width=130)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "suites",
        nargs="*",
        help="files, relative to the checkout (the general ones and those of all families that generate)",
    )
    parser.add_argument("--checkout", type=Path, required=True, help="source tree of transformers")
    parser.add_argument("-k", default=SELECTION, help="pytest's selection of tests")
    parser.add_argument("--cache", default="paged_exact", help="what takes DynamicCache's place")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--sink-tokens", type=int, default=0)
    # transformers' own 7 and 3 fill hardly any page
    parser.add_argument("--seq-length", type=int, default=40, help="tokens of a prompt (0: as is)")
    parser.add_argument("--new-tokens", type=int, default=12, help="tokens to generate (0: as is)")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds per run")
    parser.add_argument("--record", action="store_true", help=f"append rows to {RESULTS.name}")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args(argv)


def default_suites(checkout: Path) -> list[str]:
    """Return the general suites, and those of every family of scripts/model_families.py that the checkout has."""
    modules = {model_type_to_module_name(name): None for role in ROLES for name in families(role)}
    found = [
        *GENERAL,
        *(f"tests/models/{name}/test_modeling_{name}.py" for name in sorted(modules)),
    ]
    return [name for name in found if (checkout / name).is_file()]


def run(args: argparse.Namespace, cache: str) -> dict[str, dict[str, Any]]:
    """Run the suites with one cache; return what the plugin reports, by test name."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.jsonl"
        settings = {
            "cache": cache,
            "options": {"page_size": args.page_size, "sink_tokens": args.sink_tokens},
            "seq_length": args.seq_length,
            "new_tokens": args.new_tokens,
            "report": str(report),
        }
        paths = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
        environment = {
            "HF_HUB_OFFLINE": "1",  # models of the hub are used where they are there already
            **os.environ,
            "KV_HF_SUITE": json.dumps(settings),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        command = [sys.executable, "-m", "pytest", "-p", "suites_plugin", "-p", "no:cacheprovider"]
        command += ["-q", "-k", args.k, "--continue-on-collection-errors", *args.suites]
        ended = subprocess.run(
            command,
            cwd=args.checkout,
            env=environment,
            timeout=args.timeout,
            capture_output=True,
            text=True,
        )
        if not report.is_file():
            raise SystemExit(f"pytest with {cache} left no report:\n{ended.stdout}\n{ended.stderr}")
        rows = [json.loads(line) for line in report.read_text().splitlines()]
    # tests are numbered over the names of caches: with ours there are more, and numbers get another digit
    return {re.sub(r"_0+(\d+_)", r"_\1", row["test"]): row for row in rows}


def verdict(stock: dict[str, Any] | None, ours: dict[str, Any] | None) -> str:
    """Return the column of the comparison that a test belongs to."""
    before, after = (found["outcome"] if found else "absent" for found in (stock, ours))
    if "absent" in (before, after):  # parameterized over the names of caches: ours are new ones
        return f"new_{after}" if before == "absent" else "lost"
    if "failed" in (before, after):
        return {("failed", "failed"): "both_failed"}.get(
            (before, after), "only_ours_failed" if after == "failed" else "only_stock_failed"
        )
    return "passed" if before == after == "passed" else "skipped"


def compare(
    stock: dict[str, dict[str, Any]], ours: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return, for each file, the tests by verdict and how many of the passed ones used a paged cache."""
    files: dict[str, dict[str, Any]] = {}
    for test in dict.fromkeys((*stock, *ours)):
        found = files.setdefault(test.split("::")[0], {"tests": {}, "paged": 0, "pages": 0})
        kind = verdict(stock.get(test), ours.get(test))
        found["tests"].setdefault(kind, []).append(test.split("::", 1)[-1])
        mine = ours.get(test, {})
        if mine.get("outcome") == "passed" and (mine.get("made", 0) or mine.get("generate", 0)):
            found["paged"] += 1
            found["pages"] += mine.get("pages", 0)
    return files


COLUMNS = ("passed", "only_ours_failed", "only_stock_failed", "both_failed", "skipped")
NEW = ("new_passed", "new_failed", "new_skipped", "lost")


def show(files: dict[str, dict[str, Any]], ours: dict[str, dict[str, Any]], cache: str) -> None:
    """Print the table, and the tests that pass with one cache only."""
    table = Table(title=f"transformers' tests: DynamicCache against {cache}")
    table.add_column("file")
    for name in (*COLUMNS, "of passed: with pages", "pages sealed"):
        table.add_column(name.replace("_", " "), justify="right")
    for file, found in files.items():
        numbers = [len(found["tests"].get(name, [])) for name in COLUMNS]
        cells = [*numbers, found["paged"], found["pages"]]
        name = Path(file).name.removeprefix("test_modeling_")
        table.add_row(name, *(str(cell) for cell in cells))
    console.print(table)
    for file, found in files.items():
        for kind in ("only_ours_failed", "only_stock_failed", "new_failed", "lost"):
            by_message: dict[str, list[str]] = {}
            for test in found["tests"].get(kind, []):
                lines = ours.get(f"{file}::{test}", {}).get("message", "").splitlines()
                by_message.setdefault(lines[0] if lines else "", []).append(test)
            for message, tests in by_message.items():
                console.print(f"{kind}: {file}: {', '.join(tests)}\n    {message}", markup=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare the suites; 0 when nothing fails that passes with DynamicCache."""
    args = arguments(argv)
    if not (args.checkout / "tests").is_dir():
        console.print(f"--checkout: {args.checkout} has no folder tests")
        return 2
    args.suites = args.suites or default_suites(args.checkout)
    stock, ours = run(args, "dynamic"), run(args, args.cache)
    files = compare(stock, ours)
    show(files, ours, args.cache)
    if args.record:
        shared = {"page_size": args.page_size, "sink_tokens": args.sink_tokens}
        shared |= {"seq_length": args.seq_length, "new_tokens": args.new_tokens}
        rows = [
            make_row(
                kind="transformers_suites",
                weights="random",
                suite=file,
                cache=args.cache,
                **shared,
                **{name: len(found["tests"].get(name, [])) for name in (*COLUMNS, *NEW)},
                passed_with_pages=found["paged"],
                pages_sealed=found["pages"],
                names={
                    kind: found["tests"][kind]
                    for kind in ("only_ours_failed", "only_stock_failed", "both_failed")
                    if kind in found["tests"]
                },
            )
            for file, found in files.items()
        ]
        append_rows(args.out, rows)
    return int(any("only_ours_failed" in found["tests"] for found in files.values()))


if __name__ == "__main__":
    sys.exit(main())
