"""Prompts of the long-context tasks: their length, what is hidden where, and that nothing else holds the answer."""

import random
import re

import pytest
from tiny_tokenizer import make_tokenizer

from kv_hf.evaluation.retrieval import TASKS, load_haystack
from kv_hf.evaluation.retrieval.haystack import Haystack, hide
from kv_hf.evaluation.retrieval.prompt import SPARE, Cell, Frame, make_prompt
from kv_hf.evaluation.retrieval.words import NOUNS, drawn, numbers

LISTS = ("common_words", "frequent_words")


def prompt_of(task, length=700, depth=None, seed=0, sample=0, chat=False, haystack="lincoln"):
    tokenizer = make_tokenizer(chat=chat)
    frame = Frame.of(tokenizer, None)
    cell = Cell(task, length, depth)
    return tokenizer, make_prompt(tokenizer, load_haystack(haystack), frame, cell, seed, sample)


@pytest.mark.parametrize("haystack", ["lincoln", "noise"])
@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("length", [600, 601, 1024])
@pytest.mark.parametrize("task", TASKS)
def test_make_prompt_fills_the_length(task, length, chat, haystack):
    tokenizer, prompt = prompt_of(task, length, chat=chat, haystack=haystack)
    # one word more would not fit; a word of the haystack or of a list takes at most this many tokens here
    assert length - 9 < prompt.tokens <= length
    assert prompt.tokens == len(prompt.context + prompt.question + prompt.answer) + SPARE
    whole = tokenizer(prompt.text, add_special_tokens=not chat).input_ids
    assert prompt.context + prompt.question == whole
    behind = tokenizer.decode(prompt.question)
    assert behind.lstrip().startswith(("What", "Which"))
    assert ("<|bot|>" in behind) == chat
    assert behind.endswith(tokenizer.decode(whole)[-20:])


@pytest.mark.parametrize("task", TASKS)
def test_make_prompt_is_the_same_for_the_same_seed_only(task):
    first = prompt_of(task)[1]
    assert first == prompt_of(task)[1]
    assert first.text != prompt_of(task, seed=1)[1].text
    assert first.text != prompt_of(task, sample=1)[1].text


@pytest.mark.parametrize("sample", range(4))
@pytest.mark.parametrize("task", TASKS)
def test_expected_strings_stand_in_context_and_answer(task, sample):
    tokenizer, prompt = prompt_of(task, 900, sample=sample)
    context, answer = tokenizer.decode(prompt.context), tokenizer.decode(prompt.answer)
    assert len(set(prompt.expected)) == len(prompt.expected)
    for each in prompt.expected:
        assert len(re.findall(rf"\b{each}\b", answer)) in (1, 2)  # a variable is copied to and from
        count = len(re.findall(rf"\b{each}\b", context))
        if task in LISTS:
            assert count >= 2
        elif task == "variable_tracking":
            assert count == (1 if each == prompt.expected[-1] else 2)
        else:
            assert count == 1
        if task != "variable_tracking":  # there the last word of the lead may be asked for already
            assert each not in tokenizer.decode(prompt.question)


@pytest.mark.parametrize("task", LISTS)
def test_words_asked_for_come_most_often(task):
    tokenizer, prompt = prompt_of(task, 900)
    context = tokenizer.decode(prompt.context)
    entries = re.findall(r"[a-z]+(?=[,.]\s)", context.split("\n\n")[1] + " ")
    counts = {word: entries.count(word) for word in set(entries)}
    top = sorted(counts, key=counts.__getitem__, reverse=True)
    assert set(top[:3]) == set(prompt.expected)
    assert counts[top[2]] > 1.5 * counts[top[3]]
    if task == "frequent_words":
        assert tuple(top[:3]) == prompt.expected


def test_variable_chain_can_be_followed():
    tokenizer, prompt = prompt_of("variable_tracking", 900)
    context = tokenizer.decode(prompt.context)
    [value] = re.findall(r"value (\d+)\?", prompt.text)
    chain = re.findall(rf"value {value} is written to (\w+)\.", context)
    copies = dict(re.findall(r"of (\w+) is copied to (\w+)\.", context))
    while chain[-1] in copies:
        chain.append(copies[chain[-1]])
    assert tuple(chain) == prompt.expected
    assert len(copies) == 6  # a second chain is there to mislead
    places = [context.index(f"to {name}.") for name in chain]
    assert places == sorted(places)


