"""Read compiled code: instructions of the loop over pages and per stored number, spills, shared memory.

Uses the disassembler that Triton's wheel brings along.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

from kv_hf.backends.triton.meta_params import column_block, tile_tokens
from kv_hf.spec import PageSpec

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
MATRIX = ("HMMA", "HGMMA", "UTCHMMA", "WARPGROUP")
_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\d+\s+)?([A-Z][\w.]*)([^;]*);")
_BRANCH = re.compile(r"0x([0-9a-f]+)")


@dataclass(frozen=True)
class Code:
    """What was compiled.

    Attributes:
        loop: opcodes of the loop over pages in order, with their suffixes.
        whole: opcodes of the kernel.
        shared: bytes per program.
        num_warps: of the compiled kernel.
    """

    loop: tuple[str, ...]
    whole: tuple[str, ...]
    shared: int
    num_warps: int

    @property
    def spills(self) -> int:
        """Loads and stores of local memory, anywhere in the kernel."""
        return sum(op.startswith(("LDL", "STL")) for op in self.whole)

    def count(self, *starts: str) -> int:
        """Instructions of the loop whose opcode starts with one of `starts`."""
        return sum(op.startswith(starts) for op in self.loop)


def read_cubin(kernel: Any) -> Code:
    """Disassemble an NVIDIA kernel. The loop over pages is the first loop with matrix products (the first
    loop of a kernel without)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(kernel.asm["cubin"])
        command = [TOOLS / "cuobjdump", "-sass", path]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = [(int(at, 16), op, rest) for at, op, rest in _LINE.findall(text)]
    return Code(
        loop=_page_loop(lines),
        whole=tuple(op for _, op, _ in lines),
        shared=kernel.metadata.shared,
        num_warps=kernel.metadata.num_warps,
    )


def _page_loop(lines: list[tuple[int, str, str]]) -> tuple[str, ...]:
    loops = []
    for at, op, rest in lines:
        to = _BRANCH.search(rest)
        if op.split(".")[0] == "BRA" and to and int(to.group(1), 16) < at:
            start = int(to.group(1), 16)
            body = tuple(o for a, o, _ in lines if start <= a <= at and o != "NOP")
            loops.append((not any(o.startswith(MATRIX) for o in body), start, body))
    return min(loops)[2] if loops else ()


def instructions_per_number(code: Any, spec: PageSpec, group: int) -> float:
    """Return warp instructions of the loop over pages per stored number, for one query per query head.

    Args:
        code: of a decode kernel for `spec` and `group` query heads of a kv head; query heads beyond a
            program's columns are other programs, which count as well.
    """
    numbers = tile_tokens(spec) * sum(side.head_dim for side in spec.sides)
    programs = -(-group // column_block(spec, group, False, 90))
    return programs * len(code.loop) * code.num_warps / numbers
