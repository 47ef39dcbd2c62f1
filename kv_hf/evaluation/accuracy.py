"""The distance of the distributions read through a cache from those of the exact cache."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from transformers import Cache, PreTrainedModel

from ..texts import longest_context
from .distances import Tally, block_interval
from .reference import ExactReference
from .teacher_forcing import forced_logits

PROTOCOL = "teacher forced, decode semantics"


@dataclass(frozen=True)
class Accuracy:
    """Distances over all scored tokens; KL in nats, from the exact cache to the subject.

    Attributes:
        tokens: scored tokens.
        kl_mean, kl_median, kl_p99: of KL(exact || subject) per token.
        kl_low, kl_high: 95 % interval of the mean (block bootstrap, see `distances.block_interval`).
        top1: part of the tokens whose most likely successor is the same.
        perplexity, perplexity_exact: of the text behind the prompts.
        perplexity_delta: how much higher the subject's perplexity is, in percent of the exact one.
        perplexity_delta_low, perplexity_delta_high: its 95 % interval, from differences token by token.
        bits_per_element: stored bits per number with scales, without the exact tail (0.0 if unknown).
    """

    tokens: int
    kl_mean: float
    kl_low: float
    kl_high: float
    kl_median: float
    kl_p99: float
    top1: float
    perplexity: float
    perplexity_exact: float
    perplexity_delta: float
    perplexity_delta_low: float
    perplexity_delta_high: float
    bits_per_element: float


def measure_accuracy(
    model: PreTrainedModel,
    texts: Iterable[torch.Tensor],
    subjects: Mapping[str, Callable[[], Cache]],
    prompt_tokens: int,
    progress: Callable[[int], None] = lambda tokens: None,
    reference: ExactReference | None = None,
) -> dict[str, Accuracy]:
    """Compare caches with the exact one on the same texts, token by token in effect.

    Args:
        model: a causal language model in eval mode, on one device.
        texts: token ids [tokens] of each text; the first `prompt_tokens` of each are not scored.
        subjects: name -> function that makes an empty cache.
        progress: called with the tokens scored for one subject since the last call.
        reference: the exact distributions of these texts, from an earlier call; None computes them.
    Raises: ValueError when there is no text, when one is longer than the model reads or not longer than the prompt,
        or when a subject gives logits that are not finite (no figure is returned then).
    """
    found = tally_caches(model, texts, subjects, prompt_tokens, progress, reference)
    return {name: summary(tally, bits) for name, (tally, bits) in found.items()}


def tally_caches(
    model: PreTrainedModel,
    texts: Iterable[torch.Tensor],
    subjects: Mapping[str, Callable[[], Cache]],
    prompt_tokens: int,
    progress: Callable[[int], None] = lambda tokens: None,
    reference: ExactReference | None = None,
) -> dict[str, tuple[Tally, float]]:
    """Return the figures of every scored token and the bits per element of each subject.

    `texts` are token ids [tokens] each, int64; the other arguments and the errors are those of `measure_accuracy`.
    """
    texts = list(texts)
    check_texts(model, texts, prompt_tokens)
    if reference is None:
        reference = ExactReference(model, texts, prompt_tokens)
    tallies: dict[str, Tally] = {name: Tally() for name in subjects}
    bits: dict[str, float] = {}
    for number, ids in enumerate(texts):
        exact = reference.log_probs(number)
        targets = ids[prompt_tokens + 1 :]
        for name, make in subjects.items():
            cache = make()
            for position, logits in forced_logits(
                model, ids, cache, prompt_tokens, prefill=reference.prefill(number)
            ):
                if not torch.isfinite(logits).all():
                    raise ValueError(f"{name} gives logits that are not finite at token {position}")
                first = position - prompt_tokens
                tallies[name].add(
                    exact[first : first + len(logits)],
                    torch.log_softmax(logits, -1),
                    targets[first : first + len(logits)],
                )
                progress(len(logits))
            tallies[name].end_text()
            bits[name] = getattr(cache, "bits_per_element", 0.0)
    return {name: (tally, bits[name]) for name, tally in tallies.items()}


def check_texts(model: PreTrainedModel, texts: list[torch.Tensor], prompt_tokens: int) -> None:
    """Raise ValueError for texts that cannot be measured with this model.

    Args:
        texts: token ids [tokens] of each text.
        prompt_tokens: leading tokens of each text that are not scored; at least two must remain.
    """
    if not texts:
        raise ValueError("texts must hold at least one text, got none")
    longest = longest_context(model.config)
    for ids in texts:
        if len(ids) > longest:
            raise ValueError(
                f"a text of {len(ids)} tokens is longer than the {longest} that the model reads "
                "(max_position_embeddings)"
            )
        if not 1 <= prompt_tokens < len(ids) - 1:
            raise ValueError(
                f"prompt_tokens must leave at least two of a text's {len(ids)} tokens to score, got {prompt_tokens}"
            )


def summary(tally: Tally, bits: float) -> Accuracy:
    """Return the figures of all closed texts of a tally."""
    kl = torch.cat(tally.kl)
    loss, loss_exact = torch.cat(tally.loss), torch.cat(tally.loss_exact)
    low, high = block_interval(tally.kl)
    differences = [a - b for a, b in zip(tally.loss, tally.loss_exact, strict=True)]
    delta_low, delta_high = (percent(bound) for bound in block_interval(differences))
    return Accuracy(
        tokens=len(kl),
        kl_mean=kl.mean().item(),
        kl_low=low,
        kl_high=high,
        kl_median=kl.median().item(),
        kl_p99=kl.quantile(0.99).item(),
        top1=torch.cat(tally.same).double().mean().item(),
        perplexity=loss.mean().exp().item(),
        perplexity_exact=loss_exact.mean().exp().item(),
        perplexity_delta=percent((loss - loss_exact).mean().item()),
        perplexity_delta_low=delta_low,
        perplexity_delta_high=delta_high,
        bits_per_element=bits,
    )


def percent(difference: float) -> float:
    """Return how much higher a perplexity is, in percent, from a difference of mean losses in nats."""
    return 100 * math.expm1(difference)
