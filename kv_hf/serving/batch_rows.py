"""The rows of a batch that requests join and leave, the parts of a forward that they grow by, and the memory that they take."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.cache_utils import LinearAttentionLayer

from ..cache.layer import PagedLayer
from ..cache.layer_kinds import HybridLayer, IndexedLatentLayer, LatentLayer
from ..cache.model_shape import CACHE, is_dummy
from ..cache.paged_cache import PagedCache
from ..errors import CacheOptionError, UnsupportedModelError
from ..pages.rows import Batch, Rows, RowSizes, plan_append
from ..pages.step import Row, Step, Tables
from ..spec import PageSpec
from ..units import format_bytes

# of the budget, where full-attention layers share it with windows and sliding layers: these take no more
FIXED_PART = 0.25


class Part(NamedTuple):
    """Neighbouring rows that grow by one token each in a forward, or one row that grows by many.

    Attributes:
        first: row.
        rows: how many.
        q_len: tokens of each row.
        tokens: where they lie in the forward, a slice; or of several rows [rows], int64, on the device; None: they are all of it.
        prompt: whether they may be of a prompt, and read everything.
    """

    first: int
    rows: int
    q_len: int
    tokens: torch.Tensor | slice | None
    prompt: bool

    def cut(self, states: torch.Tensor) -> torch.Tensor:
        """Return the part of a forward's queries, keys or values [.., heads, .., head_dim] as [rows, heads, q_len, head_dim]."""
        if self.tokens is None:
            return states
        if self.rows == 1:
            return states[:, :, self.tokens]
        return states.transpose(0, 2)[self.tokens].contiguous()


class Forward(NamedTuple):
    """The parts of one forward.

    Attributes:
        parts: all tokens of the forward, each in one part.
        steps: sliding window (None: full attention) -> the change of the rows of each part.
        shape: rows and tokens of each that go through the model: all tokens in one row, or those of a single part.
    """

    parts: Sequence[Part]
    steps: Mapping[int | None, Sequence[Step]]
    shape: tuple[int, int]

    def alone(self, index: int) -> "Forward":
        """Return the forward of one part, whose rows go through the model as rows."""
        part = self.parts[index]._replace(tokens=None)
        steps = {window: [found[index]] for window, found in self.steps.items()}
        return Forward([part], steps, (part.rows, part.q_len))


class BatchRows(Rows):
    """Rows of requests, each of its own length; a forward adds tokens to some of them, and to each its own number.

    A part of a forward is a run of neighbouring rows that grow by as many tokens. It is planned as an append to a batch of
    its own, whose rows are padded on the left up to the longest: kernels read it as they read any batch.
    """

    def admit(self, row: Row) -> None:
        """Add `row` behind the others; it shares its pages with whoever holds them."""
        with self.pool.lock:
            self.batch = Batch.of((*self.batch.rows, row))

    def grow(self, first: int, last: int, q_len: int) -> Step:
        """Let the rows first .. last - 1 grow by `q_len` tokens each; return what that does, the rows counted from 0.

        Raises: PagePoolExhaustedError with the rows unchanged.
        """
        whole, chosen = self.batch, slice(first, last)
        exact, dropped, pages = whole.exact[chosen], whole.dropped[chosen], whole.pages[chosen]
        nothing = np.zeros_like(exact)
        part = Batch(nothing, exact, dropped, nothing, pages)
        lengths = self.lengths(part)
        longest = int(lengths.max())
        part = replace(part, padding=longest - lengths)
        plan = plan_append(self.sizes, part, longest, q_len, 0)
        with self.pool.lock:
            tables = self._tables if last - first > 1 else Tables()
            step, after, leaving = self.step_of(plan, self.pool.allocate(plan.num_pages), tables)
            exact, dropped = whole.exact.copy(), whole.dropped.copy()
            exact[chosen], dropped[chosen] = after.exact, after.dropped
            held = (*whole.pages[:first], *after.pages, *whole.pages[last:])
            self.batch = replace(whole, exact=exact, dropped=dropped, pages=held)
            self._leaving = (*self._leaving, *leaving)
        return step


# -- memory ------------------------------------------------------------------------------------------------------------


