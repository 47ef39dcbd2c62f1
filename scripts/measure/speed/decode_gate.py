"""The gate of whole decode steps: logits through pages against logits through something that is known to be right."""

from dataclasses import dataclass
from typing import Any

import torch
from kv_hf.evaluation.cache_kinds import cache_kind
from kv_hf.evaluation.decode_steps import Decoding, random_prompt

from kv_hf.formats import cache_names

# largest difference of two logits, as a part of the largest logit. fp32: sums in another order, and on a GPU
# products of fewer digits; 16-bit: what the roundings of some 30 layers come to
ALLOWED = {("cpu", 4): 1e-4, ("cuda", 4): 1e-2, ("cpu", 2): 0.1, ("cuda", 2): 0.1}
# with 64-token pages and 4 sinks no page becomes full between these, where rounding noise alone may flip a code
PROMPT, STEPS = 220, 6


@dataclass(frozen=True)
class GateResult:
    """How far one cache's logits are from the right ones.

    Attributes:
        against: what they were compared with.
        error, allowed: largest difference as a part of the largest logit.
        tokens_equal: greedy choices agree, except where the two best logits are closer than twice the difference.
    """

    name: str
    against: str
    error: float
    allowed: float
    tokens_equal: bool

    @property
    def ok(self) -> bool:
        """True when logits and choices agree (nan does not)."""
        return self.error <= self.allowed and self.tokens_equal


@torch.no_grad()
def gate(model: Any, kernel: str = "auto") -> list[GateResult]:
    """Decode the same tokens with every paged cache and compare the logits.

    Exact pages are compared with DynamicCache, each encoded format with the same pages read by the reference
    kernel. All are fed the tokens that DynamicCache chose.
    """
    prompt = random_prompt(model.config.vocab_size, 1, PROMPT, model.device)
    dynamic = Decoding(model, cache_kind("dynamic"), prompt)
    tokens, right = [], []
    for _ in range(STEPS):
        tokens.append(dynamic.token)
        right.append(dynamic.step().double())
    results = []
    for name in cache_names():
        against, expected = "dynamic", right
        if name != "paged_exact":
            against, expected = "reference", _logits(model, name, "reference", prompt, tokens)
        found = _logits(model, name, kernel, prompt, tokens)
        results.append(_compare(model, name, against, found, expected))
    return results


def _logits(
    model: Any, name: str, kernel: str, prompt: torch.Tensor, tokens: list[torch.Tensor]
) -> list[torch.Tensor]:
    decoding = Decoding(model, cache_kind(name, kernel), prompt)
    found = []
    for token in tokens:
        decoding.token = token
        found.append(decoding.step().double())
    return found


def _compare(
    model: Any,
    name: str,
    against: str,
    found: list[torch.Tensor],
    expected: list[torch.Tensor],
) -> GateResult:
    size = max(float(logits.abs().max()) for logits in expected)
    apart = [float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)]
    equal = True
    for a, b, difference in zip(found, expected, apart, strict=True):
        best = b.topk(2).values[0]
        close = float(best[0] - best[1]) <= 2 * difference
        equal = equal and (close or bool((a.argmax(-1) == b.argmax(-1)).all()))
    device = "cpu" if model.device.type == "cpu" else "cuda"
    # max() would drop a nan that is not in front
    error = sum(apart) if any(d != d for d in apart) else max(apart)
    return GateResult(name, against, error / size, ALLOWED[device, model.dtype.itemsize], equal)
