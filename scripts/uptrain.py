"""`kv-hf uptrain` with packaged models as teachers, and with --record its curve as rows of results/uptrain.jsonl.

python scripts/uptrain.py --student OUT/model-1-kv-head --teacher smollm2-135m --out OUT/trained --data text.txt --minutes 20 --record
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kv_hf.evaluation.weights import weights_of
from measure.models.packaged import PACKAGED, resolve_model

from kv_hf.evaluation.rows import append_rows, check_writable, commit, make_row
from kv_hf.gqa.checkpoint import read_json
from kv_hf.gqa.uptrain import UptrainReport, UptrainSettings
from kv_hf.gqa.uptrain.uptrain_command import parser, train
from kv_hf.printable import tell_error
from kv_hf.records import CONVERSION

PROG = "uptrain.py"
RESULTS = Path(__file__).parent.parent / "results" / "uptrain.jsonl"


def rows_of(report: UptrainReport, settings: UptrainSettings, args: Any) -> list[dict[str, Any]]:
    """Return the rows of a curve, with what is needed to repeat it."""
    conversion = read_json(args.out / "config.json").get(CONVERSION, {})
    common = {
        "kind": "uptrain", "student": Path(args.student).name, "teacher": Path(args.named).name,
        "method": conversion.get("method"), "num_key_value_heads": conversion.get("num_key_value_heads"),
        "data": [Path(name).name for name in args.data], "held_out": args.eval_text and Path(args.eval_text).name,
        "dtype": settings.dtype, "settings": asdict(settings), **weights_of(str(args.teacher))._asdict(),
    }  # fmt: skip
    if len(report.rates) > 1:
        common["lr_from_step"] = report.rates
    return [make_row(**common, **row) for row in report.curve]


def main(argv: Sequence[str] | None = None) -> int:
    """Train; 0 when the result is written, 1 when the run was interrupted, 2 for bad arguments."""
    asked = parser(PROG)
    asked.description = f"{asked.description} Packaged models: {', '.join(PACKAGED)}."
    asked.add_argument("--record", action="store_true", help=f"append the curve to {RESULTS.name}")
    asked.add_argument("--results", type=Path, default=RESULTS)
    args = asked.parse_args(argv)
    try:
        if args.record:
            check_writable(args.results)
            commit()  # of the code that runs, whatever is edited meanwhile
        args.named, args.teacher = args.teacher, resolve_model(args.teacher)
    except ValueError as error:
        tell_error(PROG, error)
        return 2

    def finished(report: UptrainReport, settings: UptrainSettings) -> None:
        if args.record:
            append_rows(args.results, rows_of(report, settings, args))

    return train(args, PROG, finished)


if __name__ == "__main__":
    sys.exit(main())
