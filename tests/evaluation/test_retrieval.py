"""Answers of the long-context tasks come from the stored cache, whatever cache it is, and bad input gives no row."""

import json
import math

import pytest
import torch
import transformers
from tiny_models import make_config, make_model
from tiny_tokenizer import make_tokenizer
from transformers import DynamicCache, LlamaForCausalLM

import kv_hf
from kv_hf.evaluation.cache_kinds import CacheKind, cache_kind, why_not
from kv_hf.evaluation.prefill import Prefill
from kv_hf.evaluation.retrieval import needle_grid, retrieval_tasks
from kv_hf.evaluation.retrieval.grid import measure_cells
from kv_hf.evaluation.retrieval.haystack import load_haystack
from kv_hf.evaluation.retrieval.prompt import Cell, Frame, make_prompt
from kv_hf.evaluation.retrieval.reading import found_part, read
from kv_hf.evaluation.teacher_forcing import decoded_logits

SMALL = "page_size=16,sink_tokens=0"
PEERS = (
    "quanto_int4:residual_length=20,q_group_size=16",
    "hqq_int4:residual_length=20,q_group_size=16",
    "quantized_fp8",
    "static",
)
TOKENIZER = make_tokenizer()


def tiny(family="llama", dtype=torch.float32, **changes):
    model = make_model(family, dtype, vocab_size=len(TOKENIZER), **changes)
    if model._can_set_attn_implementation():
        model.set_attn_implementation("kv_hf")
    return model


def prompt_of(task="single", length=300, depth=0.5):
    frame = Frame.of(TOKENIZER, None)
    return make_prompt(TOKENIZER, load_haystack(), frame, Cell(task, length, depth), 0, 0)


def reading(model, kind, prompt, **how):
    kind = cache_kind(kind) if isinstance(kind, str) else kind
    return read(
        model, TOKENIZER, kind, prompt, Prefill(model, torch.tensor([prompt.context])), **how
    )


READ = f"paged_int4:{SMALL},read_tokens=64,read_from=100"


@pytest.mark.parametrize("name", [f"paged_int4:{SMALL}", f"paged_int2:{SMALL}", READ, PEERS[0]])
def test_question_in_chunks_equals_token_by_token(name):
    if reason := why_not(name, torch.device("cpu")):
        pytest.skip(reason)
    model = tiny(dtype=torch.float64)  # fp32 noise alone can flip a rounded code
    prompt = prompt_of()
    assert len(prompt.question) > 20
    chunks, single = (
        reading(model, name, prompt, **how) for how in ({}, {"chunk": lambda cache, position: 1})
    )
    assert chunks.nll == pytest.approx(single.nll, abs=1e-6)  # fp32 logits
    assert chunks.generated == single.generated
    # in one forward the question would not read its own stored tokens: the test can fail
    ids = torch.tensor(prompt.context + prompt.question + prompt.answer)
    logits = []
    for how in ((), (lambda cache, position: 1,), (lambda cache, position: 1000,)):
        cache = cache_kind(name).make(model.config, 400)
        Prefill(model, torch.tensor([prompt.context])).fill(cache)
        logits.append(
            torch.cat(
                [part for _, part in decoded_logits(model, ids, cache, len(prompt.context), *how)]
            )
        )
    assert len(logits[0]) == len(prompt.question + prompt.answer)
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-6)
    assert (logits[2] - logits[1]).abs().max() > 1e-3


def test_exact_pages_read_as_dynamic_does():
    model, prompt = tiny(), prompt_of()
    found = {name: reading(model, name, prompt) for name in ("dynamic", "paged_exact")}
    assert found["paged_exact"].nll == pytest.approx(found["dynamic"].nll, rel=1e-5)
    assert found["paged_exact"].generated == found["dynamic"].generated


def zeroed(cache_name, what):
    """Return a cache whose sealed pages, or whose exact window, read as zeros from the prefill on."""

    class Zeroed(kv_hf.PagedCache):
        def update(self, key_states, value_states, layer_idx, *args, **kwargs):
            found = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            layer = self.layers[layer_idx]
            if what == "pages":
                for side in (layer.storage.keys, layer.storage.values):
                    for tensor in side.fields.values():
                        tensor.zero_()
            return found

    options = {"page_size": 16, "sink_tokens": 0}
    return CacheKind(
        "broken",
        "kv_hf",
        lambda config, most: Zeroed.from_implementation(config, cache_name, options),
    )


