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

    def gone(self, tokens: Count) -> Count:
        """Return the pages that were given back, or never sealed at all."""
        return self.dropped(tokens, self.sealed(tokens))

    def held(self, tokens: Count) -> Count:
        """Return the pages that a row holds between two steps."""
        return self.sealed(tokens) - self.gone(tokens)

    def in_use(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the page ids in use while single tokens are appended that make rows of `tokens`.

        A step seals its page before it gives back those that left the window.

        Args:
            tokens: [any shape], int64, real tokens of a row.
        Returns: as many numbers of pages, int64.
        """
        before = (tokens - 1).clamp(min=0)
        never = (self.gone(tokens) - self.sealed(before)).clamp(min=0)
        return self.sealed(tokens) - self.gone(before) - never


@dataclass(frozen=True)
class PageUse:
    """Pages of a group of layers over a whole text.

    Attributes:
        most: most page ids that were ever in use at once, over all rows.
        held: pages of each row at the end.
    """

    most: int
    held: tuple[int, ...]

    def capacity(self, reserved: int) -> int:
        """Return the pages that storage has room for at the end, for `reserved` of them from the first forward on."""
        return page_capacity(max(self.most, reserved))


def page_use(sizes: RowPages, row_tokens: Sequence[int], prompt: int | None = None) -> PageUse:
    """Return the pages that rows take which hold `row_tokens` tokens at the end.

    Args:
        prompt: tokens of the longest row that came in the first forward; the others came one by one. None: the most
            that any prompt could have led to, which never falls when rows grow. It matters with a window only.
    """
    longest = max(row_tokens, default=0)
    new = longest - (min(1, longest) if prompt is None else prompt)
    rows = Counter(row_tokens)
    held = _most_held if sizes.window is not None and prompt is None else RowPages.held
    now = {tokens: held(sizes, tokens) for tokens in rows}
    each = tuple(map(now.__getitem__, row_tokens))
    return PageUse(sum(each) if sizes.window is None else _most_in_use(sizes, rows, new), each)


def _most_held(sizes: RowPages, tokens: int) -> int:
    """Return the most pages that a row of at most `tokens` tokens ever holds between two steps.

    What it holds grows until its window is full, and then repeats with every page.
    """
    return max(map(sizes.held, range(max(0, tokens - sizes.page_size), tokens + 1)))


def _most_in_use(sizes: RowPages, rows: Counter[int], new: int) -> int:
    """Return the most page ids that are ever in use at once.

    Args:
        rows: tokens at the end -> how many rows have so many.
        new: steps behind the prompt, of one token each.
    """
    counts = torch.tensor(list(rows.values()), dtype=torch.int64, device="cpu")
    ends = torch.tensor(list(rows), dtype=torch.int64, device="cpu")
    starts = ends - new  # below 0: its padding goes on
    begun = sum(sizes.held(max(0, tokens - new)) * count for tokens, count in rows.items())
    grown = (starts + _sealing_steps(sizes, starts, new)[:, None]).clamp(min=0)
    in_use = (sizes.in_use(grown) * counts).sum(1)
    return max([begun, *in_use.tolist()])


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
    steps = offsets[:, None] + torch.arange(last // size + 1, device="cpu") * size
    steps = steps.flatten().sort().values
    return steps[(steps >= 1) & (steps <= last)]
