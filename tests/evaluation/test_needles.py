"""Needles: where they lie, that nothing else holds the answer, that it is read from the store; and Wilson's interval."""

import json
import math
import re

import pytest
import torch
from tiny_models import make_config, make_model
from tiny_tokenizer import make_tokenizer
from transformers import LlamaForCausalLM

from kv_hf.cache.model_shape import CACHE
from kv_hf.evaluation.accuracy import Prefill
from kv_hf.evaluation.caches import cache_kind
from kv_hf.evaluation.needles import (
    NOUNS,
    SPARE,
    TASKS,
    Haystack,
    frame_of,
    load_haystack,
    make_prompt,
    needle_grid,
    read,
    wilson,
)

SMALL = "page_size=16,sink_tokens=0"
TOKENIZER = make_tokenizer()


def prompt_of(task="single", length=700, depth=None, seed=0, sample=0, chat=False):
    tokenizer = make_tokenizer(chat=chat)
    return make_prompt(tokenizer, load_haystack(), task, length, depth, seed, sample)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("length", [600, 1024])
@pytest.mark.parametrize("task", TASKS)
def test_make_prompt_fills_the_length(task, length, chat):
    prompt = prompt_of(task, length, chat=chat)
    # one word more would not fit; a word of the haystack takes at most this many tokens here
    assert length - 9 < prompt.tokens <= length
    assert prompt.tokens == len(prompt.context + prompt.question + prompt.answer) + SPARE
    tokenizer = make_tokenizer(chat=chat)
    whole = tokenizer(prompt.text, add_special_tokens=not chat).input_ids
    assert prompt.context + prompt.question == whole
    behind = tokenizer.decode(prompt.question)
    assert behind.lstrip().startswith("What") and ("<|bot|>" in behind) == chat


@pytest.mark.parametrize("task", TASKS)
def test_what_is_asked_for_stands_in_context_and_answer_once(task):
    first = prompt_of(task)
    assert first == prompt_of(task)
    assert len({first.text, prompt_of(task, seed=1).text, prompt_of(task, sample=1).text}) == 3
    for sample in range(4):
        prompt = prompt_of(task, 900, sample=sample)
        context, question, answer = map(
            TOKENIZER.decode, (prompt.context, prompt.question, prompt.answer)
        )
        assert context.count(prompt.expected) == answer.count(prompt.expected) == 1
        assert prompt.expected not in question
        assert context.count("The secret code of the") == {"copy": 0}.get(task, TASKS[task])


@pytest.mark.parametrize("depth", [0.0, 0.1, 0.5, 1.0])
def test_needle_lies_at_its_depth(depth):
    """Behind as many words of the haystack; other needles, which lie anywhere, are left out."""
    prompt = prompt_of("multi_key", 1500, depth)
    text = TOKENIZER.decode(prompt.context).split("\n\n")[1]
    others = rf" ?The secret code of the \w+ is (?!{prompt.expected})\d{{7}}\."
    needle = rf" ?The secret code of the \w+ is {prompt.expected}\. ?"
    before, behind = re.split(needle, re.sub(others, "", text))
    words = len((before + behind).split())
    longest = max(len("".join(s).split()) for s in load_haystack().sentences)
    assert abs(len(before.split()) - depth * words) <= (longest / 2 if 0 < depth < 1 else 0)
    assert not before.strip() or before.strip()[-1] in ".?!"  # at the border of a sentence


def test_haystacks_are_cut_to_words_and_begin_anew(tmp_path):
    haystack = Haystack.of("h", "one two three. four, five.")
    assert haystack.take(4) == ["one two three.", "four."]
    assert haystack.take(9, start=1) == ["four, five.", "one two three.", "four, five.", "one two."]
    numbers = Haystack.of("n", "It is $901,125,674.86, all in all.")
    assert numbers.take(5) == ["It is $901,125."]
    (tmp_path / "own.txt").write_text("One   sentence. Another\none! No end")
    own = load_haystack(tmp_path / "own.txt")
    assert own.take(8) == ["One sentence.", "Another one!", "No end", "One sentence."]
    assert len(NOUNS) > 100 and not [(a, b) for a in NOUNS for b in NOUNS if a != b and a in b]


def test_frame_is_the_template_that_shows_the_message():
    assert frame_of(TOKENIZER) == ("", "\n")
    tokenizer = make_tokenizer(chat=True)
    assert frame_of(tokenizer) == ("<s><|user|>", "</s><|bot|>")
    tokenizer.chat_template = "nothing"
    with pytest.raises(ValueError, match="leaves the message out"):
        frame_of(tokenizer)


@pytest.mark.parametrize(
    ("found", "asked", "low", "high"),
    # of tables of Wilson's interval, three digits
    [(20, 20, 0.839, 1.0), (0, 20, 0.0, 0.161), (81, 263, 0.255, 0.366)],
)
def test_interval_is_wilsons(found, asked, low, high):
    assert wilson(found, asked) == pytest.approx((low, high), abs=6e-4)


# -- read through a cache


def tiny():
    return make_model("llama", vocab_size=len(TOKENIZER))


