"""Attention over pages in readable torch, fp32, tile by tile: the oracle of every kernel.

Refuses to be clever: it walks the block table, decodes one tile at a time, and keeps a running softmax.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

import torch

from ...geometry import page_start, window_token
from ..base import AttentionCall
from .pages import TILE_TOKENS, decode_tile


def _without_autocast(
    function: Callable[[AttentionCall], torch.Tensor],
) -> Callable[[AttentionCall], torch.Tensor]:
    @functools.wraps(function)
    def run(call: AttentionCall) -> torch.Tensor:
        with torch.autocast(call.query.device.type, enabled=False):
            return function(call)

    return run


@_without_autocast
def paged_attention(call: AttentionCall) -> torch.Tensor:
    """Attend the newest tokens of each row to all of the row's tokens.

        out[b, h, i] = softmax(cap(softmax_scale * q[b, h, i] @ K[b, h // group].T) + mask) @ V[b, h // group]
        cap(s) = softcap * tanh(s / softcap), or s

    Pages of latents are one kv head with K = [latent, RoPE key] and V = latent (absorbed multi-head latent attention).

    Returns: [rows, num_heads, q_len, out_dim] in query's dtype, accumulated in fp32 (fp64 for fp64); a
        query that may see no token gives zeros.
    Source: PagedAttention (arXiv 2309.06180) with the online softmax of arXiv 1805.02867; absorption, DeepSeek-V2
        (arXiv 2405.04434, section 2.1.2).
    """
    query, kv, mask = call.query, call.kv, call.mask
    softmax_scale, softcap = call.softmax_scale, call.softcap
    sink_logits, sliding_window = call.sink_logits, call.sliding_window
    rows, num_heads, q_len, _ = query.shape
    heads = kv.spec.keys.num_kv_heads
    group = num_heads // heads
    compute = torch.float64 if query.dtype == torch.float64 else torch.float32
    q = query.to(compute).reshape(rows, heads, group * q_len, -1) * softmax_scale
    # absorbed latent attention: a key is a latent and a RoPE key side by side, its value the latent itself
    latent = kv.spec.is_latent
    device = query.device
    num_pages, exact_lens = kv.num_pages.long(), kv.exact_lens.long()
    kv_lens = num_pages * kv.page_size + exact_lens
    query_at = kv_lens[:, None] - q_len + torch.arange(q_len, device=device)  # [rows, q_len]

    best = q.new_full((rows, heads, group * q_len, 1), float("-inf"))
    total = torch.zeros_like(best)
    out = q.new_zeros((rows, heads, group * q_len, kv.spec.out_dim))

    def add_tile(
        keys: torch.Tensor, values: torch.Tensor, at: torch.Tensor, held: torch.Tensor
    ) -> None:
        """Add tokens at positions `at` [rows, n], of which `held` [rows, n] exist, to the softmax."""
        nonlocal best, total, out
        if latent:
            keys, values = torch.cat([keys, values], -1), keys
        scores = q @ keys.transpose(-1, -2)  # [rows, heads, group * q_len, n]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.unflatten(2, (group, q_len))
        visible = held[:, None, None, None, :]
        if sliding_window is not None:
            near = at[:, None, :] > query_at[:, :, None] - sliding_window
            visible = visible & near[:, None, None]
        if mask is None:
            visible = visible & (at[:, None, :] <= query_at[:, :, None])[:, None, None]
        else:
            tile = _mask_columns(mask, at + kv.padding.long()[:, None])
            shape = (heads, group) if tile.shape[1] > 1 else (1, 1)
            tile = tile.unflatten(1, shape)
            if tile.dtype == torch.bool:
                visible = visible & tile
            else:
                scores = scores + tile.to(compute)
        scores = scores.masked_fill(~visible, float("-inf")).flatten(2, 3)
        new_best = torch.maximum(best, scores.amax(-1, keepdim=True))
        shift = torch.where(new_best == float("-inf"), torch.zeros_like(new_best), new_best)
        weights = torch.exp(scores - shift)
        keep = torch.exp(best - shift)
        total = total * keep + weights.sum(-1, keepdim=True)
        # a slot that holds no token may contain anything, nan included
        out = out * keep + weights @ values.masked_fill(~held[:, None, :, None], 0.0)
        best = new_best

    per_tile = max(1, TILE_TOKENS // kv.page_size)
    sizes = {"page_size": kv.page_size, "sink_tokens": kv.sink_tokens}
    for first in range(0, kv.block_table.shape[1], per_tile):
        ids = kv.block_table[:, first : first + per_tile]
        columns = torch.arange(first, first + ids.shape[1], device=device)
        held = (columns < num_pages[:, None]).repeat_interleave(kv.page_size, -1)
        at = page_start(first, **sizes) + torch.arange(held.shape[1], device=device)
        add_tile(
            decode_tile(kv.key_pages, kv.spec.keys, ids, compute),
            decode_tile(kv.value_pages, kv.spec.values, ids, compute),
            at.expand(rows, -1),
            held,
        )
    for first in range(0, kv.residual_keys.shape[2], TILE_TOKENS):
        keys, values = (
            w[:, :, first : first + TILE_TOKENS] for w in (kv.residual_keys, kv.residual_values)
        )
        slots = torch.arange(first, first + keys.shape[2], device=device)
        held = slots < exact_lens[:, None]
        keys = keys.to(compute).masked_fill(~held[:, None, :, None], 0.0)
        values = values.to(compute).masked_fill(~held[:, None, :, None], 0.0)
        add_tile(keys, values, window_token(slots, num_pages[:, None], **sizes), held)

    if sink_logits is not None:
        logits = sink_logits.to(compute).reshape(1, heads, group, 1, 1)
        logits = logits.expand(rows, heads, group, q_len, 1).flatten(2, 3)
        new_best = torch.maximum(best, logits)
        shift = torch.where(new_best == float("-inf"), torch.zeros_like(new_best), new_best)
        keep = torch.exp(best - shift)
        total, out = total * keep + torch.exp(logits - shift), out * keep
    out = out / torch.where(total == 0, torch.ones_like(total), total)
    return out.reshape(rows, num_heads, q_len, -1).to(query.dtype)


def errors_of(out: torch.Tensor, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how far a kernel's result is from the definition's in fp64, and how far rounding may move it.

        allowed = (16 * u + 2 * (query_dim + tokens) * u_sums) * the size of the right result

    u, half an ulp of the query's dtype, is the error of each of the five numbers that are rounded to it at most: a query, a
    key, a weight, a value and the result. u_sums, that of fp32, is the error of each term of a score and of a result. What
    is rounded up and down evens out over the channels, so that errors and sizes are root mean squares.

    Args:
        out: [rows, num_heads, q_len, out_dim] of `call`, on its device.
    Returns: (errors, allowed), [rows, num_heads, q_len], fp64; an error of nan is within no bound.
    """
    right = paged_attention(replace(call, query=call.query.double()))
    errors, size = (x.square().mean(-1).sqrt() for x in (out.double() - right, right))
    kv, ulp, ulp_sums = call.kv, *(torch.finfo(x).eps / 2 for x in (out.dtype, torch.float32))
    terms = call.query.shape[-1] + kv.num_pages * kv.page_size + kv.exact_lens
    return errors, (16 * ulp + 2 * terms[:, None, None] * ulp_sums) * size


def _mask_columns(mask: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Take `columns` [rows, n] (clamped to the mask) of a [rows or 1, heads or 1, q_len, seen] mask."""
    columns = columns.clamp(max=mask.shape[-1] - 1)
    mask = mask.expand(columns.shape[0], *mask.shape[1:])
    index = columns[:, None, None, :].expand(-1, mask.shape[1], mask.shape[2], -1)
    return mask.gather(-1, index)
