"""Fingerprints of functions: their source without comments, docstring and layout, as a hash."""

import ast
import hashlib
import inspect
import textwrap
from typing import Any


def normal_form(source: str) -> str:
    """Return the lines of a function that say what it does, the same under all versions of Python."""
    source = textwrap.dedent(source)
    lines = source.splitlines()
    definition: Any = ast.parse(source).body[0]
    first = definition.body[0]
    if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
        assert first.end_lineno is not None
        lines[first.lineno - 1 : first.end_lineno] = []
    kept = (line.rstrip() for line in lines)
    return "\n".join(line for line in kept if line and not line.lstrip().startswith("#"))


def fingerprint(function: Any) -> str | None:
    """Return 16 hexadecimal digits for what a function does, or None where its source is not there."""
    try:
        return fingerprint_of_source(inspect.getsource(inspect.unwrap(function)))
    except (OSError, TypeError, SyntaxError, IndexError):
        return None


def fingerprint_of_source(source: str) -> str:
    """Return 16 hexadecimal digits for the source of one function."""
    return hashlib.sha256(normal_form(source).encode()).hexdigest()[:16]


def methods_called(name: str, source: str) -> list[str]:
    """Return the source of each method `name` of a module, classes one after another, without importing it."""
    lines, found = source.splitlines(), []
    start = f"    def {name}("
    for first, line in enumerate(lines):
        if line.startswith(start):
            end = first + 1
            while end < len(lines) and (not lines[end].strip() or lines[end].startswith("     ")):
                end += 1
            # the signature may end in a line of its own: "    ) -> X:"
            if end < len(lines) and lines[end].startswith("    )"):
                end += 1
                while end < len(lines) and (
                    not lines[end].strip() or lines[end].startswith("     ")
                ):
                    end += 1
            found.append("\n".join(lines[first:end]))
    return found
