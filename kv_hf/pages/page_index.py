"""What a choice of pages reads of one layer's keys, on the device, while the pages themselves live outside.

Of every page the words of its codes that are read, and what says the middle of the rest (page_summary.part_fields): about a
quarter of the keys, and nothing of the values. It is filled when a step is about to choose, with those pages that it lacks:
sealing, cropping and loading only have pages forgotten, if anything. Which words are read is fixed by the first pages.
"""

from collections.abc import Callable, Iterable, Sequence

import torch

from ..page_summary import RANGED_PAGES, Summary, part_bytes, part_fields, spread, summary_of
from ..quant.page_parts import part_of, words_to_read
from ..spec import PageFields, SideSpec
from .device_budget import SEAL_PAGES
from .persistent import persistent_tensors
from .slab import Fields

Take = Callable[[Sequence[int]], Fields]


class PageIndex:
    """The index of one layer's keys.

    Args:
        spec: of the keys.
        device: where kernels choose.
    Attributes:
        fields: tensors of page_summary.part_fields, by page id; pages that are not held are zero or stale.
        words: [heads, words], int32: which words of a token's codes; None: all of them.
    """

    def __init__(self, spec: SideSpec, device: torch.device) -> None:
        self.spec, self.device = spec, device
        self._shapes = part_fields(spec)
        with persistent_tensors():
            self.fields = self._room(0)
        self.words: torch.Tensor | None = None
        self._held: set[int] = set()
        self._covered: torch.Tensor | None = None  # a table all of whose pages are held

    @property
    def capacity(self) -> int:
        """Pages that there is room for."""
        return self.fields.room

    @property
    def nbytes(self) -> int:
        """Bytes allocated for pages."""
        return self.capacity * part_bytes(self.spec)

    def forget(self, pages: Iterable[int]) -> None:
        """Note that other tokens lie in these pages now."""
        self._held.difference_update(pages)
        self._covered = None

    def cover(self, table: torch.Tensor, pages: Sequence[int], capacity: int, take: Take) -> None:
        """Hold all pages of a table.

        Args:
            table: the block table, by which the pages are known the next time.
            pages: its pages, each once.
            capacity: pages to have room for.
            take: returns copies of whole pages of keys, [n, ..] by field name; called for some pages at a time.
        """
        if table is self._covered and capacity <= self.capacity:
            return
        with persistent_tensors():
            if capacity > self.capacity:
                self._grow(capacity)
            if pages and self.words is None and summary_of(self.spec) != Summary.ALL_CHANNELS:
                sample = take([pages[place] for place in spread(RANGED_PAGES, len(pages))])
                self.words = words_to_read(sample, self.spec)
            missing = [page for page in pages if page not in self._held]
            for first in range(0, len(missing), SEAL_PAGES):
                some = missing[first : first + SEAL_PAGES]
                part = part_of(take(some), self.words, self.spec)
                for name, field in self.fields.items():
                    field[some] = part[name]
                self._held.update(some)
        self._covered = table

    def _room(self, pages: int) -> PageFields:
        return PageFields(
            {
                name: torch.zeros((pages, *shape), dtype=dtype, device=self.device)
                for name, (shape, dtype) in self._shapes.items()
            }
        )

    def _grow(self, capacity: int) -> None:
        """Make room, all of the new before the old is given up: for a moment the index exists twice."""
        old, new = self.fields, self._room(capacity)
        for name, field in old.items():
            new[name][: len(field)] = field
        self.fields = new
