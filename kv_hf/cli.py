"""The command line as a module of the package: `kv_hf.cli.main(["doctor"])`. `kv-hf` itself starts without the package."""

import sys

from kv_hf_cli import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
