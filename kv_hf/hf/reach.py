"""The code of other people that a model may run: from its classes along the names in them, through helpers and their modules.

Finds code, and judges none of it. transformers, torch and the standard library are not followed.
"""

import ast
import functools
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

_FOLLOWED_BY_NOBODY = frozenset(
    {
        *("torch", "torchvision", "torchaudio", "transformers", "accelerate", "peft", "kv_hf"),
        *("numpy", "safetensors", "tokenizers", "huggingface_hub", "triton", "einops", "PIL"),
    }
)
_INSTALLED = ("site-packages", "dist-packages")


@dataclass(frozen=True, eq=False)
class Piece:
    """A statement of a module that a model may run.

    Attributes:
        module: whose statement it is.
        node: its syntax tree.
        strict: it belongs to the model; else to an installed library that the model calls, and is not followed further.
    """

    module: ModuleType
    node: ast.AST
    strict: bool


@dataclass
class Reach:
    """The code that was found.

    Attributes:
        pieces: all code that was found.
        unread: why some code could not be read.
    """

    pieces: list[Piece] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    _seen: set[int] = field(default_factory=set)
    _roots: set[str] = field(default_factory=set)
    _waiting: list[Any] = field(default_factory=list)
    _statements: list[tuple[ModuleType, ast.stmt]] = field(default_factory=list)

    def follow(self, thing: type | FunctionType, *, strict: bool) -> None:
        """Add a class with its bases, or a function, and all that it names.

        Args:
            strict: it is part of the model itself; else it is a layer that a library brought in.
        """
        name = _module_of(thing)
        if strict:
            self._roots.add(name.split(".")[0])
        self._waiting.append(thing)
        while self._waiting or self._statements:
            if self._statements:
                self._add_node(*self._statements.pop())
            else:
                self._add_value(self._waiting.pop())

    def _add(self, thing: Any) -> None:
        if isinstance(thing, type):
            for base in thing.__mro__:
                if self._is_new(base, base.__module__):
                    self._add_definition(base)
                    for value in list(vars(base).values()):
                        self._add_enclosed(value)
        elif self._is_new(thing, _module_of(thing)):
            self._add_definition(thing)
            self._add_enclosed(thing)

    def _is_new(self, thing: Any, module: str) -> bool:
        """Remember a thing; True where it is to be followed, and was not yet."""
        if is_trusted(module) or id(thing) in self._seen:
            return False
        self._seen.add(id(thing))
        return True

    def _add_enclosed(self, function: Any) -> None:
        """Add the functions and objects around a function that it was defined in."""
        for cell in getattr(function, "__closure__", None) or ():
            self._waiting.append(_content(cell))

    def _add_definition(self, thing: Any) -> None:
        module = sys.modules.get(_module_of(thing))
        if module is None or statements_of(module) is None:
            self.unread.append(f"the source of {thing.__qualname__} is not there to be read")
            return
        found = _definitions(module, thing)
        for node in found:
            self._add_node(module, node)
        if not found:
            self._add_module(module)

    def _add_module(self, module: ModuleType) -> None:
        if not self._is_new(module, module.__name__):
            return
        tops = statements_of(module)
        if tops is None:
            if _is_python(module):
                self.unread.append(
                    f"the source of module {module.__name__} is not there to be read"
                )
            return
        for node in tops.body:
            self._add_node(module, node)

    def _add_node(self, module: ModuleType, node: ast.AST) -> None:
        if id(node) in self._seen:
            return
        self._seen.add(id(node))
        strict = module.__name__.split(".")[0] in self._roots or not _is_installed(module)
        self.pieces.append(Piece(module, node, strict))
        if not strict:
            return
        tops = statements_of(module)
        for one in ast.walk(node):
            if isinstance(one, ast.Import | ast.ImportFrom):
                self._waiting += self._imported(module, one)
            elif isinstance(one, ast.Name):
                bound = [] if tops is None else tops.bound.get(one.id, [])
                self._statements += [(module, statement) for statement in bound]
                self._waiting.append(vars(module).get(one.id))

    def _add_value(self, value: Any) -> None:
        """Add what a name stands for: a module, a class, a function, or the class of any other object."""
        if isinstance(value, ModuleType):
            self._add_module(value)
        elif isinstance(value, type | FunctionType):
            self._add(value)
        elif hasattr(value, "__wrapped__") and isinstance(value.__wrapped__, FunctionType):
            self._add(value.__wrapped__)
        elif not is_trusted(type(value).__module__):
            self._add(type(value))

    def _imported(self, module: ModuleType, node: ast.Import | ast.ImportFrom) -> Iterator[Any]:
        """Yield what an import brings in, and note modules that are not loaded although they are there."""
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield self._module(alias.name)
            return
        package = module.__package__ or ""
        base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        name = ".".join([*base, *([node.module] if node.module else [])])
        source = self._module(name)
        if source is None:
            return
        for alias in node.names:
            if alias.name == "*":
                yield source
            else:
                yield getattr(source, alias.name, None) or sys.modules.get(f"{name}.{alias.name}")

    def _module(self, name: str) -> ModuleType | None:
        root = name.split(".")[0]
        if is_trusted(root):
            return None
        module = sys.modules.get(name)
        if module is None and (root in sys.modules or importlib.util.find_spec(root) is not None):
            self.unread.append(f"module {name}, which it imports, is not loaded yet")
        return module