def test_what_is_stored_decides_the_score():
    """Probe: broken pages and coarse formats change the likelihood of the answer, each by more than fp32 noise."""
    model, prompt = tiny(), prompt_of()
    exact = reading(model, "dynamic", prompt).nll
    assert abs(reading(model, zeroed("paged_exact", "nothing"), prompt).nll - exact) < 1e-5
    assert abs(reading(model, zeroed("paged_exact", "pages"), prompt).nll - exact) > 1e-2
    coarse = abs(reading(model, f"paged_int2:{SMALL}", prompt).nll - exact)
    fine = abs(reading(model, f"paged_int8:{SMALL}", prompt).nll - exact)
    assert coarse > 1e-3
    assert fine < coarse / 4


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "bloom"])
@pytest.mark.parametrize("name", ["dynamic", "paged_exact", f"paged_int4:{SMALL}", *PEERS])
def test_shared_prefill_leaves_what_an_own_one_leaves(family, name):
    if reason := why_not(name, torch.device("cpu")):
        pytest.skip(reason)
    model = tiny(family, **({"sliding_window": 24} if family == "mistral" else {}))
    if family == "mistral" and name in PEERS[:3]:
        with pytest.raises(
            ValueError, match="cannot be measured with MistralForCausalLM: .*sliding"
        ):
            needle_grid(model, TOKENIZER, name, [300], [0.5], 1)
        return
    kind, prompt = cache_kind(name), prompt_of(length=260)
    ids = torch.tensor(prompt.context + prompt.question)
    shared = Prefill(model, torch.tensor([prompt.context]))
    own = Prefill(model, torch.tensor([prompt.context]))
    assert shared.calls
    own.calls = None  # as for models that cannot share
    logits = []
    for prefill in (shared, own):
        cache = kind.make(model.config, 300)
        prefill.fill(cache)
        logits.append(
            torch.cat([part for _, part in decoded_logits(model, ids, cache, len(prompt.context))])
        )
    if (family, name) == ("bloom", "static"):  # its sums run over the unused columns, too
        torch.testing.assert_close(*logits, rtol=0, atol=1e-5)
    else:
        assert torch.equal(*logits)


