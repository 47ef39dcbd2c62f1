"""What the wheel brings without extras: tools import nothing heavy, and say which extra a feature needs."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import kv_hf
from kv_hf import evaluation
from kv_hf.extras import extra

# of extras; transformers itself needs tqdm and yaml
EXTRAS = (
    "accelerate",
    "datasets",
    "gguf",
    "hqq",
    "jinja2",
    "lm_eval",
    "matplotlib",
    "nltk",
    "optimum",
    "rich",
    "wonderwords",
)
TOOLS = (
    "kv_hf.doctor",
    "kv_hf.evaluation",
    "kv_hf.evaluation.harness.tasks",
    "kv_hf.evaluation.recommend",
    "kv_hf.evaluation.report",
    "kv_hf.evaluation.retrieval",
    "kv_hf.gqa",
    "kv_hf.planner",
)


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_tools_import_nothing_of_the_extras():
    """Each would raise if it were imported; transformers comes first, which looks for some of them itself."""
    code = f"""
import sys
import transformers.generation.utils, transformers.modeling_utils
sys.modules.update(dict.fromkeys({EXTRAS}))
for name in {TOOLS}:
    __import__(name)
import kv_hf.evaluation as evaluation
print(*(getattr(evaluation, name).__name__ for name in evaluation.__all__))
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == evaluation.__all__


def render():
    from kv_hf.evaluation.report import html

    html._template.cache_clear()
    html.render_page()


def register():
    from kv_hf.evaluation.harness.register import register

    register()


def model_class():
    sys.modules.pop("kv_hf.evaluation.harness.model", None)
    import kv_hf.evaluation.harness.model  # noqa: F401


def draw():
    from kv_hf.evaluation.retrieval.heatmap import draw_needle

    draw_needle([{"task": "single", "cache": "a", "length": 1, "depth": 0, "score": 1}], "x")


@pytest.mark.parametrize(
    ("missing", "call"),
    [("jinja2", render), ("lm_eval", register), ("lm_eval", model_class), ("matplotlib", draw)],
)
def test_a_missing_package_names_the_extra(missing, call, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    module = sys.modules.get("kv_hf.evaluation.harness.model")
    with pytest.raises(ImportError, match=rf"needs {missing}.*pip install 'kv_hf\[eval\]'"):
        call()
    if module is not None:
        sys.modules["kv_hf.evaluation.harness.model"] = module


def test_extra_leaves_faults_of_ours_as_they_are():
    with pytest.raises(ModuleNotFoundError, match="kv_hf.nowhere"), extra("eval", "a report"):
        import kv_hf.nowhere  # noqa: F401
    with pytest.raises(ValueError, match="no import"), extra("eval", "a report"):
        raise ValueError("no import")


def test_the_wheel_carries_every_file_that_is_read():
    """Templates, texts, presets: setuptools takes what pyproject.toml names, and nothing else."""
    package = Path(kv_hf.__file__).parent
    text = (package.parent / "pyproject.toml").read_text("utf-8")
    settings = tomllib.loads(text)["tool"]["setuptools"]
    assert settings["include-package-data"] is False
    named = {
        path for pattern in settings["package-data"]["kv_hf"] for path in package.glob(pattern)
    }
    compiled = package / "kernels" / "cpu"
    read = {
        path
        for path in package.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc") and compiled not in path.parents
    }
    assert len(read) > 60
    assert read == {path for path in named if path.is_file()}
