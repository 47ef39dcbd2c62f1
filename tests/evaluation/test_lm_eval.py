"""lm-eval's scores read the stored cache: equal to an independent loop and to generate(), never handed to another cache."""

import functools
import json
import sys

import pytest
import torch
import yaml
from tiny_encoders import shared_model as encoder_decoder
from tiny_models import make_model, shared_model
from tiny_tokenizer import sentence, tiny_tokenizer

import kv_hf
import kv_hf_cli
from kv_hf.evaluation.caches import why_not

lm_eval = pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from kv_hf.cache_names import parse_cache_name  # noqa: E402
from kv_hf.evaluation.lm_eval import KVCacheLM, chosen_cache  # noqa: E402

MAX_LENGTH = 200
PAIRS = [
    (sentence(30 + 13 * number, number), " " + sentence(length, 100 * number + length))
    for number in range(4)
    for length in (1, 3, 25, 90)
]
PAIRS += [
    ("", sentence(40, 7)),
    (sentence(190, 8), " " + sentence(30, 9)),  # too long: loses tokens on the left
    (sentence(30, 0), " w4"),  # one token behind a context that others share
    (sentence(30, 0), " w5"),
]
TEXTS = [(sentence(70 + 60 * number, 50 + number),) for number in range(4)]
PROMPTS = [
    (sentence(30 + 13 * number, number), {"until": ["w9"], "max_gen_toks": 12})
    for number in range(4)
]
CACHES = (
    "paged_int4:page_size=16",
    "paged_int2:page_size=16,sink_tokens=0",
    "paged_int4:page_size=16,recent_tokens=0,read.tokens=36,read.from=50",
    "quanto_int4:q_group_size=16,residual_length=20",
    "quantized_fp8",
)


@pytest.fixture(scope="module", name="model")
def double_model():
    return make_model("llama", dtype=torch.float64)  # fp32 noise alone can flip a rounded code


@pytest.fixture(scope="module")
def own(model):
    """lm-eval's own numbers."""
    how = {"tokenizer": tiny_tokenizer(), "batch_size": 4, "max_length": MAX_LENGTH}
    return scores(HFLM(pretrained=model, **how))


def requests(kind, arguments):
    return [
        Instance(request_type=kind, doc={}, arguments=given, idx=number)
        for number, given in enumerate(arguments)
    ]


def lm_of(model, cache="paged_exact", batch_size=4, **options):
    options = {"max_length": MAX_LENGTH, "tokenizer": tiny_tokenizer(), **options}
    return KVCacheLM(pretrained=model, batch_size=batch_size, cache_implementation=cache, **options)


def scores(lm):
    pairs = lm.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True)
    texts = lm.loglikelihood_rolling(requests("loglikelihood_rolling", TEXTS), disable_tqdm=True)
    made = lm.generate_until(requests("generate_until", PROMPTS), disable_tqdm=True)
    sums = torch.tensor([total for total, _ in pairs], dtype=torch.float64)
    return sums, [greedy for _, greedy in pairs], torch.tensor(texts, dtype=torch.float64), made


def close(found, wanted, atol):
    torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=atol)
    torch.testing.assert_close(found[2], wanted[2], rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("cache", "batch_size"),
    [("paged_exact:page_size=16", 1), ("paged_exact:page_size=16", 4), ("static", 4)],
)
def test_exact_caches_reproduce_hf(model, own, cache, batch_size):
    found = scores(lm_of(model, cache, batch_size))
    close(found, own, 1e-10)
    assert (found[1], found[3]) == (own[1], own[3])


def token_by_token(model, kind, context, continuation):
    """Return the log-likelihood by the slowest road: one row, an own prefill, one token per forward."""
    text = torch.tensor([*context, *continuation])
    cache, done, total = kind.make(model.config, len(text)), max(1, len(context) - 1), 0.0
    with torch.no_grad():
        logits = model(text[None, :done], past_key_values=cache, use_cache=True).logits[0, -1]
        for position in range(done, len(text)):
            if position >= len(context):
                total += float(torch.log_softmax(logits, -1)[text[position]])
            step = text[None, position : position + 1]
            logits = model(step, past_key_values=cache, use_cache=True).logits[0, -1]
    return total


