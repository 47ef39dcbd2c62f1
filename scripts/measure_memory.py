"""Measure what each cache takes in memory, by part and as the system sees it, and its throughput, side by side.

    python scripts/measure_memory.py --context 1024 4096
    python scripts/measure_memory.py --caches dynamic hqq_int4 paged_int4:keys=int8 --context 2048 --batch 4
    python scripts/measure_memory.py --model llama-3.1-8b --device cuda --context 4096 32768 --record

Every cache is measured alone, in fresh processes with the environment of any user's, because memory that one has freed
would serve the next. Its throughput is a by-product: `scripts/bench.py generate` times all caches in turns. A model is a
packaged one, a hub id, a folder, or a random one (measure/shapes.py). Other options are those of `scripts/bench.py`.
"""

import argparse
import json
import sys
from collections.abc import Sequence

from measure import steps  # noqa: F401
from measure.runner import main as bench

FIELDS = {"model": str, "cache": str, "context": int, "batch": int, "steps": int, "dtype": str}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the workload "memory" with these values of its fields."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, kind in FIELDS.items():
        parser.add_argument("--caches" if name == "cache" else f"--{name}", dest=name, nargs="+", type=kind, default=[])  # fmt: skip
    given, rest = parser.parse_known_args(argv)
    only = [f"{name}={json.dumps(value)}" for name, values in vars(given).items() for value in values]  # fmt: skip
    return bench(["memory", *rest, *(["--only", *only] if only else [])])


if __name__ == "__main__":
    sys.exit(main())
