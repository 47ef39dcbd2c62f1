"""The import direction of the package: a module imports from its own layer or from the layers below it."""

import ast
from pathlib import Path

import pytest

import kv_hf

ROOT = Path(kv_hf.__file__).parent
LAYERS = [
    {"errors", "files", "home", "notices", "printable", "records", "version"},
    {
        "cache_names",
        "checks",
        "config",
        "config_layers",
        "config_numbers",
        "field_names",
        "formats",
        "recipe",
        "texts",
    },
    {"row_pages", "spec"},
    {"quant"},
    {"kernels", "pages"},
    {"cache"},
    {"hf"},
    {"evaluation", "gqa", "planner", "doctor"},
    {"cli"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
SIBLINGS = [
    {"kernels", "pages"},
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
        if names[0] == "triton":
            assert path.parts[:2] == ("kernels", "triton"), f"{path} imports triton"
        if names[0] == "transformers":
            assert part_of(path) in {"cache", "hf", "evaluation", "gqa", "planner", "doctor"}, (
                f"{path} imports transformers"
            )
        assert names[0] != "lm_eval" or part_of(path) == "evaluation"
        assert names[0] != "datasets" or part_of(path) in {"evaluation", "gqa", "texts"}


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_modules_stay_small(path):
    assert len((ROOT / path).read_text().splitlines()) <= 350
