"""`kv-hf convert-gqa SRC DST --num-kv-heads G`: a conversion from the command line, with a bar and a table."""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from tqdm import tqdm

from ..errors import KVCacheError
from ..printable import printable, tell, tell_error
from .convert import DTYPES, METHODS, convert_to_gqa


class Parser(argparse.ArgumentParser):
    """A parser that says an error in one sentence, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with 2."""
        tell_error(self.prog, ValueError(message))
        sys.exit(2)


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    about = "Write a checkpoint with fewer kv heads, which transformers loads without any code of kv_hf."
    found = Parser(prog=prog, allow_abbrev=False, description=about)
    add = found.add_argument
    add("source", metavar="SRC", help="folder of a checkpoint, or a model of the hub")
    add("destination", metavar="DST", help="folder that does not exist, or is empty")
    add("--num-kv-heads", type=int, required=True, metavar="G", help="must divide the model's")
    how = "how heads are merged; svd needs --calibration (default: mean)"
    add("--method", default="mean", choices=METHODS, help=how)
    text = "for svd: a text file, a bundled text, or dataset:NAME"
    add("--calibration", metavar="TEXT_OR_DATASET", help=text)
    add("--dtype", choices=tuple(DTYPES), help="of all weights; default: as they are")
    add("--dry-run", action="store_true", help="check everything and write nothing")
    return found


def main(argv: Sequence[str] | None = None, prog: str = "kv-hf convert-gqa") -> int:
    """Run a conversion; return the exit code: 0, 2 for an error that says its reason, 130 when it was stopped."""
    args = parser(prog).parse_args(sys.argv[1:] if argv is None else list(argv))
    bars: dict[str, tqdm] = {}

    def progress(unit: str, done: int, of: int) -> None:
        if unit not in bars:
            bars[unit] = tqdm(total=of, desc=unit, file=sys.stderr, unit="", unit_scale=True)
        bars[unit].update(done - bars[unit].n)
        if done >= of:
            bars[unit].close()

    try:
        report = convert_to_gqa(**vars(args), progress=progress)
    except (KVCacheError, OSError, MemoryError) as error:
        tell_error(prog, error)
        return 2
    except KeyboardInterrupt:
        tell(f"{prog}: stopped; {args.destination} is as it was", to_errors=True)
        return 130
    finally:
        for bar in bars.values():
            bar.close()
    lines = [f"{report.source}, method {report.method}", report.table()]
    lines += [f"{len(report.changed)} tensors change, {report.nbytes:,} bytes of weights"]
    lines += [f"note: {printable(note)}" for note in report.notes]
    written = f"written to {report.destination}"
    tell("\n".join([*lines, "nothing was written (dry run)" if args.dry_run else written]))
    return 0
