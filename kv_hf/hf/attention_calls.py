"""The way in which a function gets its attention function from transformers' AttentionInterface and calls it."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
# after these the order of arguments is another one in each attention function: (module, query, key, value, attention_mask)
SHARED_ORDER = 5
# what sdpa and "kv_hf" take in the same order: those, dropout and scaling
ORDER_OF_SDPA = 7


@dataclass(frozen=True)
class AttentionCalls:
    """The uses of attention functions in one function.

    Attributes:
        gets: expressions that get one.
        calls: calls of one.
        fallbacks: expressions of what is called where the attention is 'eager'.
        astray: it is handed on, compared or stored, instead of called.
        opened: calls hand on arguments that the function did not get as they are: a dict of its own, or changed **kwargs.
    """

    gets: tuple[ast.expr, ...] = ()
    calls: tuple[ast.Call, ...] = ()
    fallbacks: tuple[ast.expr, ...] = ()
    astray: bool = False
    opened: bool = False

    @property
    def positional(self) -> int:
        """The most arguments that a call gives by position; a starred one counts as any number."""
        counts = (
            99 if any(isinstance(one, ast.Starred) for one in call.args) else len(call.args)
            for call in self.calls
        )
        return max(counts, default=0)

    @property
    def keywords(self) -> frozenset[str]:
        """Names of all arguments that calls give by name."""
        return frozenset(word.arg for call in self.calls for word in call.keywords if word.arg)


def calls_of(function: ast.AST) -> AttentionCalls:
    """Return what a function, or any other piece of code, does with the attention functions that it gets itself."""
    nodes = list(ast.walk(function))
    gets = [node for node in nodes if isinstance(node, ast.expr) and gets_attention(node)]
    if not gets:
        return AttentionCalls()
    names, values = set(), []
    for target, value in _assigned(nodes):
        if any(_is_part(value, get) for get in gets):
            names.add(target)
    for target, value in _assigned(nodes):
        if target in names:
            values += [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
    functions = [node.func for node in nodes if isinstance(node, ast.Call)]
    called = {id(function) for function in functions}
    used = {id(value) for value in values} | called
    loads = [
        node
        for node in nodes
        if isinstance(node, ast.Name) and node.id in names and isinstance(node.ctx, ast.Load)
    ]
    calls = tuple(
        node
        for node in nodes
        if isinstance(node, ast.Call)
        and (
            gets_attention(node.func) or (isinstance(node.func, ast.Name) and node.func.id in names)
        )
    )
    return AttentionCalls(
        tuple(gets),
        calls,
        tuple(_fallbacks(gets, values)),
        any(id(get) not in used for get in gets) or any(id(load) not in called for load in loads),
        any(_opens(call, nodes) for call in calls),
    )


def gets_attention(node: ast.AST) -> bool:
    """Say whether a node itself gets an attention function: ALL_ATTENTION_FUNCTIONS.get_interface(..) or [..]."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in ("get_interface", "get") and _INTERFACE in ast.unparse(node.func)
    return isinstance(node, ast.Subscript) and last_name(node.value) == _INTERFACE


def last_name(node: ast.expr) -> str | None:
    """Return "c" of a.b.c or of c, and None for other expressions."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def _assigned(nodes: list[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    """Yield (name, value) of assignments to one name."""
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    yield target.id, node.value


def _is_part(value: ast.expr, get: ast.expr) -> bool:
    return value is get or (isinstance(value, ast.IfExp) and get in (value.body, value.orelse))


def _fallbacks(gets: list[ast.expr], values: list[ast.expr]) -> Iterator[ast.expr]:
    for get in gets:
        if isinstance(get, ast.Call):
            yield from get.args[1:2]
            yield from (word.value for word in get.keywords if word.arg == "default")
    yield from (value for value in values if not gets_attention(value))


def _opens(call: ast.Call, nodes: list[ast.AST]) -> bool:
    """Say whether a call hands on a dict that is not the **kwargs of a function around it, as that one got it."""
    own = {
        node.args.kwarg.arg
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and node.args.kwarg
    }
    harmless = set()
    for node in nodes:
        if isinstance(node, ast.Call):
            harmless |= {id(word.value) for word in node.keywords if word.arg is None}
            if isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop"):
                harmless.add(id(node.func.value))
    for word in call.keywords:
        if word.arg is None:
            if not isinstance(word.value, ast.Name) or word.value.id not in own:
                return True
            name = word.value.id
            uses = (node for node in nodes if isinstance(node, ast.Name) and node.id == name)
            if any(id(use) not in harmless for use in uses):
                return True
    return False
