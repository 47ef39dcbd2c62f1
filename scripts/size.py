"""Print how much code each room of the repository holds, and fail where a room is over its budget.

Sizes are printed as pyproject.toml takes them. A code line holds code: blank lines, comments and docstrings are free. A token is a name, a number, a string or a sign. Budgets
stand in pyproject.toml, [tool.kv_hf.size]: room = [code lines, files, tokens a line].
"""

import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
LAYOUT = {tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
SUFFIXES = (".py", ".c", ".h", ".inc")
C_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
C_TOKEN = re.compile(r"\w+|[^\w\s]")


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


def sizes(paths: list[str], rooms: list[str]) -> dict[str, list[float]]:
    """Return [code lines, files, tokens a line] of each room: of the files below a folder."""
    found = {}
    for room in rooms:
        own = [path for path in paths if path.startswith(f"{room}/") and path.endswith(SUFFIXES)]
        lines: list[tuple[str, int]] = []
        tokens = 0
        for path in own:
            text = (ROOT / path).read_text("utf-8")
            for number, count in (python_lines if path.endswith(".py") else c_lines)(text):
                lines.append((path, number))
                tokens += count
        code = len(set(lines))
        found[room] = [code, len(own), round(tokens / max(code, 1), 1)]
    return found


def main() -> int:
    """Print a table of all rooms; return how many are over their budgets."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    budgets = settings["tool"]["kv_hf"]["size"]
    command = ["git", "ls-files"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = sizes(listed.stdout.splitlines(), list(budgets))
    over = 0
    print("room = [code lines, files, tokens a line]")
    for room, size in found.items():
        print(f'"{room}" = {size}')
        if any(one > most for one, most in zip(size, budgets[room], strict=True)):
            over += 1
            print(
                f"    its budget is {budgets[room]}: shorten it, or raise it in pyproject.toml and say why"
            )
    return over


if __name__ == "__main__":
    sys.exit(main())
