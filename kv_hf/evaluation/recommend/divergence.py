"""KL divergence of one set of logits from another, precise where they hardly differ."""

import torch

ROWS_AT_ONCE = 32  # of [rows, vocab], to bound the memory of what is made on the way
SMALL = 0.1  # below it a series is more precise than a difference


def divergence(exact: torch.Tensor, subject: torch.Tensor) -> torch.Tensor:
    """Return KL(softmax(exact) || softmax(subject)) of each row, in nats.

    It is log(sum p * exp(d)) - sum p * d, with d = subject - exact less its mean. With exp(d) = 1 + d + rest(d) it is
    log(1 + sum p * d + sum p * rest(d)) - sum p * d, whose middle term is nearly nothing. The difference of two rounded
    log-probabilities would leave nothing of divergences below 1e-7.

    Args:
        exact, subject: [rows, vocab] fp32 or fp64.
    Returns: [rows], float64, at least 0.
    """
    found = []
    for start in range(0, len(exact), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        p, d = exact[rows].softmax(-1), subject[rows] - exact[rows]
        d -= (p * d).sum(-1, keepdim=True)
        mean, rest = (p * d).sum(-1).double(), (p * _rest(d)).sum(-1).double()
        found.append(torch.log1p(mean + rest) - mean)
    return torch.cat(found).clamp_min(0.0)


def _rest(d: torch.Tensor) -> torch.Tensor:
    """Return exp(d) - 1 - d."""
    series = d * d * (1 / 2 + d * (1 / 6 + d * (1 / 24 + d / 120)))
    return torch.where(d.abs() < SMALL, series, torch.expm1(d) - d)
