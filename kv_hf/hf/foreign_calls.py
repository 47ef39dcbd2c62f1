"""Calls of attention functions in code of other people, judged by the reaction of sdpa or of a known eager function."""

import ast
from collections.abc import Iterable, Iterator
from typing import Any

from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .attention_calls import ORDER_OF_SDPA, SHARED_ORDER, AttentionCalls, calls_of, last_name
from .dense import HARMLESS, parameters
from .eager_forms import what_it_reads
from .reach import Piece

# what "kv_hf" reads by name, and other attention functions read or drop
_BENDING = frozenset({"softcap", "s_aux", "position_bias", "indices"})
_TENSORS = frozenset({"module", "query", "key", "value", "attention_mask"})
_SHARED = _TENSORS | {"dropout", "scaling"}
_SHAPES = frozenset({"size", "dim", "stride", "ndimension", "numel"})
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def why_not_called(pieces: Iterable[Piece], current: str) -> str | None:
    """Return how code calls its attention in a way that `current` and "kv_hf" take differently, or None."""
    reasons = (
        reason
        for piece in pieces
        if piece.strict
        for reason in _reasons(piece, current)
        if reason is not None
    )
    return next(reasons, None)


def _reasons(piece: Piece, current: str) -> Iterator[str | None]:
    read = parameters(sdpa_attention_forward) - {"cache"}
    for name, function in _functions(piece.node, ""):
        calls = calls_of(function)
        if calls.gets:
            read_here, reason = _read_by(piece, name, calls, current)
            read = read & read_here if current == "eager" else read
            yield reason or _why_not_arguments(name, calls, current, read_here)
        if current == "eager":
            yield _why_not_masks(name, function)
    bent = _BENDING - read
    for node in ast.walk(piece.node):
        if isinstance(node, ast.Call) and _is_of_a_module(node.func):
            given = sorted(word.arg for word in node.keywords if word.arg in bent)
            if given:
                yield f"it passes {given[0]} on ({ast.unparse(node.func)}), which its attention does not read"


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield (name, code) of the outermost functions of a piece, and of the code outside of any."""
    if isinstance(node, _FUNCTIONS):
        yield f"{prefix}{node.name}", node
    elif isinstance(node, ast.ClassDef):
        for item in ast.iter_child_nodes(node):
            yield from _functions(item, f"{node.name}.")
    elif isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
        for item in ast.iter_child_nodes(node):
            yield from _functions(item, prefix)
    else:
        yield prefix.rstrip(".") or "its module", node


def _read_by(
    piece: Piece, name: str, calls: AttentionCalls, current: str
) -> tuple[frozenset[str], str | None]:
    """Return the arguments that the attention of today reads, and why nobody can say so."""
    if current != "eager":
        return parameters(sdpa_attention_forward) - {"cache"}, None
    reads: frozenset[str] = _SHARED | _BENDING
    for fallback in calls.fallbacks:
        read = what_it_reads(_value_of(fallback, piece))
        if read is None:
            return reads, (
                f"{name} attends with {ast.unparse(fallback)}, which is no eager attention that is known to do the same"
            )
        reads &= _SHARED | read
    if not calls.fallbacks:
        return reads, f"{name} has no eager attention that could be read"
    return reads, None


def _value_of(node: ast.expr, piece: Piece) -> Any:
    """Return what a name or attribute at the top of a module is, or None."""
    if isinstance(node, ast.Name):
        return vars(piece.module).get(node.id)
    if isinstance(node, ast.Attribute):
        return getattr(_value_of(node.value, piece), node.attr, None)
    return None


def _why_not_arguments(
    name: str, calls: AttentionCalls, current: str, read: frozenset[str]
) -> str | None:
    if calls.astray:
        return f"{name} does something else with its attention function than to call it"
    shared = SHARED_ORDER if current == "eager" else ORDER_OF_SDPA
    if calls.positional > shared:
        return f"{name} passes {calls.positional} arguments by position, whose order is not that of 'kv_hf'"
    if calls.opened:
        return f"{name} passes its attention arguments from a dict, so that nobody can say which"
    lost = sorted(calls.keywords - read - _TENSORS - HARMLESS)
    if lost:
        return f"{name} passes {', '.join(lost)} to its attention, which {current} attention drops"
    given = all(any(word.arg == "scaling" for word in call.keywords) for call in calls.calls)
    if current == "eager" and not given:
        return f"{name} does not pass scaling, for which eager functions have other defaults"
    return None


def _why_not_masks(name: str, function: ast.AST) -> str | None:
    """Return how code computes with masks, which are additive for 'eager' and bool for 'kv_hf'."""
    for node in ast.walk(function):
        if isinstance(node, ast.BinOp):
            taken = [node.left, node.right]
        elif isinstance(node, ast.AugAssign):
            taken = [node.target, node.value]
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert | ast.USub):
            taken = [node.operand]
        elif isinstance(node, ast.Call):
            taken = _taken_by(node)
        elif isinstance(node, ast.Assign):
            taken = [target for target in node.targets if isinstance(target, ast.Subscript)]
        else:
            continue
        if any(_is_mask(one) for one in taken):
            return f"{name} computes with the masks of 'eager' ({ast.unparse(node)})"
    return None


def _taken_by(call: ast.Call) -> list[ast.expr]:
    """Return what a call computes with: the object of a method, and the arguments of torch's functions."""
    if not isinstance(call.func, ast.Attribute):
        return []
    if last_name(_root(call.func)) in ("torch", "F", "nn"):
        return [*call.args, *(word.value for word in call.keywords)]
    return [] if call.func.attr in _SHAPES else [call.func.value]


def _is_mask(node: ast.expr) -> bool:
    while isinstance(node, ast.Subscript):
        node = node.value
    return isinstance(node, ast.Name) and "mask" in node.id


def _root(node: ast.expr) -> ast.expr:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node


def _is_of_a_module(function: ast.expr) -> bool:
    """Say whether a call is one of a part of the model: self.attention(..), super().forward(..), layer(..)."""
    return last_name(_root(function)) not in ("torch", "F", "nn", "math")
