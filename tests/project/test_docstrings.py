"""Public functions that take or return tensors say their shapes: CONTRIBUTING.md has the rule."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import ROOT

PACKAGE = ROOT / "kv_hf"
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
SHAPE = re.compile(r"\[[^\[\]]*\]")  # [] is a scalar's

Function = ast.FunctionDef | ast.AsyncFunctionDef


def public_functions(body: list[ast.stmt], owner: str = "") -> Iterator[tuple[str, Function]]:
    """Yield (name, node) of the public functions of a module, those of public classes included."""
    for node in body:
        if isinstance(node, Function) and not node.name.startswith("_"):
            yield owner + node.name, node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node.body, f"{owner}{node.name}.")
        elif isinstance(node, ast.If):
            yield from public_functions([*node.body, *node.orelse], owner)


def handles_tensors(function: Function) -> bool:
    """Say whether a torch.Tensor is named in the annotations of a function's arguments or result."""
    arguments = [one for one in ast.walk(function.args) if isinstance(one, ast.arg)]
    annotations = [one.annotation for one in arguments] + [function.returns]
    return any(re.search(r"\bTensor\b", ast.unparse(one)) is not None for one in annotations if one)


def functions_without_shapes(source: str) -> list[str]:
    """Return the public tensor functions of a source whose docstrings hold no shape in brackets."""
    return [
        name
        for name, function in public_functions(ast.parse(source).body)
        if handles_tensors(function) and not SHAPE.search(ast.get_docstring(function) or "")
    ]


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_docstrings_of_tensor_functions_give_shapes(path: Path) -> None:
    assert functions_without_shapes((PACKAGE / path).read_text("utf-8")) == []


def test_functions_without_shapes_finds_what_is_missing() -> None:
    source = '''
class Store:
    def read(self, ids: "torch.Tensor | None") -> None:
        """Read pages."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors."""

    def write(self, *new: torch.Tensor) -> None:
        """Write tokens [rows, heads, q_len, dim]."""

    def _own(self, x: torch.Tensor) -> None: ...

class _Hidden:
    def read(self, x: torch.Tensor) -> None: ...

def count(pages: int) -> int: ...

def bare(x: torch.Tensor): ...
'''
    assert functions_without_shapes(source) == ["Store.read", "Store.tensors", "bare"]
