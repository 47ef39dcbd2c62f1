"""Validate the arguments of paged attention and call the chosen implementation."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from ..errors import CacheMismatchError
from ..notices import warn_once
from .inputs import PagedKV
from .registry import Kernel, choose, load

MAX_DECODE_QUERIES = 16  # queries of one call of a kernel; more go in slices


def paged_attention(
    query: torch.Tensor,
    kv: PagedKV,
    *,
    softmax_scale: float,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    sliding_window: int | None = None,
    kernel: Kernel | str = "auto",
) -> torch.Tensor:
    """Attend `query` to the pages and the window of `kv`; see `reference.paged_attention`.

    More than MAX_DECODE_QUERIES queries go in slices; then the window has to hold the tokens of all queries.

    Args:
        query: [rows, num_heads, q_len, key_dim].
        kernel: one that was chosen for these pages, or a name for `choice.choose`.
    Returns: [rows, num_heads, q_len, value_dim] in query's dtype.
    Raises: CacheMismatchError naming the argument whose shape does not fit; CacheOptionError for a kernel that is
        unknown or cannot run here.
    """
    spec = kv.spec
    if not isinstance(kernel, Kernel):
        kernel = choose(kernel, query.device, spec)
    learns = query.requires_grad and torch.is_grad_enabled()
    if kernel.name != "reference" and (learns or query.dtype == torch.float64):
        reason = "has a backward pass" if learns else "keeps the digits of float64"
        warn_once(
            f"reference: {reason}",
            f"Paged attention runs as 'reference', slower than {kernel.name!r}: only the reference {reason}",
        )
        kernel = load("reference")
    shape, heads = query.shape, spec.keys.num_kv_heads
    if (
        len(shape) != 4
        or shape[3] != spec.query_dim
        or shape[1] % heads
        or shape[0] != kv.window_keys.shape[0]
    ):
        raise CacheMismatchError(
            f"query must be [{kv.rows}, a multiple of {heads}, q_len, {spec.query_dim}], "
            f"got {tuple(shape)}"
        )
    rows, num_heads, q_len, _ = shape
    if sink_logits is not None and sink_logits.shape != (num_heads,):
        raise CacheMismatchError(
            f"sink_logits must be [{num_heads}], got {tuple(sink_logits.shape)}"
        )
    if sliding_window is not None and sliding_window < 1:
        raise CacheMismatchError(f"sliding_window must be at least 1, got {sliding_window}")
    if mask is not None:
        whole = (rows, num_heads, q_len, kv.seen)
        if mask.ndim != 4 or any(
            m not in (f, 1) for m, f in zip(mask.shape[:3], whole[:3], strict=True)
        ):
            raise CacheMismatchError(f"mask must broadcast to {whole}, got {tuple(mask.shape)}")
        if mask.shape[-1] < kv.seen:
            raise CacheMismatchError(
                f"mask must have at least {kv.seen} columns, got {mask.shape[-1]}"
            )
        mask = mask.expand(mask.shape[0], mask.shape[1], q_len, mask.shape[3])
    if kv.hold is nullcontext and q_len <= MAX_DECODE_QUERIES:
        return kernel.attend(
            query,
            kv,
            softmax_scale=softmax_scale,
            mask=mask,
            softcap=softcap,
            sink_logits=sink_logits,
            sliding_window=sliding_window,
        )
    options = {"softmax_scale": softmax_scale, "softcap": softcap, "sink_logits": sink_logits}
    with kv.hold():
        if q_len <= MAX_DECODE_QUERIES or kernel.longest <= MAX_DECODE_QUERIES:
            return kernel.attend(query, kv, mask=mask, sliding_window=sliding_window, **options)
        return _attend_in_slices(kernel, query, kv, mask, sliding_window, options)


def _attend_in_slices(
    kernel: Kernel,
    query: torch.Tensor,
    kv: PagedKV,
    mask: torch.Tensor | None,
    sliding_window: int | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """Attend MAX_DECODE_QUERIES queries at a time."""
    q_len = query.shape[2]
    parts = []
    for first in range(0, q_len, MAX_DECODE_QUERIES):
        last = min(first + MAX_DECODE_QUERIES, q_len)
        part = query[:, :, first:last]
        if mask is None:
            # to the slice, the tokens behind it are not there yet; rows that only begin behind it have none
            behind = q_len - last
            lens = (kv.exact_lens - behind).clamp(min=0)
            cut = replace(kv, exact_lens=lens, seen=kv.seen - behind)
            parts.append(
                kernel.attend(part, cut, mask=None, sliding_window=sliding_window, **options)
            )
        else:
            rows_of = _within(mask[:, :, first:last], kv.seen - q_len + first, sliding_window)
            parts.append(kernel.attend(part, kv, mask=rows_of, sliding_window=None, **options))
    return torch.cat(parts, 2)


def _within(mask: torch.Tensor, first: int, sliding_window: int | None) -> torch.Tensor:
    """Hide from the queries of `mask`, which stand at column `first` and behind, what a sliding window hides."""
    if sliding_window is None:
        return mask
    at = first + torch.arange(mask.shape[2], device=mask.device)[:, None]
    near = torch.arange(mask.shape[3], device=mask.device) > at - sliding_window
    return mask & near if mask.dtype == torch.bool else mask.masked_fill(~near, float("-inf"))