def test_layers_without_keys_are_not_shared():
    config = transformers.Lfm2Config(
        vocab_size=len(TOKENIZER),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    prompt = prompt_of()
    assert Prefill(model, torch.tensor([prompt.context])).calls is None
    [row] = needle_grid(model, TOKENIZER, "dynamic", [300], [0.5], 1)
    ids = torch.tensor([prompt.context + prompt.question + prompt.answer])
    with torch.no_grad():
        logp = model(ids).logits[0].log_softmax(-1)
    behind = len(prompt.answer)
    expected = -logp[-behind - 1 : -1].gather(-1, ids[0, -behind:, None]).mean().item()
    assert row["nll"] == pytest.approx(expected, rel=1e-4)
    assert row["bytes_dtype"] == "float32"


class Scripted(LlamaForCausalLM):
    """A model that says what it was told to say, whatever it reads."""

    script: list[int]

    def forward(self, input_ids=None, past_key_values=None, **kwargs):
        first = past_key_values.get_seq_length()
        out = super().forward(input_ids, past_key_values=past_key_values, **kwargs)
        out.logits = torch.full_like(out.logits, -30.0)
        for i in range(out.logits.shape[1]):
            following = first + input_ids.shape[1] - out.logits.shape[1] + i + 1
            token = self.script[following] if following < len(self.script) else 2
            out.logits[0, i, token] = 30.0
        return out


@pytest.mark.parametrize("task", ["single", "multi_value", "variable_tracking", "common_words"])
def test_a_model_that_answers_right_scores_one(task):
    model = Scripted(make_config("llama", vocab_size=len(TOKENIZER))).eval()
    prompt = prompt_of(task, 500)
    asked = prompt.context + prompt.question
    model.script = asked + prompt.answer
    right = reading(model, "dynamic", prompt)
    assert (right.score, right.top1) == (1.0, 1.0)
    assert right.nll < 1e-9
    assert right.generated == TOKENIZER.decode(prompt.answer)
    model.script = asked + prompt.answer[:-1] + [TOKENIZER(" No").input_ids[-1]]
    nearly = reading(model, "dynamic", prompt)
    assert nearly.score == pytest.approx(1 - 1 / len(prompt.expected))
    assert nearly.top1 == pytest.approx(1 - 1 / len(prompt.answer))
    model.script = asked
    wrong = reading(model, "dynamic", prompt)
    assert (wrong.score, wrong.top1) == (0.0, 0.0)
    assert wrong.nll > 50


def test_found_part_counts_whole_words():
    assert found_part(" it is 1234567.", ("1234567",)) == 1
    assert found_part(" 12345678 91234567", ("1234567",)) == 0
    assert found_part("Lantern, and MANGO", ("lantern", "kettle", "mango")) == pytest.approx(2 / 3)
    assert found_part("", ("a",)) == 0


def test_needle_grid_gives_a_row_per_cache_length_and_depth():
    model = tiny()
    model.set_attn_implementation("sdpa")
    read_tokens = []
    names = ["dynamic", f"paged_int4:{SMALL}"]
    rows = needle_grid(
        model, TOKENIZER, names, [300, 200], [0, 1], 2, seed=3, progress=read_tokens.append
    )
    assert [(row["length"], row["depth"], row["cache"]) for row in rows] == [
        (length, depth, name) for length in (200, 300) for depth in (0, 1) for name in names
    ]
    assert sum(read_tokens) == 2 * 2 * 2 * (200 + 300)
    assert model.config._attn_implementation == "sdpa"
    for row in rows:
        assert row["kind"] == "needle" and row["task"] == "single" and row["samples"] == 2
        assert 0 <= row["score"] <= 1 and row["nll"] > 0
        assert row["nll"] == pytest.approx(sum(row["nlls"]) / 2)
        assert row["prompt_tokens"] + row["answer_tokens"] <= row["length"]
        assert row["bytes_dtype"] == "bfloat16" and "decoded from the store" in row["protocol"]
        json.dumps(row)
    # 2 layers, keys and values, 2 heads of 16, 2 bytes
    assert [row["bytes_per_token"] for row in rows[::2]] == [256.0] * 4
    assert all(row["bytes_per_token"] < 220 for row in rows[1::2])
    alone = needle_grid(model, TOKENIZER, names[1], [300], [1], 2, seed=3)[0]
    assert (
        alone["nlls"] == rows[-1]["nlls"]
    )  # the same texts and numbers, whatever else is measured


def test_retrieval_tasks_gives_a_row_per_task():
    tasks = ["variable_tracking", "frequent_words"]
    rows = retrieval_tasks(tiny(), TOKENIZER, "paged_exact", tasks, 500, samples=1)
    assert [(row["task"], row["length"], row["depth"]) for row in rows] == [
        (task, 500, None) for task in tasks
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": [2000]}, "length 2000 is longer than .* max_position_embeddings is 1024"),
        ({"lengths": [40]}, "length 40 is too short for the task 'single'"),
        ({"lengths": []}, "lengths and depths must not be empty"),
        ({"depths": [0.5, 1.2]}, "depths must be between 0 and 1, got 1.2"),
        ({"depths": [math.nan]}, "depths must be between 0 and 1, got nan"),
        ({"samples": 0}, "samples of at least 1"),
        ({"cache_name": "paged_int5"}, "paged_int5"),
        ({"cache_name": []}, "need a cache"),
        ({"cache_name": "offloaded"}, "'offloaded' cannot be measured here"),
        ({"task": "common_words"}, "task must be one of single, multi_key"),
        ({"haystack": "moby"}, "haystack must be"),
        ({"chat": True}, "chat=True needs a tokenizer with a chat template"),
    ],
)
def test_bad_input_is_refused_before_the_model_runs(changes, message):
    model = tiny()
    model.forward = None  # would fail if called
    call = {"cache_name": "dynamic", "lengths": [300], "depths": [0.5], "samples": 1, **changes}
    with pytest.raises(ValueError, match=message):
        needle_grid(model, TOKENIZER, **call)


def test_unknown_tasks_are_refused():
    for tasks, message in ((["qa"], "tasks must be of single, .*'qa'"), ([], "must not be empty")):
        with pytest.raises(ValueError, match=message):
            retrieval_tasks(tiny(), TOKENIZER, "dynamic", tasks, 300)


def test_logits_that_are_not_finite_give_no_row(monkeypatch):
    class Broken(DynamicCache):
        def update(self, key_states, value_states, layer_idx, *args, **kwargs):
            keys, values = super().update(key_states, value_states, layer_idx)
            return keys, values * math.nan if key_states.shape[2] < 100 else values

    kind = CacheKind("nan", "sdpa", lambda config, most: Broken(config=config))
    monkeypatch.setattr("kv_hf.evaluation.retrieval.grid.cache_kind", lambda name: kind)
    rows = []
    with pytest.raises(ValueError, match="single, length 300, .*nan gives logits that are not fin"):
        rows.extend(measure_cells(tiny(), TOKENIZER, "dynamic", [Cell("single", 300, 0.5)], 1, 0))
    assert not rows