@pytest.mark.parametrize("task", ["single", "multi_key"])
@pytest.mark.parametrize("depth", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_needle_lies_at_its_depth(task, depth):
    tokenizer, prompt = prompt_of(task, 1500, depth)
    text = tokenizer.decode(prompt.context).removeprefix("<s>").split("\n\n")[1]
    [(at, end)] = [m.span() for m in re.finditer(r"[^.?!]*" + prompt.expected[0] + r"\.", text)]
    needle = text[at:end].strip()
    assert re.fullmatch(r"The secret code of the \w+ is \d{7}\.", needle)
    others = r"The secret code of the \w+ is \d{7}\. ?"
    before, behind = re.sub(others, "", text[:at]), re.sub(others, "", text[end:])
    found = len(before.split()) / len((before + behind).split())
    longest = max(len(s.split()) for s in load_haystack().sentences)
    assert abs(found - depth) * len((before + behind).split()) <= longest / 2
    assert not before.strip() or before.strip()[-1] in ".?!"  # at the border of a sentence
    if depth in (0.0, 1.0):
        assert found == depth


def test_hide_measures_depth_in_words_and_keeps_the_order():
    sentences = ["a b c d.", "e.", "f g h i j."]
    assert hide(sentences, [(0.45, "X."), (0.41, "Y.")]) == "a b c d. X. Y. e. f g h i j."
    assert hide(sentences, [(0.46, "X.")]) == "a b c d. e. X. f g h i j."
    assert hide(sentences, [(1.0, "Z."), (0.0, "X.")]) == "X. a b c d. e. f g h i j. Z."


def test_samples_at_two_depths_differ_in_the_place_only():
    a, b = (prompt_of("single", 700, depth)[1] for depth in (0.0, 1.0))
    assert a.expected == b.expected
    needle = re.search(rf"The secret code of the \w+ is {a.expected[0]}\.", a.text)[0]
    assert a.text.replace(needle + " ", "", 1) == b.text.replace(" " + needle, "", 1)


def test_take_cuts_to_words_and_begins_anew():
    haystack = Haystack("h", ("one two three.", "four, five."))
    assert haystack.take(4) == ["one two three.", "four."]
    assert haystack.take(9, start=1) == ["four, five.", "one two three.", "four, five.", "one two."]
    numbers = Haystack("n", ("It is $901,125,674.86, all in all.",))
    assert numbers.take(5) == ["It is $901,125."]
    assert numbers.take(10) == ["It is $901,125,674.86, all in all."]
    assert load_haystack("noise").start(random.Random(1)) == 0


def test_hidden_words_are_no_part_of_each_other_or_of_the_text():
    assert not [(a, b) for a in NOUNS for b in NOUNS if a != b and a in b]
    with pytest.raises(ValueError, match="haystack holds nearly every name"):
        drawn(1, lambda: "aa", "an aa")
    text = " ".join(numbers(random.Random(5), 3, ""))
    assert not set(numbers(random.Random(5), 3, text)) & set(text.split())


@pytest.mark.parametrize("task", TASKS)
def test_make_prompt_refuses_a_length_too_short(task):
    with pytest.raises(ValueError, match=f"length 60 is too short for the task '{task}'"):
        prompt_of(task, 60)


def test_load_haystack_refuses_what_is_no_text(tmp_path):
    empty = tmp_path / "empty.txt"
    empty.write_text("\n \n")
    with pytest.raises(ValueError, match=r"empty\.txt.*is empty"):
        load_haystack(empty)
    with pytest.raises(
        ValueError, match="haystack must be a file or one of lincoln, noise, .*'moby'"
    ):
        load_haystack("moby")
    own = tmp_path / "own.txt"
    own.write_text("One   sentence. Another\none! No end")
    assert load_haystack(own).sentences == ("One sentence.", "Another one!", "No end")


def test_frame_needs_a_template_that_shows_the_message():
    with pytest.raises(ValueError, match="chat=True needs a tokenizer with a chat template"):
        Frame.of(make_tokenizer(), True)
    tokenizer = make_tokenizer(chat=True)
    assert Frame.of(tokenizer, False) == Frame("", "\n", False)
    assert Frame.of(tokenizer, None) == Frame("<s><|user|>", "</s><|bot|>", True)
    tokenizer.chat_template = "nothing"
    with pytest.raises(ValueError, match="leaves the user's message out"):
        Frame.of(tokenizer, True)
