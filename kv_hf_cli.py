"""The command `kv-hf`: its commands, the arguments of each, and where each of them lives.

Importing any file of kv_hf imports the package first, and so torch and transformers, which takes seconds. This file lies beside
the package and imports neither: it reads the arguments, and imports a command once they are right. What only the package knows,
such as the name of a cache, is refused by the command.
"""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

# names of an argument, and what `add_argument` takes beside them
Argument = tuple[tuple[str, ...], dict[str, Any]]


class Command(NamedTuple):
    """A command.

    Attributes:
        function: module and name: (what was read, name of the command) -> exit code.
        about: what it does, for the help of `kv-hf` and its own.
        arguments: of a list of them exactly one must be given.
        notes: what its help says after the arguments.
        reads_itself: whether it takes another program's arguments too, which are known when that program is imported. Its function
            gets the words; only its own arguments are looked at here.
    """

    function: str
    about: str
    arguments: tuple[Argument | list[Argument], ...]
    notes: str = ""
    reads_itself: bool = False


def argument(*names: str, **how: Any) -> Argument:
    """Return an argument; names and options are those of `add_argument`."""
    return names, how


def caches(text: str) -> Argument:
    """Return the argument that names caches; `text` is its help."""
    return argument("--caches", "--cache", nargs="+", action="extend", metavar="CACHE", help=text)


def rows(default: str) -> Argument:
    """Return the argument that names the file of rows."""
    return argument("--out", type=Path, default=Path(default), metavar="FILE", help="file of rows")