def reading(model, kind, prompt):
    return read(
        model, TOKENIZER, cache_kind(kind), prompt, Prefill(model, torch.tensor([prompt.context]))
    )


def test_what_is_stored_decides_the_score():
    """Exact pages change nothing, coarse formats the likelihood of the answer, by more than fp32 noise."""
    model, prompt = tiny(), prompt_of(length=300, depth=0.5)
    exact = reading(model, "dynamic", prompt)
    same = reading(model, f"paged_exact:{SMALL}", prompt)
    assert same.nll == pytest.approx(exact.nll, abs=1e-5) and same.generated == exact.generated
    coarse = abs(reading(model, f"paged_int2:{SMALL}", prompt).nll - exact.nll)
    fine = abs(reading(model, f"paged_int8:{SMALL}", prompt).nll - exact.nll)
    assert coarse > 1e-3 and fine < coarse / 4


class Scripted(LlamaForCausalLM):
    """A model that says what it was told to say, whatever it reads."""

    script: list[int]

    def forward(self, input_ids=None, **kwargs):
        first = kwargs[CACHE].get_seq_length()
        out = super().forward(input_ids, **kwargs)
        out.logits = torch.full_like(out.logits, -30.0)
        for i in range(out.logits.shape[1]):
            following = first + input_ids.shape[1] - out.logits.shape[1] + i + 1
            token = self.script[following] if following < len(self.script) else 2
            out.logits[0, i, token] = 30.0
        return out


@pytest.mark.parametrize("task", ["single", "copy"])
def test_a_model_that_answers_right_scores_one(task):
    model = Scripted(make_config("llama", vocab_size=len(TOKENIZER))).eval()
    prompt = prompt_of(task, 500)
    asked = prompt.context + prompt.question
    model.script = asked + prompt.answer
    right = reading(model, "dynamic", prompt)
    assert (right.score, right.top1) == (1.0, 1.0) and right.nll < 1e-9
    assert right.generated == TOKENIZER.decode(prompt.answer)
    model.script = asked + prompt.answer[:-1] + [TOKENIZER(" No").input_ids[-1]]
    nearly = reading(model, "dynamic", prompt)
    assert nearly.score == 0 and nearly.top1 == pytest.approx(1 - 1 / len(prompt.answer))
    # a number that goes on is another one
    model.script = asked + prompt.answer + [TOKENIZER("7").input_ids[-1]]
    assert reading(model, "dynamic", prompt).score == (task == "copy" and 0.0)


def test_needle_grid_gives_a_row_per_cache_length_and_depth():
    model = tiny()
    model.set_attn_implementation("sdpa")
    names = ["dynamic", f"paged_int4:{SMALL}"]
    rows = needle_grid(model, TOKENIZER, names, [300, 200], [0, 1], 2, seed=3)
    assert [(row["length"], row["depth"], row["cache"]) for row in rows] == [
        (length, depth, name) for length in (200, 300) for depth in (0, 1) for name in names
    ]
    assert model.config._attn_implementation == "sdpa"
    for row in rows:
        said = [row[name] for name in ("kind", "model", "task", "samples")]
        assert said == ["needle", "llama", "single", 2]
        assert row["nll"] == pytest.approx(sum(row["nlls"]) / 2)
        assert row["found"] == row["scores"].count(1) == 0  # of random weights
        assert (row["rate_low"], row["rate_high"]) == wilson(row["found"], 2)
        assert row["prompt_tokens"] + row["answer_tokens"] <= row["length"]
        json.dumps(row)
    # 2 layers, keys and values, 2 heads of 16, 2 bytes
    assert [row["bytes_per_token"] for row in rows[::2]] == [256.0] * 4
    assert all(row["bytes_per_token"] < 220 for row in rows[1::2])
    # the same texts and numbers, whatever else is measured; further samples are others
    alone = needle_grid(model, TOKENIZER, names[1], [300], [1], 2, seed=3)[0]
    assert alone["nlls"] == rows[-1]["nlls"]
    [later] = needle_grid(model, TOKENIZER, names[1], [300], [1], 1, seed=3, first_sample=1)
    assert later["nlls"] == rows[-1]["nlls"][1:]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": [2000]}, "length 2000 is longer than .* max_position_embeddings is 1024"),
        ({"lengths": [40]}, "length 40 is too short for the task 'single'"),
        ({"lengths": []}, "lengths and depths must not be empty"),
        ({"depths": [math.nan]}, "depths must be between 0 and 1, got nan"),
        ({"samples": 0}, "samples must be an integer of at least 1, got 0"),
        ({"cache_name": "offloaded"}, "'offloaded' cannot run here"),
        ({"task": "qa"}, "task must be one of single, multi_key, copy, got 'qa'"),
    ],
    ids=str,
)
def test_bad_input_is_refused_before_the_model_runs(changes, message):
    model = tiny()
    model.forward = None  # would fail if called
    call = {"cache_name": "dynamic", "lengths": [300], "depths": [0.5], "samples": 1, **changes}
    with pytest.raises(ValueError, match=message):
        needle_grid(model, TOKENIZER, **call)
