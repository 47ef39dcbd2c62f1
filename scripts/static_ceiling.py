"""Compile the decode kernel for GPUs that are not here; count its instructions, and the bound that they are on its speed.

Rows go to results/static_ceiling.jsonl in place of this triton version's. With --budgets the budgets of
tests/backends/test_triton_compiled.py rise to 3 % above what was counted, where they are lower.
"""

import argparse
import json
from typing import Any

import triton
from measure.runner import RESULTS, table

from kv_hf.backends.triton import aot, sass
from kv_hf.backends.triton.ceiling import VARIANTS, ceiling, instructions_per_number, standard_spec
from kv_hf.evaluation.rows import append_rows, make_row, read_rows

ROWS = RESULTS / "static_ceiling.jsonl"
BUDGETS = RESULTS.parent / "tests" / "triton_budgets.json"
KEY = ("arch", "format", "head_dim", "group")
METRIC = "issue ceiling, computed, part of an H200's copy bandwidth"


def counted(arch: str, name: str, dim: int, group: int) -> dict[str, Any]:
    """Return the row of one variant."""
    spec = standard_spec(name, dim)
    code = sass.read_cubin(aot.compile_decode(spec, arch, group=group))
    return make_row(
        triton=triton.__version__, arch=arch, format=name, head_dim=dim, group=group,
        page_size=spec.keys.page_size, num_warps=code.num_warps, loop_instructions=len(code.loop),
        instructions_per_number=round(instructions_per_number(code, spec, group), 5), registers=code.registers,
        spills=code.spills, shared_bytes=code.shared, metric=METRIC, value=round(ceiling(code, spec, group), 4),
        unit="ratio",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budgets", action="store_true", help="raise the tests' budgets")
    asked = parser.parse_args()
    rows = [counted(*variant) for variant in VARIANTS]
    print(
        table(
            rows,
            [*KEY, "loop_instructions", "instructions_per_number", "registers", "spills", "value"],
        )
    )
    others = [row for row in read_rows(ROWS) if row["triton"] != triton.__version__]
    ROWS.unlink(missing_ok=True)
    append_rows(ROWS, others + rows)
    if asked.budgets:
        budgets = {tuple(entry[:4]): entry[4] for entry in json.loads(BUDGETS.read_text())}
        for row in rows:
            key = tuple(row[name] for name in KEY)
            needed = round(row["instructions_per_number"] * 1.03 + 0.00005, 4)
            budgets[key] = max(budgets.get(key, 0.0), needed)
        lines = ",\n".join(f"  {json.dumps([*key, most])}" for key, most in budgets.items())
        BUDGETS.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