@pytest.mark.parametrize("cache", CACHES)
def test_scores_are_those_of_decoding_token_by_token(model, own, cache):
    """In batches and chunks, with padding: what a decode step would have seen all the same."""
    if reason := why_not(cache, torch.device("cpu")):
        pytest.skip(reason)
    lm = lm_of(model, cache)
    found = lm.loglikelihood(requests("loglikelihood", PAIRS[1:8:2]), disable_tqdm=True)
    expected = [token_by_token(model, lm.kind, *lm._encode_pair(*pair)) for pair in PAIRS[1:8:2]]
    assert [total for total, _ in found] == pytest.approx(expected, abs=1e-9)
    assert max(abs(a - b) for a, b in zip(expected, own[0][1:8:2].tolist(), strict=True)) > 1e-3


def test_batches_are_kept_and_equal_texts_are_read_once(model, monkeypatch):
    fed, forward = [], model.forward

    def counting(input_ids, **inputs):
        fed.append(tuple(input_ids.shape))
        return forward(input_ids, **inputs)

    monkeypatch.setattr(model, "forward", counting)
    question = sentence(80, 1)
    choices = [*(" " + sentence(length, length) for length in (2, 3, 4)), " w4", " w5", " w6"]
    pairs = [(question, choice) for choice in choices]
    lm_of(model, "paged_int4:page_size=16").loglikelihood(
        requests("loglikelihood", pairs), disable_tqdm=True
    )
    # the choices of one token feed the same; all prefill the question but its last token
    assert fed == [(4, 79), (4, 4)]


def test_bad_options_are_refused(model):
    for cache, config, says in (
        (None, None, "cache_implementation must name the cache"),
        ("dynamic:a=1", None, "takes no options"),
        ("paged_int4", "keys", "NAME=VALUE"),
        (
            "paged_int4:read=0.5,read.from=8k",
            None,
            "read of a cache must be a value or parts, got both",
        ),
        ("paged_int4", 3, "cache_config must be a mapping"),
    ):
        with pytest.raises(ValueError, match=says):
            lm_of(model, cache, cache_config=config)
    prompts = [("w4 w5", {"until": ["w9"], "max_gen_toks": 2, "cache_implementation": "dynamic"})]
    with pytest.raises(ValueError, match="cache_implementation"):
        lm_of(model).generate_until(requests("generate_until", prompts), disable_tqdm=True)
    long = requests("loglikelihood", [("w4", " w5" * (MAX_LENGTH + 1))])
    with pytest.raises(ValueError, match="longer than the .* that the model reads"):
        lm_of(model).loglikelihood(long, disable_tqdm=True)
    with pytest.raises(ValueError, match="must be a decoder-only model, got the seq2seq model"):
        lm_of(encoder_decoder("t5"))


def test_options_are_part_of_the_name_of_a_cache():
    parts = {"layers": {"0": "int8", "1": "fp8"}, "read": {"tokens": 2048, "from": 8192}}
    name = "paged_int4:layers.0=int8,layers.1=fp8,read.tokens=2048,read.from=8192"
    assert chosen_cache("paged_int4", parts).name == name
    assert parse_cache_name(name) == ("paged_int4", parts)
    assert chosen_cache("hqq_int4", {"residual_length": 20}).name == "hqq_int4:residual_length=20"


# -- whole runs


