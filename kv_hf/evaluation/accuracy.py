"""How far the distributions read through a cache are from those of the exact cache."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from .teacher_forcing import forced_logits


@dataclass(frozen=True)
class Accuracy:
    """Distances over all scored tokens; KL in nats, from the exact cache to the subject.

    Attributes:
        tokens: scored tokens.
        kl_mean, kl_median, kl_p99: of KL(exact || subject) per token.
        top1: part of the tokens whose most likely successor is the same.
        perplexity, perplexity_exact: of the text behind the prompts.
        bits_per_element: stored bits per number with scales, without the exact tail (0.0 if unknown).
    """

    tokens: int
    kl_mean: float
    kl_median: float
    kl_p99: float
    top1: float
    perplexity: float
    perplexity_exact: float
    bits_per_element: float


class _Tally:
    """Per-token figures of one subject, gathered over chunks."""

    def __init__(self) -> None:
        self.kl: list[torch.Tensor] = []
        self.same: list[torch.Tensor] = []
        self.loss: list[torch.Tensor] = []

    def add(self, exact: torch.Tensor, subject: torch.Tensor, targets: torch.Tensor) -> None:
        """Add log-probabilities [n, vocab]; `targets` [n or n - 1] are the tokens that follow."""
        self.kl.append((exact.exp() * (exact - subject)).sum(-1))
        self.same.append(exact.argmax(-1) == subject.argmax(-1))
        self.loss.append(-subject[: len(targets)].gather(-1, targets[:, None])[:, 0])


def measure_accuracy(
    model: PreTrainedModel,
    texts: Iterable[torch.Tensor],
    subjects: Mapping[str, Callable[[], Cache]],
    prompt_tokens: int,
    progress: Callable[[int], None] = lambda tokens: None,
) -> dict[str, Accuracy]:
    """Compare caches with the exact one on the same texts, token by token.

    Args:
        model: a causal language model in eval mode, on one device.
        texts: token ids [tokens] of each text; the first `prompt_tokens` of each are not scored.
        subjects: name -> function that makes an empty cache.
        progress: called with the tokens scored for one subject since the last call.
    Raises: ValueError when a subject gives logits that are not finite (no figure is returned then).
    """
    tallies: dict[str, _Tally] = {name: _Tally() for name in subjects}
    exact_loss: list[torch.Tensor] = []
    bits: dict[str, float] = {}
    for ids in texts:
        exact = torch.cat(
            [
                torch.log_softmax(logits, -1)
                for _, logits in forced_logits(
                    model, ids, DynamicCache(config=model.config), prompt_tokens
                )
            ]
        )
        targets = ids[prompt_tokens + 1 :]
        exact_loss.append(-exact[: len(targets)].gather(-1, targets[:, None])[:, 0])
        for name, make in subjects.items():
            cache = make()
            for position, logits in forced_logits(model, ids, cache, prompt_tokens):
                if not torch.isfinite(logits).all():
                    raise ValueError(f"{name} gives logits that are not finite at token {position}")
                first = position - prompt_tokens
                tallies[name].add(
                    exact[first : first + len(logits)],
                    torch.log_softmax(logits, -1),
                    targets[first : first + len(logits)],
                )
                progress(len(logits))
            bits[name] = getattr(cache, "bits_per_element", 0.0)
    reference = torch.cat(exact_loss).mean().exp().item()
    return {name: _summary(tally, reference, bits[name]) for name, tally in tallies.items()}


def _summary(tally: _Tally, perplexity_exact: float, bits: float) -> Accuracy:
    kl = torch.cat(tally.kl).double()
    return Accuracy(
        tokens=len(kl),
        kl_mean=kl.mean().item(),
        kl_median=kl.median().item(),
        kl_p99=kl.quantile(0.99).item(),
        top1=torch.cat(tally.same).double().mean().item(),
        perplexity=torch.cat(tally.loss).mean().exp().item(),
        perplexity_exact=perplexity_exact,
        bits_per_element=bits,
    )
