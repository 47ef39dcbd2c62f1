"""The tokens of a request that go through the prefill, and those that go through the stored cache. Knows no tensor.

    context                         continuation
    c c c c c c c c c c c c c c c | x x x x
    |-------- prefill --------| |---fed----|        the last token of all is predicted only
      exact, an empty cache     ^ read through the cache; its logits score the first x

Requests with one prefill share it; requests that feed the same tokens behind it (choices of one token) share the
forward as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Run:
    """Tokens behind a shared prefill, read through a copy of its cache.

    Attributes:
        fed: tokens that go through the model.
        start: index in `fed` of the token whose logits score the first target; -1 is the last one of the prefill.
        answers: (number of the request, its targets).
    """

    fed: tuple[int, ...]
    start: int
    answers: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)


@dataclass
class Prefix:
    """A prefill and what is scored behind it."""

    tokens: tuple[int, ...]
    runs: list[Run] = field(default_factory=list)

    @property
    def longest(self) -> int:
        """The most tokens that any run feeds."""
        return max(len(run.fed) for run in self.runs)


def plan_prefixes(
    requests: Sequence[tuple[Sequence[int], Sequence[int], int]],
    max_length: int,
    reread_tokens: int,
) -> list[Prefix]:
    """Group requests by their prefill, longest first.

    Args:
        requests: (context, continuation, least prefill), token ids, none of both empty. A text that is too long
            loses tokens on the left, as in lm-eval. The least prefill may reach into the continuation.
        max_length: the most tokens that the model is fed with.
        reread_tokens: last tokens of the context that are read through the cache, and not prefilled.
    """
    found: dict[tuple[int, ...], Prefix] = {}
    runs: dict[tuple[tuple[int, ...], tuple[int, ...], int], Run] = {}
    for number, (context, continuation, least) in enumerate(requests):
        if not 1 <= len(continuation) <= max_length or not context:
            raise ValueError(
                f"a request must have a context and 1 to {max_length} tokens to score, got {len(context)} and "
                f"{len(continuation)}"
            )
        text = tuple([*context, *continuation][-(max_length + 1) :])
        scored = len(text) - len(continuation)
        prefilled = min(len(text) - 1, max(1, least, scored - reread_tokens))
        tokens, fed, start = text[:prefilled], text[prefilled:-1], scored - 1 - prefilled
        prefix = found.setdefault(tokens, Prefix(tokens))
        key = (tokens, fed, start)
        if key not in runs:
            runs[key] = Run(fed, start)
            prefix.runs.append(runs[key])
        runs[key].answers.append((number, text[scored:]))
    return sorted(found.values(), key=lambda p: (-len(p.tokens), -p.longest, p.tokens))
