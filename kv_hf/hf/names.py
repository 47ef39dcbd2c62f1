"""Mentions of the attention's name in code of other people, and the forms of mentions that are harmless."""

import ast
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..formats import ATTENTION_NAME
from .attention_calls import gets_attention, last_name
from .attention_source import NAME_OF_ATTENTION, outcome
from .reach import Piece

_PART = (
    "attn_impl"  # of every way to write it: _attn_implementation, attn_implementation, .._internal
)
_WRITTEN = ("_attn_implementation", "_attn_implementation_internal", "attn_implementation")
# tables from which the name, or what is called under it, can be read
_TABLES = frozenset(
    {
        *("ALL_ATTENTION_FUNCTIONS", "ALL_MASK_ATTENTION_FUNCTIONS", "AttentionInterface"),
        *("AttentionMaskInterface", "sdpa_attention_forward"),
    }
)
_BY_STRING = frozenset({"getattr", "setattr", "hasattr", "delattr"})
_ANYTHING = frozenset({"eval", "exec", "vars", "__import__", "import_module", "attrgetter"})
_EQUAL = ast.Eq | ast.NotEq | ast.In | ast.NotIn | ast.Is | ast.IsNot
_SPEAKS = frozenset({"logger", "logging", "warnings"})


def why_not_named(piece: Piece, current: str) -> str | None:
    """Return how a piece of code may do something else under another name of its attention than `current`, or None."""
    nodes = list(ast.walk(piece.node))
    harmless: set[int] = set()
    for node in nodes:
        if isinstance(node, ast.expr):
            told = _told_apart(node, current)
            if told:
                text = f"({ast.unparse(node)})"
                return f"{_where(piece, node)} goes another way for another attention {text}"
            if told is not None:
                harmless |= {id(one) for one in ast.walk(node)}
        harmless |= set(_harmless_in(node, piece.module))
    for node in nodes:
        if id(node) in harmless:
            continue
        if _mentions(node):
            return f"{_where(piece, node)} mentions the attention's name ({_text(node)}), and what it does with that is not known"
        if last_name_of(node) in _TABLES:
            return f"{_where(piece, node)} uses {last_name_of(node)} otherwise than to call its attention"
        if piece.strict and _hides_names(node, piece.module):
            return f"{_where(piece, node)} reads names that its text does not say ({_text(node)})"
    return None


def last_name_of(node: ast.AST) -> str | None:
    """Return the last name of a name or attribute that is read, and None for anything else."""
    return last_name(node) if isinstance(node, ast.Name | ast.Attribute) else None


def _told_apart(node: ast.expr, current: str) -> bool | None:
    """Say whether a plain comparison of the name has another outcome under ours; None where it is no plain comparison."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        sides = [node.left, node.comparators[0]]
        if sum(map(_is_name, sides)) != 1:
            return None
        other = sides[1] if _is_name(sides[0]) else sides[0]
        inside = isinstance(node.ops[0], ast.In | ast.NotIn)
        part_of_a_text = inside and other is sides[1] and isinstance(other, ast.Constant)
        if part_of_a_text or not isinstance(node.ops[0], _EQUAL):
            return None
        if any(_mentions(one) for one in ast.walk(other)):
            return None
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if not _is_name(node.func.value) or node.func.attr not in ("startswith", "endswith"):
            return None
    else:
        return None
    before, after = outcome(node, current), outcome(node, ATTENTION_NAME)
    return before is None or before != after


def _is_name(node: ast.expr) -> bool:
    """Say whether an expression is x._attn_implementation."""
    return isinstance(node, ast.Attribute) and node.attr == NAME_OF_ATTENTION


def _harmless_in(node: ast.AST, module: ModuleType) -> Iterator[int]:
    """Yield ids of the nodes that may be mentioned because of `node` around them."""
    table = _table_in(node)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        yield id(node.value)  # a docstring
    elif isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and _speaks(node.func)):
        yield from (id(one) for one in ast.walk(node))
    elif isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant):
        yield id(node)  # attn_implementation="eager" for another model
    elif table is not None and _is_shared_table(table, module):
        yield id(table)
        asked = [node.slice] if isinstance(node, ast.Subscript) else node.args[:1]  # type: ignore[attr-defined]
        yield from (id(one) for one in asked if _is_name(one))


def _table_in(node: ast.AST) -> ast.expr | None:
    """Return the table of attention functions that a node gets one from, or None where it does not."""
    if not gets_attention(node):
        return None
    if isinstance(node, ast.Call):
        return node.func.value if isinstance(node.func, ast.Attribute) else None
    return node.value if isinstance(node, ast.Subscript) else None


def _is_shared_table(table: ast.expr, module: ModuleType) -> bool:
    """Say whether an expression is transformers' own table, by a name at the top of the module."""
    value: Any = vars(module).get(table.id) if isinstance(table, ast.Name) else None
    if isinstance(table, ast.Attribute) and isinstance(table.value, ast.Name):
        value = getattr(vars(module).get(table.value.id), table.attr, None)
    return value is ALL_ATTENTION_FUNCTIONS


def _speaks(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and last_name(function.value) in _SPEAKS


def _mentions(node: ast.AST) -> bool:
    """Say whether a node itself is a mention of the name; sentences are none."""
    return any(_PART in word for word in _words(node))


def _words(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str) and not any(letter.isspace() for letter in node.value):
            yield node.value
    elif isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.arg | ast.keyword):
        yield node.arg or ""
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.MatchClass):
        yield from node.kwd_attrs
    elif isinstance(node, ast.alias):
        yield from (node.name, node.asname or "")


def _hides_names(node: ast.AST, module: ModuleType) -> bool:
    """Say whether a node reads an attribute whose name only a run would tell, and which could be the attention's."""
    if isinstance(node, ast.Attribute):
        return node.attr in ("__dict__", "__getattribute__", "import_module", "attrgetter")
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return False
    if node.func.id in _ANYTHING:
        return True
    if node.func.id not in _BY_STRING or len(node.args) < 2:
        return node.func.id in _BY_STRING
    owner, name = node.args[:2]
    if isinstance(owner, ast.Name) and isinstance(vars(module).get(owner.id), ModuleType):
        return False
    start = _start_of(name)
    return start is None or any(word.startswith(start) for word in _WRITTEN if word != start)


def _start_of(name: ast.expr) -> str | None:
    """Return what an expression for an attribute's name is known to begin with; the whole name gets an end mark."""
    if isinstance(name, ast.Constant) and isinstance(name.value, str):
        return name.value + "\0"
    if isinstance(name, ast.JoinedStr) and name.values and isinstance(name.values[0], ast.Constant):
        return str(name.values[0].value)
    if isinstance(name, ast.BinOp) and isinstance(name.op, ast.Add):
        left = _start_of(name.left)
        return None if left is None else left.rstrip("\0")
    return None


def _where(piece: Piece, node: ast.AST) -> str:
    """Return "Class.function" or "function" around a node, or the module's name."""
    around = [
        one
        for one in ast.walk(piece.node)
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and any(inner is node for inner in ast.walk(one))
    ]
    return ".".join(one.name for one in around) or piece.module.__name__


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.expr):
        return ast.unparse(node)
    return next((word for word in _words(node) if _PART in word), type(node).__name__)
