"""Launch the kernel that chooses the pages of a step; refuses to look into device tensors."""

import struct
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from ...notices import warn_once
from ..base import AttentionCall
from ..reference import selection
from . import direct, support
from .direct import Kernel, Scratch
from .launch import Plan, keep, refuse_cpu, triton_constants
from .meta_params import column_block, power_of_two
from .selection import choose_kernel
from .selection_meta_params import NUM_WARPS, selection_constants, splits

NO_LIMIT = 2**31 - 1  # pages
LEAST_ROOM = 64  # pages
Choice = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True, kw_only=True)
class ChoicePlan(Plan):
    """How to launch one kind of choice.

    Attributes:
        columns: query heads times queries of a row; sums: float32 numbers of the sums of splits.
        room: pages that there is scratch for.
        refused: whether the device has too little for the kernel.
    """

    columns: int
    sums: int
    room: int
    refused: bool = False

    def make_room(self, width: int, where: torch.device) -> None:
        """Have room for `width` pages of each row: scores of pages, sums of splits, sums of columns, masses of pages."""
        if width > self.room:
            self.room = max(LEAST_ROOM, power_of_two(width))
            rows, columns = self.rows, self.columns
            sizes = rows * columns * self.room, self.sums, rows * (columns + 1), rows * self.room
            self.scratch = Scratch(sizes, rows, where)


def choose_pages(call: AttentionCall) -> Choice:
    """Choose as `reference.selection.choose_pages` does, in one launch on the device of the query, without waiting for it.

    Args:
        call: over keys and values, with a budget; its keys may be an index (PagedKV.words). `call.kv.launches` keeps
            the plan.
    Returns: a block table [rows, kv.budget.width(..)] and the pages of each row [rows], both int32.
    """
    if call.kv.hold is nullcontext:
        return _choose(call)
    with call.kv.hold():
        return _choose(call)


def _choose(call: AttentionCall) -> Choice:
    query, kv = call.query, call.kv
    index = query.get_device()
    if not direct.is_current(index):
        with torch.cuda.device(index):
            return _choose(call)
    if query.stride(3) != 1:
        query = query.contiguous()
    budget, sinks = kv.budget, call.sink_logits
    assert budget is not None
    key = (
        "choose", id(kv.spec), query.shape, query.stride(), query.dtype, kv.residual_keys.stride(), call.softcap is None,
        None if sinks is None else sinks.dtype, budget.top_p is None, kv.words is None, index,
    )  # fmt: skip
    plan = kv.launches.get(key)
    if plan is None:
        plan = _prepare(call)
        keep(kv.launches, key, plan)
    if plan.refused:
        return selection.choose_pages(call)
    width = kv.block_table.shape[1]
    plan.make_room(width, query.device)
    chosen = kv.block_table.new_empty((plan.rows, budget.width(width, kv.page_size)))
    pages = kv.block_table.new_empty(plan.rows)
    stream = direct.current_stream(index)
    room = plan.scratch.on(stream)  # alive until the launch
    try:
        plan.kernel.launch(
            plan.rows, plan.blocks, plan.splits(width), stream,
            lambda at: arguments(at, call, query, chosen, pages, room, plan.room),
        )  # fmt: skip
    except OutOfResources as error:
        plan.refused = True
        warn_once(
            f"read_tokens: triton: {error}",
            "The pages that a step reads are chosen by 'reference', slower than by 'triton', and not in CUDA graphs: the GPU "
            f"refuses the kernel ({error})",
        )
        return selection.choose_pages(call)
    return chosen, pages


# query, codes, scales, offsets, window: what kernels are compiled for the alignment of
POINTERS = (0, 4, 5, 6, 12)


def arguments(
    at: Callable[[torch.Tensor], Any],
    call: AttentionCall,
    query: torch.Tensor,
    chosen: torch.Tensor,
    pages: torch.Tensor,
    room: tuple[torch.Tensor, ...],
    room_pages: int,
) -> tuple[Any, ...]:
    """Return the run-time arguments of the kernel that chooses pages.

    Args:
        at: what to hand over for a tensor, its address or itself.
        query: [rows, num_heads, q_len, dim], of the call, with contiguous channels.
        chosen, pages: [rows, width] and [rows], int32, which are written.
        room: scores, sums of splits, sums of columns, masses, counters; of `room_pages` pages.
    """
    kv, budget, sinks = call.kv, call.kv.budget, call.sink_logits
    assert budget is not None
    keys, window, absent = kv.key_pages, kv.residual_keys, at(kv.num_pages)
    # an index holds bytes, which are read as what they are of
    codes = at(keys["codes"] if kv.words is None else keys["codes"].view(kv.spec.keys.code_dtype))
    scale, offset, order = (keys.get(name) for name in ("scale", "offset", "order"))
    if "middle" in keys:
        offset = keys["middle"]
    return (
        at(query), *query.stride()[:3], codes,
        codes if scale is None else at(scale), codes if offset is None else at(offset),
        absent if order is None else at(order), absent if kv.words is None else at(kv.words),
        at(kv.block_table), kv.block_table.stride(0), absent, at(window), *window.stride()[:3], at(kv.exact_lens),
        absent if sinks is None else at(sinks), at(chosen), at(pages), *map(at, room), room_pages, chosen.shape[1],
        NO_LIMIT if budget.pages is None else budget.pages, _bits_of(1.0 if budget.share is None else budget.share),
        min(budget.from_tokens, NO_LIMIT), query.shape[2], float(call.softmax_scale),
        float(call.softcap or 1.0), 1.0 if budget.top_p is None else budget.top_p,
    )  # fmt: skip


def _bits_of(share: float) -> int:
    """Return the bits of a float64, which no launch takes, as an integer."""
    bits: int = struct.unpack("<q", struct.pack("<d", share))[0]
    return bits


def _prepare(call: AttentionCall) -> ChoicePlan:
    query, kv = call.query, call.kv
    where = query.device
    if where.type == "cpu":
        refuse_cpu()
    rows, num_heads, q_len, _ = query.shape
    heads = kv.spec.keys.num_kv_heads
    group, isa = num_heads // heads, support.target_isa(where)
    block = column_block(kv.spec, group, q_len, isa)
    blocks = heads * -(-group * q_len // block)
    assert kv.budget is not None
    constants = selection_constants(
        kv.spec, query_dtype=query.dtype, group=group, q_len=q_len, isa=isa, softcap=call.softcap is not None,
        sinks=call.sink_logits is not None, top_p=kv.budget.top_p is not None, indexed=kv.words is not None,
    )  # fmt: skip
    stretch, most = splits(kv.spec, rows * blocks, kv.words is not None)
    return ChoicePlan(
        spec=kv.spec,
        kernel=Kernel(
            choose_kernel, triton_constants(constants), POINTERS, num_warps=NUM_WARPS, enable_fp_fusion=True
        ),
        rows=rows, blocks=blocks, stretch=stretch, most=most, columns=num_heads * q_len,
        sums=rows * blocks * (most + 1) * 2 * block, room=0, scratch=Scratch((), rows, where),
    )  # fmt: skip
