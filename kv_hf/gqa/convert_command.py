"""`kv-hf convert-gqa SRC DST --num-kv-heads G`: a conversion from the command line, with a bar and a table."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from tqdm import tqdm

from ..errors import KVCacheError
from ..printable import printable, tell, tell_error
from .convert import DTYPES, METHODS, WARNING, ConversionReport, convert_to_gqa


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(
        prog=prog,
        allow_abbrev=False,
        description="Write a checkpoint with fewer kv heads, which transformers loads without any code of kv_hf.",
    )
    found.add_argument(
        "source", metavar="SRC", help="folder of a checkpoint, or a model of the hub"
    )
    found.add_argument("destination", metavar="DST", help="folder that does not exist, or is empty")
    found.add_argument(
        "--num-kv-heads", type=int, required=True, metavar="G", help="must divide the model's"
    )
    found.add_argument(
        "--method",
        default="mean",
        choices=METHODS,
        help="how heads are merged; svd needs --calibration (default: mean)",
    )
    found.add_argument(
        "--calibration",
        metavar="TEXT_OR_DATASET",
        help="for svd: a text file, a bundled text, or dataset:NAME",
    )
    found.add_argument(
        "--dtype", choices=tuple(DTYPES), help="of all weights; default: as they are"
    )
    found.add_argument("--dry-run", action="store_true", help="check everything and write nothing")
    return found


def main(argv: Sequence[str] | None = None, prog: str = "kv-hf convert-gqa") -> int:
    """Run a conversion; return the exit code: 0, 2 for an error that says its reason, 130 when it was stopped."""
    args = parser(prog).parse_args(sys.argv[1:] if argv is None else list(argv))
    with ExitStack() as stack:
        bars: dict[str, tqdm] = {}

        def show(what: str, done: int, of: int, **options: Any) -> None:
            if what not in bars:
                bars[what] = stack.enter_context(
                    tqdm(total=of, desc=what, file=sys.stderr, **options)
                )
            bars[what].update(done - bars[what].n)

        def progress(done: int, of: int) -> None:
            show("writing", done, of, unit="B", unit_scale=True, unit_divisor=1024)

        try:
            report = convert_to_gqa(
                args.source,
                args.destination,
                args.num_kv_heads,
                method=args.method,
                calibration=args.calibration,
                dtype=args.dtype,
                dry_run=args.dry_run,
                progress=progress,
                calibrating=lambda done, of: show("merging", done, of, unit="layer"),
            )
        except (KVCacheError, OSError, MemoryError) as error:
            stack.close()
            tell_error(prog, error)
            return 2
        except KeyboardInterrupt:
            stack.close()
            tell(f"{prog}: stopped; {args.destination} is as it was", to_errors=True)
            return 130
    tell(table(report, args.dry_run))
    return 0


def table(report: ConversionReport, dry_run: bool) -> str:
    """Return what a conversion does, or did, as lines."""
    rows = [
        ("", "before", "after"),
        ("kv heads of a layer", f"{report.num_kv_heads}", f"{report.new_kv_heads}"),
        ("kv bytes per token (bf16)", f"{report.kv_bytes_per_token:,}", f"{report.new_kv_bytes_per_token:,}"),
        ("parameters", f"{report.parameters:,}", f"{report.new_parameters:,}"),
    ]  # fmt: skip
    first, *widths = (max(len(row[i]) for row in rows) for i in range(3))
    lines = [
        f"{name:<{first}}  {before:>{widths[0]}}  {after:>{widths[1]}}".rstrip()
        for name, before, after in rows
    ]
    lines[0] = f"{report.source}, {report.num_heads} heads, method {report.method}\n{lines[0]}"
    lines.append(
        f"{len(report.changed)} tensors change, {report.files} files, {report.nbytes:,} bytes"
    )
    lines += [f"note: {printable(note)}" for note in report.notes]
    if report.method != "exact":
        lines.append(f"note: {WARNING[report.method]}")
    done = f"written to {report.destination} in {report.seconds:.1f} s"
    lines.append("nothing was written (dry run)" if dry_run else done)
    return "\n".join(lines)
