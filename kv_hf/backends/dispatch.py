"""Which backend runs where, and why not another; calls of paged attention, whose arguments are validated here."""

from contextlib import nullcontext
from dataclasses import replace

import torch

from ..checks import check_choice
from ..config import AUTO, KERNELS, OTHER_KERNEL_WORDS
from ..errors import CacheMismatchError, CacheOptionError
from ..notices import warn_once
from ..spec import LANES, ROWS, PageSpec
from . import cpu, reference, triton
from .base import AttentionCall, Backend

MAX_DECODE_QUERIES = 16  # queries of one call of a backend; more go in slices
# each has load() and why_not(device, spec); the best first
BACKENDS = dict(zip(KERNELS[1:], (triton, cpu, reference), strict=True))


def layout_for(device: torch.device) -> str:
    """Return the layout of pages on `device`: that of the compiled kernel which runs there."""
    return LANES if device.type == "cpu" else ROWS


def why_not(name: str, device: torch.device, spec: PageSpec) -> str | None:
    """Return why backend `name` cannot read such pages on `device`, or None when it can."""
    return BACKENDS[name].why_not(device, spec)


def load(name: str) -> Backend:
    """Return backend `name`; whether it can run is `why_not`'s to say."""
    return BACKENDS[name].load()


def choose(asked: str, device: torch.device, spec: PageSpec) -> Backend:
    """Return backend `asked`, or for "auto" the compiled one of the device, and else the reference; that is said once.

    Raises: CacheOptionError when a backend asked for by name cannot run here, with the reason.
    """
    check_choice("kernel", asked, KERNELS, OTHER_KERNEL_WORDS)
    best = asked if asked != AUTO else "c" if device.type == "cpu" else "triton"
    reason = why_not(best, device, spec)
    if reason is None:
        return load(best)
    if asked != AUTO:
        raise CacheOptionError(f"kernel={asked!r} cannot run here: {reason}")
    warn_once(
        f"kernel {best} {reason}",
        f"Paged attention runs as 'reference', slower than {best!r} would: {reason}",
    )
    return load("reference")


# -- calls -------------------------------------------------------------------------------------------------------------


def paged_attention(call: AttentionCall, kernel: Backend | str = "auto") -> torch.Tensor:
    """Attend to the pages and the window of `call.kv`; see AttentionCall.

    More than MAX_DECODE_QUERIES queries go in slices; then the window has to hold the tokens of all queries.

    Args:
        kernel: a backend that was chosen for these pages, or a name for `choose`.
    Returns: [rows, num_heads, q_len, out_dim] in the query's dtype.
    Raises: CacheMismatchError naming the argument whose shape does not fit; CacheOptionError for a backend that is
        unknown or cannot run here.
    """
    query, kv = call.query, call.kv
    spec = kv.spec
    if not isinstance(kernel, Backend):
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
        or shape[0] != kv.residual_keys.shape[0]
    ):
        raise CacheMismatchError(
            f"query must be [{kv.rows}, a multiple of {heads}, q_len, {spec.query_dim}], "
            f"got {tuple(shape)}"
        )
    _, num_heads, q_len, _ = shape
    if call.sink_logits is not None and call.sink_logits.shape != (num_heads,):
        raise CacheMismatchError(
            f"sink_logits must be [{num_heads}], got {tuple(call.sink_logits.shape)}"
        )
    if call.sliding_window is not None and call.sliding_window < 1:
        raise CacheMismatchError(f"sliding_window must be at least 1, got {call.sliding_window}")
    if call.mask is not None:
        call = replace(call, mask=_expanded_mask(call.mask, query, kv.seen))
    if kv.budget is not None and q_len <= MAX_DECODE_QUERIES and call.sliding_window is None:
        call = _of_chosen_pages(call, kernel)
        kv = call.kv
    if kv.hold is nullcontext and q_len <= MAX_DECODE_QUERIES:
        return kernel.attend(call)
    with kv.hold():
        if q_len <= MAX_DECODE_QUERIES or kernel.max_queries <= MAX_DECODE_QUERIES:
            return kernel.attend(call)
        return _attend_in_slices(kernel, call)


def _of_chosen_pages(call: AttentionCall, kernel: Backend) -> AttentionCall:
    """Return the call over the pages that the budget of its kv leaves, or the call itself where it leaves all."""
    kv, budget = call.kv, call.kv.budget
    assert budget is not None
    if not budget.chooses(kv.block_table.shape[1], kv.seen):
        return call
    if call.mask is not None:
        warn_once(
            "read: mask",
            "This model gives its attention a mask of its own, which says something of every column: steps read all pages, "
            "whatever the option 'read' says",
        )
        return call
    index = kv.to_choose_from()
    with index.hold():
        chosen = kernel.choose_pages(replace(call, kv=index))
    return replace(call, kv=kv.with_pages(*chosen))


def _expanded_mask(mask: torch.Tensor, query: torch.Tensor, seen: int) -> torch.Tensor:
    """Return the mask with a row per query. Raises CacheMismatchError where it does not broadcast to the scores."""
    rows, num_heads, q_len, _ = query.shape
    whole = (rows, num_heads, q_len, seen)
    if mask.ndim != 4 or any(
        m not in (f, 1) for m, f in zip(mask.shape[:3], whole[:3], strict=True)
    ):
        raise CacheMismatchError(f"mask must broadcast to {whole}, got {tuple(mask.shape)}")
    if mask.shape[-1] < seen:
        raise CacheMismatchError(f"mask must have at least {seen} columns, got {mask.shape[-1]}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise CacheMismatchError(
            f"mask must be bool, or numbers that are added to scores, got {mask.dtype}; mask.bool() hides zeros"
        )
    return mask.expand(mask.shape[0], mask.shape[1], q_len, mask.shape[3])


def _attend_in_slices(kernel: Backend, call: AttentionCall) -> torch.Tensor:
    """Attend MAX_DECODE_QUERIES queries at a time."""
    query, kv, mask = call.query, call.kv, call.mask
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
            parts.append(kernel.attend(replace(call, query=part, kv=cut)))
        else:
            rows_of = mask[:, :, first:last]
            if call.sliding_window is not None:
                end = kv.padding + kv.num_pages * kv.page_size + kv.exact_lens
                rows_of = _within(rows_of, end - q_len + first, call.sliding_window)
            parts.append(
                kernel.attend(replace(call, query=part, mask=rows_of, sliding_window=None))
            )
    return torch.cat(parts, 2)


def _within(mask: torch.Tensor, first: torch.Tensor, sliding_window: int) -> torch.Tensor:
    """Hide from the queries of `mask`, which stand at column `first` [rows] and after it, what a sliding window hides."""
    queries = torch.arange(mask.shape[2], device=mask.device)[:, None]
    at = first[:, None, None, None] + queries
    near = torch.arange(mask.shape[3], device=mask.device) > at - sliding_window
    return mask & near if mask.dtype == torch.bool else mask.masked_fill(~near, float("-inf"))
