"""The shape of the package: imports point down, files form no circles, and objects change their own fields only."""

import ast
from pathlib import Path

import pytest

import kv_hf

ROOT = Path(kv_hf.__file__).parent
LAYERS = [
    {
        "backend_names",
        "errors",
        "extras",
        "files",
        "hub",
        "user_dir",
        "notices",
        "plugins",
        "printable",
        "records",
        "text_table",
        "version",
    },
    {
        "cache_names",
        "cache_options",
        "checks",
        "config",
        "config_given",
        "config_layers",
        "config_numbers",
        "config_reading",
        "config_room",
        "config_sizes",
        "field_names",
        "formats",
        "read_budget",
        "recipe",
        "texts",
        "units",
    },
    {"geometry", "page_summary", "row_pages", "spec"},
    {"quant"},
    {"backends", "pages"},
    {"bridge"},
    {"cache"},
    {"hf"},
    {"evaluation", "gqa", "planner", "doctor"},
    {"serving"},
    {"__main__", "cli"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
SIBLINGS = [
    {"backends", "pages"},
    {"evaluation", "gqa"},
    {"evaluation", "planner"},
    {"gqa", "planner"},
]
MODULES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


def part_of(path):
    return path.parts[0].removesuffix(".py")


def imports(path):
    """Yield (parts of the package, outside modules) that a file imports, wherever in it."""
    package = ("kv_hf", *path.parts[:-1])
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.split(".")
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            names = [*base, *(node.module.split(".") if node.module else [])]
            if node.level and not node.module:
                for alias in node.names:
                    yield [*names, alias.name]
            else:
                yield names


@pytest.mark.parametrize(
    "path", [p for p in MODULES if p.name != "__init__.py" or len(p.parts) > 1], ids=str
)
def test_module_imports_point_down(path):
    own = part_of(path)
    assert own in RANK, f"{path} belongs to no layer"
    for names in imports(path):
        if names[0] != "kv_hf" or len(names) < 2:
            continue
        other = names[1]
        assert RANK[other] <= RANK[own], f"{path} imports {other}, which lies above {own}"
        clash = any({own, other} <= pair and own != other for pair in SIBLINGS)
        assert not clash, f"{path} imports {other}, which lies beside {own}"


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_outside_packages_are_imported_where_they_belong(path):
    for names in imports(path):
        assert names[0] != "measure", f"{path} imports scripts/measure, which no wheel carries"
        if names[0] == "triton":
            assert path.parts[:2] == ("backends", "triton"), f"{path} imports triton"
        if names[0] == "transformers":
            assert part_of(path) in {
                "cache",
                "hf",
                "evaluation",
                "gqa",
                "planner",
                "doctor",
                "serving",
            }, f"{path} imports transformers"
        assert names[0] != "lm_eval" or part_of(path) == "evaluation"
        assert names[0] != "datasets" or part_of(path) in {"evaluation", "gqa", "texts"}


def module_of(path):
    parts = ("kv_hf", *path.with_suffix("").parts)
    return parts[:-1] if parts[-1] == "__init__" else parts


def imported_files(path, known):
    """The files of the package that one imports, wherever in it: within functions, and for annotations alone too."""
    package = ("kv_hf", *path.parts[:-1])
    found = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            found |= {tuple(alias.name.split(".")) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base = (*base, *(node.module.split(".") if node.module else ()))
            named = {(*base, alias.name) for alias in node.names}
            found |= {name if name in known else base for name in named}
    return {known[name] for name in found if name in known} - {path}


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
    known = {module_of(path): path for path in MODULES}
    found = circles({path: imported_files(path, known) for path in MODULES})
    assert not found


def test_circles_finds_long_ones_and_no_others():
    files = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set()}
    assert circles(files) == {"a": ["b"], "b": ["c"], "c": ["a"]}


# -- who changes what ------------------------------------------------------------------------------------------

# (file, function): one statement that no signal divides, on parts that the object has made for itself alone
TOGETHER = {
    ("pages/held_rows.py", "let_go"),
    ("pages/storage.py", "take_over"),
    ("pages/offload_storage.py", "leave"),
}
# objects of transformers, numpy and ctypes, which have no method for it
OF_OTHERS = {
    ("pages/huge_pages.py", "_madvise"),
    ("pages/host_heap.py", "_malloc_trim"),
    ("bridge/lazy_kv.py", "numpy"),
    ("cache/compat.py", "forget_tokens"),
    ("cache/model_shape.py", "cross_config"),
    ("cache/model_shape.py", "decoder_config"),
}

MAKERS = {"__new__", "_make_wrapper_subclass", "_make_subclass", "make"}


def assigned_attributes(function):
    """(object, attribute) of every assignment to an attribute in a function, the object as source text."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        else:
            continue
        for target in targets:
            for one in ast.walk(target):
                if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store):
                    yield ast.unparse(one.value), one.attr


def assigned_names(node):
    """The names that an assignment binds."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def makes_an_object(value):
    """Whether an expression calls a class, or what makes an instance of one."""
    if not isinstance(value, ast.Call):
        return False
    called = ast.unparse(value.func).split(".")[-1]
    return called.lstrip("_")[:1].isupper() or called in MAKERS


def foreign_assignments(text):
    """(function, what is assigned) wherever a function changes an object that is neither its own nor made by it."""
    tree = ast.parse(text)
    of_module = {name for node in tree.body for name in assigned_names(node)}
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        made = {"self", "cls"} | of_module
        for node in ast.walk(function):
            if makes_an_object(getattr(node, "value", None)):
                made |= set(assigned_names(node))
        for owner, attribute in assigned_attributes(function):
            if owner not in made:
                yield function.name, f"{owner}.{attribute}"


@pytest.mark.parametrize(
    "path", [path for path in MODULES if part_of(path) in {"bridge", "cache", "pages"}], ids=str
)
def test_objects_change_their_own_fields_only(path):
    """Whoever wants another object changed calls a method, which says what it guarantees."""
    found = foreign_assignments((ROOT / path).read_text())
    allowed = TOGETHER | OF_OTHERS
    assert not [what for function, what in found if (str(path), function) not in allowed]


def test_foreign_assignments_finds_what_belongs_to_others():
    text = "class A:\n def f(self, b):\n  self.a = b.c = 1\n  d = B()\n  d.e = 2\n  self.g.h += 1"
    assert list(foreign_assignments(text)) == [("f", "b.c"), ("f", "self.g.h")]
