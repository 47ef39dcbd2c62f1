"""Write a checkpoint with fewer kv heads: `kv-hf convert-gqa` without an installation.

    python scripts/convert_mha_to_gqa.py SRC DST --num-kv-heads 4 --dry-run
    python scripts/convert_mha_to_gqa.py SRC DST --num-kv-heads 4 --method svd --calibration text.txt

Checks everything before it writes; one file of weights is in memory at a time. docs/gqa.md says the rest.
"""

import sys

from kv_hf_cli import main

if __name__ == "__main__":
    sys.exit(main(["convert-gqa", *sys.argv[1:]]))
