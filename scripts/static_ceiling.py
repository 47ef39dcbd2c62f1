"""Compile the decode kernel for GPUs that are not here and write instruction counts to results/static_ceiling.jsonl."""

import argparse
import json
from pathlib import Path

import triton

from kv_hf.backends.triton import aot, sass
from kv_hf.backends.triton.ceiling import VARIANTS, ceiling, instructions_per_number, standard_spec
from kv_hf.evaluation.rows import append_rows, make_row, read_rows

RESULTS = Path(__file__).parent.parent / "results" / "static_ceiling.jsonl"
BUDGETS = Path(__file__).parent.parent / "tests" / "triton_budgets.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="rows of this triton version are replaced"
    )
    parser.add_argument(
        "--budgets",
        action="store_true",
        help="raise the tests' budgets to 3 %% above what was counted where they are lower",
    )
    args = parser.parse_args()
    print("arch    format  dim group  loop  instr/number  regs spills shared KiB  ceiling")
    rows = []
    for arch, name, dim, group in VARIANTS:
        spec = standard_spec(name, dim)
        code = sass.read_cubin(aot.compile_decode(spec, arch, group=group))
        per_number, bound = instructions_per_number(code, spec, group), ceiling(code, spec, group)
        print(
            f"{arch:7} {name:6} {dim:4} {group:5} {len(code.loop):5} {per_number:13.4f} {code.registers:5} "
            f"{code.spills:6} {code.shared / 1024:10.1f} {bound:8.0%}"
        )
        rows.append(
            make_row(
                triton=triton.__version__, arch=arch, format=name, head_dim=dim, group=group,
                page_size=spec.keys.page_size, num_warps=code.num_warps, loop_instructions=len(code.loop),
                instructions_per_number=round(per_number, 5), registers=code.registers, spills=code.spills,
                shared_bytes=code.shared, metric="issue ceiling, computed, part of an H200's copy bandwidth",
                value=round(bound, 4), unit="ratio",
            )
        )  # fmt: skip
    others = [row for row in read_rows(args.out) if row["triton"] != triton.__version__]
    args.out.unlink(missing_ok=True)
    append_rows(args.out, others + rows)
    if args.budgets:
        write_budgets(rows)


def write_budgets(rows: list[dict[str, object]]) -> None:
    """Raise the committed budgets where `rows` need more: the worst of all triton versions counts."""
    old = json.loads(BUDGETS.read_text()) if BUDGETS.is_file() else []
    budgets = {tuple(entry[:4]): entry[4] for entry in old}
    for row in rows:
        key = (row["arch"], row["format"], row["head_dim"], row["group"])
        counted = row["instructions_per_number"]
        assert isinstance(counted, float)
        budgets[key] = max(budgets.get(key, 0.0), round(counted * 1.03 + 0.00005, 4))
    lines = ",\n".join(f"  {json.dumps([*key, budget])}" for key, budget in budgets.items())
    BUDGETS.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
