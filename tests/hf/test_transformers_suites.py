"""scripts/measure/suites.py: its columns, and a run on a checkout made up for the purpose."""

from pathlib import Path

from measure import suites
from measure.family_models import ROLES, families
from transformers.models.auto.configuration_auto import model_type_to_module_name


def test_compared_counts_tests_that_used_pages():
    stock = {f"T::{name}": {"outcome": "passed"} for name in "xyz"}
    ours = {
        "T::x": {"outcome": "passed", "made": 1, "pages": 4},
        "T::y": {"outcome": "passed", "pages": 0},
        "T::z": {"outcome": "failed", "made": 1, "pages": 9},
        "T::new": {"outcome": "passed", "made": 1, "pages": 2},
    }
    found = suites.compared(stock, ours)
    assert (found["passed"], found["only_ours_failed"]) == (2, 1)
    assert found["names"] == {"only_ours_failed": ["T::z"]}
    assert (found["passed_with_pages"], found["pages_sealed"]) == (1, 4)


def test_suites_are_the_general_ones_and_those_of_every_family(tmp_path, monkeypatch):
    for name in ("gemma4", "minimax_m3_vl", "git", "t5", "whisper", "llava", "vit"):
        folder = tmp_path / "tests" / "models" / name
        folder.mkdir(parents=True)
        (folder / f"test_modeling_{name}.py").touch()
    for name in suites.GENERAL:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setenv(suites.CHECKOUT, str(tmp_path))
    found = suites.suites()
    assert tuple(found[:2]) == suites.GENERAL
    names = {Path(name).parent.name for name in found[2:]}
    known = {model_type_to_module_name(name) for role in ROLES for name in families(role)}
    assert names == known & {"git", "t5", "whisper", "llava", "gemma4", "minimax_m3_vl"}
    assert {"git", "t5"} <= names  # vit does not generate
