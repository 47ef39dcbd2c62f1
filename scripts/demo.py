"""`kv-hf demo` on a real model from a PyPI package: SmolLM2-135M-Instruct, without the hub.

python scripts/demo.py                      SmolLM2-135M-Instruct, no network
python scripts/demo.py --model org/name     any causal language model (hub id or folder)
"""

import sys
from collections.abc import Sequence

from measure.models.packaged import packaged_model
from measure.runner import RESULTS

from kv_hf.evaluation.demo_command import demonstrate
from kv_hf_cli import command_parser, guarded

PROG = "demo.py"


def main(argv: Sequence[str] | None = None) -> int:
    """Generate and compare; 0, or 2 for an error that says its reason."""
    asked = command_parser("demo", PROG)
    asked.set_defaults(model="smollm2-135m", out=RESULTS / "demo.jsonl")
    args = asked.parse_args(argv)
    return guarded(PROG, lambda: demonstrate(args, PROG, packaged_model))


if __name__ == "__main__":
    sys.exit(main())
