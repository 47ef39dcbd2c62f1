"""Measure what caches take in memory as the system sees it: the workload `memory` of bench.py.

python scripts/measure_memory.py --only model=smollm2-135m context=4096 cache=dynamic cache=paged_int4
"""

import sys

from measure import steps  # noqa: F401
from measure.runner import main

if __name__ == "__main__":
    sys.exit(main(["memory", *sys.argv[1:]]))
