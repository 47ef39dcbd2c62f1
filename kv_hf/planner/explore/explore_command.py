"""`kv-hf explore`: write the planner's page, or serve it to this machine's browser."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ...errors import KVCacheError
from ...files.writing import replace_text
from ...printable import tell, tell_error
from .models import offered
from .page import build_page
from .serve import HOST, make_server, serve

DEFAULT_NAME = "kv-planner.html"


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(
        prog=prog,
        allow_abbrev=False,
        description="The KV memory planner as one HTML file: choose a model, drag sliders, see what fits. The file needs no "
        "network.",
    )
    where = found.add_mutually_exclusive_group()
    where.add_argument(
        "--out", metavar="PAGE", help=f"file to write (default: {DEFAULT_NAME} in this folder)"
    )
    where.add_argument(
        "--serve", action="store_true", help=f"serve it at http://{HOST} until Ctrl-C instead"
    )
    found.add_argument("--port", type=int, help="for --serve (default: any free one)")
    found.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="MODEL",
        help="offer this model beside the presets, and first: a hub id, a folder or a config.json; may be repeated",
    )
    return found


def main(argv: Sequence[str] | None = None, prog: str = "kv-hf explore") -> int:
    """Run the command; return the exit code: 0, or 2 for an error that says its reason."""
    args = parser(prog).parse_args(sys.argv[1:] if argv is None else list(argv))
    try:
        if args.port is not None and not args.serve:
            raise ValueError(f"--port {args.port} goes with --serve")
        page = build_page(offered(args.model))
        if args.serve:
            server = make_server(page, args.port or 0)
            print(f"http://{HOST}:{server.server_port}/ (Ctrl-C ends it)", flush=True)
            serve(server)
            return 0
        path = Path(DEFAULT_NAME if args.out is None else args.out)
        write_page(path, page)
    except (KVCacheError, OSError, OverflowError, ValueError) as error:
        tell_error(prog, error)
        return 2
    tell(f"{path} ({path.stat().st_size:,} bytes): open it in a browser")
    return 0


def write_page(path: Path, text: str) -> None:
    """Write `text` beside `path` and rename it, so that `path` is whole at any time. Raises OSError."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} to")
    replace_text(path, text)
