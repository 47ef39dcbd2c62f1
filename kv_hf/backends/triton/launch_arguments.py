"""The run-time arguments of the kernels that attend, in their order; addresses for a launch, tensors for the compiler."""

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch

from ..base import AttentionCall

STEPWISE = (
    "table_row",
    "mask_row",
    "mask_head",
    "mask_query",
    "sliding_window",
    "sink_tokens",
    "q_len",
)
TABLES = ("block_table", "num_pages", "exact_lens", "padding")
UNALIGNED = (*TABLES, "mask", "sink_logits", "counters", "key_order")
# for triton.jit: numbers that change while a sequence grows must not make new kernels
SPECIALIZED = {"do_not_specialize": STEPWISE, "do_not_specialize_on_alignment": UNALIGNED}
# places of query, codes, scales and offsets of both sides, windows
POINTERS = itemgetter(0, 4, 5, 6, 7, 8, 9, 13, 17)
LATENT_POINTERS = itemgetter(0, 4, 5, 6, 7, 8, 9, 13, 16)


def arguments(
    at: Callable[[torch.Tensor], Any],
    call: AttentionCall,
    query: torch.Tensor,
    mask: Any,
    mask_strides: tuple[int, ...],
    sink_logits: Any,
    out: Any,
    room: tuple[Any, Any, Any],
) -> tuple[Any, ...]:
    """Return the run-time arguments of the decode kernel, or over latents of the latent kernel.

    Args:
        at: what to hand over for a tensor, its address or itself; from `mask` on it was applied already, and what is
            absent is replaced by `out`.
        query: [rows, num_heads, q_len, query_dim], of the call, with contiguous channels.
        room: partial results, their maxima and sums, counters.
    """
    kv = call.kv
    keys, values = kv.key_pages, kv.value_pages
    key_scale, key_offset = keys.get("scale"), keys.get("offset")
    value_scale, value_offset = values.get("scale"), values.get("offset")
    order = keys.get("order")
    table, window_keys, window_values = kv.block_table, kv.residual_keys, kv.residual_values
    query_row, query_head, query_token, _ = query.stride()
    key_row, key_head, key_slot, _ = window_keys.stride()
    value_row, value_head, value_slot, _ = window_values.stride()
    partial, bests, counters = room
    pages = (
        at(query), query_row, query_head, query_token,
        at(keys["codes"]),
        out if key_scale is None else at(key_scale), out if key_offset is None else at(key_offset),
        at(values["codes"]),
        out if value_scale is None else at(value_scale), out if value_offset is None else at(value_offset),
        at(table), table.stride(0), at(kv.num_pages), at(window_keys), key_row,
    )  # fmt: skip
    others = (
        at(kv.exact_lens),
        at(kv.padding),
        mask,
        *mask_strides,
        sink_logits,
        out,
        partial,
        bests,
    )
    window = call.sliding_window or 0
    if kv.spec.is_latent:  # one head, no softcap; splits are merged by another kernel
        return (
            *pages, key_slot, at(window_values), value_row, value_slot, *others,
            call.softmax_scale, window, kv.sink_tokens, query.shape[2],
        )  # fmt: skip
    return (
        *pages, key_head, key_slot, at(window_values), value_row, value_head, value_slot, *others, counters,
        out if order is None else at(order), call.softmax_scale, call.softcap or 1.0, window, kv.sink_tokens, query.shape[2],
    )  # fmt: skip
