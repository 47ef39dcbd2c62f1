"""Write tokens into windows and pages, and pages out as dense tensors: the definition of what every backend writes."""

from collections.abc import Mapping

import torch

from ...quant.codec import decode, encode, order_of
from ...spec import PageWrite, SideSpec
from ..base import PagedKV

# tokens decoded at a time (a page, where pages are larger): the largest temporary
TILE_TOKENS = 512
SEAL_PAGES = 64  # pages encoded at a time: bounds the fp32 temporaries of a long prefill


def seal_pages(
    tokens: torch.Tensor, jobs: torch.Tensor, fields: Mapping[str, torch.Tensor], spec: SideSpec
) -> torch.Tensor:
    """Encode full pages of exact tokens into their places in storage.

    Args:
        tokens: [rows, num_kv_heads, slots, head_dim], the spec's dtype; the last dimension is contiguous.
        jobs: [n, 4], int32, as of PageWrite.
        fields: the storage to write to, in place: tensors of spec.fields with a leading [pages].
        spec: the side to encode for.
    Returns: bool scalar tensor, True when some number had to be made finite (see quant/codec.py).
    """
    damaged = torch.zeros((), dtype=torch.bool, device=tokens.device)
    for some in jobs[jobs[:, 2] >= 0].long().split(SEAL_PAGES):
        row, first, page, like = some.unbind(1)
        order = order_of(_taken(tokens, row, (-1 - like).clamp(min=0), spec), spec)
        if order is not None:
            theirs = fields["order"][like.clamp(min=0)].long()
            order = order.where((like < 0)[:, None, None], theirs)
        encoded, bad = encode(_taken(tokens, row, first, spec), spec, order)
        for name, new in encoded.items():
            fields[name][page] = new
        damaged = damaged | bad
    return damaged


def _taken(
    tokens: torch.Tensor, row: torch.Tensor, first: torch.Tensor, spec: SideSpec
) -> torch.Tensor:
    """Return page_size tokens from slots `first` [n] of rows [n] on: [n, num_kv_heads, page_size, head_dim]."""
    slots = first[:, None] + torch.arange(spec.page_size, device=tokens.device)
    return tokens[row[:, None], :, slots].transpose(1, 2)


def append_tokens(
    window: torch.Tensor, new: torch.Tensor, starts: torch.Tensor, skips: torch.Tensor
) -> None:
    """Write the new tokens of each row into its exact window, in place: window[b, :, starts[b] + i] = new[b, :, skips[b] + i].

    Args:
        window: [rows, num_kv_heads, slots, head_dim].
        new: [rows, num_kv_heads, q_len, head_dim], with padding in front.
        starts, skips: [rows], int32: first slot to write, and columns of padding that are not stored.
    """
    q_len = new.shape[2]
    if q_len == 1 and not bool(skips.any()):
        rows = torch.arange(window.shape[0], device=window.device)
        window.transpose(1, 2)[rows, starts.long()] = new[:, :, 0]
        return
    for row, (start, skip) in enumerate(zip(starts.tolist(), skips.tolist(), strict=True)):
        window[row, :, start : start + q_len - skip] = new[row, :, skip:]


def decode_tile(
    pages: Mapping[str, torch.Tensor], spec: SideSpec, ids: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Decode pages `ids` [rows, n] to [rows, num_kv_heads, n * page_size, head_dim]."""
    flat = ids.reshape(-1)
    tokens = decode({name: tensor[flat] for name, tensor in pages.items()}, spec, dtype)
    rows, count = ids.shape
    tokens = tokens.reshape(rows, count, *tokens.shape[1:]).transpose(1, 2)
    return tokens.flatten(2, 3)


def write(call: PageWrite) -> None:
    """Append new tokens to both windows in place, and seal pages from them: [rows, heads, slots, head_dim]."""
    windows, jobs = call.windows, call.jobs
    if windows[0].is_meta:  # which hold nothing, and whose lengths cannot be read
        return
    if call.new is not None:
        assert call.starts is not None
        assert call.skips is not None
        for window, tokens in zip(windows, call.new, strict=True):
            append_tokens(window, tokens, call.starts, call.skips)
    if jobs is not None:
        for side, own, pages in zip(call.spec.sides, windows, call.fields, strict=True):
            call.damaged.logical_or_(seal_pages(own, jobs, pages, side))


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
