"""Which tokens the queries of a program see, and which tiles of them it walks. Knows nothing of numbers and codes."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Visibility(NamedTuple):
    """What a meta_params.Hiding needs to know of the queries of a program.

    Attributes:
        query_at: [columns], positions of the queries.
        masks: [columns], pointers to column 0 of each query's mask; left: the column of token 0.
        sink_tokens, sliding_window, softcap: as in AttentionCall and PagedKV.
    """

    query_at: Any
    masks: Any
    left: Any
    sink_tokens: Any
    sliding_window: Any
    softcap: Any


@triton.jit
def row_lengths(num_pages, exact_lens, padding, row):
    """Return pages, tokens of the window and columns of padding of a row."""
    return tl.load(num_pages + row), tl.load(exact_lens + row), tl.load(padding + row)


@triton.jit
def mask_pointers(mask, row, head, token, real, mask_row, mask_head, mask_query):
    """Return pointers [columns] to column 0 of the masks of queries, which are those of token 0 where not `real`."""
    masks = mask + row.to(tl.int64) * mask_row + head * mask_head
    return masks + tl.where(real, token, 0) * mask_query


@triton.jit
def tiles_of_split(first, tiles, window, split, num_splits):
    """Return begin and end of a split's tiles, of those from `first` on.

    window: the work of the window, in tiles; the last split does it and therefore gets fewer tiles.
    """
    work = tiles - first + window
    begin = tl.minimum(first + work * split // num_splits, tiles)
    end = tl.minimum(first + work * (split + 1) // num_splits, tiles)
    return begin, end


@triton.jit
def window_slots(first, exact, page_tokens, sink_tokens, TILE: tl.constexpr):
    """Return TILE slots of the window from `first` on, which of them hold tokens, and the positions of these.

    Slots below `sink_tokens` lie in front of the `page_tokens` tokens in pages, the others behind them.
    """
    slot = first + tl.arange(0, TILE)
    return slot, slot < exact, slot + tl.where(slot < sink_tokens, 0, page_tokens)
