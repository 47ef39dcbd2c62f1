"""The number of tokens for which a greedy continuation equals that of the exact cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import Cache

from .prefill import Prefill, last_logits


@dataclass(frozen=True)
class Divergence:
    """Tokens before the first difference, over some prompts.

    Attributes:
        mean, median: tokens that are the same from the start; `tokens` where all are.
        tokens: tokens that were generated for each prompt.
    """

    mean: float
    median: float
    tokens: int


@torch.no_grad()
def greedy(prefill: Prefill, cache: Cache, tokens: int) -> torch.Tensor:
    """Return the `tokens` most likely tokens behind prompts of one length, one by one: [rows, tokens].

    No token ends a continuation, so that all have the same length.

    Args:
        prefill: of the prompts.
        cache: an empty cache.
    """
    step = prefill.fill(cache).argmax(-1, keepdim=True)
    found = [step]
    while len(found) < tokens:
        step = last_logits(prefill.model, step, cache).argmax(-1, keepdim=True)
        found.append(step)
    return torch.cat(found, 1)


def leading_equal(exact: torch.Tensor, subject: torch.Tensor) -> list[int]:
    """Return, for each row of [batch, tokens], how many tokens are the same before the first difference."""
    return (exact == subject).long().cumprod(1).sum(1).tolist()


def measure_divergence(
    prefills: Sequence[Prefill], make: Callable[[], Cache], tokens: int, exact: torch.Tensor
) -> Divergence:
    """Compare greedy continuations of prompts with the exact ones.

    Args:
        prefills: of the prompts, each with a cache of its own.
        make: returns an empty cache.
        exact: [prompts, tokens], continuations with the exact cache (see `greedy`).
    """
    equal = leading_equal(exact, torch.cat([greedy(one, make(), tokens) for one in prefills]))
    lengths = torch.tensor(equal, dtype=torch.float64)
    return Divergence(lengths.mean().item(), lengths.quantile(0.5).item(), tokens)
