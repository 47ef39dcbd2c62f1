"""The command line of `kv-hf doctor`."""

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from ..errors import KVCacheError
from ..printable import printable, tell
from ..text_table import text_width
from .diagnosis import Subject, examine, self_test
from .self_test import SECONDS
from .text import described, fitted, tested, verdict

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CODES = "exit codes: 0 nothing is broken, 1 something is, 2 bad arguments"


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(
        prog=prog,
        allow_abbrev=False,
        description="What would run here, why, and whether it works.",
        epilog=CODES,
    )
    found.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    found.add_argument(
        "--dtype", choices=DTYPES, help="of the model; default: --model's, else bfloat16"
    )
    found.add_argument("--head-dim", type=int, help="default: --model's, else 128")
    found.add_argument("--page-size", type=int, default=64)
    found.add_argument(
        "--model",
        help="folder, preset (kv-hf memory --list-presets) or hub name: say how each layer would be cached",
    )
    found.add_argument(
        "--no-self-test", "--quick", action="store_true", help="run no kernels and no model"
    )
    found.add_argument(
        "--seconds", type=float, default=SECONDS, help="of the self-test (%(default)g)"
    )
    found.add_argument("--verbose", action="store_true", help="list all seams of transformers")
    found.add_argument("--json", action="store_true", help="print everything as JSON")
    return found


def main(argv: Sequence[str], prog: str = "kv-hf doctor") -> int:
    """Run `kv-hf doctor`; return the exit code."""
    asked = parser(prog)
    args = asked.parse_args(argv)
    try:
        dtype = DTYPES[args.dtype] if args.dtype else None
        device = torch.device(args.device)
        subject = Subject.of(device, dtype, args.head_dim, args.page_size, args.model)
        if not args.seconds > 0:
            asked.error(f"--seconds must be more than 0, got {args.seconds:g}")
        diagnosis = examine(subject)
    except (KVCacheError, RuntimeError) as error:  # torch raises RuntimeError for an unknown device
        asked.error(printable(str(error).splitlines()[0]))
    if not args.json:
        _tell(described(diagnosis, args.verbose))
    if not args.no_self_test:
        diagnosis = replace(diagnosis, self_test=self_test(subject, args.seconds))
    if args.json:
        print(json.dumps(diagnosis.as_dict(), indent=2))
    else:
        if diagnosis.self_test is not None:
            print("\nSelf-test (largest error against the reference, and what rounding explains):")
            _tell(tested(diagnosis.self_test))
        print()
        _tell(verdict(diagnosis))
    return 1 if diagnosis.broken else 0


def _tell(lines: Iterable[str]) -> None:
    """Print lines that fit the terminal, at once: a kernel that is tried next may crash."""
    tell("\n".join(fitted(lines, text_width())), flush=True)