class LayersOfKind(NamedTuple):
    """The layers of one sliding window (None: full attention), as far as their memory is concerned.

    Attributes:
        sizes: where the tokens of a row lie.
        specs: of each layer.
    """

    sizes: RowSizes
    specs: Sequence[PageSpec]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of each layer."""
        return sum(spec.page_bytes for spec in self.specs)

    @property
    def window_bytes(self) -> int:
        """Bytes of the exact tokens of one row in all layers."""
        return sum(spec.window_bytes(1, self.sizes.slots) for spec in self.specs)

    def fixed_pages(self, rows: int, batch_tokens: int) -> int:
        """Return the pages that `rows` rows hold at most behind a window, with those that a forward of `batch_tokens` tokens still reads."""
        if self.sizes.window is None:
            return 0
        size = self.sizes.page_size
        return rows * (self.sizes.window // size + 4) + batch_tokens // size + 1

    def fixed_bytes(self, rows: int, batch_tokens: int) -> int:
        """Return the bytes of the exact tokens of all rows, and of the pages behind a window."""
        return rows * self.window_bytes + self.fixed_pages(rows, batch_tokens) * self.page_bytes


Kinds = Mapping[int | None, LayersOfKind]


def check_layers(template: PagedCache) -> None:
    """Raise UnsupportedModelError where a layer holds more than states, and keys and values or latents and RoPE keys in pages."""
    for index, layer in enumerate(template.layers):
        why = f"is a {type(layer).__name__}"
        if type(layer) in (HybridLayer, LinearAttentionLayer):
            if CACHE == "cache":
                continue
            why = "keeps a state of its text, which needs transformers 5.24 or newer"
        elif type(layer) in (PagedLayer, LatentLayer) or is_dummy(layer):
            continue
        elif isinstance(layer, IndexedLatentLayer):
            why = "has an indexer, whose keys are in no pages"
        raise UnsupportedModelError(
            f"continuous batching holds keys and values, or latents, in pages; layer {index} of this model {why}: use generate()"
        )


def kinds_of(template: PagedCache) -> dict[int | None, LayersOfKind]:
    """Return the layers of each sliding window, full attention first.

    Raises: UnsupportedModelError where a layer has stored no tokens of its own.
    """
    specs: dict[int | None, list[PageSpec]] = {}
    layers: Sequence[Any] = template.paged_layers
    for layer in layers:
        if layer.spec is None:
            raise UnsupportedModelError(
                f"continuous batching has pages for layer {layer.layer_idx} of this model, which stored nothing; use generate()"
            )
        specs.setdefault(layer.window, []).append(layer.spec)
    options = template.options
    numbers = options.page_size, options.sink_tokens, options.recent_tokens
    ordered = sorted(specs, key=lambda window: window or 0)
    return {window: LayersOfKind(RowSizes(*numbers, window), specs[window]) for window in ordered}


@dataclass(frozen=True)
class BatchRoom:
    """What continuous batching has room for; allocated as a whole when a manager starts.

    Attributes:
        rows: requests that may hold tokens at once.
        pages: sliding window (None: full attention) -> pages of each of its layers.
        nbytes: bytes of all pages, exact windows and states.
        batch_tokens: most tokens of a forward.
    """

    rows: int
    pages: Mapping[int | None, int]
    nbytes: int
    batch_tokens: int

    @classmethod
    def of(
        cls,
        kinds: Kinds,
        state_bytes: int,
        most_rows: int,
        batch_tokens: int,
        budget: int = 0,
        pages: int | None = None,
    ) -> "BatchRoom":
        """Return the room within `budget` bytes, or for `pages` pages of the full-attention layers.

        Args:
            state_bytes: of the states of one request.
            most_rows: requests that are wanted at once; fewer where their windows and states would take over a quarter of a budget.
            batch_tokens: most tokens of a forward.
        Raises: CacheOptionError where not even one request has room.
        """

        def fixed_bytes(rows: int) -> int:
            windows = sum(kind.fixed_bytes(rows, batch_tokens) for kind in kinds.values())
            return windows + rows * state_bytes

        full = kinds.get(None)
        page_bytes = 0 if full is None else full.page_bytes
        none, one = fixed_bytes(0), fixed_bytes(1)
        part = budget if full is None else int(budget * FIXED_PART)
        rows = min(most_rows, max(0, part - none) // (one - none) if pages is None else pages)
        fixed = fixed_bytes(rows)
        if full is not None and pages is None:
            pages = (budget - fixed) // page_bytes
        if rows < 1 or (pages is not None and pages < 1):
            least = one if full is None else max(int(one / FIXED_PART), one + page_bytes)
            raise CacheOptionError(
                f"continuous batching has {format_bytes(budget) if budget else 'no pages'} for its cache, and one request of this "
                f"model takes at least {format_bytes(least)}: give it more (cache_config={{'max_bytes': ..}}, or "
                "max_memory_percent of the ContinuousBatchingConfig)"
            )
        found = {window: kind.fixed_pages(rows, batch_tokens) for window, kind in kinds.items()}
        if pages is not None:
            found[None] = pages
        return cls(rows, found, fixed + (pages or 0) * page_bytes, batch_tokens)
