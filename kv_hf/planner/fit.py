"""The largest loads that fit: context, batch and number of resident tokens that a memory holds."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import DeviceBudgetError, PagePoolExhaustedError
from .choices import Choice
from .inventory import Inventory

MOST_TOKENS = 1 << 30  # what still fits at this size has no limit
MOST_ROWS = 1 << 16  # larger batches are not searched


@dataclass(frozen=True)
class Fit:
    """The largest loads in the memory behind the weights. None: nothing grows, or the limit lies beyond all use.

    Attributes:
        context: tokens of each row at the batch of the plan.
        batch: rows at the context of the plan; None: MOST_ROWS or more.
        resident_tokens: tokens over all rows of the plan's batch, in whole pages: what an engine may admit.
    """

    context: int | None
    batch: int | None
    resident_tokens: int | None


def find_fit(
    choice: Choice,
    inventory: Inventory,
    available: int,
    *,
    batch: int,
    context: int,
) -> Fit:
    """Search what fits into `available` bytes, whatever the prompts; 0 where not even one token, row or page does.

    What the cache itself would refuse, by max_pages or the budget of an offload, does not fit. Without prompts
    predictions are quick: with one, an offload is followed step by step up to the context.
    """
    page, exact, bound = choice.page_size, choice.exact_tokens, choice.max_length

    def cost(row_tokens: Sequence[int]) -> float:
        try:
            return choice.predict(inventory, row_tokens).total
        except (DeviceBudgetError, PagePoolExhaustedError):
            return math.inf

    def of_context(tokens: int) -> float:
        return cost([tokens] * batch)

    def of_batch(rows: int) -> float:
        return cost([context] * rows)

    def of_pages(pages: int) -> float:
        each, more = divmod(pages, batch)
        counts = [each + 1] * more + [each] * (batch - more)
        tokens = [exact + count * page for count in counts]
        return cost([count for count in tokens if count])

    most_tokens = MOST_TOKENS if bound is None else bound
    most_pages = max(0, most_tokens - exact) // page * (1 if bound is None else batch)
    found = Fit(
        context=largest_context(of_context, available, most_tokens, page, exact),
        batch=largest(of_batch, available, MOST_ROWS),
        resident_tokens=_times(largest(of_pages, available, most_pages), page),
    )
    if bound is None:
        return found
    return Fit(
        context=bound if found.context is None else found.context,
        batch=found.batch,
        resident_tokens=_times(most_pages, page)
        if found.resident_tokens is None
        else found.resident_tokens,
    )


def _times(pages: int | None, page_size: int) -> int | None:
    return None if pages is None else pages * page_size


def largest_context(
    cost: Callable[[int], float], limit: int, most: int, page_size: int, exact: int
) -> int | None:
    """Return `largest` of a cost that mostly changes where a row seals a page: first in pages, then in tokens."""

    def before_sealing(pages: int) -> int:
        return min(most, exact + page_size * pages - 1)

    if page_size == 1:
        return largest(cost, limit, most)
    most_pages = max(1, (most - exact) // page_size + 1)
    pages = largest(lambda count: cost(before_sealing(count)), limit, most_pages)
    if pages is None:
        return None
    # the token before the next page is sealed does not fit; some of those in between may
    first, end = before_sealing(pages) if pages else 0, before_sealing(pages + 1)
    if end - first == 1 or cost(first + 1) > limit:
        return first
    more = largest(lambda count: cost(first + count), limit, end - first - 1)
    return end - 1 if more is None else first + more


def largest(cost: Callable[[int], float], limit: int, most: int) -> int | None:
    """Return the largest number of 1 to `most` with cost(number) <= limit: 0 if none, None if `most` still fits.

    `cost` must not fall. It is close to a line far out, so it is tried where a line would meet the limit; every third
    try halves what is left. Where it is endless at the far end, every try does.
    """
    if most < 1:
        return 0
    low, low_cost = 1, cost(1)
    if low_cost > limit:
        return 0
    high, high_cost = _too_much(cost, limit, most, low, low_cost)
    if high is None:
        return None
    turn = 0
    while high - low > 1:
        turn += 1
        guess = (low + high) // 2
        if turn % 3 and high_cost != math.inf:
            line = int((limit - low_cost) / (high_cost - low_cost) * (high - low))
            aside = max(
                1, (high - low) >> 6
            )  # past the line and before it, so that both ends close in
            guess = low + line + (aside if turn % 3 == 1 else -aside)
        guess = min(max(guess, low + 1), high - 1)
        found = cost(guess)
        if found <= limit:
            low, low_cost = guess, found
        else:
            high, high_cost = guess, found
    return low


def _too_much(
    cost: Callable[[int], float], limit: int, most: int, low: int, low_cost: float
) -> tuple[int | None, float]:
    """Return a number of at most `most` that costs more than `limit`, and its cost; (None, 0) where there is none."""
    guess, step = 1 << 10, 64
    while True:
        guess = min(guess, most)
        found = cost(guess)
        if found > limit:
            return guess, found
        if guess == most:
            return None, 0
        slope = (found - low_cost) / (guess - low)
        low, low_cost = guess, found
        step *= 4
        meeting = low + (limit - low_cost) / slope if slope else most
        guess = min(most, max(int(1.005 * meeting) + 64, low + step))