TASKS = {
    "tiny_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "tiny_generate": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{text}}",
        "generation_kwargs": {"until": ["w9"], "do_sample": False, "max_gen_toks": 12},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module", name="tasks")
def tasks_folder(tmp_path_factory):
    """Data and task files."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {
            "question": sentence(30 + 13 * number, number),
            "choices": [sentence(length, 100 * number + length) for length in (3, 9, 25)],
            "label": number % 3,
            "text": sentence(70 + 20 * number, 50 + number),
        }
        for number in range(6)
    ]
    data = folder / "docs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in TASKS.items():
        config = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "num_fewshot": 0,
            "metadata": {"version": 1.0},
            **task,
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
    return folder


@pytest.fixture(autouse=True)
def _few_tasks(monkeypatch):
    """Leave lm-eval's own 14,000 task files unread, which takes seconds."""
    few = functools.partial(TaskManager, include_defaults=False)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", few)


def evaluate(lm, tasks, **options):
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    how = {"tasks": list(TASKS), "task_manager": manager, "bootstrap_iters": 0, **options}
    return lm_eval.simple_evaluate(model=lm, **how)


def figures(results):
    return {
        (task, key): value
        for task, found in results["results"].items()
        for key, value in found.items()
        if "," in key and isinstance(value, float)
    }


def test_results_of_pages_that_nothing_filled_say_so(tasks):
    lm = lm_of(shared_model("llama"), "paged_int2:page_size=256")
    with pytest.warns(kv_hf.KVCacheWarning, match="scores are those of the exact cache"):
        assert evaluate(lm, tasks, limit=1)["config"]["kv_cache"]["encoded_share"] == 0.0


def test_use_cache_repeats_results_of_the_same_cache_only(tasks, tmp_path, monkeypatch):
    """lm-eval finds results by the request alone, so that int2 would be handed what int4 had scored."""
    model, path = shared_model("llama"), str(tmp_path / "results")
    first = figures(evaluate(lm_of(model, "paged_int4:page_size=16"), tasks, use_cache=path))
    again = lm_of(model, "paged_int4:page_size=16")
    monkeypatch.setattr(again, "_score", None)  # nothing is left to be scored
    monkeypatch.setattr(again, "_model_generate", None)
    assert figures(evaluate(again, tasks, use_cache=path)) == first
    with pytest.raises(ValueError, match="read through paged_int4.*, not through paged_int2"):
        evaluate(lm_of(model, "paged_int2:page_size=16"), tasks, use_cache=path)
    own = HFLM(pretrained=model, tokenizer=tiny_tokenizer(), batch_size=4)
    evaluate(own, tasks, use_cache=str(tmp_path / "own"), limit=1)
    with pytest.raises(ValueError, match="read through another model class"):
        evaluate(again, tasks, use_cache=str(tmp_path / "own"))


def test_command_line_runs_lm_eval_with_our_class(tasks, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kv-hf"])
    arguments = f"pretrained={folder},cache_implementation=paged_int4"
    asked = ["lm-eval", "--model", "kv_hf", "--device", "cpu", "--batch_size", "2"]
    asked += [
        "--model_args",
        f"{arguments},cache_config=keys=int8;page_size=16;recent_tokens=0,dtype=float32",
    ]
    asked += ["--include_path", str(tasks), "--tasks", "tiny_choice,tiny_generate"]
    assert kv_hf_cli.main([*asked, "--limit", "2", "--output_path", str(tmp_path / "out")]) == 0
    (saved,) = (tmp_path / "out").rglob("results*.json")
    results = json.loads(saved.read_text())
    assert results["config"]["model"] == "kv_hf"
    how = results["config"]["kv_cache"]
    assert how["cache"] == "paged_int4:keys=int8,page_size=16,recent_tokens=0"
    assert how["versions"]["kv_hf"] == kv_hf.__version__
    assert how["bytes_per_token"] > 0 and 0.5 < how["encoded_share"] < 1
    # the second question has 30 + 13 words and its longest choice 25, of which the last is not read
    assert how["longest"] == 67
    assert set(results["results"]) == {"tiny_choice", "tiny_generate"}
    wrong = ["lm-eval", "--model", "kv_hf", "--tasks", "tiny_choice", "--include_path", str(tasks)]
    assert kv_hf_cli.main([*wrong, "--model_args", f"pretrained={folder}"]) == 2
    assert "kv-hf lm-eval: error: cache_implementation must" in capsys.readouterr().err
    assert kv_hf_cli.main([*wrong, "--model_args", arguments, "--device", "cuda:99"]) == 2
    assert "error: device 'cuda:99' cannot be used here: " in capsys.readouterr().err
