"""Read the PTX that Triton makes: one kernel, as segments of instructions whose operands are places of registers.

A segment is code that runs from its start to its end: between labels, branches and barriers. Knows nothing of what
instructions do.
"""

import re
from dataclasses import dataclass
from typing import Any

# bytes that a number of each type takes, by its name's parts
SIZES = {"pred": 1, "bf16": 2, "f16x2": 4, "bf16x2": 4, "s16x2": 4, "e4m3x2": 2}
SIZES |= {f"{kind}{8 * size}": size for kind in "bsuf" for size in (1, 2, 4, 8)}
STATEMENT = re.compile(
    r"\s*(?:(?P<label>[\w$]+)\s*:(?!:)|(?P<open>\{)|(?P<close>\})|\.(?:loc|file|pragma)[^\n]*|(?P<text>[^;]+);)"
)
INSTRUCTION = re.compile(r"(?:@(!?)([%\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
HEAD = re.compile(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)([^{]*)(?=\{)")


class PtxError(Exception):
    """What a GPU would fault on, or what is not known here; names the line of PTX and the program."""


@dataclass(frozen=True)
class Register:
    """A place in a program's registers: bits of all of its threads."""

    place: int
    kind: str  # of the .reg that declares it

    @property
    def code(self) -> str:
        """The type of numpy's array."""
        return "?" if self.kind == "pred" else f"u{SIZES[self.kind]}"


@dataclass(frozen=True)
class Address:
    """[base + offset]; base: a Register or a name."""

    base: Any
    offset: int


@dataclass
class Instruction:
    """One instruction: @guard opcode operands.

    Attributes:
        parts: of its opcode, between dots.
        operands: Registers, Addresses, the bits of numbers as int, names as str, tuples of these, None for "_".
    """

    line: int
    parts: tuple[str, ...]
    operands: list[Any]
    guard: Register | None = None
    negated: bool = False

    @property
    def is_barrier(self) -> bool:
        """Return whether all threads meet here."""
        return self.parts[:2] == ("bar", "sync")

    @property
    def types(self) -> list[str]:
        """Return the types in its opcode, in order."""
        return [part for part in self.parts if part in SIZES]

    @property
    def space(self) -> str:
        """Return the memory that it touches; addresses without one are of global memory."""
        spaces = [part.split("::")[0] for part in self.parts]
        return next((one for one in spaces if one in ("global", "shared", "param")), "global")

    @property
    def nbytes(self) -> int:
        """Return how many bytes a thread writes with it at once."""
        if self.parts[0] == "stmatrix":
            return 16
        if self.parts[0] == "cp":
            return self.operands[2]
        count = next((int(part[1:]) for part in self.parts if part in ("v2", "v4")), 1)
        return count * SIZES[self.types[-1]]


class Kernel:
    """A kernel's text.

    Attributes:
        name, threads: as the text says.
        params: (offset, type) of each among the bytes that a launch hands over; places: their offsets by name.
        registers: of each place the Register; constants, specials: those that hold (bits, bytes) and %tid.x.
        segments, labels: its code, and the segments that labels stand in front of.
        granules: the least bytes that an instruction writes to global and to shared memory.
    """

    def __init__(self, ptx: str):
        self.lines = ptx.splitlines()
        text = re.sub(r"//[^\n]*", "", ptx)
        head = HEAD.search(text)
        if head is None:
            raise PtxError("no kernel in this text")
        self.name, listed, limits = head.groups()
        self.threads = int(re.search(r"\.reqntid\s+(\d+)", limits)[1])
        self.params: list[tuple[int, str]] = []
        self.places: dict[str, int] = {}
        self.param_bytes = 0
        for kind, name in re.findall(r"\.param\s+\.(\w+)[^,]*?([\w$]+)\s*(?:,|$)", listed.strip()):
            offset = -(-self.param_bytes // SIZES[kind]) * SIZES[kind]
            self.params.append((offset, kind))
            self.places[name] = offset
            self.param_bytes = offset + SIZES[kind]
        self.registers: list[Register] = []
        self.constants: dict[tuple[int, int], Register] = {}
        self.specials: dict[str, Register] = {}
        self.segments: list[list[Instruction]] = [[]]
        self.labels: dict[str, int] = {}
        self._scopes: list[dict[str, Register]] = []
        self._read(text, head.end())
        self.granules = {"global": 16, "shared": 16}
        for segment in self.segments:
            for one in segment:
                copies = one.parts[0] == "cp" and len(one.operands) > 2
                if copies or one.parts[0] in ("st", "stmatrix"):
                    self.granules[one.space] = min(self.granules[one.space], one.nbytes)

    def line(self, number: int) -> str:
        """Return a line of the text, for messages."""
        return f"{self.name}, line {number}: {' '.join(self.lines[number - 1].split())}"

    def register(self, kind: str) -> Register:
        """Return a new place."""
        self.registers.append(Register(len(self.registers), kind))
        return self.registers[-1]

    def constant(self, bits: int, size: int) -> Register:
        """Return the place that holds a number's bits in every thread."""
        key = bits % 2 ** (8 * size), size
        if key not in self.constants:
            self.constants[key] = self.register(f"b{8 * size}")
        return self.constants[key]

    def special(self, name: str) -> Register:
        """Return the place of a special register (%tid.x)."""
        if name not in self.specials:
            self.specials[name] = self.register("b32")
        return self.specials[name]

    def _read(self, text: str, at: int):
        line, counted = 1, 0
        while True:
            found = STATEMENT.match(text, at)
            start = found.end() - len(found[0].lstrip())
            line, counted = line + text.count("\n", counted, start), start
            at = found.end()
            if found["open"]:
                self._scopes.append({})
            elif found["close"]:
                self._scopes.pop()
                if not self._scopes:
                    return
            elif found["label"]:
                self._start()
                self.labels[found["label"]] = len(self.segments) - 1
            elif found["text"]:
                self._statement(found["text"].strip(), line)

    def _start(self):
        """Begin a segment."""
        if self.segments[-1]:
            self.segments.append([])

    def _statement(self, text: str, line: int):
        if text.startswith(".reg"):
            kind, names = re.match(r"\.reg\s+\.(\w+)\s+(.*)", text).groups()
            for stem, count in re.findall(r"([%\w$]+)(?:<(\d+)>)?", names):
                for name in [f"{stem}{i}" for i in range(int(count))] if count else [stem]:
                    self._scopes[-1][name] = self.register(kind)
            return
        negated, guard, opcode, rest = INSTRUCTION.match(text).groups()
        one = Instruction(
            line, tuple(opcode.split(".")), [self._operand(part) for part in _split(rest)]
        )
        if guard:
            one.guard, one.negated = self._find(guard), negated == "!"
        self.segments[-1].append(one)
        if one.parts[0] in ("bra", "ret") or one.is_barrier:
            self._start()

    def _find(self, name: str) -> Register | str:
        return next((scope[name] for scope in reversed(self._scopes) if name in scope), name)

    def _operand(self, text: str):
        text = text.strip()
        if text[0] in "{[":
            inner = text[1:-1].strip()
            if text[0] == "{":
                return tuple(self._operand(part) for part in _split(inner))
            base, _, offset = inner.partition("+")
            return Address(self._find(base.strip()), int(offset or 0))
        if "|" in text:
            return tuple(self._operand(part) for part in text.split("|"))
        if text == "_":
            return None
        if re.match(r"0[fd]", text):
            return int(text[2:], 16)
        return int(text.rstrip("U"), 0) if re.match(r"-?\d", text) else self._find(text)


def _split(text: str) -> list[str]:
    """Split at commas outside of braces and brackets."""
    return [part for part in re.split(r",\s*(?![^{\[]*[}\]])", text) if part.strip()]
