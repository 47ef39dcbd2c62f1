"""`python -m kv_hf`: the command `kv-hf`."""

import sys

from kv_hf_cli import main

if __name__ == "__main__":
    sys.exit(main())
