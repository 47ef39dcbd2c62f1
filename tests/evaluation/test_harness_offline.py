"""Every offline task over the real data of the packages, where they are installed (nothing is downloaded)."""

import math
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from measure.tasks.offline import write_offline_tasks
from tiny_harness import tiny_tokenizer, write_tasks
from tiny_models import make_model

from kv_hf.evaluation.harness.nltk_data import packaged_nltk
from kv_hf.evaluation.harness.register import include_file

pytestmark = pytest.mark.slow
pytest.importorskip("lm_eval")
TASKS = (
    *("hellaswag", "arc_easy", "arc_challenge", "piqa", "winogrande", "boolq", "lambada"),
    *("gsm8k", "squad", "wiki"),
)


@pytest.fixture(scope="module", name="model_folder")
def saved_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", name="folder")
def offline_folder(tmp_path_factory):
    for module in ("olmo_eval", "exllamav3"):
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    folder = tmp_path_factory.mktemp("tasks")
    write_offline_tasks(folder, subjects=["anatomy", "high_school_us_history"])
    return folder


def run(folder, model_folder, task):
    from transformers import AutoTokenizer

    from kv_hf.evaluation.harness.tasks import run_tasks

    rows = run_tasks(
        make_model("llama"),
        AutoTokenizer.from_pretrained(model_folder),
        "paged_int4",
        task,
        limit=2,
        include_path=folder,
        max_length=1020,
        gen_kwargs={"max_gen_toks": 4},
        metadata={"max_seq_lengths": [1024]},
    )
    assert {row["task"] for row in rows} == {task}
    for row in rows:
        assert math.isfinite(row["value"]) and row["value"] >= 0, row
    return rows


@pytest.mark.parametrize("task", [*TASKS, "mmlu"])
def test_offline_tasks_run(folder, model_folder, task):
    run(folder, model_folder, f"{task}_offline")


@pytest.mark.parametrize("task", ["niah_single_1", "niah_multikey_2", "ruler_vt", "ruler_fwe"])
def test_ruler_runs_below_its_lengths(folder, model_folder, task):
    if packaged_nltk() is None:
        pytest.skip("llama-index-core is not installed")
    rows = run(folder, model_folder, f"{task}_offline")
    assert {row["metric"] for row in rows} == {"1024"}


def test_lm_eval_itself_runs_with_the_include_file(tmp_path, model_folder):
    """The very command `lm_eval`, without a patch: the include file stands among its tasks."""
    folder = write_tasks(tmp_path)
    code = "from lm_eval.__main__ import cli_evaluate; cli_evaluate()"
    done = subprocess.run(
        [
            *[sys.executable, "-c", code, "--model", "kv_hf", "--device", "cpu", "--limit", "1"],
            *["--model_args", f"pretrained={model_folder},cache_implementation=paged_int4"],
            *["--include_path", str(folder), "--tasks", str(include_file()), "tiny_word"],
        ],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "tiny_word" in done.stdout and "kv_hf (" in done.stdout
