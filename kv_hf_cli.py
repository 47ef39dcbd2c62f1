"""The command `kv-hf`: what its commands are called, and where each of them lives.

Importing any file of kv_hf imports the package first, and so torch and transformers, which takes seconds. This file lies beside
the package: `kv-hf --help` and `kv-hf --version` come without them.
"""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

# command -> (module with a function `main(arguments, prog)` that returns the exit code, what it does)
COMMANDS = {
    "demo": ("kv_hf.evaluation.demo_command", "generate with every cache on a model, side by side"),
    "doctor": ("kv_hf.doctor.doctor_command", "what would run here, why, and whether it works"),
    "memory": ("kv_hf.planner.plan_command", "what caches take and what fits, from a config alone"),
    "explore": ("kv_hf.planner.explore", "the memory planner as a page in a browser"),
    "eval": ("kv_hf.evaluation.eval_command", "what caches cost on your model and text: KL, bytes"),
    "lm-eval": ("kv_hf.evaluation.lm_eval", "lm-eval's command line, which then knows our caches"),
    "serve": ("kv_hf.serving.serve_command", "transformers' own server, with pages as its cache"),
    "convert-gqa": ("kv_hf.gqa.convert", "write a checkpoint with fewer kv heads"),
}  # fmt: skip
NO_PACKAGE = (
    "kv-hf: error: Python finds no package kv_hf, only the folder {found}, as in the parent folder of a clone named kv_hf: "
    "rename the clone (kv-hf, say), or install kv_hf into this Python ({python} -m pip install)"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code.

    Args:
        argv: command and arguments, those of this process when None.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    if given and given[0] in COMMANDS:
        if no_package() is not None:
            print(no_package(), file=sys.stderr)
            return 2
        return run(given[0], given[1:])
    asked = parser()
    if not given:
        asked.print_help()
        return 0
    asked.parse_args(given[:1])
    return 0


def run(command: str, arguments: Sequence[str]) -> int:
    """Run one command; return its exit code. A reader that has seen enough (`| head`) is no error."""
    try:
        module = import_module(COMMANDS[command][0])
    except ImportError as error:
        if (error.name or "kv_hf").partition(".")[0] == "kv_hf":  # a fault of ours
            raise
        print(f"kv-hf {command}: error: {error}", file=sys.stderr)
        return 2
    try:
        code = int(module.main(arguments, f"kv-hf {command}"))
        sys.stdout.flush()
    except BrokenPipeError:
        # what is left in the buffer would fail again when the interpreter ends
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)
        return 0
    return code


def parser() -> argparse.ArgumentParser:
    """Return the parser of what stands before a command, which names all commands."""
    wide = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{wide}}{text}" for name, (_, text) in COMMANDS.items()]
    found = argparse.ArgumentParser(
        prog="kv-hf",
        usage="kv-hf [-h] [--version] COMMAND ...",
        description="Paged, quantized key/value caches for Hugging Face transformers.",
        epilog="\n".join(["commands:", *lines, "", "kv-hf COMMAND --help tells its arguments."]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("--version", action="version", version=f"kv-hf {version()}")
    found.add_argument("command", metavar="COMMAND", type=_command, help=argparse.SUPPRESS)
    return found


def version() -> str:
    """Return the version of the package that Python finds, read and not imported."""
    spec = find_spec("kv_hf")
    if spec is None or spec.origin is None:
        return "of no package: " + (no_package() or "")
    text = Path(spec.origin).with_name("version.py").read_text("utf-8")
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    return "unknown" if found is None else found.group(1)


def no_package() -> str | None:
    """Return an error where Python finds a folder kv_hf that is no package, or nothing; None where all is well."""
    spec = find_spec("kv_hf")
    if spec is not None and spec.origin is not None:
        return None
    where = [] if spec is None else list(spec.submodule_search_locations or ())
    return NO_PACKAGE.format(found=", ".join(where) or "nothing", python=sys.executable)


def _command(name: str) -> str:
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise argparse.ArgumentTypeError(f"must be one of {', '.join(COMMANDS)}, got {name!r}{hint}")


if __name__ == "__main__":
    sys.exit(main())
