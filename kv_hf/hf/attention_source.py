"""Facts about a model's attention, read from its sources: uses of transformers' AttentionInterface and of the attention's name.

Decides nothing about one model on its own: `hf/models.py` asks about the classes that a model is made of. A class is read
once per process. Code whose source is not there (a notebook, a frozen program) proves nothing.
"""

import ast
import functools
import hashlib
import inspect
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType

import torch

from .attention_calls import calls_of, gets_attention, last_name

NAME_OF_ATTENTION = "_attn_implementation"
_REGISTRY = "_FUNCTIONS"  # tables of attention and mask functions by name
# what a model compares the name with where it masks by itself, and hands the choice to other attentions as `indices`
_MASKED_BY_THE_MODEL = frozenset({"eager", "sdpa"})
# Functions that ask for the name "sdpa" and were read: both branches give what "kv_hf" needs, because its masks are
# explicit wherever queries are fewer than keys, and bool as sdpa's. By name and by digest of the syntax tree.
_READ = {
    # gemma4 and gemma4_unified (5.23): keeps all queries where sdpa's mask may be None; ours never is
    "_maybe_slice_kv_shared_inputs": frozenset({"dbd39b9fb7d0f850", "5a2792a666f2f8fb"}),
    # glm5_next (5.17 to 5.23): bool mask for sdpa, additive mask for others; "kv_hf" takes both
    "build_attention_mask_from_topk": frozenset({"2b7ca584d48e28e8"}),
}


@dataclass(frozen=True)
class Comparison:
    """One place that asks for the attention's name.

    Attributes:
        where: "Class.function" or "function".
        text: the expression.
        node: its syntax tree.
        honoured: "kv_hf" is right in whichever branch.
    """

    where: str
    text: str
    node: ast.expr
    honoured: bool

    def differs(self, one: str, other: str) -> bool:
        """Say whether it may have another outcome under the name `other` than under `one`."""
        if self.honoured:
            return False
        first, second = outcome(self.node, one), outcome(self.node, other)
        return first is None or first != second


@dataclass(frozen=True)
class Facts:
    """The uses in one function, or in all functions of a class together.

    Attributes:
        updates_cache: hands keys and values of a layer to a cache.
        reads_interface: gets its attention function from AttentionInterface.
        masks_by_itself: calls a softmax or scaled_dot_product_attention, and names a mask.
        joins_mask: gets its attention function from AttentionInterface, and adds columns to the mask before.
        arguments: keywords of its calls of the attention function, beside those that come in as **kwargs.
        comparisons: places that ask for the attention's name.
        opened: hands its attention function other arguments than those that it names or got as **kwargs.
    """

    updates_cache: bool = False
    reads_interface: bool = False
    masks_by_itself: bool = False
    joins_mask: bool = False
    arguments: frozenset[str] = frozenset()
    comparisons: tuple[Comparison, ...] = ()
    opened: bool = False

    def __or__(self, other: "Facts") -> "Facts":
        return Facts(
            self.updates_cache or other.updates_cache,
            self.reads_interface or other.reads_interface,
            self.masks_by_itself or other.masks_by_itself,
            self.joins_mask or other.joins_mask,
            self.arguments | other.arguments,
            self.comparisons + other.comparisons,
            self.opened or other.opened,
        )


@dataclass(frozen=True)
class Source:
    """The functions of a module, and the methods of its classes by class name."""

    functions: dict[str, ast.FunctionDef]
    classes: dict[str, dict[str, ast.FunctionDef]]


@functools.cache
def source_of(module: ModuleType) -> Source | None:
    """Return the parsed source of a module, or None where there is none."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return None
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    classes = {
        node.name: {item.name: item for item in _methods(node)}
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    return Source(functions, classes)


def _methods(node: ast.AST) -> Iterator[ast.FunctionDef]:
    """Yield the functions in the body of a class, those under an if or try included."""
    for item in ast.iter_child_nodes(node):
        if isinstance(item, ast.FunctionDef):
            yield item
        elif isinstance(item, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from _methods(item)


@functools.cache
def facts_of(cls: type) -> Facts | None:
    """Return what a class does, inherited methods and the functions of its module included; None without a source.

    Base classes of torch and the general ones of transformers (PreTrainedModel, GenerationMixin) are left out.
    """
    found, seen = Facts(), set()
    for base in cls.__mro__:
        if not is_modeling(base):
            continue
        module = sys.modules.get(base.__module__)
        source = None if module is None else source_of(module)
        if source is None or base.__name__ not in source.classes:
            return None
        for name, function in source.classes[base.__name__].items():
            if name not in seen:
                seen.add(name)
                found |= _with_helpers(function, f"{cls.__name__}.{name}", source)
    return found


def classes_of(module: ModuleType) -> Iterator[type]:
    """Yield the torch modules that are defined in a Python module."""
    for found in list(vars(module).values()):
        is_module = isinstance(found, type) and issubclass(found, torch.nn.Module)
        if is_module and found.__module__ == module.__name__:
            yield found


def outcome(node: ast.expr, name: str) -> bool | None:
    """Return what an expression about the attention's name is when that is `name`, None where the source does not say."""
    if isinstance(node, ast.Call):
        assert isinstance(node.func, ast.Attribute)
        given = [_constant(argument) for argument in node.args]
        if node.func.attr in ("startswith", "endswith") and len(given) == 1 and given[0]:
            return any(getattr(name, node.func.attr)(part) for part in given[0])
        return None
    assert isinstance(node, ast.Compare)
    if len(node.ops) != 1:
        return None
    operator, right = node.ops[0], node.comparators[0]
    if _asks(node.left):
        if _REGISTRY in ast.unparse(right):  # names of registered functions: ours is one
            return isinstance(operator, ast.In)
        values = _constant(right)
    elif isinstance(operator, (ast.In, ast.NotIn)):  # "flash" in name
        parts = _constant(node.left)
        if parts is None:
            return None
        inside = any(part in name for part in parts)
        return inside if isinstance(operator, ast.In) else not inside
    else:
        values = _constant(node.left)
    if values is None:
        return None
    equal = name in values
    return equal if isinstance(operator, (ast.Eq, ast.In, ast.Is)) else not equal


