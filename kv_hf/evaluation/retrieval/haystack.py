"""The text that needles are hidden in: sentences without end, cut to a number of words and parts of numbers."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ...texts import BUNDLED, load_text

LINCOLN, NOISE = "lincoln", "noise"
SPEECHES = ("lincoln_1862", "lincoln_1863")  # of LINCOLN
# what RULER calls noise: sentences that say nothing, over and over
NOISE_SENTENCES = (
    "The road goes up the hill.",
    "The water runs down again.",
    "Somebody closed a window.",
    "The wind is cold today.",
    "Later it will be warm.",
)
# a word, or up to three digits of one: "$901,125,674.86" would be twenty tokens at once
PIECE = re.compile(r"\s*(?:[^\s\d]+|\d{1,3}[^\s\d]*)")


@dataclass(frozen=True)
class Haystack:
    """A text in sentences; it begins anew where it ends.

    Attributes:
        name: what the user called it.
        sentences: at least one, each of at least one word.
    """

    name: str
    sentences: tuple[str, ...]

    @cached_property
    def text(self) -> str:
        """All of it in lower case, to look for words that it must not hold."""
        return " ".join(self.sentences).lower()

    def start(self, rng: random.Random) -> int:
        """Return a sentence to begin at; noise always begins at its first, as all of it is alike."""
        return 0 if self.name == NOISE else rng.randrange(len(self.sentences))

    @cached_property
    def pieces(self) -> tuple[tuple[str, ...], ...]:
        """The pieces of each sentence, which make it up again."""
        return tuple(tuple(PIECE.findall(sentence)) for sentence in self.sentences)

    def take(self, pieces: int, start: int = 0) -> list[str]:
        """Return sentences from `start` on that hold exactly `pieces` pieces; the last may be cut behind a piece."""
        taken: list[str] = []
        left = pieces
        index = start
        while left > 0:
            parts = self.pieces[index % len(self.pieces)]
            sentence = "".join(parts)
            if len(parts) > left:
                sentence = "".join(parts[:left]).rstrip(" .,;:!?-$") + "."
            taken.append(sentence)
            left -= len(parts)
            index += 1
        return taken


def load_haystack(source: str | Path = LINCOLN) -> Haystack:
    """Return the haystack "lincoln" (both bundled speeches), "noise", one of the bundled texts, or a UTF-8 file.

    Raises: ValueError naming the source when it is none of these, or empty.
    """
    name = str(source)
    if name == NOISE:
        return Haystack(name, NOISE_SENTENCES)
    texts = [load_text(each) for each in SPEECHES] if name == LINCOLN else [_text_of(source)]
    joined = " ".join(" ".join(texts).split())
    return Haystack(name, tuple(re.split(r"(?<=[.!?])\s+", joined)))


def _text_of(source: str | Path) -> str:
    if str(source) not in BUNDLED and not Path(source).is_file():
        choices = ", ".join((LINCOLN, NOISE, *BUNDLED))
        raise ValueError(f"haystack must be a file or one of {choices}, got {str(source)!r}")
    return load_text(source)


def hide(sentences: Sequence[str], needles: Sequence[tuple[float, str]]) -> str:
    """Return the text with each needle at the sentence border that is nearest to its depth.

    Args:
        needles: (depth, sentence); depth 0 is in front of the first sentence, 1 behind the last, measured in words.
            Needles that share a border stand in the order given.
    """
    behind = [0]
    for sentence in sentences:
        behind.append(behind[-1] + len(sentence.split()))
    at: dict[int, list[str]] = {}
    for depth, needle in needles:
        border = min(range(len(behind)), key=lambda i: abs(behind[i] - depth * behind[-1]))
        at.setdefault(border, []).append(needle)
    parts: list[str] = []
    for border in range(len(behind)):
        parts += at.get(border, [])
        parts += sentences[border : border + 1]
    return " ".join(parts)
