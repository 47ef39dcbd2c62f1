"""Print how much code each room of the repository holds, and fail where a room is over its budget.

usage: size.py [--toml]    with --toml, today's sizes as pyproject.toml takes them

A code line holds code: blank lines, comments and docstrings are free. A token is a name, a number, a string or a sign. Budgets
stand in pyproject.toml, [tool.kv_hf.size]: room = [code lines, files, tokens a line].
"""

import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
LAYOUT = {tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
C_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
C_TOKEN = re.compile(r"\w+|[^\w\s]")


@dataclass
class Size:
    """What files hold: code lines, files and tokens."""

    code: int = 0
    files: int = 0
    tokens: int = 0

    def add(self, text: str, is_python: bool) -> None:
        """Count one more file."""
        lines = list(python_lines(text) if is_python else c_lines(text))
        self.code += len({number for number, _ in lines})
        self.files += 1
        self.tokens += sum(tokens for _, tokens in lines)

    @property
    def per_line(self) -> float:
        """Return the tokens of a code line."""
        return self.tokens / max(self.code, 1)

    def over(self, room: str, code: int, files: int, per_line: float) -> str | None:
        """Return a sentence if a room is larger than its budget."""
        if self.code <= code and self.files <= files and round(self.per_line, 1) <= per_line:
            return None
        return (
            f"{room} holds {self.code} code lines in {self.files} files with {self.per_line:.1f} tokens a line, and its budget "
            f"is {code} in {files} with {per_line}; shorten it, or raise the budget in pyproject.toml and say why"
        )


def python_lines(text: str) -> Iterator[tuple[int, int]]:
    """Yield (line, tokens that end on it), with 0 for lines within a string; a statement that is a string alone is none."""
    statement: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NEWLINE:
            if [one.type for one in statement] != [tokenize.STRING]:
                for one in statement:
                    yield one.end[0], 1
                    yield from ((line, 0) for line in range(one.start[0], one.end[0]))
            statement = []
        elif token.type not in LAYOUT:
            statement.append(token)


def c_lines(text: str) -> Iterator[tuple[int, int]]:
    """Yield (line, its tokens) of C, for lines that hold any."""
    bare = C_COMMENT.sub(lambda comment: "\n" * comment[0].count("\n"), text)
    for number, line in enumerate(bare.splitlines()):
        if tokens := len(C_TOKEN.findall(line)):
            yield number, tokens


def sizes(paths: list[str], rooms: list[str]) -> dict[str, Size]:
    """Return the size of each room: of the files below a folder."""
    found = {room: Size() for room in rooms}
    for path in paths:
        if path.endswith((".py", ".c", ".h", ".inc")) and (ROOT / path).is_file():
            text = (ROOT / path).read_text("utf-8")
            for room in rooms:
                if path.startswith(f"{room}/"):
                    found[room].add(text, path.endswith(".py"))
    return found


def main() -> int:
    """Print a table of all rooms; return how many are over their budgets."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    budgets = settings["tool"]["kv_hf"]["size"]
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = sizes(listed.stdout.splitlines(), list(budgets))
    if "--toml" in sys.argv[1:]:
        for room, size in found.items():
            print(f'"{room}" = [{size.code}, {size.files}, {size.per_line:.1f}]')
        return 0
    print(f"{'room':20}{'code':>8}{'files':>8}{'tokens a line':>16}")
    for room, size in found.items():
        print(f"{room:20}{size.code:8}{size.files:8}{size.per_line:16.1f}")
    over = [line for room, size in found.items() if (line := size.over(room, *budgets[room]))]
    print("\n".join(over) or "every room is within its budget")
    return len(over)


if __name__ == "__main__":
    sys.exit(main())
