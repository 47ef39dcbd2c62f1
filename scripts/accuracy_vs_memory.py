"""Measure what caches cost in quality, over models and caches: accuracy, needles, reading a part.

    python scripts/accuracy_vs_memory.py accuracy --record --only cache=paged_int4 cache=paged_int8 cache=quanto_int4
    python scripts/accuracy_vs_memory.py accuracy --only model=./my-model text=essay.txt windows=7
    python scripts/accuracy_vs_memory.py needle --only length=1024 length=2048 'caches=["dynamic", "paged_int4"]'

Options are those of bench.py: every combination of values is a measurement, --list names the fields and their defaults, and
the same command goes on where it was stopped.
"""

import sys

from measure import quality  # noqa: F401  registers the workloads
from measure.runner import main

if __name__ == "__main__":
    sys.exit(main())
