"""The number of pages that the rows of a batch take, step by step, in plain numbers: no pool, no tensor of a cache.

What the rows of a cache do one forward after the other (`plan_append` in pages/rows.py), worked out for a whole text at once: one
forward takes the prompts, and each one behind it a token of every row.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .geometry import Count, Geometry


def page_capacity(num_pages: int) -> int:
    """Return the pages that storage allocates to hold `num_pages`.

    Exactly that many up to 256, then in steps that keep the unused part below 1/128: memory stays close to
    what is used, and growing copies a layer's pages once per step.
    """
    if num_pages <= 256:
        return num_pages
    step = (1 << (num_pages - 1).bit_length()) // 256
    return -(-num_pages // step) * step


class RowPages(Geometry):
    """Pages of one row, by its tokens: a number, or an int64 tensor of numbers."""

    def dropped(self, tokens: Count) -> Count:
        """Return the pages that no later query can see: given back, or never sealed at all."""
        passed, sealed = self.out_of_sight(tokens), self.sealed(tokens)
        return (
            torch.minimum(passed, sealed)
            if isinstance(tokens, torch.Tensor)
            else min(passed, sealed)
        )

    def held(self, tokens: Count) -> Count:
        """Return the pages that a row holds between two steps."""
        return self.sealed(tokens) - self.dropped(tokens)

    def in_use(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the page ids in use while single tokens are appended that make rows of `tokens`.

        A step seals its page before it gives back those that left the window.

        Args:
            tokens: [any shape], int64, real tokens of a row.
        Returns: as many numbers of pages, int64.
        """
        before = (tokens - 1).clamp(min=0)
        never = (self.dropped(tokens) - self.sealed(before)).clamp(min=0)
        return self.sealed(tokens) - self.dropped(before) - never


@dataclass(frozen=True)
class PageUse:
    """Pages of a group of layers over a whole text.

    Attributes:
        first: page ids in use behind the prompt.
        most: most page ids that were ever in use at once, over all rows.
        held: pages of each row at the end.
    """

    first: int
    most: int
    held: tuple[int, ...]

    def capacity(self, reserved: int) -> int:
        """Return the pages that storage has room for at the end, `reserved` of them from the first forward on."""
        begun = max(page_capacity(self.first), reserved)
        return begun if self.most <= begun else page_capacity(self.most)


def page_use(sizes: RowPages, row_tokens: Sequence[int], prompt: int | None = None) -> PageUse:
    """Return the pages that rows take which hold `row_tokens` tokens at the end.

    Args:
        prompt: tokens of the longest row that came in the first forward; the others came one by one. None: the most
            that any prompt could have led to, which never falls when rows grow.
    """
    longest = max(row_tokens, default=0)
    new = longest - (min(1, longest) if prompt is None else prompt)
    rows = Counter(row_tokens)
    now = {tokens: sizes.held(tokens) for tokens in rows}
    held = tuple(map(now.__getitem__, row_tokens))
    first = sum(count * sizes.held(max(0, tokens - new)) for tokens, count in rows.items())
    if sizes.window is None:
        return PageUse(sum(held) if prompt is None else first, sum(held), held)
    peaks = page_peaks(sizes, row_tokens, new)
    if prompt is None:
        known = {tokens: _most_held(sizes, tokens) for tokens in set(row_tokens)}
        held = tuple(known[tokens] for tokens in row_tokens)
        return PageUse(peaks[-1][1], peaks[-1][1], held)
    return PageUse(first, peaks[-1][1], held)


def _most_held(sizes: RowPages, tokens: int) -> int:
    """Return the most pages that a row of at most `tokens` tokens ever holds between two steps.

    What it holds grows until its window is full, and then repeats with every page.
    """
    return max(map(sizes.held, range(max(0, tokens - sizes.page_size), tokens + 1)))


def page_peaks(sizes: RowPages, row_tokens: Sequence[int], new: int) -> list[tuple[int, int]]:
    """Return (step, page ids in use) where more are in use than ever before: step 0 is the prompt's, `new` the last.

    Args:
        row_tokens: tokens of each row at the end.
        new: steps behind the prompt, of one token each.
    """
    rows = Counter(row_tokens)
    counts = torch.tensor(list(rows.values()), dtype=torch.int64)
    starts = torch.tensor(list(rows), dtype=torch.int64) - new  # below 0: its padding goes on
    begun = sum(sizes.held(max(0, tokens - new)) * count for tokens, count in rows.items())
    steps = _sealing_steps(sizes, starts, new)
    found = [(0, begun)]
    if not len(steps):
        return found
    grown = (starts[None] + steps[:, None]).clamp(min=0)
    in_use = (sizes.in_use(grown) * counts).sum(1)
    most = torch.cat([torch.tensor([begun]), in_use]).cummax(0).values
    for index in (most[1:] > most[:-1]).nonzero().flatten().tolist():
        found.append((int(steps[index]), int(most[index + 1])))
    return found


def _sealing_steps(sizes: RowPages, starts: torch.Tensor, new: int) -> torch.Tensor:
    """Return the steps in which some row of `starts` tokens seals a page, ascending; with a window while it matters.

    As soon as all rows are past their window, what they hold repeats with every page.
    """
    size, last = sizes.page_size, new
    if sizes.window is not None:
        full = sizes.window + sizes.slots
        last = min(new, max(0, full - int(starts.min())) + 2 * size)
    due = (sizes.kept - starts) % size
    offsets = due.unique()
    steps = offsets[:, None] + torch.arange(last // size + 1) * size
    steps = steps.flatten().sort().values
    return steps[(steps >= 1) & (steps <= last)]
