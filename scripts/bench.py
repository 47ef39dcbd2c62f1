"""Measure workloads of this repository side by side: `python scripts/bench.py --list` names them.

    python scripts/bench.py decode --only shape=smollm2 context=2048 context=8192
    python scripts/bench.py generate --device cuda --record
    python scripts/bench.py model_families --only family=gemma4 family=git

Results are judged before anything is timed. Contenders take turns in one process. Rows are appended as soon as a
configuration ends; what failed is a row that says why, and the same command goes on where it was stopped.
"""

import sys

from measure import attention, check_gpu, families, gpu, serving, steps, suites  # noqa: F401
from measure.runner import main

if __name__ == "__main__":
    sys.exit(main())