@dataclass(frozen=True)
class Statements:
    """The statements at the top of a module, all of them and by the names that they bind."""

    body: list[ast.stmt]
    bound: dict[str, list[ast.stmt]]


@functools.cache
def statements_of(module: ModuleType) -> Statements | None:
    """Return the statements of a module, or None where its source is not there."""
    try:
        body = ast.parse(inspect.getsource(module)).body
    except (OSError, TypeError, SyntaxError):
        return None
    bound: dict[str, list[ast.stmt]] = {}
    for statement in body:
        for name in _bound_by(statement):
            bound.setdefault(name, []).append(statement)
    return Statements(body, bound)


def is_trusted(module: str) -> bool:
    """Say whether a module is one that knows nothing of this model: of torch, transformers, Python itself, ..."""
    root = module.split(".")[0]
    return root in _FOLLOWED_BY_NOBODY or root in sys.stdlib_module_names


def _module_of(thing: Any) -> str:
    """Return the name of the module whose code a class or function is; a wrapper may bear another one's name."""
    if isinstance(thing, FunctionType):
        return str(thing.__globals__.get("__name__", thing.__module__))
    return str(thing.__module__)


def _definitions(module: ModuleType, thing: Any) -> list[ast.AST]:
    """Return the syntax trees that may define a class (by its name) or a function (by its line)."""
    tops = statements_of(module)
    assert tops is not None
    nodes = [one for statement in tops.body for one in ast.walk(statement)]
    if isinstance(thing, type):
        return [
            one for one in nodes if isinstance(one, ast.ClassDef) and one.name == thing.__name__
        ]
    line = thing.__code__.co_firstlineno
    functions = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    return [one for one in nodes if isinstance(one, functions) and line == _first_line(one)]


def _first_line(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> int:
    decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
    return min([node.lineno, *(one.lineno for one in decorators)])


def _bound_by(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement at the top of a module binds, inside of if, try and with too."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
        return
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Subscript | ast.Attribute) and not isinstance(node.ctx, ast.Load):
            yield from _root_of(node)  # TABLE["sdpa"] = 0.3
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield from _root_of(node.value.func)  # TABLE.update(sdpa=0.3)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).split(".")[0]


def _root_of(node: ast.expr) -> Iterator[str]:
    """Yield "a" of a.b[c].d, and nothing where an expression begins otherwise."""
    while isinstance(node, ast.Subscript | ast.Attribute):
        node = node.value
    if isinstance(node, ast.Name):
        yield node.id


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _is_python(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return file is None or str(file).endswith((".py", ".pyc"))


def is_installed_module(name: str) -> bool:
    """Say whether a module lies where packages are installed."""
    module = sys.modules.get(name)
    return module is not None and _is_installed(module)


def _is_installed(module: ModuleType) -> bool:
    file = str(getattr(module, "__file__", None) or "")
    return any(part in file.replace("\\", "/").split("/") for part in _INSTALLED)
