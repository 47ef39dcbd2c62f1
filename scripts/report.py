"""Write one HTML report, with its plots, of the rows that an evaluation left.

    python scripts/report.py
    python scripts/report.py --rows results/accuracy_vs_memory.jsonl more.jsonl --out report

Of each cell the newest row is shown. Nothing is measured, so this takes seconds and can be repeated while a grid runs.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kv_hf.evaluation.report import write_report
from kv_hf.evaluation.rows import read_rows

RESULTS = Path(__file__).parent.parent / "results"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report; 1 with a reason when there is nothing to report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--rows",
        type=Path,
        nargs="+",
        metavar="FILE",
        default=[RESULTS / "accuracy_vs_memory.jsonl"],
        help="default: results/accuracy_vs_memory.jsonl",
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "report", metavar="FOLDER")
    args = parser.parse_args(argv)
    absent = [str(path) for path in args.rows if not path.is_file()]
    if absent:
        print(f"--rows must name files of rows, not found: {', '.join(absent)}", file=sys.stderr)
        return 1
    try:
        written = write_report([row for path in args.rows for row in read_rows(path)], args.out)
    except (ValueError, ImportError, OSError) as error:
        print(f"no report: {error}", file=sys.stderr)
        return 1
    for path in written:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
