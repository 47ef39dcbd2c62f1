"""What the wheel brings without extras: tools that import nothing heavy and say which extra a feature needs, and the bundled texts."""

import sys
from importlib.resources import files

import pytest
from harness import run_python

from kv_hf import evaluation, texts
from kv_hf.checks import extra
from kv_hf.evaluation.needles import load_haystack

# of extras; transformers itself needs tqdm and yaml
EXTRAS = (
    "accelerate datasets gguf hqq jinja2 lm_eval matplotlib nltk optimum rich triton wonderwords"
)
TOOLS = "doctor evaluation evaluation.demo_command evaluation.eval_command evaluation.needles gqa planner"


def test_importing_brings_neither_extras_nor_the_tools():
    """Each of the extras would raise; transformers comes first, which looks for some of them itself.

    Why a GPU kernel cannot run is known without triton.
    """
    code = f"""
import sys
import transformers.generation.utils, transformers.modeling_utils
sys.modules.update(dict.fromkeys("{EXTRAS}".split()))
import torch, kv_hf
dir(kv_hf)  # lists what is imported later
late = {{"evaluation", "gqa", "planner", "doctor"}}
assert not late & {{name.split(".")[1] for name in sys.modules if name.startswith("kv_hf.")}}
from kv_hf.backends.triton import meta_params, why_not
spec = kv_hf.spec.PageSpec.build(
    kv_hf.formats.key_scheme("int4"), kv_hf.formats.value_scheme("int4"),
    num_kv_heads=8, key_dim=128, value_dim=128, page_size=64, dtype=torch.bfloat16,
)
assert why_not(torch.device("cpu"), spec)
assert meta_params.tile_tokens(spec) == 64
for name in "{TOOLS}".split():
    __import__("kv_hf." + name)
import kv_hf.evaluation as evaluation
print(*(getattr(evaluation, name).__name__ for name in evaluation.__all__))
"""
    assert run_python("-c", code).split() == evaluation.__all__


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


# -- bundled texts -------------------------------------------------------------------------------------------

DATA = files("kv_hf") / "evaluation" / "data"


def words(name):
    """Return the words of a text, in runs of eight: what two texts of one source would share."""
    found = texts.load_text(name).split()
    return {tuple(found[i : i + 8]) for i in range(len(found) - 7)}


def test_bundled_texts_are_the_files_of_the_folder_and_their_sources_are_named():
    there = {file.name.removesuffix(".txt") for file in DATA.iterdir() if file.name.endswith("txt")}
    assert there == {*texts.BUNDLED, "nouns"}  # nouns are what needles are made of
    for name in texts.BUNDLED:
        assert len(texts.load_text(name)) > 8_000
        assert f"| {name}.txt |" in (DATA / "SOURCES.md").read_text("utf-8")


def test_held_out_shares_no_text_with_calibration():
    fitted = set().union(*map(words, texts.CALIBRATION))
    for name in texts.HELD_OUT:
        held_out = words(name)
        assert len(held_out & fitted) < 0.005 * len(held_out), name


def test_haystack_of_speeches_stays_that_of_two_speeches():
    both = " ".join(" ".join(map(texts.load_text, ("lincoln_1862", "lincoln_1863"))).split())
    assert " ".join(map("".join, load_haystack("lincoln").sentences)) == both
