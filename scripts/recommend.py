"""`kv-hf recommend` with packaged models, cells of results/sensitivity.jsonl and recipes in recipes/.

python scripts/recommend.py --model smollm2-135m --budget 4.5
python scripts/recommend.py --model qwen2.5-coder-1.5b --budget 3.25 4.5 paged_int8 --cells results/cells.jsonl
python scripts/recommend.py --model smollm2-135m --check recipe.json --against paged_int4 paged_k8v4
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from measure.models.packaged import PACKAGED, resolve_model

from kv_hf.evaluation.recommend.recommend_command import parser, recommend_formats

PROG = "recommend.py"
CELLS = Path(__file__).parent.parent / "results" / "sensitivity.jsonl"


def main(argv: Sequence[str] | None = None) -> int:
    """Search or check; 0, or 2 for an error that says its reason."""
    asked = parser(PROG)
    asked.description = f"{asked.description} Packaged models: {', '.join(PACKAGED)}."
    asked.set_defaults(cells=CELLS)
    return recommend_formats(asked.parse_args(argv), PROG, resolve_model)


if __name__ == "__main__":
    sys.exit(main())
