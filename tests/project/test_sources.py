"""Rules of the sources: imports point down and form no circles."""

import ast
import re
import sys
import tomllib
from functools import cache
from graphlib import TopologicalSorter
from importlib.util import resolve_name

from harness import ROOT

PACKAGE = ROOT / "kv_hf"
LAYERS = [
    "errors files hub notices printable text_table version",
    "cache_names checks config formats model_fields read_budget texts units",
    "geometry page_summary row_pages spec",
    "quant",
    "backends pages",
    "bridge",
    "cache",
    "hf",
    "chat doctor evaluation gqa planner",
    "serving",
    "__init__ __main__",
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names.split()}
APART = [
    {"backends", "pages"},
    {"evaluation", "gqa"},
    {"evaluation", "planner"},
    {"gqa", "planner"},
]
# package -> the only folders and files of kv_hf that import it
IMPORTED_BY = {
    "triton": ("backends/triton/",),
    "transformers": (
        *("cache/", "hf/", "chat.py", "evaluation/", "gqa/", "planner/", "doctor/", "serving/"),
    ),
    "lm_eval": ("evaluation/",),
    "datasets": ("evaluation/", "gqa/", "texts"),
    "measure": ("none: of scripts/, which no wheel carries",),
}
# what transformers brings, the commands' own module, and folders that are imported where their extra is
EVERYWHERE = {"kv_hf", "kv_hf_cli", "numpy", "tqdm", "yaml", "huggingface_hub"}
EXTRAS = ("backends/triton/", "serving/")
FILES = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def tree(name):
    return ast.parse(FILES[name].read_text("utf-8"))


def part_of(name):
    return name.partition("/")[0].removesuffix(".py")


def module_of(name):
    return f"kv_hf.{name}".replace("/", ".").removesuffix(".py").removesuffix(".__init__")


@cache
def imports(name):
    """Return what a file imports, wherever in it: dotted names of modules, and of names in modules."""
    package = f"kv_hf.{name}".replace("/", ".").rsplit(".", 2)[0]
    found = set()
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            found |= {f"{base}.{one.name}" for one in node.names}
    return found


def test_imports_point_down():
    assert not [name for name in FILES if part_of(name) not in RANK], "in no layer"
    wrong = []
    for name in FILES:
        own = part_of(name)
        others = {one.split(".")[1] for one in imports(name) if one.startswith("kv_hf.")}
        above = {other for other in others & set(RANK) if RANK[other] > RANK[own]}
        beside = {other for other in others if {own, other} in APART}
        wrong += [(name, other) for other in above | beside]
    assert not wrong


def test_other_packages_are_imported_where_they_belong():
    asked = [(name, one.partition(".")[0]) for name in FILES for one in imports(name)]
    assert not [
        (name, package)
        for name, package in asked
        if package in IMPORTED_BY and not name.startswith(IMPORTED_BY[package])
    ]


def test_files_begin_with_imports_of_what_every_install_has():
    """`import kv_hf` failed where nothing else had brought pydantic."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    named = {re.match(r"[\w-]+", one)[0] for one in project["dependencies"]}
    known = named | EVERYWHERE | set(sys.stdlib_module_names)
    for name in FILES:
        if not name.startswith(EXTRAS):
            begin = [
                node for node in tree(name).body if isinstance(node, ast.Import | ast.ImportFrom)
            ]
            found = {
                one.name for node in begin if isinstance(node, ast.Import) for one in node.names
            }
            found |= {
                node.module for node in begin if isinstance(node, ast.ImportFrom) and not node.level
            }
            assert {module.split(".")[0] for module in found} <= known, name


def test_files_import_each_other_in_no_circle():
    """The package's own __init__ may hand functions out on demand; else two files never need each other."""
    known = {module_of(name) for name in FILES}
    graph = {}
    for name in FILES:
        modules = {one if one in known else one.rpartition(".")[0] for one in imports(name)}
        graph[module_of(name)] = modules & known - {module_of(name)}
    TopologicalSorter(graph).prepare()  # names the circle that it finds


def test_tensors_are_made_on_a_device_that_is_named():
    """Else it is that of `torch.set_default_device`, where nobody looks for the tables of pages."""
    made = r"torch\.(arange|as_tensor|asarray|empty|eye|full|ones|randn?|randint|randperm|tensor|zeros)"
    assert not [
        f"{name}:{node.lineno}"
        for name in FILES
        for node in ast.walk(tree(name))
        if isinstance(node, ast.Call)
        and re.fullmatch(made, ast.unparse(node.func))
        and "device" not in {keyword.arg for keyword in node.keywords}
    ]
