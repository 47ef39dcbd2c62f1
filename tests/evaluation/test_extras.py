"""What the wheel brings without extras: tools import nothing heavy, and say which extra a feature needs."""

import subprocess
import sys

import pytest

from kv_hf import evaluation
from kv_hf.checks import extra

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
    "kv_hf.evaluation.demo_command",
    "kv_hf.evaluation.eval_command",
    "kv_hf.evaluation.needles",
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


def model_class():
    sys.modules.pop("kv_hf.evaluation.lm_eval", None)
    import kv_hf.evaluation.lm_eval  # noqa: F401


def draw():
    from kv_hf.evaluation import pareto

    pareto([{"text": "t", "cache": "a", "stored_bits": 1, "kl_mean": 1}], "x.png")


@pytest.mark.parametrize(("missing", "call"), [("lm_eval", model_class), ("matplotlib", draw)])
def test_a_missing_package_names_the_extra(missing, call, monkeypatch):
    # parts that earlier tests imported would be found without their package
    parts = [name for name in sys.modules if name.startswith(f"{missing}.")]
    for name in (missing, *parts):
        monkeypatch.setitem(sys.modules, name, None)
    module = sys.modules.get("kv_hf.evaluation.lm_eval")
    with pytest.raises(ImportError, match=rf"needs {missing}.*pip install -e '\.\[eval\]'"):
        call()
    if module is not None:
        sys.modules["kv_hf.evaluation.lm_eval"] = module


def test_extra_leaves_faults_of_ours_as_they_are():
    with pytest.raises(ModuleNotFoundError, match="kv_hf.nowhere"), extra("eval", "a report"):
        import kv_hf.nowhere  # noqa: F401
    with pytest.raises(ValueError, match="no import"), extra("eval", "a report"):
        raise ValueError("no import")
