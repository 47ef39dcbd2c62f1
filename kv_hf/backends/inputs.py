"""What a kernel reads: encoded pages, exact tokens and the table that orders them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from ..geometry import page_start, window_token
from ..read_budget import ReadBudget
from ..spec import PageSpec


class OutsidePages(Protocol):
    """Pages of one layer that live outside of the device, of which some can be chosen and read."""

    def index(self) -> tuple[Mapping[str, torch.Tensor], torch.Tensor, torch.Tensor | None]:
        """Return what a choice reads.

        Returns: fields of all keys (page_summary.part_fields), block table [rows, width], and `PagedKV.words`.
        """
        ...

    def read(
        self, block_table: torch.Tensor, num_pages: torch.Tensor
    ) -> tuple[
        Mapping[str, torch.Tensor],
        Mapping[str, torch.Tensor],
        torch.Tensor,
        Callable[[], AbstractContextManager[Any]],
    ]:
        """Return keys, values, block table and `PagedKV.hold` of these pages [rows, width] of the index's table alone."""
        ...


# not frozen, which would make it slower to make: there is one per layer and step
@dataclass(slots=True, eq=False)
class PagedKV:
    """The keys and values of one layer as one forward sees them; nobody changes one.

    geometry.place_of says where token t of row b lies: in slot t of the exact window for t < sink_tokens, in its sealed
    pages for the next num_pages[b] * page_size tokens, and from slot sink_tokens of the exact window on for the rest.

    Attributes:
        key_pages, value_pages: tensors of SideSpec.fields with a leading [num_pages].
        spec: sizes and formats of both sides.
        block_table: [rows, width], int32; entries past a row's last page hold any allocated id.
        num_pages: [rows], int32, sealed pages of each row.
        residual_keys, residual_values: [rows, num_kv_heads, slots, head_dim], model dtype: the exact window, which
            holds a row's sinks and its residual; slots at and past exact_lens may hold anything.
        exact_lens: [rows], int32, tokens in the exact window; num_pages * page_size + exact_lens = tokens.
        padding: [rows], int32, columns in front of the row's first token.
        seen: columns (padding + tokens), the same for all rows; of a preallocated cache the columns that there is
            room for.
        sink_tokens: slots of the exact window that hold the first tokens of the row.
        hold: keeps the pages where they are while kernels that read them are launched (pages that live outside of
            the device share room on it).
        launches: what a backend keeps between calls for this layer (compiled launches, packed arguments), under keys
            that name all it depends on.
        budget: how much of a row a step of few queries reads; None: everything.
        outside: the pages outside of the device that a part of can be read; None: all are to be read, or lie here.
        words: [num_kv_heads, words], int32: the words of a token's codes that `key_pages` hold, which are then those of
            page_summary.part_fields and good for a choice alone; None: all words.

    In a sliding layer that has given pages back, columns begin with the first that a query may see, the pages
    given back are left out, and the sinks are stale: a kernel hides them, as they lie before the sliding window.
    """

    key_pages: Mapping[str, torch.Tensor]
    value_pages: Mapping[str, torch.Tensor]
    spec: PageSpec
    block_table: torch.Tensor
    num_pages: torch.Tensor
    residual_keys: torch.Tensor
    residual_values: torch.Tensor
    exact_lens: torch.Tensor
    padding: torch.Tensor
    seen: int
    sink_tokens: int
    hold: Callable[[], AbstractContextManager[Any]] = nullcontext
    launches: dict[Any, Any] = field(default_factory=dict, compare=False)
    budget: ReadBudget | None = None
    outside: OutsidePages | None = None
    words: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Where kernels read it."""
        return self.residual_keys.device

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.spec.keys.page_size

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return self.residual_keys.shape[0]

    def with_pages(self, block_table: torch.Tensor, num_pages: torch.Tensor) -> "PagedKV":
        """Return what a kernel reads of some pages of each row, for queries behind all of them and without a mask.

        Of pages outside of the device these alone are fetched, when they are read.

        `padding` stays as it is: columns have no meaning without a mask.

        Args:
            block_table: [rows, width], int32, the pages in their order.
            num_pages: [rows], int32.
        """
        keys, values, hold = self.key_pages, self.value_pages, self.hold
        if self.outside is not None:
            keys, values, block_table, hold = self.outside.read(block_table, num_pages)
        return PagedKV(
            keys,
            values,
            self.spec,
            block_table,
            num_pages,
            self.residual_keys,
            self.residual_values,
            self.exact_lens,
            self.padding,
            self.seen,
            self.sink_tokens,
            hold,
            self.launches,
        )

    def to_choose_from(self) -> "PagedKV":
        """Return what a choice of pages reads: this, or the index of pages that live outside; its `value_pages` are empty."""
        if self.outside is None:
            return self
        keys, table, words = self.outside.index()
        nothing = {
            name: keys["codes"].new_empty((0, *shape), dtype=dtype)
            for name, (shape, dtype) in self.spec.values.fields.items()
        }
        return replace(
            self,
            key_pages=keys,
            value_pages=nothing,
            block_table=table,
            hold=nullcontext,
            outside=None,
            words=words,
        )

    def page_start(self, page: int) -> int:
        """Return the first token of a row's page of that number."""
        return page_start(page, page_size=self.page_size, sink_tokens=self.sink_tokens)

    def window_tokens(self, slots: torch.Tensor, pages: torch.Tensor | int) -> torch.Tensor:
        """Return which tokens lie in slots of the exact windows.

        Args:
            slots: [slots], integers.
            pages: sealed pages of each row, [rows, 1], integers, or a number for all.
        Returns: token numbers [rows, slots]; any shapes that broadcast will do.
        """
        return window_token(slots, pages, page_size=self.page_size, sink_tokens=self.sink_tokens)

    def page_tiles(self, pages_per_tile: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first page column, page ids [rows, at most pages_per_tile]) over the block table."""
        width = self.block_table.shape[1]
        for first in range(0, width, pages_per_tile):
            yield first, self.block_table[:, first : first + pages_per_tile]
