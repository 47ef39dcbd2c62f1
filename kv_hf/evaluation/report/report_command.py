"""`kv-hf report`: one HTML page, with its plots, of the rows that an evaluation left. Measures nothing."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ...printable import tell, tell_error
from ..rows import read_rows
from .write import write_report

ROWS = Path("kv_hf_eval.jsonl")  # where `kv-hf eval --record` leaves them


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(
        prog=prog,
        allow_abbrev=False,
        description="Write one HTML report, with its plots, of the rows that an evaluation left. Of each measurement the newest "
        "row is shown. Needs pip install -e '.[eval]' in the clone.",
    )
    found.add_argument(
        "--rows",
        type=Path,
        nargs="+",
        metavar="FILE",
        default=[ROWS],
        help="files of rows (default: %(default)s)",
    )
    found.add_argument(
        "--out", type=Path, default=Path("report"), metavar="FOLDER", help="default: %(default)s"
    )
    return found


def main(argv: Sequence[str] | None = None, prog: str = "kv-hf report") -> int:
    """Write the report; return the exit code: 0, or 2 for an error that says its reason."""
    args = parser(prog).parse_args(sys.argv[1:] if argv is None else list(argv))
    absent = [str(path) for path in args.rows if not path.is_file()]
    try:
        if absent:
            raise ValueError(f"--rows must name files of rows, not found: {', '.join(absent)}")
        written = write_report([row for path in args.rows for row in read_rows(path)], args.out)
    except (ValueError, ImportError, OSError) as error:
        tell_error(prog, error)
        return 2
    tell("\n".join(map(str, written)))
    return 0
