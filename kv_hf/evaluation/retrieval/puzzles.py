"""The hidden facts and the questions: one function per task, each making a puzzle from a random source.

The tasks are RULER's (arXiv 2404.06654, section 3) in words of our own; the single needle is G. Kamradt's test.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from .haystack import Haystack, hide
from .words import capitals, coded, nouns, numbers

DISTRACTORS = 3  # further needles of other keys
VALUES = 3  # of one key, in multi_value
ASKED = 2  # keys, in multi_query
COPIED, SECRET = 6, "The secret words are"  # words that copy hides, and how they are introduced
CHAINS, HOPS = 2, 3  # of assignments, in variable_tracking
COMMON = 3  # words asked for, in common_words and frequent_words
COMMON_SHARE = 0.2  # of the list, for each common word
FREQUENT_SHARE = 0.6  # of the list, for the most frequent word; the k-th has 1 / k^2 of it
LEAST_LIST = 40  # words: shorter lists have no clear winners


@dataclass(frozen=True)
class Puzzle:
    """A text that can be made longer, and a question about it.

    Attributes:
        opening: what the reader is told before the text.
        body: number of words (pieces of a haystack) -> text; more make it longer, and what is hidden stays whole.
        least: the smallest number of them.
        question: stands behind the text.
        lead: first words of the answer, given to the model.
        target: the rest of the answer, with a space in front.
        expected: strings that an answer must hold; parts of `target`.
    """

    opening: str
    body: Callable[[int], str]
    least: int
    question: str
    lead: str
    target: str
    expected: tuple[str, ...]


def _listed(items: list[str]) -> str:
    return ", ".join(items[:-1]) + f" and {items[-1]}"


def _code(key: str, value: str) -> str:
    return f"The secret code of the {key} is {value}."


def _written(value: str, name: str) -> str:
    return f"The value {value} is written to {name}."


def _copied(name: str, to: str) -> str:
    return f"The value of {name} is copied to {to}."


def _spread(rng: random.Random, count: int, depth: float | None) -> list[float]:
    """Return depths: the first as asked for, if at all, the others anywhere."""
    depths = [rng.random() for _ in range(count)]
    return depths if depth is None else [depth, *depths[1:]]


def _codes(
    rng: random.Random,
    haystack: Haystack,
    needles: list[tuple[float, str]],
    question: str,
    lead: str,
    target: str,
    expected: list[str],
) -> Puzzle:
    start = haystack.start(rng)
    return Puzzle(
        opening="Read the text below. Secret codes are hidden in it. Remember them: you will be asked for them.",
        body=lambda words: hide(haystack.take(words, start), needles),
        least=1,
        question=question,
        lead=lead,
        target=target,
        expected=tuple(expected),
    )


def _one_key(
    rng: random.Random, haystack: Haystack, depth: float | None, distractors: int
) -> Puzzle:
    keys = nouns(rng, 1 + distractors, haystack.text)
    values = numbers(rng, 1 + distractors, haystack.text)
    depths = _spread(rng, 1 + distractors, depth)
    return _codes(
        rng,
        haystack,
        [(d, _code(k, v)) for d, k, v in zip(depths, keys, values, strict=True)],
        f"What is the secret code of the {keys[0]} that the text above gives?",
        f"The secret code of the {keys[0]} is",
        f" {values[0]}",
        values[:1],
    )


def single(rng: random.Random, haystack: Haystack, depth: float | None) -> Puzzle:
    """Hide one number and ask for it (Kamradt; RULER's single needle)."""
    return _one_key(rng, haystack, depth, 0)


def multi_key(rng: random.Random, haystack: Haystack, depth: float | None) -> Puzzle:
    """Hide numbers of several things, ask for that of one; `depth` is where the one asked for lies."""
    return _one_key(rng, haystack, depth, DISTRACTORS)


def multi_value(rng: random.Random, haystack: Haystack, depth: float | None) -> Puzzle:
    """Hide several numbers of one thing, ask for all; `depth` is where the first drawn lies."""
    [key] = nouns(rng, 1, haystack.text)
    values = numbers(rng, VALUES, haystack.text)
    placed = sorted(zip(_spread(rng, VALUES, depth), values, strict=True))
    found = [value for _, value in placed]
    return _codes(
        rng,
        haystack,
        [(d, _code(key, value)) for d, value in placed],
        f"What are all {VALUES} secret codes of the {key} that the text above gives?",
        f"The secret codes of the {key} are",
        f" {_listed(found)}",
        found,
    )


def multi_query(rng: random.Random, haystack: Haystack, depth: float | None) -> Puzzle:
    """Hide numbers of several things, ask for those of two; `depth` is where the first of them lies."""
    count = ASKED + DISTRACTORS
    keys, values = nouns(rng, count, haystack.text), numbers(rng, count, haystack.text)
    asked = " and of the ".join(keys[:ASKED])
    clauses = [
        f"the secret code of the {k} is {v}"
        for k, v in zip(keys[:ASKED], values[:ASKED], strict=True)
    ]
    answer = " and ".join(clauses)
    lead = f"The secret code of the {keys[0]} is"
    return _codes(
        rng,
        haystack,
        [
            (d, _code(k, v))
            for d, k, v in zip(_spread(rng, count, depth), keys, values, strict=True)
        ],
        f"What are the secret codes of the {asked} that the text above gives?",
        lead,
        answer[len(lead) :],
        values[:ASKED],
    )


def copy(rng: random.Random, haystack: Haystack, depth: float | None) -> Puzzle:
    """Hide a list of words and ask for all of it, word by word: an answer that only exact recall gives.

    The first word is given, so that small models go on with the list and not with words about it.
    """
    listed = " ".join(nouns(rng, COPIED, haystack.text))
    first, rest = listed.split(" ", 1)
    [place] = _spread(rng, 1, depth)
    start = haystack.start(rng)
    return Puzzle(
        opening="Read the text below. Secret words are hidden in it. Remember them: you will be asked to repeat them.",
        body=lambda words: hide(haystack.take(words, start), [(place, f"{SECRET} {listed}.")]),
        least=1,
        question=f"What are the {COPIED} secret words that the text above gives? Repeat them in their order.",
        lead=f"{SECRET} {first}",
        target=f" {rest}",
        expected=(rest,),
    )


def variable_tracking(rng: random.Random, haystack: Haystack, depth: float | None) -> Puzzle:
    """Hide chains of assignments, ask for all variables of one value; `depth` is where the first chain begins.

    An assignment names its source first, and the answer spells the chain out, so that small models can follow it.
    """
    names = capitals(rng, CHAINS * (HOPS + 1), haystack.text.upper())
    values = numbers(rng, CHAINS, haystack.text)
    needles: list[tuple[float, str]] = []
    for chain, value in enumerate(values):
        links = names[chain * (HOPS + 1) : (chain + 1) * (HOPS + 1)]
        first = rng.random() if depth is None or chain else depth
        depths = [first, *sorted(first + (1 - first) * rng.random() for _ in range(HOPS))]
        steps = [_written(value, links[0]), *map(_copied, links[:-1], links[1:])]
        needles += zip(depths, steps, strict=True)
    start = haystack.start(rng)
    asked = names[: HOPS + 1]
    answer = " ".join([_written(values[0], asked[0]), *map(_copied, asked, asked[1:])])
    target = answer[answer.index(f" {asked[0]}") :]
    return Puzzle(
        opening="Read the text below. It says where values are written and copied to. Follow them.",
        body=lambda words: hide(haystack.take(words, start), needles),
        least=1,
        question=f"Which {HOPS + 1} variables hold the value {values[0]}? Give all {HOPS + 1} steps.",
        lead=answer[: -len(target)],
        target=target,
        expected=tuple(asked),
    )


def _word_list(
    key: int, counted: Callable[[int], Counter[str]], asked: str, question: str, found: list[str]
) -> Puzzle:
    def body(words: int) -> str:
        entries = sorted(counted(words).elements())
        random.Random(key).shuffle(entries)
        return ", ".join(entries) + "."

    return Puzzle(
        opening=f"Read the list of words below. {asked}",
        body=body,
        least=LEAST_LIST,
        question=question,
        lead="The words that come most often are",
        target=f" {_listed(found)}",
        expected=tuple(found),
    )


def common_words(rng: random.Random, haystack: Haystack, depth: float | None) -> Puzzle:
    """List nouns, of which a few come much oftener than all others (RULER's common words)."""
    pool = nouns(rng, 120, "")
    common, others = pool[:COMMON], pool[COMMON:]

    def counted(words: int) -> Counter[str]:
        counts = dict.fromkeys(common, round(words * COMMON_SHARE))
        left = words - sum(counts.values())
        return Counter(counts) + Counter(others[i % len(others)] for i in range(left))

    return _word_list(
        rng.getrandbits(64),
        counted,
        f"{COMMON} of them come much oftener than the others.",
        f"Which {COMMON} words of the list above come most often?",
        common,
    )


def frequent_words(rng: random.Random, haystack: Haystack, depth: float | None) -> Puzzle:
    """List made-up words whose counts fall as 1 / k^2, ask for the first three (RULER's frequent words)."""
    key = rng.getrandbits(64)

    def counted(words: int) -> Counter[str]:
        counts = [int(words * FREQUENT_SHARE / k**2) for k in range(1, words)]
        counts = [count for count in counts if count]
        counts += [1] * (words - sum(counts))
        return Counter(dict(zip(coded(random.Random(key), len(counts)), counts, strict=True)))

    found = coded(random.Random(key), COMMON)
    return _word_list(
        key,
        counted,
        "They are in a secret language, and some come often.",
        f"Which {COMMON} words of the list above come most often?",
        found,
    )


TASKS: dict[str, Callable[[random.Random, Haystack, float | None], Puzzle]] = {
    "single": single,
    "multi_key": multi_key,
    "multi_value": multi_value,
    "multi_query": multi_query,
    "copy": copy,
    "variable_tracking": variable_tracking,
    "common_words": common_words,
    "frequent_words": frequent_words,
}
# tasks whose answer lies at one depth, for the grid over depths
AT_A_DEPTH = ("single", "multi_key", "copy")
