"""Write pages out as dense tensors, for callers that are not ours and for long chunks of a prefill."""

import torch

from ..inputs import PagedKV
from .attention import TILE_TOKENS, decode_tile


def dense_side(kv: PagedKV, side: str) -> torch.Tensor:
    """Return the keys or values of all rows as [rows, num_kv_heads, seen, head_dim] in the model's dtype.

    Columns of left padding, and of a preallocated cache those that are free yet, are zeros. The result is the size of one layer's whole cache: callers that can
    walk pages should.

    Args:
        kv: the layer's pages and window.
        side: "keys" or "values".
    """
    with kv.hold():
        return _dense_side(kv, side)


def _dense_side(kv: PagedKV, side: str) -> torch.Tensor:
    spec = getattr(kv.spec, side)
    pages = kv.key_pages if side == "keys" else kv.value_pages
    window = kv.residual_keys if side == "keys" else kv.residual_values
    out = window.new_zeros((kv.rows, spec.num_kv_heads, kv.seen, spec.head_dim))
    per_tile = max(1, TILE_TOKENS // kv.page_size)
    for row in range(kv.rows):
        count, exact = int(kv.num_pages[row]), int(kv.exact_lens[row])
        start = int(kv.padding[row])
        sinks = min(kv.sink_tokens, exact)
        out[row, :, start : start + sinks] = window[row, :, :sinks]
        at = start + sinks
        for first in range(0, count, per_tile):
            ids = kv.block_table[row : row + 1, first : min(first + per_tile, count)]
            tokens = decode_tile(pages, spec, ids, spec.dtype)[0]
            out[row, :, at : at + tokens.shape[1]] = tokens
            at += tokens.shape[1]
        out[row, :, at : at + exact - sinks] = window[row, :, sinks:exact]
    return out
