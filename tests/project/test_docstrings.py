"""Public functions that take or return tensors say their shapes: CONTRIBUTING.md has the rule."""

import ast
import re

from paths import ROOT

SHAPE = re.compile(r"\[[^\[\]]*\]")  # [] is a scalar's


def public_functions(body, owner=""):
    """Yield (name, node) of the public functions of a module, those of public classes included."""
    for node in body:
        if isinstance(node, ast.If):
            yield from public_functions([*node.body, *node.orelse], owner)
        elif getattr(node, "name", "_").startswith("_"):
            continue
        elif isinstance(node, ast.ClassDef):
            yield from public_functions(node.body, f"{owner}{node.name}.")
        else:
            yield owner + node.name, node


def functions_without_shapes(source):
    """Return the public functions that name a Tensor in their annotations and no shape in their docstrings."""
    found = []
    for name, function in public_functions(ast.parse(source).body):
        arguments = [one.annotation for one in ast.walk(function.args) if isinstance(one, ast.arg)]
        annotations = [ast.unparse(one) for one in [*arguments, function.returns] if one]
        if any(re.search(r"\bTensor\b", one) for one in annotations):
            found += [] if SHAPE.search(ast.get_docstring(function) or "") else [name]
    return found


def test_docstrings_of_tensor_functions_give_shapes():
    modules = sorted((ROOT / "kv_hf").rglob("*.py"))
    found = {path.name: functions_without_shapes(path.read_text("utf-8")) for path in modules}
    assert not {name: functions for name, functions in found.items() if functions}


def test_functions_without_shapes_finds_what_is_missing():
    source = '''
class Store:
    def read(self, ids: "torch.Tensor | None") -> None:
        """Read pages."""
    def write(self, *new: torch.Tensor) -> None:
        """Write tokens [rows, heads, q_len, dim]."""
    def _own(self, x: torch.Tensor) -> None: ...
def count(pages: int) -> int: ...
def bare(x: int) -> list[torch.Tensor]: ...
'''
    assert functions_without_shapes(source) == ["Store.read", "bare"]