# a test compares these names with the package's
CACHES = (
    "paged_exact, paged_fp8, paged_int8, paged_int6, paged_k8v4, paged_int4, paged_int3, paged_int2"
)
OTHER_CACHES = "dynamic, static, offloaded, quanto_int4, quanto_int2, hqq_int8, hqq_int4, hqq_int2, quantized_fp8"
TEXTS = "lincoln_1862, novel, code, german, tables, lincoln_1863, moby_dick, sqlite, french, wages"
SETS = "held_out, calibration, lincoln"
OPTIONS = "options after a colon, as in paged_int4:keys=int8,offload=cpu"
DTYPES = ("bfloat16", "float16", "float32")
DEVICE = argument("--device", help="cpu or cuda (default: cuda where there is a GPU)")
RECORD = argument("--record", action="store_true", help="append rows to --out")
JSON = argument("--json", action="store_true", help="print everything as JSON")
COMMANDS = {
    "demo": Command(
        "kv_hf.evaluation.demo_command:demonstrate",
        "generate with every cache on a model, side by side",
        (
            DEVICE, RECORD, rows("kv_hf_demo.jsonl"),
            argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="a hub id or a folder"),
            argument("--text", default="lincoln_1862", help="bundled text or a file"),
            argument("--prompt-tokens", type=int, default=2048, metavar="N", help="about how many"),
            argument("--new-tokens", type=int, default=64, metavar="N", help="generated with each cache"),
        ),
        "Models with a chat template need pip install -e '.[demo]' in the clone.",
    ),
    "doctor": Command(
        "kv_hf.doctor.doctor_command:diagnose",
        "what would run here, why, and whether it works",
        (
            DEVICE, JSON,
            argument("--dtype", choices=DTYPES, help="of the model (default: --model's, else bfloat16)"),
            argument("--head-dim", type=int, metavar="N", help="default: --model's, else 128"),
            argument("--page-size", type=int, default=64, metavar="N", help="tokens of a page"),
            argument("--model", help="folder, preset or hub name: say how each layer would be cached"),
            argument("--quick", action="store_true", help="no self-test: run no kernels and no model"),
            argument("--seconds", type=float, default=5.0, help="of the self-test"),
        ),
        "exit codes: 0 nothing is broken, 1 something is, 2 bad arguments",
    ),
    "memory": Command(
        "kv_hf.planner.plan_command:print_plan",
        "what caches take and what fits, from a config alone",
        (
            [
                argument("model", nargs="?", metavar="CONFIG_OR_MODEL", help="hub id, folder, config.json, or a preset such as llama-3.1-8b"),
                argument("--list-presets", action="store_true", help="list the presets, and stop"),
                argument("--list-devices", action="store_true", help="list known devices, and stop"),
            ],
            JSON,
            caches(f"dynamic, static, offloaded, {CACHES}; {OPTIONS} (default: the common ones)"),
            argument("--context", metavar="S", help="tokens of each row: 8192 or 128k (default: 8192, or what the model was made for if that is less)"),
            argument("--prompt", metavar="P", help="how many of them came in one prefill (default: the most that any takes)"),
            argument("--batch", type=int, default=1, metavar="B", help="rows"),
            argument("--device", metavar="NAME", help="memory and bandwidth of a known device"),
            argument("--device-memory", metavar="SIZE", help="24GiB (1024**3) or 24GB (1000**3)"),
            argument("--bandwidth", metavar="SPEED", help="of the device's memory: 3.35TB/s"),
            argument("--host-bandwidth", metavar="SPEED", help="of the way to offloaded pages: 64GB/s"),
            argument("--reserve", metavar="SIZE", default=0, help="memory to keep free"),
            argument("--weights", metavar="SIZE", help="of all weights, for quantized checkpoints; 0 to leave them out"),
            argument("--kv-heads", type=int, metavar="G", help="in place of the model's"),
            argument("--tensor-parallel", type=int, default=1, metavar="N", help="devices that share each layer"),
            argument("--dtype", choices=("bf16", "fp16", "fp32", *DTYPES), help="of weights and cache (default: the config's)"),
        ),
    ),
    "explore": Command(
        "kv_hf.planner.explore:serve_page",
        "the memory planner as a page in a browser",
        (
            argument("--port", type=int, help="default: the first free one from 7860 on"),
            argument("--model", action="append", default=[], help="offered first: hub id, folder, config.json or preset; may be repeated"),
        ),
        "Serves http://127.0.0.1 until Ctrl-C.",
    ),
    "eval": Command(
        "kv_hf.evaluation.eval_command:evaluate",
        "what caches cost on your model and text: KL, bytes",
        (
            DEVICE, RECORD, rows("kv_hf_eval.jsonl"),
            argument("--model", required=True, help="a hub id or a folder"),
            argument("--text", default="held_out", help=f"a file, dataset:PATH,CONFIG,SPLIT,FIELD, one of {TEXTS}, or a set of them: {SETS}"),
            caches(f"what is measured: {CACHES} (these by default), {OTHER_CACHES}; {OPTIONS}"),
            argument("--windows", type=int, default=2, metavar="N", help="texts cut from each source"),
            argument("--window", type=int, default=1600, metavar="N", help="tokens of a text"),
            argument("--prompt", type=int, default=512, metavar="N", help="tokens of it that are not scored"),
            argument("--bits", type=float, help="name the cache that loses least within so many bits per number"),
            argument("--plot", type=Path, metavar="FILE", help="draw KL against bits; a table lies next to it"),
            argument("--dtype", default="float32", choices=DTYPES, help="that the model computes in"),
        ),
        "transformers' quantized caches, texts of the hub and the plot need pip install -e '.[eval]'\nin the clone.",
    ),
    "lm-eval": Command(
        "kv_hf.evaluation.lm_eval:run_lm_eval",
        "lm-eval's command line, which then knows our caches",
        (DEVICE,),
        """All other options are lm-eval's: `lm_eval run --help` lists them. Its model class `kv_hf` takes a cache:
  kv-hf lm-eval --model kv_hf --model_args pretrained=DIR,cache_implementation=paged_int8 --tasks NAME""",
        reads_itself=True,
    ),
    "serve": Command(
        "kv_hf.serving.serve_command:serve",
        "transformers' own server, with pages as its cache",
        (
            argument("model", metavar="MODEL", help="hub name, or folder with a checkpoint"),
            argument("--cache", default="paged_int4", help=f"cache of every request, {OPTIONS}; a request's generation_config may name another"),
            argument("--cache-config", metavar="JSON", help="""options of the cache, as in '{"recent_tokens": 32}'"""),
            argument("--prefix-store", metavar="SIZE", help="bytes of prompts and answers kept for later requests, 0 for none (default: 1GiB; not with --continuous-batching, which shares prefixes in its own pool)"),
            argument("--prefix-folder", metavar="FOLDER", help="where these pages are kept too, up to 16GiB: a server that starts again, or another one, finds them there"),
        ),
        """All other options are those of transformers' server: `transformers serve --help` lists them.

examples:
  kv-hf serve HuggingFaceTB/SmolLM2-135M-Instruct --cache paged_int4 --port 8000
  kv-hf serve ./model --cache paged_int4 --cache-config '{"max_pages": 4096}' --prefix-store 0

GET /kv_hf/stats returns the counts of the prefix store; with --log-level info a line is logged per request.""",
        reads_itself=True,
    ),
    "convert-gqa": Command(
        "kv_hf.gqa.convert:convert",
        "write a checkpoint with fewer kv heads",
        (
            argument("source", metavar="SRC", help="folder of a checkpoint, or a model of the hub"),
            argument("destination", metavar="DST", help="folder that does not exist, or is empty"),
            argument("--num-kv-heads", type=int, required=True, metavar="G", help="must divide the model's"),
            argument("--method", default="mean", choices=("mean", "svd"), help="how heads are merged; svd needs --calibration"),
            argument("--calibration", metavar="TEXT_OR_DATASET", help="for svd: a text file, a bundled text, or dataset:NAME"),
            argument("--dry-run", action="store_true", help="check everything and write nothing"),
        ),
        "transformers loads the result without any code of kv_hf.",
    ),
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
        prog = f"kv-hf {given[0]}"
        return guarded(prog, lambda: run(given[0], given[1:], prog))
    asked = parser()
    if not given:
        asked.print_help()
        return 0
    asked.parse_args(given[:1])
    return 0


