"""Puzzles as token ids of an exact length, split into what is read first and what is asked."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .haystack import Haystack
from .puzzles import TASKS, Puzzle

SPARE = 16  # tokens that a generated answer may be longer than the expected one
PLACE = "kv_hf-content"


@dataclass(frozen=True)
class Cell:
    """One place of a grid: `samples` prompts of it are asked.

    Attributes:
        length: tokens of a prompt with room for the answer.
        depth: 0 (begin) to 1 (end) of the text, or None: anywhere.
    """

    task: str
    length: int
    depth: float | None = None

    def __str__(self) -> str:
        depth = "" if self.depth is None else f", depth {self.depth:g}"
        return f"{self.task}, length {self.length}{depth}"


@dataclass(frozen=True)
class Frame:
    """The text before and behind the user's words.

    Attributes:
        chat: whether a chat template gave them (then special tokens are among them).
    """

    head: str
    tail: str
    chat: bool

    @classmethod
    def of(cls, tokenizer: Any, chat: bool | None) -> "Frame":
        """Return the tokenizer's chat template around a user's message, or bare lines.

        Args:
            chat: True or False as asked for; None takes the template where there is one.
        Raises: ValueError when a template is asked for that does not exist or hides the message.
        """
        template = getattr(tokenizer, "chat_template", None)
        if not (template if chat is None else chat):
            return cls("", "\n", False)
        if not template:
            raise ValueError(
                "chat=True needs a tokenizer with a chat template, and this one has none"
            )
        whole = tokenizer.apply_chat_template(
            [{"role": "user", "content": PLACE}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,  # read by templates of models that would think aloud first
        )
        head, found, tail = whole.partition(PLACE)
        if not found:
            raise ValueError(
                "chat=True: the tokenizer's chat template leaves the user's message out"
            )
        return cls(head, tail, True)


@dataclass(frozen=True)
class Prompt:
    """Token ids of one sample.

    Attributes:
        context: everything in front of the question; prefilled.
        question: question, template and the first words of the answer; read through the cache.
        answer: what is expected behind them.
        text: the text of context and question.
        expected: strings that a generated answer must hold.
    """

    context: list[int]
    question: list[int]
    answer: list[int]
    text: str
    expected: tuple[str, ...]

    @property
    def new_tokens(self) -> int:
        """Tokens that may be generated."""
        return len(self.answer) + SPARE

    @property
    def tokens(self) -> int:
        """Tokens of the prompt and the room for the answer."""
        return len(self.context) + len(self.question) + self.new_tokens


def make_prompt(
    tokenizer: Any, haystack: Haystack, frame: Frame, cell: Cell, seed: int, sample: int
) -> Prompt:
    """Return sample number `sample` of a cell: the same for the same arguments, whatever the cache.

    Samples of equal number at different depths have the same text and needles, in another place.

    Returns: the longest prompt of at most `cell.length` tokens, room for the answer included; one more word would
        exceed it.
    Raises: ValueError naming length and task when not even the shortest text fits.
    """
    rng = random.Random(f"{seed}/{cell.task}/{haystack.name}/{cell.length}/{sample}")
    puzzle = TASKS[cell.task](rng, haystack, cell.depth)

    def at(words: int) -> Prompt:
        return _encode(tokenizer, frame, puzzle, words)

    shortest = at(puzzle.least)
    if shortest.tokens > cell.length:
        raise ValueError(
            f"length {cell.length} is too short for the task {cell.task!r}: its shortest prompt and answer take "
            f"{shortest.tokens} tokens"
        )
    return _longest(at, puzzle.least, cell.length, shortest)


def _longest(at: Callable[[int], Prompt], least: int, length: int, shortest: Prompt) -> Prompt:
    """Return the prompt of the most words that fits; lengths grow with words, nearly always."""
    best, low, high = shortest, least, least + length  # a word is at least one token
    while high - low > 1:
        middle = (low + high) // 2
        prompt = at(middle)
        if prompt.tokens <= length:
            best, low = prompt, middle
        else:
            high = middle
    return best


def _encode(tokenizer: Any, frame: Frame, puzzle: Puzzle, words: int) -> Prompt:
    context = f"{frame.head}{puzzle.opening}\n\n{puzzle.body(words)}\n\n"
    text = f"{context}{puzzle.question}{frame.tail}{puzzle.lead}"

    def ids(part: str) -> list[int]:
        # a template's text holds its special tokens already
        return list(tokenizer(part, add_special_tokens=not frame.chat, verbose=False).input_ids)

    # split where the parts' own tokens and those of the whole agree: a token across a border goes to what is behind
    whole = ids(text + puzzle.target)
    first, prompt = _common(ids(context), whole), _common(ids(text), whole)
    return Prompt(whole[:first], whole[first:prompt], whole[prompt:], text, puzzle.expected)


def _common(part: Sequence[int], whole: Sequence[int]) -> int:
    """Return how many tokens two texts have in common at their beginning."""
    pairs = enumerate(zip(part, whole, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(part), len(whole)))
