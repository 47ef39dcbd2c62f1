"""Functions of transformers that kv_hf replaces or relies on have the source that they had when the whole suite passed.

seams.json holds 16 digits for each function and tested version. Where this test fails for a new version of transformers,
read what has changed in the function, and what kv_hf makes of it. Once all tests pass, write the new digits:

    python tests/hf/test_seams.py
"""

import ast
import hashlib
import importlib
import inspect
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import transformers

import kv_hf
from kv_hf.doctor.doctor_command import TESTED

TABLE = Path(__file__).with_name("seams.json")
SEAMS = json.loads(TABLE.read_text())
VERSION = transformers.__version__


def fingerprint(source):
    """Return 16 hexadecimal digits for a function's lines without docstring, comments and empty lines."""
    source = textwrap.dedent(source)
    lines, first = source.splitlines(), ast.parse(source).body[0].body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        del lines[first.lineno - 1 : first.end_lineno]
    lines = [line.rstrip() for line in lines]
    kept = [line for line in lines if line and not line.lstrip().startswith("#")]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:16]


def sources_of(place):
    """Return the source of a function without kv_hf's patch; of "models:NAME" those of all methods of that name."""
    module, _, path = place.partition(":")
    if module == "models":
        return methods_of_models(path)
    kv_hf.uninstall()
    try:
        value = importlib.import_module(f"transformers.{module}")
        for name in path.split("."):
            value = getattr(value, name)
        return [inspect.getsource(value)]
    finally:
        kv_hf.install()


def methods_of_models(name):
    found = []
    for file in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        text = file.read_text(encoding="utf-8")
        if f"def {name}(" in text:
            functions = (x for x in ast.walk(ast.parse(text)) if isinstance(x, ast.FunctionDef))
            named = (function for function in functions if function.name == name)
            found += [ast.get_source_segment(text, function, padded=True) for function in named]
    return found


@pytest.mark.parametrize("place", SEAMS)
def test_a_seam_has_the_source_of_a_tested_version(place):
    known = [SEAMS[place][version] for version in TESTED]
    if VERSION in TESTED:
        known = [SEAMS[place][VERSION]]
    elif place.startswith("models:"):
        pytest.skip("compared in tested versions")
    sources = sources_of(place)
    assert sources, f"{place} is gone; it {SEAMS[place]['it']}"
    for source in sources:
        said = f"{place} has changed; it {SEAMS[place]['it']}. Its source is now:\n{source}"
        assert fingerprint(source) in known, said


def test_a_fingerprint_tells_code_from_comments():
    one = "def f(x):\n    return x + 1\n"
    same = '    def f(x):\n        """Say.\n\n        More."""\n        # why\n\n        return x + 1  \n'
    assert fingerprint(one) == fingerprint(same) != fingerprint(one.replace("1", "2"))


def write():
    """Put the installed version's digits into the table; a method of many models gets those of the first one."""
    for place, known in SEAMS.items():
        known[VERSION] = fingerprint(sources_of(place)[0])
    rows = ",\n".join(f"  {json.dumps(place)}: {json.dumps(row)}" for place, row in SEAMS.items())
    TABLE.write_text(f"{{\n{rows}\n}}\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("5.16.2", "ImportError: kv_hf needs transformers 5.17 to 5.24"),
        ("5.25.0.dev0", "KVCacheWarning: .* may fail or give other tokens"),
    ],
)
def test_other_transformers_are_named_when_kv_hf_is_imported(version, said):
    told = f"import transformers; transformers.__version__ = {version!r}; import kv_hf.cache.model_shape"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True)
    assert re.search(f"{said}.*[,;] found {version}: pip install", done.stderr)


if __name__ == "__main__":
    write()