def run(command: str, words: Sequence[str], prog: str) -> int:
    """Read the words of a command, then import and call its function; return the exit code."""
    asked = command_parser(command, prog)
    read: Any = words
    if COMMANDS[command].reads_itself:
        asked.parse_known_args(words)
    else:
        read = asked.parse_args(words)
    if no_package() is not None:
        print(no_package(), file=sys.stderr)
        return 2
    try:
        function = resolve_name(COMMANDS[command].function)
    except ImportError as error:
        if (error.name or "kv_hf").partition(".")[0] == "kv_hf":  # a fault of ours
            raise
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2
    return int(function(read, prog))


def guarded(prog: str, call: Callable[[], int]) -> int:
    """Call a command; return its exit code, or 130 for Ctrl-C. A reader that has seen enough (`| head`) is no error."""
    try:
        code = call()
        if sys.stdout is not None:  # closed before Python began
            sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"{prog}: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # what is left in the buffer would fail again when the interpreter ends
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)
        return 0
    except OSError as error:  # a full disk, say
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    return code


def parser() -> argparse.ArgumentParser:
    """Return the parser of what stands before a command, which names all commands."""
    wide = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{wide}}{command.about}" for name, command in COMMANDS.items()]
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


def command_parser(command: str, prog: str) -> argparse.ArgumentParser:
    """Return the parser of a command's arguments."""
    about = COMMANDS[command].about
    found = argparse.ArgumentParser(
        prog=prog,
        allow_abbrev=False,
        description=f"{about[0].upper()}{about[1:]}.",
        epilog=COMMANDS[command].notes,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for one in COMMANDS[command].arguments:
        if isinstance(one, list):
            group = found.add_mutually_exclusive_group(required=True)
            for names, how in one:
                group.add_argument(*names, **how)
        else:
            names, how = one
            action = found.add_argument(*names, **how)
            if action.default not in (None, False, []):
                action.help = f"{action.help} (default: %(default)s)"
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
