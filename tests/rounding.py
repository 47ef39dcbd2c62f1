"""How far rounding may move results of fp32 sums: from the number of terms, their size and the dtype, not from a processor's figures.

Codes of quantized pages are no such sums: a number that rounds otherwise may get the next code, and everything behind it differs by
a step of the format. Results are compared where the pages hold the same bytes.
"""

import torch
from error_bound import roundings, unit

# in a row on the longest way through a tiny model: 4 layers of 7 products of at most 96 terms, weights of at most 300 tokens, the head
TERMS = 4 * (7 * 96 + 300) + 96


def allowed(expected: torch.Tensor, terms: int = TERMS) -> float:
    """Return how far apart two results may be that add up `terms` numbers in two orders, each as large as the largest result.

    Both err by up to roundings(terms) halves of an ulp. Sums that end small although their terms are large would err by more;
    logits, weights of attention and its results have no such terms.
    """
    numbers = expected.detach()
    finite = numbers[numbers.isfinite() & (numbers.abs() < 1e6)].double()
    size = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
    largest = max(
        unit(expected.dtype), unit(torch.float32)
    )  # what is compared in fp64 was computed in fp32
    return 2 * roundings(terms) * largest * size


def assert_close(found: torch.Tensor, expected: torch.Tensor, terms: int = TERMS) -> None:
    """Raise AssertionError where two results differ by more than rounding may move both."""
    torch.testing.assert_close(found, expected, rtol=0, atol=allowed(expected, terms))
