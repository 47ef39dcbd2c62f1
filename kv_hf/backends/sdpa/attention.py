"""Attention over pages through torch's SDPA: the fallback where no kernel was compiled.

Tiles of pages are decoded into the query's dtype, SDPA attends to them with the query heads of a kv head packed
into the query axis (which is exact, and on a CPU several times faster than SDPA's own way to share heads), and
the tiles are merged by their log-sum-exps. Nothing larger than a tile is ever decoded.
"""

import torch

from ...notices import warn_once
from ..base import AttentionCall
from ..inputs import PagedKV
from ..reference.attention import decode_tile
from ..reference.attention import paged_attention as reference_attention

TILE_TOKENS = 1024


def paged_attention(call: AttentionCall) -> torch.Tensor:
    """Attend to pages by SDPA, row by row; CPU tensors only.

    SDPA cannot express softcap, values of another head_dim than keys, float64, or masks of the lowest number: these calls
    go to the reference. Decoded keys and values are rounded to the query's dtype.

    Returns: [rows, num_heads, q_len, out_dim] in the query's dtype. Oracle: reference.attention.paged_attention.
    """
    query, kv, mask = call.query, call.kv, call.mask
    sink_logits, sliding_window = call.sink_logits, call.sliding_window
    spec = kv.spec
    # a query that sees nothing but such a mask attends to all tokens alike, which log-sum-exps cannot tell
    lowest = False
    if mask is not None and mask.is_floating_point():
        lowest = bool((mask == torch.finfo(mask.dtype).min).any())
    differing = spec.keys.head_dim != spec.values.head_dim
    reasons = {
        "a mask of the lowest number": lowest,
        "softcap": call.softcap is not None,
        "values of another head_dim than keys": differing,
        "float64": query.dtype.itemsize > 4,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason:
        warn_once(
            f"sdpa {reason}",
            f"kernel 'sdpa' leaves {reason} to 'reference', which is slower: SDPA cannot express it",
        )
        return reference_attention(call)
    rows, num_heads, q_len, dim = query.shape
    heads = spec.keys.num_kv_heads
    group = num_heads // heads
    out = query.new_zeros(rows, num_heads, q_len, dim)
    for row in range(rows):
        count, exact = int(kv.num_pages[row]), int(kv.exact_lens[row])
        first_query = count * kv.page_size + exact - q_len
        q = query[row].reshape(1, heads, group * q_len, dim).contiguous()
        outs: list[torch.Tensor] = []
        lses: list[torch.Tensor] = []

        def add(
            keys: torch.Tensor,
            values: torch.Tensor,
            at: torch.Tensor,
            *,
            row: int = row,
            first_query: int = first_query,
            q: torch.Tensor = q,
            outs: list[torch.Tensor] = outs,
            lses: list[torch.Tensor] = lses,
        ) -> None:
            bias = _bias(kv, row, at, first_query, q_len, mask, sliding_window)
            if bias is not None:
                bias = bias.expand(num_heads, q_len, -1).reshape(1, heads, group * q_len, -1)
            attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            part, lse = attend(
                q,
                keys.to(q.dtype).contiguous(),  # it takes the last stride for 1 unasked
                values.to(q.dtype).contiguous(),
                attn_mask=None if bias is None else bias.to(q.dtype),
                scale=call.softmax_scale,
            )
            lse = lse.float().reshape(1, heads, group * q_len)
            if bias is not None:
                unseen = (bias == float("-inf")).all(-1)
                lse = lse.masked_fill(unseen, float("-inf"))
                part = part.masked_fill(unseen[..., None], 0.0)
            outs.append(part.float())
            lses.append(lse)

        per_tile = max(1, TILE_TOKENS // kv.page_size)
        for first in range(0, count, per_tile):
            ids = kv.block_table[row : row + 1, first : min(first + per_tile, count)]
            start = kv.page_start(first)
            add(
                decode_tile(kv.key_pages, spec.keys, ids, q.dtype),
                decode_tile(kv.value_pages, spec.values, ids, q.dtype),
                torch.arange(start, start + ids.shape[1] * kv.page_size),
            )
        for first in range(0, exact, TILE_TOKENS):
            last = min(first + TILE_TOKENS, exact)
            slots = torch.arange(first, last)
            add(
                kv.residual_keys[row : row + 1, :, first:last],
                kv.residual_values[row : row + 1, :, first:last],
                kv.window_tokens(slots, count),
            )
        if sink_logits is not None:
            logits = sink_logits.float().reshape(1, heads, group, 1).expand(-1, -1, -1, q_len)
            lses.append(logits.reshape(1, heads, group * q_len))
            outs.append(torch.zeros(1, heads, group * q_len, dim))
        if outs:
            out[row] = _merged(outs, lses).reshape(num_heads, q_len, dim).to(query.dtype)
    return out


def _merged(outs: list[torch.Tensor], lses: list[torch.Tensor]) -> torch.Tensor:
    """Join parts of a softmax: sum of out * exp(lse) / sum of exp(lse); 0 where every lse is -inf."""
    lse = torch.stack(lses)
    shift = lse.amax(0).nan_to_num(neginf=0.0)
    weights = torch.exp(lse - shift)[..., None]
    total = weights.sum(0)
    return (torch.stack(outs) * weights).sum(0) / torch.where(total == 0, 1.0, total)


def _bias(
    kv: PagedKV,
    row: int,
    at: torch.Tensor,
    first_query: int,
    q_len: int,
    mask: torch.Tensor | None,
    sliding_window: int | None,
) -> torch.Tensor | None:
    """Return what to add to the scores of tokens `at` [n]: [1 or num_heads, q_len, n], or None for nothing."""
    query_at = first_query + torch.arange(q_len)[:, None]
    hidden = torch.zeros(q_len, at.numel(), dtype=torch.bool)
    if mask is None:
        hidden |= at > query_at
    if sliding_window is not None:
        hidden |= at <= query_at - sliding_window
    bias = None
    if mask is not None:
        columns = mask[row if mask.shape[0] > 1 else 0][..., at + int(kv.padding[row])]
        bias = columns.float()
        if columns.dtype == torch.bool:
            bias = torch.where(columns, 0.0, float("-inf"))
    if bool(hidden.any()):
        bias = torch.zeros(1, 1, 1) if bias is None else bias
        bias = bias.masked_fill(hidden, float("-inf"))
    return bias
