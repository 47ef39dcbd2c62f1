"""Distances of next-token distributions, gathered over chunks, with intervals. Knows no model and no cache."""

from collections.abc import Iterable, Sequence

import torch

BLOCK = 64  # neighbouring tokens that an interval draws together, because their errors go together
LEAST_BLOCKS = 10
RESAMPLES = 2000


class Tally:
    """Per-token figures of one subject against the exact distributions, on the CPU.

    Attributes:
        kl: per text, KL(exact || subject) in nats, [scored tokens] each, fp64.
        loss, loss_exact: per text, the negative log-likelihood of the next token, [scored tokens - 1] each, fp64.
        same: per text, whether the most likely successor is the same.
    """

    def __init__(self) -> None:
        self.kl: list[torch.Tensor] = []
        self.same: list[torch.Tensor] = []
        self.loss: list[torch.Tensor] = []
        self.loss_exact: list[torch.Tensor] = []
        self._parts: list[tuple[torch.Tensor, ...]] = []

    def add(self, exact: torch.Tensor, subject: torch.Tensor, targets: torch.Tensor) -> None:
        """Add a chunk: log-probabilities [n, vocab] of both; `targets` [n or n - 1] are the tokens that follow."""
        # may be below 0 by about 1e-8, by rounding; cut off, it would not average out
        kl = (exact.exp() * (exact - subject)).sum(-1).double()
        index = targets[:, None]
        rows = len(targets)
        self._parts.append(
            (
                kl.cpu(),
                (exact.argmax(-1) == subject.argmax(-1)).cpu(),
                -subject[:rows].gather(-1, index)[:, 0].double().cpu(),
                -exact[:rows].gather(-1, index)[:, 0].double().cpu(),
            )
        )

    def end_text(self) -> None:
        """Close the text whose chunks were added."""
        kl, same, loss, loss_exact = (torch.cat(part) for part in zip(*self._parts, strict=True))
        self.kl.append(kl)
        self.same.append(same)
        self.loss.append(loss)
        self.loss_exact.append(loss_exact)
        self._parts = []

    def of(self, texts: Iterable[int]) -> "Tally":
        """Return a tally of some of the closed texts, by their numbers."""
        part = Tally()
        for number in texts:
            part.kl.append(self.kl[number])
            part.same.append(self.same[number])
            part.loss.append(self.loss[number])
            part.loss_exact.append(self.loss_exact[number])
        return part


def block_interval(
    texts: Sequence[torch.Tensor], block: int = BLOCK, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean of per-token figures.

    Blocks of neighbouring tokens of one text are drawn with replacement (moving neither across texts nor within
    one), so that a few hard passages widen the interval as they should. Of less than ten blocks nothing could be
    told: blocks are shorter there.

    Args:
        texts: [tokens] of each text.
    Source: the block bootstrap, Kuensch 1989 (with fixed blocks, Carlstein 1986).
    """
    tokens = sum(len(text) for text in texts)
    block = max(1, min(block, tokens // LEAST_BLOCKS))
    blocks = [part for text in texts for part in text.double().split(block)]
    sums = torch.stack([part.sum() for part in blocks])
    counts = torch.tensor([float(len(part)) for part in blocks], dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(blocks), (resamples, len(blocks)), generator=generator)
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high
