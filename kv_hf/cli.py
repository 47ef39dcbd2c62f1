"""The command line: `kv-hf doctor` says what would run here, why, and whether it works; `kv-hf memory` what caches take and
what fits, and `kv-hf explore` shows it in a browser; `kv-hf convert-gqa` writes a checkpoint with fewer kv heads;
`kv-hf lm-eval` runs lm-eval over our caches.
"""

import argparse
import sys
from collections.abc import Sequence

from .printable import tell_error


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="kv-hf", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "doctor", help="what would run here, why, and whether it works", add_help=False
    )
    commands.add_parser(
        "lm-eval",
        help="lm-eval's command line, which then knows the model class kv_hf",
        add_help=False,
    )
    commands.add_parser(
        "convert-gqa", help="write a checkpoint with fewer kv heads", add_help=False
    )
    commands.add_parser(
        "memory", help="what caches take and what fits, from a config alone", add_help=False
    )
    commands.add_parser("explore", help="the memory planner as a page in a browser", add_help=False)
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["lm-eval"]:
        from .evaluation.harness.__main__ import main as lm_eval

        try:
            lm_eval(arguments[1:])
        # bad arguments, a task or data that is not there
        except (ValueError, ImportError, OSError) as error:
            tell_error("kv-hf lm-eval", error)
            return 2
        return 0
    if arguments[:1] == ["convert-gqa"]:
        from .gqa.convert_command import main as convert_gqa

        return convert_gqa(arguments[1:])
    if arguments[:1] == ["doctor"]:
        from .doctor.doctor_command import main as doctor

        return doctor(arguments[1:])
    if arguments[:1] == ["memory"]:
        from .planner.plan_command import main as memory

        return memory(arguments[1:])
    if arguments[:1] == ["explore"]:
        from .planner.explore.explore_command import main as explore

        return explore(arguments[1:])
    parser.parse_args(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
