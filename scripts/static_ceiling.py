"""Compile the decode kernel for GPUs that are not here; print its instructions per number, and the bound on its speed.

The bound is a part of an H200's copy bandwidth, computed from the instructions that a multiprocessor can issue. With
--budgets the budgets of tests/backends/test_triton_compiled.py rise to 3 % above what was counted, where they are lower.
"""

import json
import sys
from pathlib import Path

from kv_hf.backends.triton import aot, sass
from kv_hf.backends.triton.ceiling import VARIANTS, ceiling, instructions_per_number, standard_spec

BUDGETS = Path(__file__).parents[1] / "tests" / "triton_budgets.json"

if __name__ == "__main__":
    budgets = {tuple(entry[:4]): entry[4] for entry in json.loads(BUDGETS.read_text())}
    print("arch    format  dim group  loop  instr/number  regs spills shared KiB  ceiling")
    for variant in VARIANTS:
        arch, name, dim, group = variant
        spec = standard_spec(name, dim)
        code = sass.read_cubin(aot.compile_decode(spec, arch, group=group))
        counted, bound = instructions_per_number(code, spec, group), ceiling(code, spec, group)
        size = f"{code.registers:5} {code.spills:6} {code.shared / 1024:10.1f}"
        print(
            f"{arch:7} {name:6} {dim:4} {group:5} {len(code.loop):5} {counted:13.4f} {size} {bound:8.0%}"
        )
        budgets[variant] = max(budgets.get(variant, 0.0), round(counted * 1.03 + 0.00005, 4))
    if "--budgets" in sys.argv[1:]:
        lines = ",\n".join(f"  {json.dumps([*key, most])}" for key, most in budgets.items())
        BUDGETS.write_text(f"[\n{lines}\n]\n")
