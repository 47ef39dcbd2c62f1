"""The shape of the package: imports point down, files form no circles, and objects change their own fields only."""

import ast
from functools import cache

from paths import ROOT

PACKAGE = ROOT / "kv_hf"
LAYERS = [
    "backend_names errors extras files hub notices plugins printable records text_table user_dir version",
    "cache_names checks config config_numbers field_names formats read_budget recipe texts units",
    "geometry page_summary row_pages spec",
    "quant",
    "backends pages",
    "bridge",
    "cache",
    "hf",
    "doctor evaluation gqa planner",
    "serving",
    "__init__ __main__ cli",
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names.split()}
APART = [
    {"backends", "pages"},
    {"evaluation", "gqa"},
    {"evaluation", "planner"},
    {"gqa", "planner"},
]
# outside package -> the only parts that import it
HOMES = {
    "triton": {"backends"},
    "transformers": {"cache", "hf", "evaluation", "gqa", "planner", "doctor", "serving"},
    "lm_eval": {"evaluation"},
    "datasets": {"evaluation", "gqa", "texts"},
    "measure": set(),  # of scripts/, which no wheel carries
}
FILES = {path.relative_to(PACKAGE): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def tree(path):
    return ast.parse(FILES[path].read_text("utf-8"))


def part_of(path):
    return path.parts[0].removesuffix(".py")


def module_of(path):
    parts = ("kv_hf", *path.with_suffix("").parts)
    return parts[:-1] if parts[-1] == "__init__" else parts


@cache
def imports(path):
    """What a file imports, wherever in it, as tuples of names: modules, and names of modules."""
    package, found = ("kv_hf", *path.parts[:-1]), set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {tuple(alias.name.split(".")) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base = (*base, *(node.module.split(".") if node.module else ()))
            found |= {(*base, alias.name) for alias in node.names}
    return found


def test_imports_point_down():
    assert not [str(path) for path in FILES if part_of(path) not in RANK], "in no layer"
    wrong = []
    for path in FILES:
        own = part_of(path)
        for name in imports(path):
            other = name[1] if name[0] == "kv_hf" and len(name) > 1 else own
            above = other in RANK and RANK[other] > RANK[own]
            if above or any({own, other} == pair for pair in APART):
                wrong.append((str(path), other))
    assert not wrong


def test_outside_packages_are_imported_where_they_belong():
    wrong = [
        (str(path), name[0])
        for path in FILES
        for name in imports(path)
        if (name[0] in HOMES and part_of(path) not in HOMES[name[0]])
        or (name[0] == "triton" and path.parts[:2] != ("backends", "triton"))
    ]  # fmt: skip
    assert not wrong


def circles(files):
    """Files that reach themselves along imports, with the imports by which they do."""
    reached = {path: set(targets) for path, targets in files.items()}
    for middle in files:
        for targets in reached.values():
            if middle in targets:
                targets |= reached[middle]
    inside = {path for path in files if path in reached[path]}
    return {str(path): sorted(map(str, files[path] & inside)) for path in sorted(inside)}


def test_files_import_each_other_in_no_circle():
    """The package's own __init__ may hand functions out on demand; else two files never need each other."""
    known = {module_of(path): path for path in FILES}
    files = {}
    for path in FILES:
        modules = {name if name in known else name[:-1] for name in imports(path)}
        files[path] = {known[name] for name in modules if name in known} - {path}
    assert not circles(files)


def test_circles_finds_long_ones_and_no_others():
    files = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set()}
    assert circles(files) == {"a": ["b"], "b": ["c"], "c": ["a"]}


# -- who changes what ------------------------------------------------------------------------------------------

# one statement that no signal divides, on parts that the object has made for itself alone; and objects of transformers,
# numpy and ctypes, which have no method for it
ALLOWED = {
    *("pages/held_rows.py let_go", "pages/storage.py take_over", "pages/offload_storage.py leave"),
    *("pages/huge_pages.py _madvise", "pages/host_heap.py _malloc_trim", "bridge/lazy_kv.py numpy"),
    *("cache/compat.py forget_tokens", "cache/model_shape.py cross_config"),
    "cache/model_shape.py decoder_config",
}
MAKERS = {"__new__", "_make_wrapper_subclass", "_make_subclass", "make"}


def assignments(root):
    """Yield (target, value) of the assignments below a node, tuples taken apart."""
    for node in ast.walk(root):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            for target in getattr(node, "targets", None) or [node.target]:
                for one in ast.walk(target):
                    if isinstance(getattr(one, "ctx", None), ast.Store):
                        yield one, node.value


def makes_an_object(value):
    """Whether an expression calls a class, or what makes an instance of one."""
    if not isinstance(value, ast.Call):
        return False
    called = ast.unparse(value.func).split(".")[-1]
    return called.lstrip("_")[:1].isupper() or called in MAKERS


def foreign_assignments(module):
    """Yield (function, what is assigned) wherever a function changes an object that is neither its own nor made by it."""
    of_module = {
        one.id
        for node in module.body
        if not isinstance(node, ast.FunctionDef | ast.ClassDef)
        for one, _ in assignments(node)
        if isinstance(one, ast.Name)
    }
    for function in ast.walk(module):
        if not isinstance(function, ast.FunctionDef):
            continue
        made = {"self", "cls"} | of_module
        for one, value in assignments(function):
            if isinstance(one, ast.Name) and makes_an_object(value):
                made.add(one.id)
        for one, _ in assignments(function):
            if isinstance(one, ast.Attribute) and ast.unparse(one.value) not in made:
                yield function.name, ast.unparse(one)


def test_objects_change_their_own_fields_only():
    """Whoever wants another object changed calls a method, which says what it guarantees."""
    wrong = [
        (str(path), what)
        for path in FILES
        if part_of(path) in {"bridge", "cache", "pages"}
        for function, what in foreign_assignments(tree(path))
        if f"{path} {function}" not in ALLOWED
    ]
    assert not wrong


def test_foreign_assignments_finds_what_belongs_to_others():
    text = "class A:\n def f(self, b):\n  self.a = b.c = 1\n  d = B()\n  d.e = 2\n  self.g.h += 1"
    assert list(foreign_assignments(ast.parse(text))) == [("f", "b.c"), ("f", "self.g.h")]
