"""The memory of continuous batching: how many requests and pages fit into a budget, and the bytes that they take."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import CacheOptionError
from ..geometry import Geometry
from ..spec import PageSpec
from ..units import format_bytes

# of the budget, where full-attention layers share it with windows and sliding layers: these take no more
FIXED_PART = 0.25


@dataclass(frozen=True)
class LayersOfKind:
    """The layers of one sliding window (None: full attention), as far as their memory is concerned.

    Attributes:
        sizes: where the tokens of a row lie.
        specs: of each layer.
    """

    sizes: Geometry
    specs: Sequence[PageSpec]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of each layer."""
        return sum(spec.page_bytes for spec in self.specs)

    @property
    def window_bytes(self) -> int:
        """Bytes of the exact tokens of one row in all layers."""
        return sum(spec.window_bytes(1, self.sizes.slots) for spec in self.specs)

    def sliding_pages(self, rows: int, batch_tokens: int) -> int:
        """Return the pages that `rows` rows hold at most, with those that a forward of `batch_tokens` tokens still reads."""
        assert self.sizes.window is not None
        size = self.sizes.page_size
        return rows * (self.sizes.window // size + 4) + batch_tokens // size + 1


@dataclass(frozen=True)
class BatchRoom:
    """What continuous batching has room for; allocated as a whole when a manager starts.

    Attributes:
        rows: requests that may hold tokens at once.
        pages: sliding window (None: full attention) -> pages of each of its layers.
        nbytes: bytes of all pages and exact windows.
    """

    rows: int
    pages: Mapping[int | None, int]
    nbytes: int

    @classmethod
    def of(
        cls,
        kinds: Mapping[int | None, LayersOfKind],
        *,
        most_rows: int,
        batch_tokens: int,
        budget: int | None = None,
        pages: int | None = None,
    ) -> "BatchRoom":
        """Return the room within `budget` bytes, or for `pages` pages of the full-attention layers.

        Args:
            most_rows: requests that are wanted at once; fewer where their exact windows would take over a quarter of a budget.
            batch_tokens: most tokens of a forward.
        Raises: CacheOptionError where not even one request has room.
        """
        full = kinds.get(None)
        if pages is not None and full is not None:
            rows = min(most_rows, pages)
        else:
            assert budget is not None
            part = budget if full is None else int(budget * FIXED_PART)
            rows = _most(kinds, most_rows, batch_tokens, part)
        fixed = _fixed_bytes(kinds, rows, batch_tokens)
        if full is not None and pages is None:
            assert budget is not None
            pages = (budget - fixed) // full.page_bytes
        if rows < 1 or (pages is not None and pages < 1):
            least = _fixed_bytes(kinds, 1, batch_tokens)
            least = least if full is None else max(int(least / FIXED_PART), least + full.page_bytes)
            given = "no pages" if budget is None else format_bytes(budget)
            raise CacheOptionError(
                f"continuous batching has {given} for its cache, and one request of this model takes at least "
                f"{format_bytes(least)}: give it more (cache_config={{'max_bytes': ..}}, or max_memory_percent of the "
                "ContinuousBatchingConfig)"
            )
        found: dict[int | None, int] = {
            window: kind.sliding_pages(rows, batch_tokens)
            for window, kind in kinds.items()
            if window is not None
        }
        if full is not None:
            assert pages is not None
            found[None] = pages
            fixed += pages * full.page_bytes
        return cls(rows, found, fixed)


def _fixed_bytes(kinds: Mapping[int | None, LayersOfKind], rows: int, batch_tokens: int) -> int:
    """Return the bytes of windows and sliding layers."""
    sliding = sum(
        kind.sliding_pages(rows, batch_tokens) * kind.page_bytes
        for window, kind in kinds.items()
        if window is not None
    )
    return sliding + rows * sum(kind.window_bytes for kind in kinds.values())


def _most(
    kinds: Mapping[int | None, LayersOfKind], most_rows: int, batch_tokens: int, budget: int
) -> int:
    """Return the most rows, up to `most_rows`, whose windows and sliding layers fit into `budget` bytes."""
    none = _fixed_bytes(kinds, 0, batch_tokens)
    each = _fixed_bytes(kinds, 1, batch_tokens) - none
    return min(most_rows, max(0, budget - none) // each)
