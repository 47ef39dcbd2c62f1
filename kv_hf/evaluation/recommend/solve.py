"""The multiple-choice knapsack: one choice per item, least loss at every size. Knows nothing of caches."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# points of the frontier that are kept after each item. Below it the result is exact, and it is in every model whose
# layers are of one size: the bytes of the formats are multiples of one number. Beyond it sizes are rounded up to one
# of as many steps, which wastes at most one step per item.
MOST_POINTS = 1 << 14


@dataclass(frozen=True)
class Frontier:
    """Every best total: no other selection is both as small and as good.

    Attributes:
        sizes: [points], int64, rising.
        losses: [points], float64, falling.
    """

    sizes: np.ndarray
    losses: np.ndarray
    _steps: tuple[
        tuple[np.ndarray, np.ndarray], ...
    ]  # per item: (choice, point before) of each point

    def best(self, limit: int) -> int | None:
        """Return the point of the least loss whose size is at most `limit`; None where all are larger."""
        point = int(np.searchsorted(self.sizes, limit, side="right")) - 1
        return None if point < 0 else point

    def selection(self, point: int) -> list[int]:
        """Return the choice of every item at a point."""
        chosen = []
        for choice, before in reversed(self._steps):
            chosen.append(int(choice[point]))
            point = int(before[point])
        return chosen[::-1]


def solve(items: Sequence[Sequence[tuple[int, float]]], most_points: int = MOST_POINTS) -> Frontier:
    """Find the best selections of one choice per item, at every total size.

    Args:
        items: for each item the (size, loss) of its choices; sizes are whole numbers of at least 0.
        most_points: see MOST_POINTS.
    Returns: the frontier. Of choices with the same totals an arbitrary one is kept.
    Raises: ValueError for an item without choices.
    """
    if not all(items):
        raise ValueError("every item needs at least one choice")
    sizes, losses = np.zeros(1, np.int64), np.zeros(1)
    steps = []
    for choices in items:
        own_sizes = np.array([size for size, _ in choices], np.int64)
        own_losses = np.array([loss for _, loss in choices], np.float64)
        count = len(sizes)
        all_sizes = (own_sizes[:, None] + sizes).ravel()
        all_losses = (own_losses[:, None] + losses).ravel()
        kept = _best(all_sizes, all_losses)
        if len(kept) > most_points:
            step = -(-int(all_sizes[kept[-1]] - all_sizes[kept[0]]) // most_points)
            low = all_sizes[kept[0]]
            all_sizes = np.maximum(all_sizes, low + -(-(all_sizes - low) // step) * step)
            kept = kept[_best(all_sizes[kept], all_losses[kept])]
        sizes, losses = all_sizes[kept], all_losses[kept]
        steps.append((kept // count, kept % count))
    return Frontier(sizes, losses, tuple(steps))


def _best(sizes: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """Return the indices of the points that no other beats, by rising size."""
    order = np.lexsort((losses, sizes))
    best_before = np.minimum.accumulate(losses[order])
    better = np.ones(len(order), bool)
    better[1:] = losses[order][1:] < best_before[:-1]
    return order[better]
