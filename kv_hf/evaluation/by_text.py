"""Accuracy over several kinds of text in one run: of each text, and of all pooled. Knows no file and no tokenizer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from .accuracy import Accuracy, summary, tally_caches
from .distances import BLOCK, block_interval
from .reference import ExactReference

Blocks = Mapping[str, Sequence[Sequence[float]]]
# fields of an Accuracy that a row holds of each text
FIELDS = ("tokens", "kl_mean", "kl_low", "kl_high", "top1", "perplexity_exact", "perplexity_delta")


@dataclass(frozen=True)
class TextsAccuracy:
    """Distances of one cache on several texts.

    Attributes:
        pooled: over the scored tokens of all texts. Its interval draws blocks of all texts, so that it is wider where
            texts differ.
        texts: of each text.
        kl_blocks: of each text, the mean KL of each 64 neighbouring tokens of each window, from the prompt on. Two caches
            on the same texts can be compared block by block, and positions with each other.
    """

    pooled: Accuracy
    texts: dict[str, Accuracy]
    kl_blocks: dict[str, list[list[float]]]

    @property
    def worst(self) -> str:
        """The text with the largest mean KL."""
        return max(self.texts, key=lambda name: self.texts[name].kl_mean)

    def row(self) -> dict[str, Any]:
        """Return what a row says of the texts, beside the pooled figures."""
        each = {
            name: {field: getattr(found, field) for field in FIELDS}
            for name, found in self.texts.items()
        }
        return {"texts": each, "worst_text": self.worst, "kl_blocks": self.kl_blocks}


def measure_texts(
    model: PreTrainedModel,
    texts: Mapping[str, Sequence[torch.Tensor]],
    subjects: Mapping[str, Callable[[], Cache]],
    prompt_tokens: int,
    progress: Callable[[int], None] = lambda tokens: None,
    reference: ExactReference | None = None,
) -> dict[str, TextsAccuracy]:
    """Compare caches with the exact one on windows of several texts.

    Args:
        texts: name -> windows, token ids [tokens] each. A text weighs as much as it has scored tokens: give as many
            windows of each.
        reference: the exact distributions of all windows, in the order of `texts`.
        model, subjects, prompt_tokens, progress: as those of `measure_accuracy`.
    Raises: ValueError for a text without windows, and as `measure_accuracy` does.
    """
    for name, windows in texts.items():
        if not windows:
            raise ValueError(
                f"texts must hold at least one window of each text, got none of {name!r}"
            )
    numbers: dict[str, range] = {}
    for name, windows in texts.items():
        first = sum(map(len, numbers.values()))
        numbers[name] = range(first, first + len(windows))
    flat = [ids for windows in texts.values() for ids in windows]
    found = tally_caches(model, flat, subjects, prompt_tokens, progress, reference)
    return {
        subject: TextsAccuracy(
            pooled=summary(tally, bits),
            texts={name: summary(tally.of(which), bits) for name, which in numbers.items()},
            kl_blocks={
                name: [block_means(tally.kl[number]) for number in which]
                for name, which in numbers.items()
            },
        )
        for subject, (tally, bits) in found.items()
    }


def block_means(kl: torch.Tensor) -> list[float]:
    """Return the mean of each BLOCK neighbouring figures [tokens], to seven digits that count; the last may have fewer."""
    return [float(f"{part.mean().item():.7g}") for part in kl.split(BLOCK)]


def paired_difference(here: Blocks, there: Blocks) -> tuple[float, float, float]:
    """Return how much more one cache loses than another: the mean, and the ends of its paired 95 % interval, in nats.

    The same tokens are compared, block by block, so that caches are told apart whose own intervals overlap.

    Args:
        here, there: `TextsAccuracy.kl_blocks` of the same windows of the same texts. Every block weighs the same: let the
            scored tokens of a window be a multiple of 64.
    Raises: ValueError where texts, windows or blocks differ.
    """
    shapes = [
        {name: [len(window) for window in windows] for name, windows in one.items()}
        for one in (here, there)
    ]
    if shapes[0] != shapes[1] or not shapes[0]:
        raise ValueError(
            f"both must hold blocks of the same windows, got {shapes[0]} and {shapes[1]}"
        )
    apart = [
        torch.tensor(a, dtype=torch.float64) - torch.tensor(b, dtype=torch.float64)
        for name in here
        for a, b in zip(here[name], there[name], strict=True)
    ]
    low, high = block_interval(apart, block=1)
    return torch.cat(apart).mean().item(), low, high