def _constant(node: ast.expr) -> tuple[str, ...] | None:
    """Return the strings of a literal, or None where it is none."""
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    if value is None:
        return ()
    if not isinstance(value, str | tuple | list | set | dict):
        return None  # a number: len(name) == 4
    found = (value,) if isinstance(value, str) else tuple(value)
    return found if all(isinstance(one, str) for one in found) else None


def is_modeling(cls: type) -> bool:
    """Say whether a class is part of a model's own code."""
    parts = cls.__module__.split(".")
    if parts[0] == "transformers":
        return parts[1] == "models"
    return parts[0] not in ("torch", "builtins", "abc", "typing", "accelerate", "peft", "kv_hf")


def _with_helpers(function: ast.FunctionDef, where: str, source: Source) -> Facts:
    """Return the facts of a function and of the functions of its module that it names."""
    found, waiting, seen = Facts(), [(function, where)], {function.name}
    while waiting:
        current, place = waiting.pop()
        found |= _facts(current, place)
        for node in ast.walk(current):
            if isinstance(node, ast.Name) and node.id in source.functions and node.id not in seen:
                seen.add(node.id)
                waiting.append((source.functions[node.id], node.id))
    return found


def _facts(function: ast.FunctionDef, where: str) -> Facts:
    attention, aliases = set(), set()
    for node in ast.walk(function):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {target.id for target in targets if isinstance(target, ast.Name)}
            if gets_attention(node.value):
                attention |= names
            elif isinstance(node.value, ast.Attribute) and node.value.attr == NAME_OF_ATTENTION:
                aliases |= names
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    arguments = frozenset(
        keyword.arg
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id in attention
        for keyword in call.keywords
        if keyword.arg
    )
    called = {last_name(call.func) for call in calls}
    comparisons = tuple(
        Comparison(where, ast.unparse(node), node, _is_honoured(node, function, arguments))
        for node in ast.walk(function)
        if isinstance(node, ast.expr) and _is_question(node, aliases)
    )
    reads = any(gets_attention(node) for node in ast.walk(function))
    named = _names(function) | {
        node.arg for node in ast.walk(function) if isinstance(node, ast.arg)
    }
    joins = any(
        last_name(call.func) in ("cat", "pad") and "attention_mask" in _names(call)
        for call in calls
    )
    return Facts(
        any(_is_update(call) for call in calls),
        reads,
        bool(called & {"softmax", "scaled_dot_product_attention"})
        and any("mask" in name for name in named),
        reads and joins,
        arguments,
        comparisons,
        calls_of(function).opened,
    )


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _is_update(call: ast.Call) -> bool:
    """Say whether a call hands keys and values to a cache: x.update(keys, values, layer_idx, ..).

    Convolutions over audio hand their caches one tensor, or other things behind it.
    """
    if last_name(call.func) != "update" or len(call.args) < 2:
        return False
    if len(call.args) == 2:
        return any(keyword.arg == "layer_idx" for keyword in call.keywords)
    return "layer" in ast.unparse(call.args[2])


def _asks(node: ast.expr, aliases: Iterable[str] = ()) -> bool:
    """Say whether an expression is the attention's name."""
    if isinstance(node, ast.Attribute):
        return node.attr.startswith(NAME_OF_ATTENTION)
    if isinstance(node, ast.Name):
        return node.id in aliases or node.id == NAME_OF_ATTENTION
    return isinstance(node, ast.Call) and NAME_OF_ATTENTION in ast.unparse(node)


def _is_question(node: ast.AST, aliases: Iterable[str]) -> bool:
    if isinstance(node, ast.Compare):
        return any(_asks(one, aliases) for one in (node.left, *node.comparators))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return _asks(node.func.value, aliases) and node.func.attr != "get_interface"
    return False


def _is_honoured(node: ast.AST, function: ast.FunctionDef, arguments: frozenset[str]) -> bool:
    """Say whether "kv_hf" is right in every branch of a comparison."""
    if function.name in _READ:
        return digest(function) in _READ[function.name]
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In) and "indices" in arguments:
        values = _constant(node.comparators[0])
        return values is not None and set(values) == _MASKED_BY_THE_MODEL
    return False


def digest(function: ast.FunctionDef) -> str:
    """Return a short digest of a function's syntax tree, comments and docstring left out."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    text = "\n".join(ast.unparse(statement) for statement in body)
    return hashlib.sha256(f"{ast.unparse(function.args)}\n{text}".encode()).hexdigest()[:16]
